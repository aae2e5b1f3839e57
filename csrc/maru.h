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
  /* There is no CUDA driver, or it lacks what is needed. */
  MARU_E_NO_DRIVER = -5,
  /* A call of the CUDA driver failed; maru_cuda_error says which. */
  MARU_E_CUDA = -6,
  /* No memory for a few kilobytes. */
  MARU_E_MEMORY = -7,
  /* It was cancelled. */
  MARU_E_CANCELLED = -8,
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

/* One line of English for a status of the functions above, static memory, never NULL. */
MARU_API const char *maru_status_text(int status);

/* ==== Copies between a CUDA device's pages and objects in host memory: libmaru_cuda =================================
 *
 * A library of its own. It calls the driver (libcuda.so.1), which it opens by name when it is asked to: it loads without
 * one, and there is no second CUDA runtime beside that of torch, whichever version that is. It works in the device's
 * primary context, the one that CUDA runtimes use, and makes it current only for the time of a call.
 *
 * Addresses are numbers; none is checked. Device addresses are what the driver and torch call pointers. Layouts are
 * described as maru_core/geometry.py does: by strides, so that no layout has a name here.
 *
 * One struct maru_cuda may be used by any number of threads, one struct maru_pages by one thread at a time: calls on it
 * must not overlap, whichever threads they come from. A struct maru_layers may be used by any number of threads at once,
 * also while another one is within maru_cuda_submit_layers with it; only maru_cuda_layers_close must come when no other
 * call on it is under way or will come. In a forked child none may be used, not even closed. */

/* Raised as MARU_ABI_VERSION is, for the functions maru_cuda_* and what they take. */
#define MARU_CUDA_ABI_VERSION 3

/* Planes of a layer: K and V, or one. */
#define MARU_PLANES 2

/* Where element (block, token, head, dim) of a plane lies, in elements behind the layer's first one:
 * offset + b*block + t*token + h*head + d*dim. */
struct maru_plane {
  uint64_t offset, block, token, head, dim;
};

/* Pages of one engine rank, every layer alike, and how many tokens an object has: rows of [chunk_tokens, heads, head_size],
 * one per plane and layer that it holds. */
struct maru_geometry {
  struct maru_plane plane[MARU_PLANES];
  uint32_t planes, layers, blocks, block_size, heads, head_size;
  /* Bytes: 1, 2, 4 or 8. */
  uint32_t element_size;
  uint32_t chunk_tokens;
};

/* How the bytes of a segment travel. */
enum maru_way {
  /* By the copy engine to or from a slot of staging memory, and by a kernel between that and the pages. */
  MARU_STAGED = 0,
  /* The same, with one more copy by the CPU to or from the bounce buffer: for memory that the driver does not know. */
  MARU_BOUNCED = 1,
  /* By the copy engine straight to or from the pages, one copy per row and run of blocks that follow each other. */
  MARU_DIRECT = 2,
  /* By a kernel that reaches the object itself; its address must be a multiple of the element size. */
  MARU_MAPPED = 3,
};

enum maru_direction { MARU_LOAD = 0, MARU_STORE = 1 };

/* Of one object the tokens [token, token + tokens) of `rows` rows: row, row + step, ..., row = plane * layers + layer.
 * Tokens are counted from the beginning of the request: token t is slot t % block_size of its block t / block_size. */
struct maru_segment {
  /* Address of the object's first wanted byte: of `row`, of `token`. */
  uint64_t host;
  /* Bytes behind the beginning of the slice's slot, a multiple of 16; only for staged and bounced segments. */
  uint64_t offset;
  /* Bytes from one of these rows to the next in the object. All rows of an object that holds every layer follow each
   * other; of one layer's rows there, or in an object that holds that layer only, `step` is the number of layers. */
  uint64_t pitch;
  uint32_t row, rows, step, token, tokens;
  /* Segments with one number are moved together. They follow each other and travel in one way. */
  uint32_t slice;
  /* enum maru_way. */
  uint32_t way;
  /* So many layers, counted from the first, are complete when this segment's slice and all before it are: the same for a
   * slice's segments, and never less than before. Only for maru_cuda_submit_layers. */
  uint32_t layers;
};

