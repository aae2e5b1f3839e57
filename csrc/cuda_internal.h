/* What the files of libmaru_cuda share: its structs, how calls of the driver are made and told of, and who does what.
 *
 *   cuda_device.c   the driver, the device, its context
 *   cuda_pages.c    pages, staging memory, streams and events
 *   cuda_jobs.c     a job: slice after slice, how many are under way, its end
 *   cuda_lanes.c    a slice: in which order things happen to it, and to others
 *   cuda_batch.c    its copies by the copy engine
 *   cuda_launch.c   its placement by a kernel
 *   cuda_layers.c   who follows a load by layer
 *   cuda_copies.c   arithmetic without a device
 */
#ifndef MARU_CUDA_INTERNAL_H
#define MARU_CUDA_INTERNAL_H

#include <pthread.h>

#include "cuda_copies.h"
#include "cuda_driver.h"
#include "place.h"

#define MARU_MOST_SLOTS 16
#define MARU_MOST_WINDOW 64
#define MARU_TEXT 320
#define MARU_WIDTHS 5 /* accesses of 1, 2, 4, 8, 16 bytes */
#define MARU_MOST_SPARE 256
#define MARU_BATCH 256

struct maru_cuda {
  struct maru_driver driver;
  struct maru_cuda_info info;
  int device;
  CUhandle_ context, module;
  CUhandle_ kernel[2][MARU_WIDTHS]; /* by direction */
  /* Events that nobody uses, for the next load by layer: making and destroying them for each takes longer. */
  pthread_mutex_t lock;
  CUhandle_ spare[MARU_MOST_SPARE];
  uint32_t spares;
};

/* Copies of a slice that are not yet submitted. */
struct maru_batch {
  struct maru_sink sink;
  struct maru_pages *pages;
  CUhandle_ lane;
  int whole; /* it has all of a slice's copies */
  size_t count, most; /* of `runs`, behind which there is room for one that is taken */
  struct maru_rows runs[MARU_BATCH + 1];
  /* What the driver is told of a batch. */
  CUdeviceptr_ targets[MARU_BATCH], sources[MARU_BATCH];
  size_t bytes[MARU_BATCH];
};

struct maru_pages {
  struct maru_cuda *cuda;
  struct maru_geometry geometry;
  uint64_t *layer_addresses;
  uint64_t staging, bounce, slot_bytes;
  uint32_t slots;
  CUhandle_ began; /* on the caller's stream: from here on pages may be touched */
  CUhandle_ lane[MARU_MOST_SLOTS];
  CUhandle_ placed[MARU_MOST_SLOTS];   /* the last slice of the job in that slot has no more to do with pages */
  CUhandle_ crossed[MARU_MOST_WINDOW]; /* the host memory of a slice may be used again; slices take turns */
  uint8_t way[MARU_MOST_WINDOW];       /* of each slice under way, enum maru_way */
  uint8_t gave_way[MARU_MOST_WINDOW];  /* whether it comes after the slice that crossed slots - 1 before it */
  /* What addresses of pages are all multiples of, 16 at most. */
  uint64_t aligned;
  struct maru_place place;
  struct maru_batch batch;
  /* The job that was submitted last; slices are counted from its first. */
  struct maru_job job;
  uint32_t first[MARU_MOST_WINDOW], last[MARU_MOST_WINDOW]; /* segments of the slices under way */
  uint32_t first_slot, submitted, retired, slices;
  double issued, waited;      /* seconds of the last job */
  struct maru_layers *layers; /* who follows the job, or NULL */
  const int32_t *brake;       /* enum maru_brake, set by anybody, or NULL */
  uint32_t least, moved;      /* segments: of what MARU_YIELD leaves to be moved, and that were submitted */
  int followed;               /* the last job was: nobody's stream waits for its pages, so maru_cuda_wait does */
  int finished;               /* all is done when the call that submits returns: no stream has to wait */
  int failed;
  char text[MARU_TEXT];
};

struct maru_layers {
  struct maru_cuda *cuda;
  CUhandle_ began;    /* on the stream of whoever began: from here on pages may be touched */
  CUhandle_ *arrived; /* per layer; those that one slice completes share one. NULL: there was nothing to move */
  uint32_t count;
  pthread_mutex_t lock; /* of what is below */
  pthread_cond_t changed;
  uint32_t submitted, done;
  int status, cancelled;
  char text[MARU_TEXT];
};

