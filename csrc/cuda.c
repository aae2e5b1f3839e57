/* Copies between a CUDA device's pages and objects: see maru.h for what is promised.
 *
 * Staging memory is a ring of slots, and every slot has a stream of its own, its lane: what happens in a slot happens in
 * the lane's order, one slice after another, while other lanes are at other stages. A copy engine serves a stream for as
 * long as that has copies that may run, so every copy of ours waits for one in another lane: then the engine turns to
 * somebody else's before it goes on with ours.
 * Order against the caller's stream is kept by events on the device. The CPU waits only to bound what is under way, and
 * before it uses a bounce buffer again. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cuda_copies.h"
#include "cuda_driver.h"
#include "place.h"

#define BLOCKS_PER_MULTIPROCESSOR 4
#define VECTORS_PER_BLOCK (MARU_PLACE_THREADS * MARU_PLACE_UNROLL)
#define MOST_SLOTS 16
#define MOST_WINDOW 64
#define MOST_PITCH (1u << 31)
#define BATCH 256
#define TEXT 320
#define WIDTHS 5 /* accesses of 1, 2, 4, 8, 16 bytes */

/* What every driver takes as parameters of a launch. */
_Static_assert(sizeof(struct maru_place) <= 4096, "fewer segments or blocks");

struct maru_cuda {
  struct maru_driver driver;
  struct maru_cuda_info info;
  int device;
  CUhandle_ context, module;
  CUhandle_ kernel[2][WIDTHS]; /* by direction */
};

struct maru_pages {
  struct maru_cuda *cuda;
  struct maru_geometry geometry;
  uint64_t *layer_addresses;
  uint64_t staging, bounce, slot_bytes;
  uint32_t slots;
  CUhandle_ began; /* on the caller's stream: from here on pages may be touched */
  CUhandle_ lane[MOST_SLOTS];
  CUhandle_ placed[MOST_SLOTS];   /* the last slice of the job in that slot has no more to do with pages */
  CUhandle_ crossed[MOST_WINDOW]; /* the host memory of a slice may be used again; slices take turns */
  /* What addresses of pages are all multiples of, 16 at most, and the bytes of a head that follow each other. */
  uint64_t aligned;
  uint32_t head_bytes;
  struct maru_place place;
  /* The job that was submitted last; slices are counted from its first. */
  struct maru_job job;
  uint32_t first[MOST_WINDOW], last[MOST_WINDOW]; /* segments of the slices under way */
  uint32_t first_slot, submitted, retired, slices;
  double issued, waited; /* seconds of the last job */
  struct maru_layers *layers; /* who follows the job, or NULL */
  const int32_t *brake;       /* enum maru_brake, set by anybody, or NULL */
  uint32_t least, moved;      /* segments: of what MARU_YIELD leaves to be moved, and that were submitted */
  int followed;               /* the last job was: nobody's stream waits for its pages, so maru_cuda_wait does */
  int failed;
  char text[TEXT];
};

struct maru_layers {
  struct maru_cuda *cuda;
  CUhandle_ began;    /* on the stream of whoever began: from here on pages may be touched */
  CUhandle_ *arrived; /* per layer */
  uint32_t count;
  pthread_mutex_t lock; /* of what is below */
  pthread_cond_t changed;
  uint32_t submitted, done;
  int status, cancelled;
  char text[TEXT];
};

/* The image of place.cu, in the library's read-only data. MARU_FATBIN is its path. */
__asm__(
    ".pushsection .rodata,\"a\",@progbits\n"
    ".balign 64\n"
    ".globl maru_place_image\n"
    ".hidden maru_place_image\n"
    "maru_place_image:\n"
    ".incbin \"" MARU_FATBIN "\"\n"
    ".popsection\n");
extern const char maru_place_image[];

/* ---- Errors ----------------------------------------------------------------------------------------------------- */

static int explain(const struct maru_driver *driver, char *text, size_t room, const char *call, int result) {
  const char *name = NULL, *words = NULL;
  if (driver->GetErrorName && driver->GetErrorName(result, &name)) name = NULL;
  if (driver->GetErrorString && driver->GetErrorString(result, &words)) words = NULL;
  if (text && room)
    snprintf(text, room, "%s failed: %s (%d)%s%s", call, name ? name : "error", result, words ? " " : "",
             words ? words : "");
  return MARU_E_CUDA;
}

/* Calls a function of the driver within a function that has `driver`, `text` and `room`, and returns if it fails. */
#define TRY(member, ...)                                                                                      \
  do {                                                                                                        \
    int result_ = driver->member(__VA_ARGS__);                                                                \
    if (result_) return explain(driver, text, room, #member, result_);                                        \
  } while (0)

/* What leave() puts back: whether a context was pushed, and the thread's capture mode. */
struct entered {
  int pushed, mode;
};

/* Makes the device's context current if it is not. An engine may be capturing a graph in another thread meanwhile: of
 * what a thread in the usual mode then calls, much is refused and spoils the capture, which ends the engine. */
static struct entered enter(const struct maru_cuda *cuda) {
  struct entered before = {0, CU_CAPTURE_RELAXED_};
  CUhandle_ current = NULL;
  if (cuda->driver.CtxGetCurrent(&current) || current != cuda->context)
    before.pushed = cuda->driver.CtxPush(cuda->context) == 0;
  cuda->driver.ExchangeCaptureMode(&before.mode);
  return before;
}

static void leave(const struct maru_cuda *cuda, struct entered before) {
  CUhandle_ popped;
  cuda->driver.ExchangeCaptureMode(&before.mode);
  if (before.pushed) cuda->driver.CtxPop(&popped);
}

/* ---- The device ------------------------------------------------------------------------------------------------- */

static int open_library(struct maru_driver *driver, const char *library, char *text, size_t room) {
  const char *name = library ? library : "libcuda.so.1", *missing = NULL;
  driver->library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!driver->library) {
    const char *said = dlerror();
    if (text && room)
      snprintf(text, room, "%s cannot be opened: %s; it comes with NVIDIA's driver (in a container: --gpus all)", name,
               said ? said : "?");
    return MARU_E_NO_DRIVER;
  }
#define X(member, symbol, arguments)                                         \
  *(void **)&driver->member = dlsym(driver->library, symbol);                \
  if (!driver->member && !missing) missing = symbol;
  MARU_DRIVER_FUNCTIONS(X)
#undef X
  *(void **)&driver->batch_13 = dlsym(driver->library, MARU_BATCH_13);
  *(void **)&driver->batch_12_8 = dlsym(driver->library, MARU_BATCH_12_8);
  if (!missing) return MARU_OK;
  if (text && room) snprintf(text, room, "%s has no %s; a driver of CUDA 11.2 or newer is needed", name, missing);
  return MARU_E_NO_DRIVER;
}