/* What one maru_cuda_submit moves. All arrays must stay as they are until maru_cuda_wait has returned. */
struct maru_job {
  const struct maru_segment *segments;
  /* Blocks of the request from place `first_place` on; each below `geometry.blocks`. */
  const int32_t *blocks;
  /* Addresses, ascending, that no copy may cross: where one registration of host memory ends and another begins. */
  const uint64_t *cuts;
  uint32_t segment_count, block_count, first_place, cut_count;
  /* enum maru_direction. */
  uint32_t direction;
  /* Slices that are submitted and have not crossed, 1 to 64. When there are so many, the thread sleeps until `burst` of
   * them have gone (1 to `window`): the more, the fewer times it wakes up. A copy of somebody else waits for copies of
   * all slots but one at most, unless the driver puts its stream and one of ours into one queue: then for the window.
   * Of slices that are MARU_MAPPED as many run at once as there are slots. */
  uint32_t window, burst;
  /* Thread blocks per launch at most; 0: as many as the device runs at once. */
  uint32_t grid;
  /* 1: copies one by one, even where the driver takes them in batches. */
  uint32_t one_by_one;
  /* So many copies of a slice, or more, that lie at one distance on both sides are made as one copy of two dimensions;
   * 0: never. Copies that continue each other on both sides are always one. */
  uint32_t fold;
  /* A staged slice of so many copies, or more, that do not lie at one distance, is MARU_MAPPED instead, by
   * `scattered_grid` thread blocks at most (0: as `grid`): one launch costs a thread less. Only where a kernel may use
   * the host's address, and all of the slice lies so that accesses are of 16 bytes. 0: never. */
  uint32_t scattered, scattered_grid;
  /* The caller's stream, a CUstream. */
  uint64_t stream;
};

struct maru_cuda_info {
  /* As the driver counts: 12080 is 12.8. */
  int32_t driver_version;
  int32_t multiprocessors;
  /* Compute capability, 90 for 9.0. */
  int32_t architecture;
  /* Whether the driver takes copies in batches. */
  int32_t batches;
  /* Whether a kernel may use the host's address of registered memory; without it nothing may be MARU_MAPPED. */
  int32_t maps_host;
  int32_t reserved;
};

struct maru_cuda;
struct maru_pages;
/* A load whose layers others follow. */
struct maru_layers;

/* MARU_CUDA_ABI_VERSION of the library. */
MARU_API uint32_t maru_cuda_abi_version(void);

/* Open the driver (`library`, or NULL for libcuda.so.1) and device number `device` of those that this process sees.
 * MARU_E_NO_DRIVER, MARU_E_CUDA, MARU_E_MEMORY, MARU_E_NULL; `text`, if not NULL, then says why in at most `text_bytes`
 * bytes with the zero behind. */
MARU_API int maru_cuda_open(const char *library, int device, struct maru_cuda **cuda, char *text, size_t text_bytes);

/* Let go of the device. Every struct maru_pages of it must be closed before. NULL is fine. */
MARU_API void maru_cuda_close(struct maru_cuda *cuda);

/* Fill `info`. */
MARU_API int maru_cuda_query(const struct maru_cuda *cuda, struct maru_cuda_info *info);

/* The registered or driver-allocated host memory around `address`: its first address and its bytes, 0 bytes if none. */
MARU_API int maru_cuda_host_range(struct maru_cuda *cuda, uint64_t address, uint64_t *start, uint64_t *bytes);

/* Get ready to move pages. `layer_addresses`: where each layer's first element is on the device, aligned. `staging`: device
 * memory of the caller, `slots` slots (1 to 16) of `slot_bytes` bytes (a multiple of 16) and behind them 8 bytes per layer; it must
 * stay until maru_cuda_unbind. `text` as in maru_cuda_open.
 * MARU_E_ARGUMENT, MARU_E_CUDA, MARU_E_MEMORY, MARU_E_NULL. */