/* Writes into `text` that a call of the driver failed, in at most `room` bytes. Returns MARU_E_CUDA. */
int maru_explain(const struct maru_driver *driver, char *text, size_t room, const char *call, int result);

/* Calls a function of the driver within a function that has `driver`, `text` and `room`, and returns if it fails. */
#define TRY(member, ...)                                                       \
  do {                                                                         \
    int result_ = driver->member(__VA_ARGS__);                                 \
    if (result_) return maru_explain(driver, text, room, #member, result_);    \
  } while (0)

/* The same for pages, which keep the text. */
#define DO(pages_, member, ...)                                                                                    \
  do {                                                                                                             \
    const struct maru_driver *driver_ = &(pages_)->cuda->driver;                                                   \
    int result_ = driver_->member(__VA_ARGS__);                                                                    \
    if (result_) return maru_explain(driver_, (pages_)->text, MARU_TEXT, #member, result_);                        \
  } while (0)

/* Goes on within a function that has `status` if a step of it went well. */
#define STEP(call) \
  if ((status = (call))) return status

/* What maru_leave puts back: whether a context was pushed, and the thread's capture mode, -1: nothing. */
struct maru_entered {
  int pushed, mode;
};

/* Makes the device's context current if it is not. An engine may be capturing a graph in another thread meanwhile: of
 * what a thread in the usual mode then calls, much is refused and spoils the capture, which ends the engine. */
struct maru_entered maru_enter(const struct maru_cuda *cuda);
void maru_leave(const struct maru_cuda *cuda, struct maru_entered before);

/* An event, to be given back when nobody uses it any more. What was recorded in it before may still be there. */
int maru_take_event(struct maru_cuda *cuda, CUhandle_ *event, char *text, size_t room);
void maru_give_event(struct maru_cuda *cuda, CUhandle_ event);

/* Nothing of ours is on the device any more. */
void maru_settle(const struct maru_pages *pages);

/* `submitted` layers are (never fewer than before), or with a `status` no more will be. */
void maru_tell_layers(struct maru_layers *layers, uint32_t submitted, int status, const char *text);
int maru_is_cancelled(struct maru_layers *layers);

/* What follows is done to the slice of segments [first, last), number pages->submitted of its job, in `slot`. */

/* How many copies its bytes are for the copy engine, which are kept for maru_copy_slice; UINT32_MAX: more than the job's
 * `scattered`, or very many, and none were kept. */
uint32_t maru_gather_slice(struct maru_pages *pages, uint32_t slot, const struct maru_segment *first,
                           const struct maru_segment *last);

/* Its copies between host memory and the slot, or the pages. */
int maru_copy_slice(struct maru_pages *pages, uint32_t slot, const struct maru_segment *first,
                    const struct maru_segment *last);

/* Its placement between the pages and the slot, or with MARU_MAPPED as `way` and host memory. */
int maru_place_slice(struct maru_pages *pages, uint32_t slot, const struct maru_segment *first,
                     const struct maru_segment *last, uint32_t way);

/* All of it. */
int maru_load_slice(struct maru_pages *pages, uint32_t slot, const struct maru_segment *first,
                    const struct maru_segment *last);
int maru_store_slice(struct maru_pages *pages, uint32_t slot, const struct maru_segment *first,
                     const struct maru_segment *last);

/* What comes to `stream` later comes after all that a slice of the job, one of the last `slots`, does with pages. */
int maru_await_pages(struct maru_pages *pages, CUhandle_ stream, uint32_t slice);

/* The slice that was submitted last, in `slot`, completes layers up to `layers`: their events come behind it, and
 * behind the slices before it. */
int maru_complete_layers(struct maru_pages *pages, uint32_t slot, uint32_t layers);

/* Whether a slice of the job goes straight to pages or from them, without staging memory: when its host memory may be
 * used again, pages have no more to do with it either. */
int maru_is_straight(const struct maru_pages *pages, uint32_t slice);

/* The slot of a slice of the job. */
uint32_t maru_slot_of(const struct maru_pages *pages, uint32_t slice);

#endif /* MARU_CUDA_INTERNAL_H */