static int look_at(struct maru_cuda *cuda, int number, char *text, size_t room) {
  const struct maru_driver *driver = &cuda->driver;
  int major = 0, minor = 0;
  TRY(Init, 0);
  TRY(DriverGetVersion, &cuda->info.driver_version);
  TRY(DeviceGet, &cuda->device, number);
  TRY(DeviceGetAttribute, &cuda->info.multiprocessors, CU_DEVICE_MULTIPROCESSORS_, cuda->device);
  TRY(DeviceGetAttribute, &major, CU_DEVICE_MAJOR_, cuda->device);
  TRY(DeviceGetAttribute, &minor, CU_DEVICE_MINOR_, cuda->device);
  TRY(DeviceGetAttribute, &cuda->info.maps_host, CU_DEVICE_HOST_POINTER_FOR_REGISTERED_, cuda->device);
  cuda->info.architecture = major * 10 + minor;
  cuda->info.batches = driver->batch_13 || driver->batch_12_8;
  TRY(PrimaryRetain, &cuda->context, cuda->device);
  return MARU_OK;
}

static int load_kernels(struct maru_cuda *cuda, char *text, size_t room) {
  const struct maru_driver *driver = &cuda->driver;
  int result = driver->ModuleLoadData(&cuda->module, maru_place_image);
  if (result) {
    char said[TEXT];
    int status = explain(driver, said, sizeof said, "ModuleLoadData", result);
    if (text && room)
      snprintf(text, room, "the kernels cannot be loaded for compute capability %d.%d by a driver of CUDA %d.%d: %s",
               cuda->info.architecture / 10, cuda->info.architecture % 10, cuda->info.driver_version / 1000,
               cuda->info.driver_version % 1000 / 10, said);
    return status;
  }
  for (int direction = 0; direction < 2; direction++)
    for (int width = 0; width < WIDTHS; width++) {
      char name[32];
      snprintf(name, sizeof name, "maru_%s_%d", direction == MARU_LOAD ? "load" : "store", 1 << width);
      TRY(ModuleGetFunction, &cuda->kernel[direction][width], cuda->module, name);
    }
  return MARU_OK;
}

uint32_t maru_cuda_abi_version(void) { return MARU_CUDA_ABI_VERSION; }

int maru_cuda_open(const char *library, int device, struct maru_cuda **out, char *text, size_t room) {
  if (!out) return MARU_E_NULL;
  *out = NULL;
  struct maru_cuda *cuda = calloc(1, sizeof *cuda);
  if (!cuda) return MARU_E_MEMORY;
  int status = open_library(&cuda->driver, library, text, room);
  if (!status) status = look_at(cuda, device, text, room);
  if (!status) {
    struct entered before = enter(cuda);
    status = load_kernels(cuda, text, room);
    leave(cuda, before);
  }
  if (status)
    maru_cuda_close(cuda);
  else
    *out = cuda;
  return status;
}

void maru_cuda_close(struct maru_cuda *cuda) {
  if (!cuda) return;
  if (cuda->context) {
    struct entered before = enter(cuda);
    if (cuda->module) cuda->driver.ModuleUnload(cuda->module);
    leave(cuda, before);
    cuda->driver.PrimaryRelease(cuda->device);
  }
  /* The driver itself stays: it has threads, and torch has it open anyway. */
  free(cuda);
}

int maru_cuda_query(const struct maru_cuda *cuda, struct maru_cuda_info *info) {
  if (!cuda || !info) return MARU_E_NULL;
  *info = cuda->info;
  return MARU_OK;
}

int maru_cuda_host_range(struct maru_cuda *cuda, uint64_t address, uint64_t *start, uint64_t *bytes) {
  if (!cuda || !start || !bytes) return MARU_E_NULL;
  uint32_t type = 0;
  uint64_t first = 0;
  size_t size = 0;
  int attributes[] = {CU_POINTER_MEMORY_TYPE_, CU_POINTER_RANGE_START_, CU_POINTER_RANGE_SIZE_};
  void *data[] = {&type, &first, &size};
  struct entered before = enter(cuda);
  /* Of an address that the driver does not know it tells zeros, and does not fail. */
  if (cuda->driver.PointerGetAttributes(3, attributes, data, address) || type != CU_MEMORYTYPE_HOST_)
    first = 0, size = 0;
  leave(cuda, before);
  *start = first;
  *bytes = size;
  return MARU_OK;
}

/* ---- Pages ------------------------------------------------------------------------------------------------------ */

