/* The C ABI of Maru's native code: cache maintenance on the host.
 *
 * Plain C, no torch, no Python, no dependency. Every function may be called from any thread, keeps no state that a
 * caller could see, and never ends the process: what cannot be done is a negative status (enum maru_status).
 * Environment variables: none are read.
 *
 * Why it is needed. Hosts that share memory without being coherent with each other (several hosts on one CXL device)
 * see each other's stores only when the writer has written its cache lines back and the reader has dropped its own:
 *
 *   writer                                           reader
 *   1. stores the bytes of an object                 5. receives the reply to ACQUIRE
 *   2. maru_writeback: lines to memory, store fence  6. maru_invalidate: drops its lines, full fence
 *   3. sends COMMIT                                  7. loads the bytes
 *   4. (server: header to READY, maru_writeback)     8. maru_invalidate of the header, loads it: still the same?
 *
 * 2 before 3 and 5 before 6 before 7 is all that this rests on; the message from 3 to 5 is the only link in between.
 * The rules of the processors:
 *   - x86: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2A, CLWB and CLFLUSHOPT: both are
 *     ordered with fences and with older stores to the same line, not with each other, nor with later loads. Hence SFENCE
 *     behind write-backs, and MFENCE before and behind invalidations. AMD64 Architecture Programmer's Manual, volume 3,
 *     CLFLUSH, CLFLUSHOPT and CLWB: weakly ordered; where only CLFLUSH is there, MFENCE is used throughout.
 *   - Arm: Architecture Reference Manual for A-profile, "Ordering and completion of data cache instructions": DC CVAC
 *     and DC CIVAC are complete after DSB. To the point of coherency, which all that is said here assumes to be the memory
 *     itself.
 *
 * An invalidation writes dirty lines back before it drops them (no unprivileged instruction does otherwise). So a host
 * must never have dirty lines of memory that another host may have written since: whoever gives pages up without
 * COMMIT writes them back, too, before it says so.
 */
#ifndef MARU_H
#define MARU_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define MARU_API __attribute__((visibility("default")))
#else
#define MARU_API
#endif

/* Raised when an existing function changes; a caller refuses a library of another one. New functions do not raise it. */
#define MARU_ABI_VERSION 1

enum maru_status {
  MARU_OK = 0,
  /* The address is NULL. */
  MARU_E_NULL = -1,
  /* address + length leaves the address space. */
  MARU_E_RANGE = -2,
  /* This processor has no such instruction, or the code knows none for it. */
  MARU_E_UNSUPPORTED = -3,
  /* An argument is none of the values that are named here. */
  MARU_E_ARGUMENT = -4,
};

/* Instructions that write lines back. All but CLWB and DC CVAC drop them as well. */
enum maru_instruction {
  MARU_NONE = 0,
  MARU_CLFLUSH = 1,
  MARU_CLFLUSHOPT = 2,
  MARU_CLWB = 3,
  MARU_DC_CVAC = 4,
  MARU_DC_CIVAC = 5,
};

/* What is used on this processor. Found once, on the first call that needs it. */
struct maru_host {
  /* enum maru_instruction; MARU_NONE: maru_writeback is refused as unsupported. */
  uint32_t writeback;
  /* enum maru_instruction; MARU_NONE: maru_invalidate is refused as unsupported. */
  uint32_t invalidate;
  /* Bytes per cache line, a power of two. */
  uint32_t line_bytes;
  /* Always zero. */
  uint32_t reserved;
};

/* MARU_ABI_VERSION of the library, to be compared with the one that the caller was written for. */
MARU_API uint32_t maru_abi_version(void);

/* Fill `host`; MARU_OK or MARU_E_NULL. */
MARU_API int maru_host_features(struct maru_host *host);

/* Write every cache line that has a byte of [address, address + length) back to memory, and wait for it: stores of the
 * calling thread before this call are in memory when it returns, so before any message that is sent then. Lines may stay
 * in the cache, clean. Stores of other threads are covered if they happened before the call (a join, a lock).
 * The range must be mapped. Length 0 is fine and only a fence.
 * MARU_OK, MARU_E_NULL, MARU_E_RANGE, MARU_E_UNSUPPORTED. */
MARU_API int maru_writeback(const void *address, size_t length);

/* Drop every cache line that has a byte of [address, address + length), on all processors of this host, and wait for it:
 * loads after this call come from memory. Dirty lines are written back first; see above why there may be none.
 * Conditions and results as those of maru_writeback. */
MARU_API int maru_invalidate(const void *address, size_t length);

/* Everything before is complete before anything behind: stores, loads, write-backs and invalidations. */
MARU_API void maru_fence(void);

/* The same as maru_writeback or maru_invalidate by one chosen `instruction` (enum maru_instruction), with full fences:
 * for tests and measurements. MARU_E_UNSUPPORTED when this processor lacks it. */
MARU_API int maru_flush_with(uint32_t instruction, const void *address, size_t length);

/* One line of English for a status, static memory, never NULL. */
MARU_API const char *maru_status_text(int status);

#ifdef __cplusplus
}
#endif

#endif /* MARU_H */
