/* A CUDA driver for tests: "device" memory is memory of the host, streams are queues that run as late, and in as odd an
 * order, as events allow. Whoever forgets to wait for something gets bytes from before.
 *
 *   cc -shared -fPIC -I csrc [-DBATCH=12|13] tests/transfer/fake_cuda.c -o libfake_cuda.so
 *
 * Kernels run place.h on the host. Threads take turns, call by call.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_driver.h"
#include "place.h"

#define API __attribute__((visibility("default")))
#define MOST 256
#define MOST_FUNCTIONS 40

enum { INVALID = 1, NO_CONTEXT = 201, NO_HANDLE = 400, NOT_READY = 600, UNKNOWN_FUNCTION = 500 };
enum op_kind { COPY, PLACE, FILL, RECORD, WAIT };

struct event {
  uint64_t recorded, completed;
  int destroyed;
};

struct op {
  enum op_kind kind;
  uint64_t target, source, bytes, ticket;
  struct event *event;
  struct maru_place *place;
  int store;
  struct op *next;
};

struct stream {
  struct op *head, *tail;
  int used, priority;
};

static struct stream streams[MOST]; /* 0: the default stream */
static struct {
  uint64_t start, bytes;
} ranges[MOST];
static int range_count;
static uint64_t state = 1;
static uint32_t slow;
/* Copies, launches, batches, waits of the CPU, bytes copied, most bytes under way, errors, folded copies, events recorded
 * and waited for by streams, uses of events that are destroyed, most blocks of a launch; most streams that could copy at
 * once, most that could run a kernel which reaches host memory, and how often there was one of both. */
static uint64_t counts[14];
static uint64_t under_way;
static int lazy; /* nothing runs unless somebody waits for it */
static char fail_name[64];
static int fail_after = -1;
static int fail_at = -1; /* so many calls of any function are left before one fails */
static const char *failed_at;
static struct {
  char name[40];
  uint64_t count;
} calls[MOST_FUNCTIONS];
static int live_events;
static int maps_host = 1; /* kernels reach registered memory at the host's address */
static int kernels[2][5]; /* store, width */

/* Held until the end of the function. */
static pthread_mutex_t lock;
__attribute__((constructor)) static void make_lock(void) {
  pthread_mutexattr_t kind;
  pthread_mutexattr_init(&kind);
  pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_RECURSIVE);
  pthread_mutex_init(&lock, &kind);
}
static pthread_mutex_t *take(void) { return pthread_mutex_lock(&lock), &lock; }
static void let_go(pthread_mutex_t **held) { pthread_mutex_unlock(*held); }
#define LOCKED __attribute__((cleanup(let_go))) pthread_mutex_t *held = take()

static uint32_t dice(uint32_t sides) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(state >> 33) % sides;
}

/* How the thread behaves beside captures of others. In the mode in which threads begin, most calls spoil one. */
static _Thread_local int capture_mode = 0;

/* Contexts that the thread has pushed. */
static _Thread_local int contexts = 0;

/* Every call comes by here: it is counted, and fails where the test wants that, or where a driver would. */
static int fails(const char *name) {
  LOCKED;
  int i = 0;
  while (i < MOST_FUNCTIONS - 1 && calls[i].count && strcmp(calls[i].name, name)) i++;
  if (!calls[i].count++) strncpy(calls[i].name, name, sizeof calls[i].name - 1);
  if (fail_at >= 0 && fail_at-- == 0) return failed_at = calls[i].name, 999;
  if (!strcmp(name, fail_name) && fail_after >= 0 && fail_after-- == 0) return 999;
  if (!strncmp(name, "cuInit", 6) || !strncmp(name, "cuD", 3) || !strncmp(name, "cuCtx", 5)) return 0;
  if (!strncmp(name, "cuThread", 8)) return 0;
  return contexts ? capture_mode != CU_CAPTURE_RELAXED_ : NO_CONTEXT;
}

static void *address(uint64_t value) { return (void *)(uintptr_t)value; }

static void place(const struct maru_place *p, int store) {
  const uint64_t *layers = address(p->layer_addresses);
  for (uint32_t n = 0; n < p->segments; n++)
    for (uint32_t i = 0; i < p->segment[n].vectors; i++) {
      uint64_t page, packed;
      maru_place_at(p, &p->segment[n], p->block, layers, i, &page, &packed);
      if ((page | packed) % p->vector_bytes) counts[6]++;
      memcpy(address(store ? packed : page), address(store ? page : packed), p->vector_bytes);
    }
}