/* Fold heads into one where they follow each other without a gap, so that any size of head gets wide accesses. */
static void fold_heads(struct maru_geometry *g) {
  int follow = 1;
  for (uint32_t n = 0; n < g->planes; n++) {
    struct maru_plane *p = &g->plane[n];
    if (g->head_size == 1) p->dim = 1;
    if (g->heads == 1) p->head = g->head_size;
    follow &= p->dim == 1 && p->head == g->head_size;
  }
  if (follow) g->head_size *= g->heads, g->heads = 1;
}

static void describe(struct maru_pages *pages) {
  struct maru_geometry g = pages->geometry;
  struct maru_place *place = &pages->place;
  uint64_t size = g.element_size, all = 16;
  fold_heads(&g);
  uint64_t head_bytes = g.head_size * size;
  for (uint32_t n = 0; n < g.planes; n++) {
    const struct maru_plane *p = &g.plane[n];
    place->plane[n] = (struct maru_place_plane){p->offset * size, p->block * size, p->token * size, p->head * size, 0};
    if (p->dim != 1) head_bytes = size;
    all |= place->plane[n].offset | place->plane[n].block | place->plane[n].token;
    if (g.heads > 1) all |= place->plane[n].head;
  }
  for (uint32_t layer = 0; layer < g.layers; layer++) all |= pages->layer_addresses[layer];
  all |= head_bytes | maru_token_bytes(&g);
  pages->aligned = all & -all;
  pages->geometry = g;
  place->layer_addresses = pages->staging + pages->slots * pages->slot_bytes;
  place->block_size = maru_divisor_of(g.block_size);
  place->layers = maru_divisor_of(g.layers);
  place->token_bytes = (uint32_t)maru_token_bytes(&g);
}

static int make_streams(struct maru_pages *pages, char *text, size_t room) {
  const struct maru_driver *driver = &pages->cuda->driver;
  TRY(EventCreate, &pages->began, CU_EVENT_DISABLE_TIMING_);
  for (uint32_t k = 0; k < pages->slots; k++) {
    /* Placing goes before an engine's own kernels when both wait for a multiprocessor: it takes microseconds, and bytes
     * on the bus wait for it. The driver takes the nearest priority that it has. */
    TRY(StreamCreate, &pages->lane[k], CU_STREAM_NON_BLOCKING_, -100);
    TRY(EventCreate, &pages->placed[k], CU_EVENT_DISABLE_TIMING_);
  }
  for (uint32_t k = 0; k < MOST_WINDOW; k++)
    TRY(EventCreate, &pages->crossed[k], CU_EVENT_DISABLE_TIMING_ | CU_EVENT_BLOCKING_SYNC_);
  TRY(MemcpyHtoD, pages->place.layer_addresses, pages->layer_addresses, pages->geometry.layers * sizeof(uint64_t));
  return MARU_OK;
}

int maru_cuda_bind(struct maru_cuda *cuda, const struct maru_geometry *geometry, const uint64_t *layer_addresses,
                   uint64_t staging, uint64_t slot_bytes, uint32_t slots, struct maru_pages **out, char *text,
                   size_t room) {
  if (!cuda || !geometry || !layer_addresses || !out) return MARU_E_NULL;
  *out = NULL;
  if (maru_check_geometry(geometry) || !slots || slots > MOST_SLOTS || !slot_bytes || slot_bytes % 16 || staging % 16 ||
      slot_bytes >= 1u << 31)
    return MARU_E_ARGUMENT;
  for (uint32_t layer = 0; layer < geometry->layers; layer++)
    if (!layer_addresses[layer] || layer_addresses[layer] % geometry->element_size) return MARU_E_ARGUMENT;
  struct maru_pages *pages = calloc(1, sizeof *pages);
  uint64_t *addresses = malloc(geometry->layers * sizeof *addresses);
  if (!pages || !addresses) {
    free(pages), free(addresses);
    return MARU_E_MEMORY;
  }
  memcpy(addresses, layer_addresses, geometry->layers * sizeof *addresses);
  pages->cuda = cuda;
  pages->geometry = *geometry;
  pages->layer_addresses = addresses;
  pages->staging = staging, pages->slot_bytes = slot_bytes, pages->slots = slots;
  describe(pages);
  struct entered before = enter(cuda);
  int status = make_streams(pages, text, room);
  leave(cuda, before);
  if (status)
    maru_cuda_unbind(pages);
  else
    *out = pages;
  return status;
}

/* Nothing of ours is on the device any more. */
static void settle(const struct maru_pages *pages) {
  for (uint32_t k = 0; k < pages->slots; k++)
    if (pages->lane[k]) pages->cuda->driver.StreamSynchronize(pages->lane[k]);
}

void maru_cuda_unbind(struct maru_pages *pages) {
  if (!pages) return;
  const struct maru_driver *driver = &pages->cuda->driver;
  struct entered before = enter(pages->cuda);
  settle(pages);
  for (uint32_t k = 0; k < pages->slots; k++) {
    if (pages->placed[k]) driver->EventDestroy(pages->placed[k]);
    if (pages->lane[k]) driver->StreamDestroy(pages->lane[k]);
  }
  for (uint32_t k = 0; k < MOST_WINDOW; k++)
    if (pages->crossed[k]) driver->EventDestroy(pages->crossed[k]);
  if (pages->began) driver->EventDestroy(pages->began);
  leave(pages->cuda, before);
  free(pages->layer_addresses);
  free(pages);
}

int maru_cuda_set_bounce(struct maru_pages *pages, uint64_t bounce) {
  if (!pages) return MARU_E_NULL;
  pages->bounce = bounce;
  return MARU_OK;
}

const char *maru_cuda_error(const struct maru_pages *pages) { return pages ? pages->text : "no pages"; }

/* ---- Layers ----------------------------------------------------------------------------------------------------- */

