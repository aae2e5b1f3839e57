/* Copies between a CUDA device's pages and objects: see maru.h for what is promised.
 *
 * Staging memory is a ring of slots, and every slot has a stream of its own, its lane: what happens in a slot happens in
 * the lane's order, one slice after another, while other lanes are at other stages. A copy engine serves a stream for as
 * long as that has copies that may run, so every copy of ours waits for one in another lane: then the engine turns to
 * somebody else's before it goes on with ours.
 * Order against the caller's stream is kept by events on the device. The CPU waits only to bound what is under way, and
 * before it uses a bounce buffer again. */
#include <dlfcn.h>
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
#define BATCH 256
#define TEXT 320
#define WIDTHS 5 /* accesses of 1, 2, 4, 8, 16 bytes */

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
  int failed;
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

uint32_t maru_cuda_abi_version(void) { return MARU_ABI_VERSION; }

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

/* ---- Copies ----------------------------------------------------------------------------------------------------- */

struct batch {
  struct maru_sink sink;
  struct maru_pages *pages;
  CUhandle_ lane;
  size_t count;
  CUdeviceptr_ targets[BATCH], sources[BATCH];
  size_t bytes[BATCH];
};

static int flush(struct batch *batch) {
  struct maru_pages *pages = batch->pages;
  const struct maru_driver *driver = &pages->cuda->driver;
  char *text = pages->text;
  const size_t room = TEXT;
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

static int batch_take(struct maru_sink *sink, uint64_t target, uint64_t source, uint64_t bytes) {
  struct batch *batch = (struct batch *)sink;
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
      here->packed = s->host, here->pitch = token * g->chunk_tokens;
    else
      here->packed = pages->staging + slot * pages->slot_bytes + s->offset, here->pitch = token * s->tokens;
    all |= here->packed | (s->rows > 1 ? here->pitch : 0);
    here->row = s->row;
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
  if (pages->submitted < pages->slots) TRY(StreamWaitEvent, pages->lane[slot], pages->began, 0);
  return MARU_OK;
}

/* The slice has no more to do with pages; what comes last in each lane is what the caller's stream will wait for. */
static int close_pages(struct maru_pages *pages, uint32_t slot) {
  const struct maru_driver *driver = &pages->cuda->driver;
  char *text = pages->text;
  const size_t room = TEXT;
  if (pages->submitted + pages->slots >= pages->slices) TRY(EventRecord, pages->placed[slot], pages->lane[slot]);
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
  return close_pages(pages, slot);
}

static int store_slice(struct maru_pages *pages, uint32_t slot, const struct maru_segment *first,
                       const struct maru_segment *last) {
  int status;
  uint32_t way = first->way;
  STEP(open_pages(pages, slot));
  if (way != MARU_DIRECT) STEP(launch(pages, slot, first, last));
  if (way != MARU_DIRECT) STEP(close_pages(pages, slot));
  if (way != MARU_MAPPED) STEP(give_way(pages, slot));
  if (way != MARU_MAPPED) STEP(copy(pages, slot, first, last));
  if (way == MARU_DIRECT) STEP(close_pages(pages, slot));
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

static int run(struct maru_pages *pages) {
  const struct maru_driver *driver = &pages->cuda->driver;
  const struct maru_job *job = &pages->job;
  char *text = pages->text;
  const size_t room = TEXT;
  CUhandle_ caller = (CUhandle_)(uintptr_t)job->stream;
  int status;
  TRY(EventRecord, pages->began, caller);
  for (uint32_t i = 0; i < job->segment_count;) {
    uint32_t end = i + 1;
    while (end < job->segment_count && job->segments[end].slice == job->segments[i].slice) end++;
    if (pages->submitted - pages->retired >= job->window) STEP(retire(pages, job->window - job->burst));
    /* The CPU itself uses the slot's bounce buffer. */
    if (job->segments[i].way == MARU_BOUNCED) STEP(retire(pages, pages->slots - 1));
    uint32_t slot = slot_of(pages, pages->submitted), turn = pages->submitted % MOST_WINDOW;
    pages->first[turn] = i, pages->last[turn] = end;
    STEP(job->direction == MARU_LOAD ? load_slice(pages, slot, &job->segments[i], &job->segments[end])
                                     : store_slice(pages, slot, &job->segments[i], &job->segments[end]));
    pages->submitted++;
    i = end;
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

static int check(const struct maru_pages *pages, const struct maru_job *job) {
  if (!is_idle(pages) || !job->window || job->window > MOST_WINDOW || !job->burst || job->burst > job->window)
    return MARU_E_ARGUMENT;
  for (uint32_t i = 0; i < job->segment_count; i++) {
    uint32_t way = job->segments[i].way;
    if ((way == MARU_BOUNCED && !pages->bounce) || (way == MARU_MAPPED && !pages->cuda->info.maps_host))
      return MARU_E_ARGUMENT;
  }
  return maru_check_job(&pages->geometry, job, pages->slot_bytes);
}

int maru_cuda_submit(struct maru_pages *pages, const struct maru_job *job) {
  if (!pages || !job) return MARU_E_NULL;
  int status = check(pages, job);
  if (status) {
    snprintf(pages->text, TEXT, "the job does not fit: %s",
             is_idle(pages) ? "a segment, a block or a limit is out of range" : "the one before was not waited for");
    return status;
  }
  pages->text[0] = 0;
  pages->job = *job;
  pages->first_slot = slot_of(pages, pages->submitted);
  pages->submitted = pages->retired = 0;
  pages->slices = count_slices(job);
  pages->waited = 0;
  double began = now();
  struct entered before = enter(pages->cuda);
  status = run(pages);
  leave(pages->cuda, before);
  pages->issued = now() - began - pages->waited;
  pages->failed = status != MARU_OK;
  return status;
}

int maru_cuda_times(const struct maru_pages *pages, double *issued, double *waited) {
  if (!pages || !issued || !waited) return MARU_E_NULL;
  *issued = pages->issued, *waited = pages->waited;
  return MARU_OK;
}

int maru_cuda_wait(struct maru_pages *pages) {
  if (!pages) return MARU_E_NULL;
  struct entered before = enter(pages->cuda);
  int status = pages->failed ? MARU_E_CUDA : retire(pages, 0);
  if (status) {
    /* Also after an error nothing may touch pages or objects any more; a text is there already. */
    settle(pages);
    pages->retired = pages->submitted;
    pages->failed = 0;
  }
  leave(pages->cuda, before);
  return status;
}