/* Run the first operation of a stream, if it may run. */
static int step(struct stream *s) {
  struct op *op = s->head;
  if (!op || (op->kind == WAIT && op->event->completed < op->ticket)) return 0;
  if (op->kind == COPY) memcpy(address(op->target), address(op->source), op->bytes), under_way -= op->bytes;
  if (op->kind == FILL) memset(address(op->target), (int)op->source, op->bytes);
  if (op->kind == PLACE) place(op->place, op->store);
  if (op->kind == RECORD && op->event->completed < op->ticket) op->event->completed = op->ticket;
  s->head = op->next;
  if (!s->head) s->tail = NULL;
  free(op->place);
  free(op);
  return 1;
}

static int reaches_host(const struct maru_place *p) {
  for (int i = 0; i < range_count; i++)
    if (p->segment[0].packed - ranges[i].start < ranges[i].bytes) return 1;
  return 0;
}

/* What would be on the bus at once, if everything that may run did. */
static void look(void) {
  uint64_t copies = 0, placed = 0;
  for (const struct stream *s = streams; s < streams + MOST; s++) {
    if (s->head && s->head->kind == COPY) copies++;
    if (s->head && s->head->kind == PLACE) placed += reaches_host(s->head->place);
  }
  if (copies > counts[11]) counts[11] = copies;
  if (placed > counts[12]) counts[12] = placed;
  counts[13] += copies && placed;
}

/* Run one operation of any stream; 0 when none can run. One stream in three is slow: mostly the others go first. */
static int step_any(void) {
  look();
  struct stream *busy[MOST];
  uint32_t count = 0, hurry = dice(8);
  for (uint32_t i = 0; i < MOST; i++)
    if (streams[i].head && hurry && (i + slow) % 3) busy[count++] = &streams[i];
  uint32_t first = count ? dice(count) : 0;
  for (uint32_t i = 0; i < count; i++)
    if (step(busy[(first + i) % count])) return 1;
  count = 0;
  for (uint32_t i = 0; i < MOST; i++)
    if (streams[i].head) busy[count++] = &streams[i];
  uint32_t start = count ? dice(count) : 0;
  for (uint32_t i = 0; i < count; i++)
    if (step(busy[(start + i) % count])) return 1;
  return 0;
}

static void idle(void) {
  if (lazy) return;
  for (uint32_t n = dice(4); n; n--) step_any();
}

static struct stream *stream_of(CUhandle_ handle) { return handle ? handle : &streams[0]; }

static struct op *push(CUhandle_ stream, enum op_kind kind) {
  struct stream *s = stream_of(stream);
  struct op *op = calloc(1, sizeof *op);
  op->kind = kind;
  if (s->tail)
    s->tail->next = op;
  else
    s->head = op;
  return s->tail = op;
}

/* ---- Hooks for tests -------------------------------------------------------------------------------------------- */

API void fake_reset(uint64_t seed) {
  LOCKED;
  while (step_any()) continue;
  state = (seed * 2 + 1) * 0x9E3779B97F4A7C15u, range_count = 0, fail_after = fail_at = -1, under_way = 0, lazy = 0;
  memset(counts, 0, sizeof counts), memset(calls, 0, sizeof calls);
  slow = dice(3);
}
API void fake_register(uint64_t start, uint64_t bytes) {
  LOCKED;
  ranges[range_count].start = start, ranges[range_count++].bytes = bytes;
}
API void fake_fill(CUhandle_ stream, uint64_t target, uint64_t bytes, int value) {
  LOCKED;
  struct op *op = push(stream, FILL);
  op->target = target, op->bytes = bytes, op->source = value;
}
API void fake_copy(CUhandle_ stream, uint64_t target, uint64_t source, uint64_t bytes) {
  LOCKED;
  struct op *op = push(stream, COPY);
  op->target = target, op->source = source, op->bytes = bytes, under_way += bytes;
}
API void fake_fail(const char *name, int after) {
  strncpy(fail_name, name, sizeof fail_name - 1);
  fail_after = after;
}
API void fake_fail_at(int index) {
  LOCKED;
  fail_at = index, failed_at = NULL;
}
/* Which function has failed since then; NULL: none. */
API const char *fake_failed_at(void) { return failed_at; }
/* The name of a function that was called, and how often; NULL: there is none of that number. */
API const char *fake_calls(int i, uint64_t *count) {
  LOCKED;
  if (i < 0 || i >= MOST_FUNCTIONS || !calls[i].count) return NULL;
  return *count = calls[i].count, calls[i].name;
}
API int fake_events(void) { return live_events; }
/* Whether the calling thread is as it was before it came: neither a context nor a mode is left behind. */
API int fake_is_clean(void) { return !contexts && !capture_mode; }
API void fake_clean(void) { contexts = capture_mode = 0; }
API void fake_maps_host(int on) { maps_host = on; }
API void fake_lazy(int on) {
  LOCKED;
  lazy = on;
}
API void fake_counts(uint64_t *out) {
  LOCKED;
  memcpy(out, counts, sizeof counts);
}
API void fake_drain(void) {
  LOCKED;
  while (step_any()) continue;
}
/* A stream of somebody else. */
API CUhandle_ fake_open_stream(void) {
  LOCKED;
  for (int i = 1; i < MOST; i++)
    if (!streams[i].used) return streams[i].used = 1, &streams[i];
  return NULL;
}
API void fake_close_stream(CUhandle_ stream) {
  LOCKED;
  stream_of(stream)->used = 0;
}
/* Of the stream with that number; 1: there is none. */
API int fake_priority(int i) { return i > 0 && i < MOST && streams[i].used ? streams[i].priority : 1; }
API int fake_streams(void) {
  int used = 0;
  for (int i = 1; i < MOST; i++) used += streams[i].used;
  return used;
}