/* `submitted` layers are (never fewer than before), or with a `status` no more will be. */
static void tell(struct maru_layers *layers, uint32_t submitted, int status, const char *text) {
  pthread_mutex_lock(&layers->lock);
  if (submitted > layers->submitted) layers->submitted = submitted;
  if (status && !layers->status) {
    layers->status = status;
    snprintf(layers->text, TEXT, "%s", text);
  }
  pthread_cond_broadcast(&layers->changed);
  pthread_mutex_unlock(&layers->lock);
}

static int is_cancelled(struct maru_layers *layers) {
  pthread_mutex_lock(&layers->lock);
  int cancelled = layers->cancelled;
  pthread_mutex_unlock(&layers->lock);
  return cancelled;
}

static int make_events(struct maru_layers *layers, CUhandle_ stream, char *text, size_t room) {
  const struct maru_driver *driver = &layers->cuda->driver;
  TRY(EventCreate, &layers->began, CU_EVENT_DISABLE_TIMING_);
  for (uint32_t k = 0; k < layers->count; k++) TRY(EventCreate, &layers->arrived[k], CU_EVENT_DISABLE_TIMING_);
  TRY(EventRecord, layers->began, stream);
  return MARU_OK;
}

int maru_cuda_layers_open(struct maru_cuda *cuda, uint32_t count, uint64_t stream, struct maru_layers **out, char *text,
                          size_t room) {
  if (!cuda || !out) return MARU_E_NULL;
  *out = NULL;
  if (!count) return MARU_E_ARGUMENT;
  struct maru_layers *layers = calloc(1, sizeof *layers);
  CUhandle_ *arrived = calloc(count, sizeof *arrived);
  if (!layers || !arrived) {
    free(layers), free(arrived);
    return MARU_E_MEMORY;
  }
  layers->cuda = cuda, layers->arrived = arrived, layers->count = count;
  pthread_mutex_init(&layers->lock, NULL);
  pthread_cond_init(&layers->changed, NULL);
  struct entered before = enter(cuda);
  int status = make_events(layers, (CUhandle_)(uintptr_t)stream, text, room);
  leave(cuda, before);
  if (status)
    maru_cuda_layers_close(layers);
  else
    *out = layers;
  return status;
}

void maru_cuda_layers_close(struct maru_layers *layers) {
  if (!layers) return;
  const struct maru_driver *driver = &layers->cuda->driver;
  struct entered before = enter(layers->cuda);
  for (uint32_t k = 0; k < layers->count; k++)
    if (layers->arrived[k]) driver->EventDestroy(layers->arrived[k]);
  if (layers->began) driver->EventDestroy(layers->began);
  leave(layers->cuda, before);
  pthread_cond_destroy(&layers->changed);
  pthread_mutex_destroy(&layers->lock);
  free(layers->arrived);
  free(layers);
}

int maru_cuda_layers_cancel(struct maru_layers *layers) {
  if (!layers) return MARU_E_NULL;
  pthread_mutex_lock(&layers->lock);
  layers->cancelled = 1;
  pthread_mutex_unlock(&layers->lock);
  return MARU_OK;
}

int maru_cuda_layers_error(struct maru_layers *layers, char *text, size_t room) {
  if (!layers || !text || !room) return MARU_E_NULL;
  pthread_mutex_lock(&layers->lock);
  snprintf(text, room, "%s", layers->text);
  pthread_mutex_unlock(&layers->lock);
  return MARU_OK;
}

/* With the lock held: what the driver said is kept for every later call. */
static int fail(struct maru_layers *layers, const char *call, int result) {
  layers->status = explain(&layers->cuda->driver, layers->text, TEXT, call, result);
  return layers->status;
}

int maru_cuda_wait_layer(struct maru_layers *layers, uint32_t layer, uint64_t stream) {
  if (!layers) return MARU_E_NULL;
  if (layer >= layers->count) return MARU_E_ARGUMENT;
  pthread_mutex_lock(&layers->lock);
  while (!layers->status && layers->submitted <= layer) pthread_cond_wait(&layers->changed, &layers->lock);
  int status = layers->status;
  pthread_mutex_unlock(&layers->lock);
  if (status) return status;
  /* Without the lock: a driver may block here for as long as the stream is full. */
  struct entered before = enter(layers->cuda);
  int result = layers->cuda->driver.StreamWaitEvent((CUhandle_)(uintptr_t)stream, layers->arrived[layer], 0);
  leave(layers->cuda, before);
  if (!result) return MARU_OK;
  pthread_mutex_lock(&layers->lock);
  status = fail(layers, "StreamWaitEvent", result);
  pthread_mutex_unlock(&layers->lock);
  return status;
}

int maru_cuda_layers_done(struct maru_layers *layers, uint32_t *submitted, uint32_t *done) {
  if (!layers || !submitted || !done) return MARU_E_NULL;
  pthread_mutex_lock(&layers->lock);
  struct entered before = enter(layers->cuda);
  while (!layers->status && layers->done < layers->submitted) {
    int result = layers->cuda->driver.EventQuery(layers->arrived[layers->done]);
    if (result == CU_ERROR_NOT_READY_) break;
    if (result)
      fail(layers, "EventQuery", result);
    else
      layers->done++;
  }
  leave(layers->cuda, before);
  int status = layers->status;
  *submitted = layers->submitted, *done = layers->done;
  pthread_mutex_unlock(&layers->lock);
  return status;
}

/* ---- Copies ----------------------------------------------------------------------------------------------------- */

struct batch {
  struct maru_sink sink;
  struct maru_pages *pages;
  CUhandle_ lane;
  size_t count;
  CUdeviceptr_ targets[BATCH], sources[BATCH];
  size_t bytes[BATCH];
};

/* How many copies from number `i` on are rows of one copy of two dimensions: all as wide, at one distance on both sides,
 * in one registration. */
