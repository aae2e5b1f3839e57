/* The CUDA driver, a device and its context, and what the driver says when it fails: see maru.h. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "cuda_internal.h"

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

int maru_explain(const struct maru_driver *driver, char *text, size_t room, const char *call, int result) {
  const char *name = NULL, *words = NULL;
  if (driver->GetErrorName && driver->GetErrorName(result, &name)) name = NULL;
  if (driver->GetErrorString && driver->GetErrorString(result, &words)) words = NULL;
  if (text && room)
    snprintf(text, room, "%s failed: %s (%d)%s%s", call, name ? name : "error", result, words ? " " : "",
             words ? words : "");
  return MARU_E_CUDA;
}

struct maru_entered maru_enter(const struct maru_cuda *cuda) {
  struct maru_entered before = {0, CU_CAPTURE_RELAXED_};
  CUhandle_ current = NULL;
  if (cuda->driver.CtxGetCurrent(&current) || current != cuda->context)
    before.pushed = cuda->driver.CtxPush(cuda->context) == 0;
  /* A thread whose mode was not changed keeps it. */
  if (cuda->driver.ExchangeCaptureMode(&before.mode)) before.mode = -1;
  return before;
}

void maru_leave(const struct maru_cuda *cuda, struct maru_entered before) {
  CUhandle_ popped;
  if (before.mode >= 0) cuda->driver.ExchangeCaptureMode(&before.mode);
  if (before.pushed) cuda->driver.CtxPop(&popped);
}

int maru_take_event(struct maru_cuda *cuda, CUhandle_ *event, char *text, size_t room) {
  const struct maru_driver *driver = &cuda->driver;
  pthread_mutex_lock(&cuda->lock);
  *event = cuda->spares ? cuda->spare[--cuda->spares] : NULL;
  pthread_mutex_unlock(&cuda->lock);
  if (!*event) TRY(EventCreate, event, CU_EVENT_DISABLE_TIMING_);
  return MARU_OK;
}

void maru_give_event(struct maru_cuda *cuda, CUhandle_ event) {
  pthread_mutex_lock(&cuda->lock);
  int kept = cuda->spares < MARU_MOST_SPARE;
  if (kept) cuda->spare[cuda->spares++] = event;
  pthread_mutex_unlock(&cuda->lock);
  if (!kept) cuda->driver.EventDestroy(event);
}

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
    char said[MARU_TEXT];
    int status = maru_explain(driver, said, sizeof said, "ModuleLoadData", result);
    if (text && room)
      snprintf(text, room, "the kernels cannot be loaded for compute capability %d.%d by a driver of CUDA %d.%d: %s",
               cuda->info.architecture / 10, cuda->info.architecture % 10, cuda->info.driver_version / 1000,
               cuda->info.driver_version % 1000 / 10, said);
    return status;
  }
  for (int direction = 0; direction < 2; direction++)
    for (int width = 0; width < MARU_WIDTHS; width++) {
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
  pthread_mutex_init(&cuda->lock, NULL);
  int status = open_library(&cuda->driver, library, text, room);
  if (!status) status = look_at(cuda, device, text, room);
  if (!status) {
    struct maru_entered before = maru_enter(cuda);
    status = load_kernels(cuda, text, room);
    maru_leave(cuda, before);
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
    struct maru_entered before = maru_enter(cuda);
    while (cuda->spares) cuda->driver.EventDestroy(cuda->spare[--cuda->spares]);
    if (cuda->module) cuda->driver.ModuleUnload(cuda->module);
    maru_leave(cuda, before);
    cuda->driver.PrimaryRelease(cuda->device);
  }
  pthread_mutex_destroy(&cuda->lock);
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
  struct maru_entered before = maru_enter(cuda);
  /* Of an address that the driver does not know it tells zeros, and does not fail. */
  if (cuda->driver.PointerGetAttributes(3, attributes, data, address) || type != CU_MEMORYTYPE_HOST_)
    first = 0, size = 0;
  maru_leave(cuda, before);
  *start = first;
  *bytes = size;
  return MARU_OK;
}