/* ---- The driver ------------------------------------------------------------------------------------------------- */

API int cuInit(unsigned flags) { return (void)flags, fails("cuInit") ? 999 : 0; }
API int cuDriverGetVersion(int *version) { return *version = 13000, fails("cuDriverGetVersion"); }
API int cuDeviceGet(int *device, int number) { return *device = number, number ? 101 : fails("cuDeviceGet"); }
API int cuDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  if (fails("cuDeviceGetAttribute")) return 999;
  if (attribute == CU_DEVICE_HOST_POINTER_FOR_REGISTERED_) return *value = maps_host, 0;
  *value = attribute == CU_DEVICE_MAJOR_ ? 9 : attribute == CU_DEVICE_MINOR_ ? 0 : attribute == 16 ? 132 : 1;
  return 0;
}
static int retained;
API int fake_retained(void) { return retained; }
API int cuDevicePrimaryCtxRetain(CUhandle_ *context, int device) {
  int failed = fails("cuDevicePrimaryCtxRetain");
  if (!failed) *context = &streams[0], retained++;
  return failed ? failed : device;
}
API int cuDevicePrimaryCtxRelease_v2(int device) {
  if (fails("cuDevicePrimaryCtxRelease")) return 999;
  return retained--, device;
}
API int cuCtxGetCurrent(CUhandle_ *context) {
  if (fails("cuCtxGetCurrent")) return 999;
  return *context = contexts ? &streams[0] : NULL, 0;
}
API int cuThreadExchangeStreamCaptureMode(int *mode) {
  int before = capture_mode;
  if (fails("cuThreadExchangeStreamCaptureMode")) return 999;
  capture_mode = *mode;
  *mode = before;
  return 0;
}
API int cuCtxPushCurrent_v2(CUhandle_ context) {
  if (context != &streams[0] || fails("cuCtxPushCurrent")) return 201;
  return contexts++, 0;
}
API int cuCtxPopCurrent_v2(CUhandle_ *context) {
  if (!contexts || fails("cuCtxPopCurrent")) return 201;
  return contexts--, *context = &streams[0], 0;
}
API int cuModuleLoadData(CUhandle_ *module, const void *image) {
  return *module = kernels, !image || fails("cuModuleLoadData") ? 209 : 0;
}
API int cuModuleUnload(CUhandle_ module) { return fails("cuModuleUnload") ? 999 : module != kernels; }
API int cuModuleGetFunction(CUhandle_ *function, CUhandle_ module, const char *name) {
  if (fails("cuModuleGetFunction")) return 999;
  for (int i = 0; i < 10; i++) {
    char known[32];
    snprintf(known, sizeof known, "maru_%s_%d", i / 5 ? "store" : "load", 1 << i % 5);
    if (module == kernels && !strcmp(name, known)) return *function = &kernels[0][0] + i, 0;
  }
  return UNKNOWN_FUNCTION;
}
API int cuStreamCreateWithPriority(CUhandle_ *stream, unsigned flags, int priority) {
  LOCKED;
  if (flags != CU_STREAM_NON_BLOCKING_ || fails("cuStreamCreateWithPriority")) return INVALID;
  if (!(*stream = fake_open_stream())) return INVALID;
  /* As a driver does with one that it does not have. */
  return stream_of(*stream)->priority = priority < -5 ? -5 : priority > 0 ? 0 : priority, 0;
}
API int cuStreamDestroy_v2(CUhandle_ stream) {
  LOCKED;
  if (fails("cuStreamDestroy")) return 999;
  return stream_of(stream)->used = 0, 0;
}
API int cuStreamSynchronize(CUhandle_ stream) {
  LOCKED;
  if (fails("cuStreamSynchronize")) return 999;
  while (stream_of(stream)->head)
    if (!step_any()) return NOT_READY;
  return 0;
}
API int cuStreamWaitEvent(CUhandle_ stream, CUhandle_ event, unsigned flags) {
  LOCKED;
  (void)flags;
  if (fails("cuStreamWaitEvent")) return 999;
  if (((struct event *)event)->destroyed) return counts[9]++, NO_HANDLE;
  counts[8]++;
  struct op *op = push(stream, WAIT);
  op->event = event, op->ticket = op->event->recorded;
  idle();
  return 0;
}
API int cuEventCreate(CUhandle_ *event, unsigned flags) {
  LOCKED;
  (void)flags;
  if (fails("cuEventCreate") || !(*event = calloc(1, sizeof(struct event)))) return INVALID;
  return live_events++, 0;
}
API int cuEventDestroy_v2(CUhandle_ event) {
  LOCKED;
  struct event *kept = event; /* a stream may still wait for it */
  if (fails("cuEventDestroy")) return 999;
  if (!kept || kept->destroyed) return counts[9]++, NO_HANDLE;
  return kept->destroyed = 1, live_events--, 0;
}
API int cuEventRecord(CUhandle_ event, CUhandle_ stream) {
  LOCKED;
  if (fails("cuEventRecord")) return 999;
  if (((struct event *)event)->destroyed) return counts[9]++, NO_HANDLE;
  counts[8]++;
  struct op *op = push(stream, RECORD);
  op->event = event, op->ticket = ++op->event->recorded;
  return 0;
}
API int cuEventSynchronize(CUhandle_ handle) {
  LOCKED;
  struct event *event = handle;
  counts[3]++;
  if (fails("cuEventSynchronize")) return 700;
  if (event->destroyed) return counts[9]++, NO_HANDLE;
  while (event->completed < event->recorded)
    if (!step_any()) return NOT_READY;
  return 0;
}