static size_t rows_from(const struct batch *batch, size_t i) {
  const struct maru_job *job = &batch->pages->job;
  const CUdeviceptr_ *host = job->direction == MARU_LOAD ? batch->sources : batch->targets;
  size_t width = batch->bytes[i], rows = 1;
  if (i + 1 == batch->count) return rows;
  uint64_t target = batch->targets[i + 1] - batch->targets[i], source = batch->sources[i + 1] - batch->sources[i];
  /* Below zero is above any pitch that the driver takes. */
  if (target < width || source < width || target >= MOST_PITCH || source >= MOST_PITCH) return rows;
  uint32_t next = maru_next_cut(job, host[i]);
  uint64_t end = next < job->cut_count ? job->cuts[next] : UINT64_MAX;
  for (size_t k = i + 1; k < batch->count; k++, rows++) {
    if (batch->bytes[k] != width || host[k] + width > end) break;
    if (batch->targets[k] - batch->targets[k - 1] != target || batch->sources[k] - batch->sources[k - 1] != source) break;
  }
  return rows;
}

static int copy_rows(const struct batch *batch, size_t i, size_t rows) {
  struct maru_pages *pages = batch->pages;
  const struct maru_driver *driver = &pages->cuda->driver;
  char *text = pages->text;
  const size_t room = TEXT;
  int load = pages->job.direction == MARU_LOAD;
  struct maru_copy_2d copy = {.width = batch->bytes[i], .height = rows};
  copy.source_type = load ? CU_MEMORYTYPE_HOST_ : CU_MEMORYTYPE_DEVICE_;
  copy.target_type = load ? CU_MEMORYTYPE_DEVICE_ : CU_MEMORYTYPE_HOST_;
  if (load)
    copy.source_host = (const void *)(uintptr_t)batch->sources[i], copy.target_device = batch->targets[i];
  else
    copy.source_device = batch->sources[i], copy.target_host = (void *)(uintptr_t)batch->targets[i];
  copy.source_pitch = batch->sources[i + 1] - batch->sources[i];
  copy.target_pitch = batch->targets[i + 1] - batch->targets[i];
  TRY(Memcpy2DAsync, &copy, batch->lane);
  return MARU_OK;
}

/* Make what lies at one distance one copy, so that a thread has fewer to submit; what is left stays in the batch. */
static int fold(struct batch *batch) {
  size_t least = batch->pages->job.fold, left = 0;
  if (!least) return MARU_OK;
  for (size_t i = 0; i < batch->count;) {
    size_t rows = rows_from(batch, i);
    if (rows > 1 && rows >= least) {
      int status = copy_rows(batch, i, rows);
      if (status) return status;
      i += rows;
      continue;
    }
    batch->targets[left] = batch->targets[i], batch->sources[left] = batch->sources[i];
    batch->bytes[left++] = batch->bytes[i++];
  }
  batch->count = left;
  return MARU_OK;
}

static int flush(struct batch *batch) {
  struct maru_pages *pages = batch->pages;
  const struct maru_driver *driver = &pages->cuda->driver;
  char *text = pages->text;
  const size_t room = TEXT;
  int status = fold(batch);
  if (status) return status;
  size_t count = batch->count, start = 0, failed = 0;
  struct maru_copy_attributes as = {.source_order = CU_SOURCE_ORDER_STREAM_};
  batch->count = 0;
  if (count > 1 && !pages->job.one_by_one && pages->cuda->info.batches) {
    if (driver->batch_13)
      TRY(batch_13, batch->targets, batch->sources, batch->bytes, count, &as, &start, 1, batch->lane);
    else
      TRY(batch_12_8, batch->targets, batch->sources, batch->bytes, count, &as, &start, 1, &failed, batch->lane);
    return MARU_OK;
  }
  for (size_t i = 0; i < count; i++)
    TRY(MemcpyAsync, batch->targets[i], batch->sources[i], batch->bytes[i], batch->lane);
  return MARU_OK;
}

/* Whether a copy continues the one before on both sides; then it is added to that. */
static int continues(struct batch *batch, uint64_t target, uint64_t source, uint64_t bytes) {
  const struct maru_job *job = &batch->pages->job;
  if (!batch->count) return 0;
  size_t last = batch->count - 1;
  uint64_t before = batch->bytes[last], host = job->direction == MARU_LOAD ? source : target;
  if (batch->targets[last] + before != target || batch->sources[last] + before != source) return 0;
  uint32_t next = maru_next_cut(job, host - 1);
  if (next < job->cut_count && job->cuts[next] == host) return 0;
  batch->bytes[last] += bytes;
  return 1;
}

static int batch_take(struct maru_sink *sink, uint64_t target, uint64_t source, uint64_t bytes) {
  struct batch *batch = (struct batch *)sink;
  if (continues(batch, target, source, bytes)) return MARU_OK;
  batch->targets[batch->count] = target, batch->sources[batch->count] = source;
  batch->bytes[batch->count++] = bytes;
  return batch->count < BATCH ? MARU_OK : flush(batch);
}

static int copy(struct maru_pages *pages, uint32_t slot, const struct maru_segment *first,
                const struct maru_segment *last) {
  struct batch batch = {.sink = {batch_take}, .pages = pages, .lane = pages->lane[slot]};
  uint64_t here = slot * pages->slot_bytes;
  int status = MARU_OK;
  for (const struct maru_segment *s = first; s < last && !status; s++)
    status = maru_segment_copies(&pages->geometry, pages->layer_addresses, &pages->job, s, pages->staging + here,
                                 pages->bounce + here, &batch.sink);
  return status ? status : flush(&batch);
}

/* ---- Launches --------------------------------------------------------------------------------------------------- */

