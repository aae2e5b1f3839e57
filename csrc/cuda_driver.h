/* The few functions of the CUDA driver that are used, opened at run time. No header of a toolkit is needed: these
 * declarations are the driver's binary interface, which no release has changed under the names given here. */
#ifndef MARU_CUDA_DRIVER_H
#define MARU_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult_;
typedef uint64_t CUdeviceptr_;
typedef void *CUhandle_; /* contexts, modules, functions, streams, events */

/* CUmemcpyAttributes: how the copies of a batch see their source; both hints unset (type 0, id 0). */
struct maru_copy_attributes {
  int32_t source_order; /* 1: in the order of the stream */
  int32_t source_hint[2], target_hint[2];
  uint32_t flags;
};

/* CUDA_MEMCPY2D: `height` rows of `width` bytes. Of each side one of the three places is looked at, by type. */
struct maru_copy_2d {
  size_t source_x, source_y;
  int32_t source_type; /* CU_MEMORYTYPE_HOST_ or CU_MEMORYTYPE_DEVICE_ */
  const void *source_host;
  CUdeviceptr_ source_device;
  void *source_array;
  size_t source_pitch;
  size_t target_x, target_y;
  int32_t target_type;
  void *target_host;
  CUdeviceptr_ target_device;
  void *target_array;
  size_t target_pitch;
  size_t width, height;
};

/* X(member, symbol, arguments): cannot do without. */
#define MARU_DRIVER_FUNCTIONS(X)                                                                                      \
  X(Init, "cuInit", (unsigned flags))                                                                                 \
  X(DriverGetVersion, "cuDriverGetVersion", (int *version))                                                           \
  X(DeviceGet, "cuDeviceGet", (int *device, int number))                                                              \
  X(DeviceGetAttribute, "cuDeviceGetAttribute", (int *value, int attribute, int device))                              \
  X(PrimaryRetain, "cuDevicePrimaryCtxRetain", (CUhandle_ *context, int device))                                      \
  X(PrimaryRelease, "cuDevicePrimaryCtxRelease_v2", (int device))                                                     \
  X(CtxGetCurrent, "cuCtxGetCurrent", (CUhandle_ *context))                                                           \
  X(CtxPush, "cuCtxPushCurrent_v2", (CUhandle_ context))                                                              \
  X(CtxPop, "cuCtxPopCurrent_v2", (CUhandle_ *context))                                                               \
  X(ExchangeCaptureMode, "cuThreadExchangeStreamCaptureMode", (int *mode))                                            \
  X(ModuleLoadData, "cuModuleLoadData", (CUhandle_ *module, const void *image))                                       \
  X(ModuleUnload, "cuModuleUnload", (CUhandle_ module))                                                               \
  X(ModuleGetFunction, "cuModuleGetFunction", (CUhandle_ *function, CUhandle_ module, const char *name))              \
  X(StreamCreate, "cuStreamCreateWithPriority", (CUhandle_ *stream, unsigned flags, int priority))                    \
  X(StreamDestroy, "cuStreamDestroy_v2", (CUhandle_ stream))                                                          \
  X(StreamSynchronize, "cuStreamSynchronize", (CUhandle_ stream))                                                     \
  X(StreamWaitEvent, "cuStreamWaitEvent", (CUhandle_ stream, CUhandle_ event, unsigned flags))                        \
  X(EventCreate, "cuEventCreate", (CUhandle_ *event, unsigned flags))                                                 \
  X(EventDestroy, "cuEventDestroy_v2", (CUhandle_ event))                                                             \
  X(EventRecord, "cuEventRecord", (CUhandle_ event, CUhandle_ stream))                                                \
  X(EventSynchronize, "cuEventSynchronize", (CUhandle_ event))                                                        \
  X(EventQuery, "cuEventQuery", (CUhandle_ event))                                                                    \
  X(MemcpyAsync, "cuMemcpyAsync", (CUdeviceptr_ target, CUdeviceptr_ source, size_t bytes, CUhandle_ stream))         \
  X(Memcpy2DAsync, "cuMemcpy2DAsync_v2", (const struct maru_copy_2d *copy, CUhandle_ stream))                         \
  X(MemcpyHtoD, "cuMemcpyHtoD_v2", (CUdeviceptr_ target, const void *source, size_t bytes))                           \
  X(LaunchKernel, "cuLaunchKernel",                                                                                   \
    (CUhandle_ function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,                \
     unsigned shared_bytes, CUhandle_ stream, void **parameters, void **extra))                                       \
  X(PointerGetAttributes, "cuPointerGetAttributes",                                                                   \
    (unsigned count, int *attributes, void **data, CUdeviceptr_ address))                                             \
  X(GetErrorName, "cuGetErrorName", (CUresult_ error, const char **text))                                             \
  X(GetErrorString, "cuGetErrorString", (CUresult_ error, const char **text))

/* A batch in one call, since CUDA 12.8; CUDA 13 dropped the argument that told which copy failed. */
typedef CUresult_ (*maru_batch_12_8)(CUdeviceptr_ *targets, CUdeviceptr_ *sources, size_t *bytes, size_t count,
                                     struct maru_copy_attributes *attributes, size_t *starts, size_t kinds,
                                     size_t *failed, CUhandle_ stream);
typedef CUresult_ (*maru_batch_13)(CUdeviceptr_ *targets, CUdeviceptr_ *sources, size_t *bytes, size_t count,
                                   struct maru_copy_attributes *attributes, size_t *starts, size_t kinds,
                                   CUhandle_ stream);
#define MARU_BATCH_12_8 "cuMemcpyBatchAsync"
#define MARU_BATCH_13 "cuMemcpyBatchAsync_v2"

struct maru_driver {
  void *library;
#define X(member, symbol, arguments) CUresult_(*member) arguments;
  MARU_DRIVER_FUNCTIONS(X)
#undef X
  maru_batch_12_8 batch_12_8;
  maru_batch_13 batch_13;
};

enum {
  CU_CAPTURE_RELAXED_ = 2,
  CU_STREAM_NON_BLOCKING_ = 1,
  CU_EVENT_BLOCKING_SYNC_ = 1,
  CU_EVENT_DISABLE_TIMING_ = 2,
  CU_SOURCE_ORDER_STREAM_ = 1,
  CU_MEMORYTYPE_HOST_ = 1,
  CU_MEMORYTYPE_DEVICE_ = 2,
  CU_ERROR_NOT_READY_ = 600,
  CU_POINTER_MEMORY_TYPE_ = 2,
  CU_POINTER_RANGE_START_ = 11,
  CU_POINTER_RANGE_SIZE_ = 12,
  CU_DEVICE_MULTIPROCESSORS_ = 16,
  CU_DEVICE_MAJOR_ = 75,
  CU_DEVICE_MINOR_ = 76,
  CU_DEVICE_HOST_POINTER_FOR_REGISTERED_ = 91,
};

#endif /* MARU_CUDA_DRIVER_H */