API int cuEventQuery(CUhandle_ handle) {
  LOCKED;
  struct event *event = handle;
  if (fails("cuEventQuery")) return 700;
  if (event->destroyed) return counts[9]++, NO_HANDLE;
  idle();
  return event->completed < event->recorded ? NOT_READY : 0;
}

/* Registered memory is copied within one registration, as drivers want it. */
static int crosses(uint64_t start, uint64_t bytes) {
  for (int i = 0; i < range_count; i++) {
    uint64_t end = ranges[i].start + ranges[i].bytes;
    if (start < end && start + bytes > ranges[i].start) return start < ranges[i].start || start + bytes > end;
  }
  return 0;
}
/* Rows of one copy run one after another, and others in between. */
API int cuMemcpy2DAsync_v2(const struct maru_copy_2d *copy, CUhandle_ stream) {
  LOCKED;
  int load = copy->source_type == CU_MEMORYTYPE_HOST_;
  if (fails("cuMemcpy2DAsync")) return 719;
  if (copy->source_x | copy->source_y | copy->target_x | copy->target_y || !copy->width || copy->height < 2) return INVALID;
  if (copy->source_pitch < copy->width || copy->target_pitch < copy->width) return INVALID;
  if (copy->target_type != (load ? CU_MEMORYTYPE_DEVICE_ : CU_MEMORYTYPE_HOST_)) return INVALID;
  uint64_t source = load ? (uint64_t)(uintptr_t)copy->source_host : copy->source_device;
  uint64_t target = load ? copy->target_device : (uint64_t)(uintptr_t)copy->target_host;
  if (crosses(source, copy->source_pitch * (copy->height - 1) + copy->width)) return INVALID;
  if (crosses(target, copy->target_pitch * (copy->height - 1) + copy->width)) return INVALID;
  for (size_t row = 0; row < copy->height; row++)
    fake_copy(stream, target + row * copy->target_pitch, source + row * copy->source_pitch, copy->width);
  counts[0]++, counts[4] += copy->width * copy->height, counts[7]++;
  if (under_way > counts[5]) counts[5] = under_way;
  idle();
  return 0;
}
static int copy_async(CUdeviceptr_ target, CUdeviceptr_ source, size_t bytes, CUhandle_ stream) {
  if (crosses(target, bytes) || crosses(source, bytes)) return INVALID;
  fake_copy(stream, target, source, bytes);
  counts[0]++, counts[4] += bytes;
  if (under_way > counts[5]) counts[5] = under_way;
  idle();
  return 0;
}
API int cuMemcpyAsync(CUdeviceptr_ target, CUdeviceptr_ source, size_t bytes, CUhandle_ stream) {
  LOCKED;
  return fails("cuMemcpyAsync") ? 719 : copy_async(target, source, bytes, stream);
}
#if BATCH >= 12
static int batch(CUdeviceptr_ *targets, CUdeviceptr_ *sources, size_t *bytes, size_t count,
                 struct maru_copy_attributes *as, size_t *starts, size_t kinds, CUhandle_ stream) {
  LOCKED;
  if (fails("cuMemcpyBatchAsync")) return 719;
  if (!count || !stream || kinds != 1 || *starts || as->source_order != 1 || as->flags) return INVALID;
  for (size_t i = 0; i < count; i++) {
    int result = bytes[i] ? copy_async(targets[i], sources[i], bytes[i], stream) : INVALID;
    if (result) return result;
  }
  counts[2]++;
  return 0;
}
API int cuMemcpyBatchAsync(CUdeviceptr_ *targets, CUdeviceptr_ *sources, size_t *bytes, size_t count,
                           struct maru_copy_attributes *as, size_t *starts, size_t kinds, size_t *failed,
                           CUhandle_ stream) {
  *failed = SIZE_MAX;
  return batch(targets, sources, bytes, count, as, starts, kinds, stream);
}
#endif
#if BATCH >= 13
API int cuMemcpyBatchAsync_v2(CUdeviceptr_ *targets, CUdeviceptr_ *sources, size_t *bytes, size_t count,
                              struct maru_copy_attributes *as, size_t *starts, size_t kinds, CUhandle_ stream) {
  return batch(targets, sources, bytes, count, as, starts, kinds, stream);
}
#endif
API int cuMemcpyHtoD_v2(CUdeviceptr_ target, const void *source, size_t bytes) {
  if (fails("cuMemcpyHtoD")) return 999;
  return memcpy(address(target), source, bytes), 0;
}
API int cuLaunchKernel(CUhandle_ function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                       unsigned shared_bytes, CUhandle_ stream, void **parameters, void **extra) {
  LOCKED;
  int index = (int)((int *)function - &kernels[0][0]);
  if (fails("cuLaunchKernel") || !gx || gy != 1 || gz != 1 || bx != MARU_PLACE_THREADS || by != 1 || bz != 1 ||
      shared_bytes || extra || ((struct maru_place *)parameters[0])->vector_bytes != 1u << index % 5)
    return INVALID;
  struct op *op = push(stream, PLACE);
  op->place = memcpy(malloc(sizeof *op->place), parameters[0], sizeof *op->place), op->store = index / 5;
  counts[1]++;
  if (gx > counts[10]) counts[10] = gx;
  idle();
  return 0;
}
API int cuPointerGetAttributes(unsigned count, int *attributes, void **data, CUdeviceptr_ at) {
  LOCKED;
  if (fails("cuPointerGetAttributes")) return 999;
  for (unsigned n = 0; n < count; n++) {
    uint64_t value[3] = {0, 0, 0};
    for (int i = 0; i < range_count; i++)
      if (at >= ranges[i].start && at < ranges[i].start + ranges[i].bytes)
        value[0] = CU_MEMORYTYPE_HOST_, value[1] = ranges[i].start, value[2] = ranges[i].bytes;
    if (attributes[n] == CU_POINTER_MEMORY_TYPE_)
      *(uint32_t *)data[n] = (uint32_t)value[0];
    else
      *(uint64_t *)data[n] = value[attributes[n] == CU_POINTER_RANGE_START_ ? 1 : 2];
  }
  return 0;
}
API int cuGetErrorName(CUresult_ error, const char **text) { return (void)error, *text = "CUDA_ERROR_FAKE", 0; }
API int cuGetErrorString(CUresult_ error, const char **text) { return (void)error, *text = "as the test wanted", 0; }