static int launch(struct maru_pages *pages, uint32_t slot, const struct maru_segment *first,
                  const struct maru_segment *last) {
  const struct maru_driver *driver = &pages->cuda->driver;
  const struct maru_geometry *g = &pages->geometry;
  const struct maru_job *job = &pages->job;
  struct maru_place *place = &pages->place;
  char *text = pages->text;
  const size_t room = TEXT;
  struct maru_place_segment *here = place->segment;
  uint64_t all = pages->aligned, token = place->token_bytes, most = 0;
  place->segments = (uint32_t)(last - first), place->blocks = 0;
  for (const struct maru_segment *s = first; s < last; s++, here++) {
    uint32_t begin = s->token / g->block_size, end = (s->token + s->tokens - 1) / g->block_size + 1;
    if (s->way == MARU_MAPPED)
      here->packed = s->host, here->pitch = s->pitch;
    else
      here->packed = pages->staging + slot * pages->slot_bytes + s->offset, here->pitch = token * s->tokens;
    all |= here->packed | (s->rows > 1 ? here->pitch : 0);
    here->row = s->row, here->step = s->step;
    here->slot = s->token % g->block_size;
    here->tokens = maru_divisor_of(s->tokens);
    if (s > first && s->token == s[-1].token && s->tokens == s[-1].tokens) {
      here->block = here[-1].block;
    } else {
      here->block = place->blocks;
      memcpy(&place->block[place->blocks], &job->blocks[begin - job->first_place], (end - begin) * sizeof(int32_t));
      place->blocks += end - begin;
    }
    here->vectors = (uint32_t)((uint64_t)s->rows * s->tokens * token); /* bytes, for now */
    if (here->vectors > most) most = here->vectors;
  }
  uint32_t width = 0;
  while (width < WIDTHS - 1 && !(all & (1u << width))) width++;
  while (here-- > place->segment) here->vectors >>= width;
  place->vector_bytes = 1u << width;
  place->token_vectors = maru_divisor_of((uint32_t)(token >> width));
  place->head_vectors = maru_divisor_of((uint32_t)((uint64_t)g->head_size * g->element_size >> width));
  for (uint32_t n = 0; n < g->planes; n++)
    place->plane[n].step = g->plane[n].dim == 1 ? 1u << width : g->plane[n].dim * g->element_size;
  uint64_t blocks = ((most >> width) + VECTORS_PER_BLOCK - 1) / VECTORS_PER_BLOCK;
  uint64_t limit = job->grid ? job->grid : (uint64_t)pages->cuda->info.multiprocessors * BLOCKS_PER_MULTIPROCESSOR;
  if (blocks > limit) blocks = limit;
  void *parameters[] = {place};
  TRY(LaunchKernel, pages->cuda->kernel[job->direction][width], (unsigned)blocks, 1, 1, MARU_PLACE_THREADS, 1, 1, 0,
      pages->lane[slot], parameters, NULL);
  return MARU_OK;
}

/* ---- Jobs ------------------------------------------------------------------------------------------------------- */

/* Pages may be touched on this lane from here on. Each lane waits once per job. */
static int open_pages(struct maru_pages *pages, uint32_t slot) {
  const struct maru_driver *driver = &pages->cuda->driver;
  char *text = pages->text;
  const size_t room = TEXT;
  CUhandle_ began = pages->layers ? pages->layers->began : pages->began;
  if (pages->submitted < pages->slots) TRY(StreamWaitEvent, pages->lane[slot], began, 0);
  return MARU_OK;
}

/* Whether one of the slices that will be in the other lanes next, the first of which begins at segment `next`, completes
 * a layer: its event comes after this slice. */
static int comes_before_a_layer(const struct maru_pages *pages, const struct maru_segment *next) {
  const struct maru_segment *end = pages->job.segments + pages->job.segment_count;
  for (uint32_t ahead = 0; next < end; next++) {
    if (next->slice != next[-1].slice && ++ahead >= pages->slots) return 0;
    if (next->layers > next[-1].layers) return 1;
  }
  return 0;
}

/* The slice, which ends before segment `next`, has no more to do with pages; what comes last in each lane is what the
 * caller's stream will wait for, and what comes last in each lane before a layer is complete what that layer's event
 * comes after. */
static int close_pages(struct maru_pages *pages, uint32_t slot, const struct maru_segment *next) {
  const struct maru_driver *driver = &pages->cuda->driver;
  char *text = pages->text;
  const size_t room = TEXT;
  if (pages->layers ? comes_before_a_layer(pages, next) : pages->submitted + pages->slots >= pages->slices)
    TRY(EventRecord, pages->placed[slot], pages->lane[slot]);
  return MARU_OK;
}

/* No more than slots - 1 copies of ours may run at any time. The next one may only once the one before it has gone, and
 * then somebody else's has waited longer. */
static int give_way(struct maru_pages *pages, uint32_t slot) {
  const struct maru_driver *driver = &pages->cuda->driver;
  char *text = pages->text;
  const size_t room = TEXT;
  if (pages->slots > 1 && pages->submitted >= pages->slots - 1)
    TRY(StreamWaitEvent, pages->lane[slot], pages->crossed[(pages->submitted + 1 - pages->slots) % MOST_WINDOW], 0);
  return MARU_OK;
}

/* The slice has no more to do with host memory. */
static int cross(struct maru_pages *pages, uint32_t slot) {
  const struct maru_driver *driver = &pages->cuda->driver;
  char *text = pages->text;
  const size_t room = TEXT;
  TRY(EventRecord, pages->crossed[pages->submitted % MOST_WINDOW], pages->lane[slot]);
  return MARU_OK;
}

#define STEP(call) \
  if ((status = (call))) return status