MARU_API int maru_cuda_bind(struct maru_cuda *cuda, const struct maru_geometry *geometry,
                            const uint64_t *layer_addresses, uint64_t staging, uint64_t slot_bytes, uint32_t slots,
                            struct maru_pages **pages, char *text, size_t text_bytes);

/* Wait for what is under way and let go; staging memory is the caller's again. NULL is fine. */
MARU_API void maru_cuda_unbind(struct maru_pages *pages);

/* Page-locked host memory of the caller, as large as all slots, for MARU_BOUNCED; without it such a job is refused. */
MARU_API int maru_cuda_set_bounce(struct maru_pages *pages, uint64_t bounce);

/* Start to move a job's segments, in order. Returns when the last one is submitted, which is when all but `window`
 * slices have gone; the caller must then call maru_cuda_wait, also when this failed.
 * Pages are touched after what is on the caller's stream now, and what comes to that stream later waits for them.
 * MARU_E_ARGUMENT (nothing was started), MARU_E_CUDA, MARU_E_NULL. */
MARU_API int maru_cuda_submit(struct maru_pages *pages, const struct maru_job *job);

enum maru_brake {
  MARU_GO_ON = 0,
  /* Stop once `least` segments are submitted. */
  MARU_YIELD = 1,
  /* Stop before the next slice. */
  MARU_STOP = 2,
};

/* maru_cuda_submit and maru_cuda_wait in one call, for callers that must take a lock after each; nothing is to be waited
 * for afterwards, also when it fails. Between slices `brake`, if not NULL, is looked at: an enum maru_brake that any
 * thread may change meanwhile. `*moved` is how many segments, from the first, were moved; all, unless it was braked. With
 * a brake it returns when pages were written, too, not only when host memory may be used again. Then, and when it stored,
 * nothing is left that the caller's stream would have to wait for, and it does not. */
MARU_API int maru_cuda_run(struct maru_pages *pages, const struct maru_job *job, const int32_t *brake, uint32_t least,
                           uint32_t *moved);

/* Get ready to follow a load of `layers` layers that will be submitted later: pages will be touched after what is on
 * `stream`, a CUstream, now. `text` as in maru_cuda_open. MARU_E_ARGUMENT, MARU_E_CUDA, MARU_E_MEMORY, MARU_E_NULL. */
MARU_API int maru_cuda_layers_open(struct maru_cuda *cuda, uint32_t layers, uint64_t stream, struct maru_layers **out,
                                   char *text, size_t text_bytes);

/* Give its events back. The load must not be under way. NULL is fine. */
MARU_API void maru_cuda_layers_close(struct maru_layers *layers);

/* maru_cuda_submit of a load whose segments are in order of layers. `layers` is told of every layer whose last slice was
 * submitted, and has an event behind it that comes after the placement of all of the layer's bytes and of all before.
 * The job's stream is not looked at and does not wait. One load per struct maru_layers. Between slices it is
 * looked whether the load was cancelled: then MARU_E_CANCELLED, to be treated as a failure. */
MARU_API int maru_cuda_submit_layers(struct maru_pages *pages, const struct maru_job *job, struct maru_layers *layers);

/* Block until layer number `layer` is submitted, not until it has arrived; then what comes to `stream` waits for it.
 * MARU_E_ARGUMENT: no such layer. MARU_E_CANCELLED or MARU_E_CUDA: it will not arrive. MARU_E_NULL. */
MARU_API int maru_cuda_wait_layer(struct maru_layers *layers, uint32_t layer, uint64_t stream);

/* How many layers have been submitted, and how many, counted from the first, have arrived. Does not block.
 * MARU_E_CANCELLED or MARU_E_CUDA when the load failed. MARU_E_NULL. */
MARU_API int maru_cuda_layers_done(struct maru_layers *layers, uint32_t *submitted, uint32_t *done);

/* Submit no further slice. Also before the load is submitted. */
MARU_API int maru_cuda_layers_cancel(struct maru_layers *layers);

