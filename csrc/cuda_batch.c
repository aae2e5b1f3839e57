/* Copies of a slice by the copy engine: as few calls of the driver as it takes. */
#include "cuda_internal.h"

#define MOST_PITCH (1u << 31)
/* How many copies from number `i` on are rows of one copy of two dimensions: all as wide, at one distance on both
 * sides, in one registration. */
static size_t rows_from(const struct maru_batch *batch, size_t i) {
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
    if (batch->targets[k] - batch->targets[k - 1] != target) break;
    if (batch->sources[k] - batch->sources[k - 1] != source) break;
  }
  return rows;
}

static int copy_rows(const struct maru_batch *batch, size_t i, size_t rows) {
  struct maru_pages *pages = batch->pages;
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
  DO(pages, Memcpy2DAsync, &copy, batch->lane);
  return MARU_OK;
}

/* Make what lies at one distance one copy, so that a thread has fewer to submit; what is left stays in the batch. */
static int fold(struct maru_batch *batch) {
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

static int flush(struct maru_batch *batch) {
  struct maru_pages *pages = batch->pages;
  const struct maru_driver *driver = &pages->cuda->driver;
  int status = fold(batch);
  if (status) return status;
  size_t count = batch->count, start = 0, failed = 0;
  struct maru_copy_attributes as = {.source_order = CU_SOURCE_ORDER_STREAM_};
  batch->count = 0;
  if (count > 1 && !pages->job.one_by_one && pages->cuda->info.batches) {
    if (driver->batch_13)
      DO(pages, batch_13, batch->targets, batch->sources, batch->bytes, count, &as, &start, 1, batch->lane);
    else
      DO(pages, batch_12_8, batch->targets, batch->sources, batch->bytes, count, &as, &start, 1, &failed, batch->lane);
    return MARU_OK;
  }
  for (size_t i = 0; i < count; i++)
    DO(pages, MemcpyAsync, batch->targets[i], batch->sources[i], batch->bytes[i], batch->lane);
  return MARU_OK;
}

/* Whether a copy continues the one before on both sides; then it is added to that. */
static int continues(struct maru_batch *batch, uint64_t target, uint64_t source, uint64_t bytes) {
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

static int take(struct maru_sink *sink, uint64_t target, uint64_t source, uint64_t bytes) {
  struct maru_batch *batch = (struct maru_batch *)sink;
  if (continues(batch, target, source, bytes)) return MARU_OK;
  if (batch->count == MARU_BATCH) {
    /* Of a slice that is only looked at nothing may be submitted. */
    int status = batch->whole ? MARU_E_MEMORY : flush(batch);
    if (status) return status;
  }
  batch->targets[batch->count] = target, batch->sources[batch->count] = source;
  batch->bytes[batch->count++] = bytes;
  return MARU_OK;
}

static int take_all(struct maru_pages *pages, uint32_t slot, const struct maru_segment *first,
                    const struct maru_segment *last, int whole) {
  struct maru_batch *batch = &pages->batch;
  uint64_t here = slot * pages->slot_bytes;
  int status = MARU_OK;
  batch->sink.take = take, batch->pages = pages, batch->lane = pages->lane[slot];
  batch->whole = whole, batch->count = 0;
  for (const struct maru_segment *s = first; s < last && !status; s++)
    status = maru_segment_copies(&pages->geometry, pages->layer_addresses, &pages->job, s, pages->staging + here,
                                 pages->bounce + here, &batch->sink);
  return status;
}

uint32_t maru_gather_slice(struct maru_pages *pages, uint32_t slot, const struct maru_segment *first,
                           const struct maru_segment *last) {
  struct maru_batch *batch = &pages->batch;
  uint32_t copies = 0, fold = pages->job.fold;
  batch->whole = take_all(pages, slot, first, last, 1) == MARU_OK;
  if (!batch->whole) return UINT32_MAX;
  for (size_t i = 0, rows; i < batch->count; i += rows, copies++) {
    rows = fold ? rows_from(batch, i) : 1;
    if (rows < fold) rows = 1;
  }
  return copies;
}

int maru_copy_slice(struct maru_pages *pages, uint32_t slot, const struct maru_segment *first,
                    const struct maru_segment *last) {
  int kept = pages->batch.whole, status = MARU_OK;
  if (!kept) status = take_all(pages, slot, first, last, 0);
  pages->batch.whole = 0;
  return status ? status : flush(&pages->batch);
}