static int load_slice(struct maru_pages *pages, uint32_t slot, const struct maru_segment *first,
                      const struct maru_segment *last) {
  int status;
  uint32_t way = first->way;
  if (way == MARU_BOUNCED)
    for (const struct maru_segment *s = first; s < last; s++)
      maru_segment_bounce(&pages->geometry, s, pages->bounce + slot * pages->slot_bytes, 1);
  if (way == MARU_DIRECT) STEP(open_pages(pages, slot));
  if (way != MARU_MAPPED) STEP(give_way(pages, slot));
  if (way != MARU_MAPPED) STEP(copy(pages, slot, first, last));
  if (way != MARU_MAPPED) STEP(cross(pages, slot));
  if (way != MARU_DIRECT) STEP(open_pages(pages, slot));
  if (way != MARU_DIRECT) STEP(launch(pages, slot, first, last));
  if (way == MARU_MAPPED) STEP(cross(pages, slot));
  return close_pages(pages, slot, last);
}

static int store_slice(struct maru_pages *pages, uint32_t slot, const struct maru_segment *first,
                       const struct maru_segment *last) {
  int status;
  uint32_t way = first->way;
  STEP(open_pages(pages, slot));
  if (way != MARU_DIRECT) STEP(launch(pages, slot, first, last));
  if (way != MARU_DIRECT) STEP(close_pages(pages, slot, last));
  if (way != MARU_MAPPED) STEP(give_way(pages, slot));
  if (way != MARU_MAPPED) STEP(copy(pages, slot, first, last));
  if (way == MARU_DIRECT) STEP(close_pages(pages, slot, last));
  return cross(pages, slot);
}

static uint32_t slot_of(const struct maru_pages *pages, uint32_t slice) {
  return (pages->first_slot + slice) % pages->slots;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

/* The slice that was submitted last, in `slot`, completes layers up to `layers`. Their events come behind it and, by way
 * of this lane, behind the slices before it in the others; those have crossed before it did, so that waiting for their
 * placement holds nobody up. */
static int complete(struct maru_pages *pages, uint32_t slot, uint32_t layers) {
  const struct maru_driver *driver = &pages->cuda->driver;
  struct maru_layers *follow = pages->layers;
  char *text = pages->text;
  const size_t room = TEXT;
  uint32_t done = follow->submitted; /* nobody else changes it */
  if (done >= layers) return MARU_OK;
  for (uint32_t k = 1; k < pages->slots && k < pages->submitted; k++)
    TRY(StreamWaitEvent, pages->lane[slot], pages->placed[slot_of(pages, pages->submitted - 1 - k)], 0);
  for (uint32_t layer = done; layer < layers; layer++) TRY(EventRecord, follow->arrived[layer], pages->lane[slot]);
  tell(follow, layers, MARU_OK, NULL);
  return MARU_OK;
}

static int go_on(struct maru_pages *pages) {
  if (!pages->layers || !is_cancelled(pages->layers)) return MARU_OK;
  snprintf(pages->text, TEXT, "the load was cancelled before layer %u of %u", pages->layers->submitted,
           pages->layers->count);
  return MARU_E_CANCELLED;
}

/* Sleep until a slice has crossed. */
static int await(struct maru_pages *pages, uint32_t slice) {
  const struct maru_driver *driver = &pages->cuda->driver;
  char *text = pages->text;
  const size_t room = TEXT;
  double began = now();
  TRY(EventSynchronize, pages->crossed[slice % MOST_WINDOW]);
  pages->waited += now() - began;
  return MARU_OK;
}

/* Wait until at most `left` slices of the job are under way, and bring bounced ones home. */
static int retire(struct maru_pages *pages, uint32_t left) {
  uint32_t until = pages->submitted > left ? pages->submitted - left : 0;
  int status;
  /* The last first: the others have mostly gone by then, and a thread that sleeps once is better than one that sleeps for
   * each. Of a lane only the last slice needs to be looked at. */
  for (uint32_t n = 0; n < pages->slots && until > pages->retired + n; n++) STEP(await(pages, until - 1 - n));
  for (; pages->retired < until; pages->retired++) {
    uint32_t turn = pages->retired % MOST_WINDOW, slot = slot_of(pages, pages->retired);
    const struct maru_segment *s = &pages->job.segments[pages->first[turn]];
    if (pages->job.direction == MARU_STORE && s->way == MARU_BOUNCED)
      for (; s < &pages->job.segments[pages->last[turn]]; s++)
        maru_segment_bounce(&pages->geometry, s, pages->bounce + slot * pages->slot_bytes, 0);
  }
  return MARU_OK;
}

/* Whether to submit no more, before segment `i`. */
static int is_braked(const struct maru_pages *pages, uint32_t i) {
  int32_t brake = pages->brake ? __atomic_load_n(pages->brake, __ATOMIC_RELAXED) : MARU_GO_ON;
  return brake == MARU_STOP || (brake == MARU_YIELD && i >= pages->least);
}

static int run(struct maru_pages *pages) {
  const struct maru_driver *driver = &pages->cuda->driver;
  const struct maru_job *job = &pages->job;
  char *text = pages->text;
  const size_t room = TEXT;
  CUhandle_ caller = (CUhandle_)(uintptr_t)job->stream;
  int status;
  if (!pages->layers) TRY(EventRecord, pages->began, caller);
  for (uint32_t i = 0; i < job->segment_count;) {
    uint32_t end = i + 1;
    while (end < job->segment_count && job->segments[end].slice == job->segments[i].slice) end++;
    STEP(go_on(pages));
    if (is_braked(pages, i)) break;
    if (pages->submitted - pages->retired >= job->window) STEP(retire(pages, job->window - job->burst));
    /* The CPU itself uses the slot's bounce buffer. */
    if (job->segments[i].way == MARU_BOUNCED) STEP(retire(pages, pages->slots - 1));
    uint32_t slot = slot_of(pages, pages->submitted), turn = pages->submitted % MOST_WINDOW;
    pages->first[turn] = i, pages->last[turn] = end;
    STEP(job->direction == MARU_LOAD ? load_slice(pages, slot, &job->segments[i], &job->segments[end])
                                     : store_slice(pages, slot, &job->segments[i], &job->segments[end]));
    pages->submitted++;
    if (pages->layers) STEP(complete(pages, slot, job->segments[i].layers));
    pages->moved = i = end;
  }
  if (pages->layers) {
    /* Layers of which there was nothing to move have events that were never recorded, which count as run. */
    tell(pages->layers, pages->layers->count, MARU_OK, NULL);
    return MARU_OK;
  }
  for (uint32_t k = 0; k < pages->slots && k < pages->submitted; k++)
    TRY(StreamWaitEvent, caller, pages->placed[slot_of(pages, pages->submitted - 1 - k)], 0);
  return MARU_OK;
}

static uint32_t count_slices(const struct maru_job *job) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < job->segment_count; i++)
    count += !i || job->segments[i].slice != job->segments[i - 1].slice;
  return count;
}