/* Why a call on `layers` failed, in at most `text_bytes` bytes with the zero behind. */
MARU_API int maru_cuda_layers_error(struct maru_layers *layers, char *text, size_t text_bytes);

/* Wait until the host memory of the last job may be used again: read by a load, written by a store. Of a load that was
 * submitted by maru_cuda_submit_layers, wait until its pages are written, too. After a failure nothing is under way any
 * more when this returns; what was moved is undefined. MARU_E_CUDA, MARU_E_NULL. */
MARU_API int maru_cuda_wait(struct maru_pages *pages);

/* Seconds that the last job took the calling thread: to issue it, and asleep until there was room or all had gone. */
MARU_API int maru_cuda_times(const struct maru_pages *pages, double *issued, double *waited);

/* An export of a Python object's memory, laid out as CPython's Py_buffer, which has been of its stable ABI since 3.11 and
 * was the same before. */
struct maru_buffer {
  void *address, *owner;
  intptr_t bytes, item_bytes;
  int32_t readonly, dimensions;
  void *rest[5];
};

/* CPython's PyObject_GetBuffer and PyBuffer_Release, as the interpreter that calls has them: nothing is linked. */
typedef int (*maru_get_buffer)(void *object, struct maru_buffer *view, int flags);
typedef void (*maru_release_buffer)(struct maru_buffer *view);

/* Export the contiguous memory of `count` objects, in one call because thousands cost milliseconds. Returns how many were
 * exported; if fewer than `count`, that object's exception is set and the exports before it are released again. The calling
 * thread holds the interpreter's lock, and the objects stay during the call. */
MARU_API uint32_t maru_buffers_take(maru_get_buffer get, maru_release_buffer release, void *const *objects,
                                    uint32_t count, struct maru_buffer *views);

/* Release exports, the last first, with the interpreter's lock held. */
MARU_API void maru_buffers_release(maru_release_buffer release, struct maru_buffer *views, uint32_t count);

/* What went wrong in the last failed call on `pages`; valid until the next call on it. Never NULL. */
MARU_API const char *maru_cuda_error(const struct maru_pages *pages);

/* ==== Copies between pages in host memory and objects: libmaru_copy =================================================
 *
 * A library of its own; it needs nothing. Addresses are numbers; none is checked. */

/* `tokens` tokens, at least one, that follow each other in the pages and in one object: within a block, or from one
 * into the next where these lie without a gap in every plane. */
struct maru_piece {
  /* Address of the object's first byte. */
  uint64_t object;
  /* Where the first token lies in the pages, and which token of the chunk it is. */
  uint32_t block, slot, token, tokens;
  /* The first layer of the pages that moves, and which one of the object that is. */
  uint32_t layer, row;
};

/* What any number of threads copy together, each with one call of maru_copy_pieces. */
struct maru_copy_job {
  const struct maru_geometry *geometry;
  /* Where each layer's first element is. */
  const uint64_t *layer_addresses;
  const struct maru_piece *pieces;
  uint32_t piece_count;
  /* Layers that an object holds: its bytes are [planes, object_layers, chunk_tokens, heads, head_size]. */
  uint32_t object_layers;
  /* Layers that each piece moves. */
  uint32_t layers;
  /* enum maru_direction. */
  uint32_t direction;
  /* 1: what is written goes past the caches where that is possible: for more than they hold. */
  uint32_t past_caches;
  uint32_t reserved;
  /* Zero. Counts what threads have taken. */
  uint64_t taken;
};

/* MARU_ABI_VERSION of the library. */
MARU_API uint32_t maru_copy_abi_version(void);

/* Copy the pieces of a job, or what other threads leave of them; all is copied once every thread that called has
 * returned. Stores of this thread are then ordered before whatever it stores later, also those past the caches.
 * MARU_E_NULL, and MARU_E_ARGUMENT when a piece is not within the geometry: nothing was copied. */
MARU_API int maru_copy_pieces(struct maru_copy_job *job);

#ifdef __cplusplus
}
#endif

#endif /* MARU_H */
