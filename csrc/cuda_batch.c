/* Copies of a slice by the copy engine: as few calls of the driver as it takes. */
#include "cuda_internal.h"

/* Rows are told apart from copies when they are submitted: fewer than `fold` are copies of their own. */
static int is_folded(const struct maru_batch *batch, const struct maru_rows *run) {
  uint32_t least = batch->pages->job.fold;
  return least && run->rows > 1 && run->rows >= least;
}

static int copy_rows(const struct maru_batch *batch, const struct maru_rows *run) {
  struct maru_pages *pages = batch->pages;
  int load = pages->job.direction == MARU_LOAD;
  struct maru_copy_2d copy = {.width = run->bytes, .height = run->rows};
  copy.source_type = load ? CU_MEMORYTYPE_HOST_ : CU_MEMORYTYPE_DEVICE_;
  copy.target_type = load ? CU_MEMORYTYPE_DEVICE_ : CU_MEMORYTYPE_HOST_;
  if (load)
    copy.source_host = (const void *)(uintptr_t)run->source, copy.target_device = run->target;
  else
    copy.source_device = run->source, copy.target_host = (void *)(uintptr_t)run->target;
  copy.source_pitch = run->source_pitch;
  copy.target_pitch = run->target_pitch;
  DO(pages, Memcpy2DAsync, &copy, batch->lane);
  return MARU_OK;
}

/* The first `count` copies that the driver is to be told of. */
static int submit(struct maru_batch *batch, size_t count) {
  struct maru_pages *pages = batch->pages;
  const struct maru_driver *driver = &pages->cuda->driver;
  size_t start = 0, failed = 0;
  struct maru_copy_attributes as = {.source_order = CU_SOURCE_ORDER_STREAM_};
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

/* What lies at one distance is one copy, so that a thread has fewer to submit. */
static int flush(struct maru_batch *batch) {
  size_t count = 0;
  int status;
  for (const struct maru_rows *run = batch->runs; run < batch->runs + batch->count; run++) {
    if (is_folded(batch, run)) {
      STEP(copy_rows(batch, run));
      continue;
    }
    for (uint64_t row = 0; row < run->rows; row++) {
      if (count == MARU_BATCH) {
        STEP(submit(batch, count));
        count = 0;
      }
      batch->targets[count] = run->target + row * run->target_pitch;
      batch->sources[count] = run->source + row * run->source_pitch;
      batch->bytes[count++] = run->bytes;
    }
  }
  batch->count = 0;
  return submit(batch, count);
}

static uint64_t host_of(const struct maru_batch *batch, const struct maru_rows *rows) {
  return batch->pages->job.direction == MARU_LOAD ? rows->source : rows->target;
}

/* Whether `more`, one row, begins where the last row of a run ends, on both sides and in one registration. */
static inline int continues(const struct maru_batch *batch, const struct maru_rows *run, const struct maru_rows *more) {
  uint64_t before = run->rows - 1;
  return more->rows == 1 && run->target + before * run->target_pitch + run->bytes == more->target &&
         run->source + before * run->source_pitch + run->bytes == more->source && host_of(batch, more) < run->end;
}

/* Whether `more` are further rows of a run; then they are added to it. Of rows that are too few to be folded the last
 * may be the first of `more` instead. */
static inline int extend(const struct maru_batch *batch, struct maru_rows *run, struct maru_rows *more) {
  uint64_t before = run->rows - 1;
  /* Below zero is above any pitch that the driver takes. */
  uint64_t target = more->target - (run->target + before * run->target_pitch);
  uint64_t source = more->source - (run->source + before * run->source_pitch);
  if (more->bytes != run->bytes || host_of(batch, more) >= run->end) return 0;
  if (target < run->bytes || source < run->bytes || target >= MARU_MOST_PITCH || source >= MARU_MOST_PITCH) return 0;
  if (more->rows > 1 && (target != more->target_pitch || source != more->source_pitch)) return 0;
  if (before && (target != run->target_pitch || source != run->source_pitch)) {
    if (is_folded(batch, run)) return 0;
    run->rows--;
    more->target -= target, more->source -= source, more->rows++;
    more->target_pitch = target, more->source_pitch = source;
    return 0;
  }
  if (!before) run->target_pitch = target, run->source_pitch = source;
  run->rows += more->rows;
  return 1;
}

/* What continues the row before is added to that, and what lies at the distance of the rows before to those. */
static int take(struct maru_sink *sink) {
  struct maru_batch *batch = (struct maru_batch *)sink;
  struct maru_rows *more = sink->next, *run = more - 1;
  uint32_t fold = batch->pages->job.fold;
  if (batch->count && continues(batch, run, more)) {
    if (run->rows == 1) {
      run->bytes += more->bytes;
      if (fold && batch->count > 1 && extend(batch, run - 1, run)) batch->count--, sink->next--;
      return MARU_OK;
    }
    run->rows--;
    more->target -= run->bytes, more->source -= run->bytes, more->bytes += run->bytes;
  } else if (batch->count && fold && extend(batch, run, more)) {
    return MARU_OK;
  }
  if (batch->count == batch->most) {
    /* Of a slice that is only looked at nothing may be submitted. */
    int status = batch->whole ? MARU_E_MEMORY : flush(batch);
    if (status) return status;
    batch->runs[0] = *more;
  }
  sink->next = &batch->runs[++batch->count];
  return MARU_OK;
}

static int take_all(struct maru_pages *pages, uint32_t slot, const struct maru_segment *first,
                    const struct maru_segment *last, int whole) {
  struct maru_batch *batch = &pages->batch;
  uint64_t here = slot * pages->slot_bytes;
  int status = MARU_OK;
  batch->sink.take = take, batch->pages = pages, batch->lane = pages->lane[slot];
  batch->sink.next = batch->runs, batch->sink.begin = batch->sink.end = 0;
  batch->whole = whole, batch->count = 0;
  batch->most = whole && pages->job.scattered < MARU_BATCH ? pages->job.scattered : MARU_BATCH;
  for (const struct maru_segment *s = first; s < last && !status; s++)
    status = maru_segment_copies(&pages->geometry, pages->layer_addresses, &pages->job, s, pages->staging + here,
                                 pages->bounce + here, &batch->sink);
  return status;
}

uint32_t maru_gather_slice(struct maru_pages *pages, uint32_t slot, const struct maru_segment *first,
                           const struct maru_segment *last) {
  struct maru_batch *batch = &pages->batch;
  uint32_t copies = 0;
  batch->whole = take_all(pages, slot, first, last, 1) == MARU_OK;
  if (!batch->whole) return UINT32_MAX;
  for (size_t i = 0; i < batch->count; i++)
    copies += is_folded(batch, &batch->runs[i]) ? 1 : (uint32_t)batch->runs[i].rows;
  return copies;
}

int maru_copy_slice(struct maru_pages *pages, uint32_t slot, const struct maru_segment *first,
                    const struct maru_segment *last) {
  int kept = pages->batch.whole, status = MARU_OK;
  if (!kept) status = take_all(pages, slot, first, last, 0);
  pages->batch.whole = 0;
  return status ? status : flush(&pages->batch);
}