/* Slices that were not waited for; a job must not take their slots. */
static int is_idle(const struct maru_pages *pages) { return !pages->failed && pages->retired == pages->submitted; }

static int check(const struct maru_pages *pages, const struct maru_job *job, const struct maru_layers *layers) {
  if (!is_idle(pages) || !job->window || job->window > MOST_WINDOW || !job->burst || job->burst > job->window)
    return MARU_E_ARGUMENT;
  for (uint32_t i = 0; i < job->segment_count; i++) {
    uint32_t way = job->segments[i].way;
    if ((way == MARU_BOUNCED && !pages->bounce) || (way == MARU_MAPPED && !pages->cuda->info.maps_host))
      return MARU_E_ARGUMENT;
    uint32_t before = i ? job->segments[i - 1].layers : 0;
    if (layers && (job->segments[i].layers < before || job->segments[i].layers > layers->count)) return MARU_E_ARGUMENT;
    /* A slice completes layers as a whole. */
    if (layers && i && job->segments[i].slice == job->segments[i - 1].slice && job->segments[i].layers != before)
      return MARU_E_ARGUMENT;
  }
  if (layers && (job->direction != MARU_LOAD || layers->count != pages->geometry.layers)) return MARU_E_ARGUMENT;
  return maru_check_job(&pages->geometry, job, pages->slot_bytes);
}

static int submit(struct maru_pages *pages, const struct maru_job *job, struct maru_layers *layers) {
  int status = check(pages, job, layers);
  if (status) {
    snprintf(pages->text, TEXT, "the job does not fit: %s",
             is_idle(pages) ? "a segment, a block or a limit is out of range" : "the one before was not waited for");
    return status;
  }
  pages->text[0] = 0;
  pages->job = *job;
  pages->layers = layers, pages->followed = layers != NULL;
  pages->first_slot = slot_of(pages, pages->submitted);
  pages->submitted = pages->retired = pages->moved = 0;
  pages->slices = count_slices(job);
  pages->waited = 0;
  double began = now();
  struct entered before = enter(pages->cuda);
  status = run(pages);
  leave(pages->cuda, before);
  pages->issued = now() - began - pages->waited;
  pages->failed = status != MARU_OK;
  pages->layers = NULL;
  return status;
}

int maru_cuda_submit(struct maru_pages *pages, const struct maru_job *job) {
  return pages && job ? submit(pages, job, NULL) : MARU_E_NULL;
}

int maru_cuda_submit_layers(struct maru_pages *pages, const struct maru_job *job, struct maru_layers *layers) {
  if (!pages || !job || !layers) return MARU_E_NULL;
  int status = submit(pages, job, layers);
  if (status) tell(layers, 0, status, pages->text);
  return status;
}

int maru_cuda_times(const struct maru_pages *pages, double *issued, double *waited) {
  if (!pages || !issued || !waited) return MARU_E_NULL;
  *issued = pages->issued, *waited = pages->waited;
  return MARU_OK;
}

/* Wait for what comes last in each lane. */
static int arrive(struct maru_pages *pages) {
  const struct maru_driver *driver = &pages->cuda->driver;
  char *text = pages->text;
  const size_t room = TEXT;
  for (uint32_t k = 0; k < pages->slots; k++) TRY(StreamSynchronize, pages->lane[k]);
  return MARU_OK;
}

int maru_cuda_wait(struct maru_pages *pages) {
  if (!pages) return MARU_E_NULL;
  struct entered before = enter(pages->cuda);
  int status = pages->failed ? MARU_E_CUDA : retire(pages, 0);
  if (!status && pages->followed) status = arrive(pages);
  if (status) {
    /* Also after an error nothing may touch pages or objects any more; a text is there already. */
    settle(pages);
    pages->retired = pages->submitted;
    pages->failed = 0;
  }
  leave(pages->cuda, before);
  return status;
}

int maru_cuda_run(struct maru_pages *pages, const struct maru_job *job, const int32_t *brake, uint32_t least,
                  uint32_t *moved) {
  if (!pages || !job || !moved) return MARU_E_NULL;
  *moved = 0;
  if (!is_idle(pages)) return submit(pages, job, NULL); /* which says why not */
  pages->brake = brake, pages->least = least;
  int status = submit(pages, job, NULL);
  pages->brake = NULL;
  if (status == MARU_E_ARGUMENT) return status; /* nothing was started */
  /* Of a job that ended early no event tells when its last slices are placed. */
  pages->followed = brake != NULL;
  int waited = maru_cuda_wait(pages);
  if (!status) status = waited;
  if (!status) *moved = pages->moved;
  return status;
}
