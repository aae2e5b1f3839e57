/* Cache maintenance on the host: see maru.h for what is promised and why. */
#include "maru.h"

#include <stdatomic.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

/* ---- One line each, and fences ---------------------------------------------------------------------------------- */

#if defined(__x86_64__)

/* "+m": the compiler must have stored the line before, and may not keep what it has loaded of it. */
static inline void line_clflush(char *line) { __asm__ volatile("clflush %0" : "+m"(*(volatile char *)line)); }
static inline void line_clflushopt(char *line) { __asm__ volatile("clflushopt %0" : "+m"(*(volatile char *)line)); }
static inline void line_clwb(char *line) { __asm__ volatile("clwb %0" : "+m"(*(volatile char *)line)); }
static inline void store_fence(void) { __asm__ volatile("sfence" ::: "memory"); }
static inline void full_fence(void) { __asm__ volatile("mfence" ::: "memory"); }

#elif defined(__aarch64__)

static inline void line_cvac(char *line) { __asm__ volatile("dc cvac, %0" : : "r"(line) : "memory"); }
static inline void line_civac(char *line) { __asm__ volatile("dc civac, %0" : : "r"(line) : "memory"); }
/* The whole system, not the inner shareable domain: the readers are other hosts. */
static inline void store_fence(void) { __asm__ volatile("dsb sy" ::: "memory"); }
static inline void full_fence(void) { __asm__ volatile("dsb sy" ::: "memory"); }

#else

static inline void store_fence(void) { atomic_thread_fence(memory_order_seq_cst); }
static inline void full_fence(void) { atomic_thread_fence(memory_order_seq_cst); }

#endif

/* ---- What this processor has ------------------------------------------------------------------------------------ */

#define HAS(instruction) (1u << (instruction))
/* Bits of `found`: the set of instructions, the line size above, and that it was looked up. */
#define LINE_SHIFT 8
#define LOOKED_UP (1u << 31)

static uint32_t look_up(void) {
  uint32_t set = 0, line = 64;
#if defined(__x86_64__)
  unsigned int a, b, c, d;
  if (__get_cpuid(1, &a, &b, &c, &d) && (d & (1u << 19))) {
    set |= HAS(MARU_CLFLUSH);
    line = ((b >> 8) & 0xff) * 8;
  }
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    if (b & (1u << 23)) set |= HAS(MARU_CLFLUSHOPT);
    if (b & (1u << 24)) set |= HAS(MARU_CLWB);
  }
#elif defined(__aarch64__)
  uint64_t type;
  __asm__("mrs %0, ctr_el0" : "=r"(type));
  line = 4u << ((type >> 16) & 0xf);
  set = HAS(MARU_DC_CVAC) | HAS(MARU_DC_CIVAC);
#endif
  if (line < 16 || (line & (line - 1))) line = 16; /* smaller steps than the lines cover all of them */
  return set | line << LINE_SHIFT | LOOKED_UP;
}

/* cpuid takes microseconds in a virtual machine. Threads that race here write the same value. */
static uint32_t processor(void) {
  static _Atomic uint32_t found;
  uint32_t value = atomic_load_explicit(&found, memory_order_relaxed);
  if (!value) {
    value = look_up();
    atomic_store_explicit(&found, value, memory_order_relaxed);
  }
  return value;
}

static uint32_t line_bytes(uint32_t value) { return (value & ~LOOKED_UP) >> LINE_SHIFT; }

static uint32_t best(uint32_t value, const uint32_t *order, size_t count) {
  for (size_t i = 0; i < count; i++)
    if (value & HAS(order[i])) return order[i];
  return MARU_NONE;
}

static uint32_t writeback_of(uint32_t value) {
  static const uint32_t order[] = {MARU_CLWB, MARU_CLFLUSHOPT, MARU_CLFLUSH, MARU_DC_CVAC};
  return best(value, order, sizeof order / sizeof *order);
}

static uint32_t invalidate_of(uint32_t value) {
  static const uint32_t order[] = {MARU_CLFLUSHOPT, MARU_CLFLUSH, MARU_DC_CIVAC};
  return best(value, order, sizeof order / sizeof *order);
}

/* ---- Ranges ----------------------------------------------------------------------------------------------------- */

#define EACH_LINE(one)                                                    \
  for (size_t lines = count; lines; lines--, at += step) one((char *)at); \
  return MARU_OK

static int flush_lines(uint32_t instruction, uintptr_t at, size_t count, uint32_t step) {
  switch (instruction) {
#if defined(__x86_64__)
    case MARU_CLFLUSH: EACH_LINE(line_clflush);
    case MARU_CLFLUSHOPT: EACH_LINE(line_clflushopt);
    case MARU_CLWB: EACH_LINE(line_clwb);
#elif defined(__aarch64__)
    case MARU_DC_CVAC: EACH_LINE(line_cvac);
    case MARU_DC_CIVAC: EACH_LINE(line_civac);
#endif
    default: (void)at, (void)count, (void)step; return MARU_E_UNSUPPORTED;
  }
}

static int flush_range(uint32_t instruction, uint32_t value, const void *address, size_t length) {
  uintptr_t start = (uintptr_t)address;
  uint32_t line = line_bytes(value);
  if (!address) return MARU_E_NULL;
  if (instruction == MARU_NONE) return MARU_E_UNSUPPORTED;
  if (!length) return MARU_OK;
  if (length - 1 > UINTPTR_MAX - start) return MARU_E_RANGE;
  uintptr_t first = start & ~(uintptr_t)(line - 1), last = (start + (length - 1)) & ~(uintptr_t)(line - 1);
  return flush_lines(instruction, first, (last - first) / line + 1, line);
}

/* ---- The interface ---------------------------------------------------------------------------------------------- */

uint32_t maru_abi_version(void) { return MARU_ABI_VERSION; }

int maru_host_features(struct maru_host *host) {
  if (!host) return MARU_E_NULL;
  uint32_t value = processor();
  host->writeback = writeback_of(value);
  host->invalidate = invalidate_of(value);
  host->line_bytes = line_bytes(value);
  host->reserved = 0;
  return MARU_OK;
}

int maru_writeback(const void *address, size_t length) {
  uint32_t value = processor(), instruction = writeback_of(value);
  int status = flush_range(instruction, value, address, length);
  if (instruction == MARU_CLFLUSH)
    full_fence(); /* SFENCE orders it on newer processors only */
  else
    store_fence();
  return status;
}

int maru_invalidate(const void *address, size_t length) {
  uint32_t value = processor();
  full_fence(); /* what says that the bytes are there was loaded before */
  int status = flush_range(invalidate_of(value), value, address, length);
  full_fence();
  return status;
}

void maru_fence(void) { full_fence(); }

int maru_flush_with(uint32_t instruction, const void *address, size_t length) {
  uint32_t value = processor();
  if (instruction < MARU_CLFLUSH || instruction > MARU_DC_CIVAC) return MARU_E_ARGUMENT;
  if (!(value & HAS(instruction))) return MARU_E_UNSUPPORTED;
  full_fence();
  int status = flush_range(instruction, value, address, length);
  full_fence();
  return status;
}

const char *maru_status_text(int status) {
  switch (status) {
    case MARU_OK: return "done";
    case MARU_E_NULL: return "the address is NULL";
    case MARU_E_RANGE: return "the range leaves the address space";
    case MARU_E_UNSUPPORTED: return "this processor has no instruction for it that an ordinary process may use";
    case MARU_E_ARGUMENT: return "an argument has a value that is not known";
    default: return "unknown status";
  }
}
