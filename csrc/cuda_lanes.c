/* In which order things happen to a slice.
 *
 * Staging memory is a ring of slots, and every slot has a stream of its own, its lane: what happens in a slot happens
 * in the lane's order, one slice after another, while other lanes are at other stages. A copy engine serves a stream
 * for as long as that has copies that may run, so every copy of ours waits for one in another lane: then the engine
 * turns to somebody else's before it goes on with ours. Kernels that reach host memory themselves leave that engine to
 * others, so that they do not wait for each other.
 * Order against the caller's stream is kept by events on the device. */
#include "cuda_internal.h"

uint32_t maru_slot_of(const struct maru_pages *pages, uint32_t slice) {
  return (pages->first_slot + slice) % pages->slots;
}

/* Pages may be touched on this lane from here on. Each lane waits once per job. */
static int open_pages(struct maru_pages *pages, uint32_t slot) {
  CUhandle_ began = pages->layers ? pages->layers->began : pages->began;
  if (pages->submitted < pages->slots) DO(pages, StreamWaitEvent, pages->lane[slot], began, 0);
  return MARU_OK;
}

/* Whether one of the slices that will be in the other lanes next, the first of which begins at segment `next`,
 * completes a layer: its event comes after this slice. */
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
  int last = pages->submitted + pages->slots >= pages->slices && !pages->finished;
  if (pages->layers ? comes_before_a_layer(pages, next) : last)
    DO(pages, EventRecord, pages->placed[slot], pages->lane[slot]);
  return MARU_OK;
}

int maru_is_straight(const struct maru_pages *pages, uint32_t slice) {
  uint32_t way = pages->way[slice % MARU_MOST_WINDOW];
  return way == MARU_DIRECT || way == MARU_MAPPED;
}

int maru_await_pages(struct maru_pages *pages, CUhandle_ stream, uint32_t slice) {
  CUhandle_ event = maru_is_straight(pages, slice) ? pages->crossed[slice % MARU_MOST_WINDOW]
                                                   : pages->placed[maru_slot_of(pages, slice)];
  DO(pages, StreamWaitEvent, stream, event, 0);
  return MARU_OK;
}

/* No more than slots - 1 slices of ours may be copied at any time. The next one may only once the one before it has
 * gone, and then somebody else's copy has waited longer. Of two slices without a copy the second does not wait: from the
 * end of one kernel to the beginning of the next the bus would be idle. */
static int give_way(struct maru_pages *pages, uint32_t slot) {
  uint32_t turn = pages->submitted % MARU_MOST_WINDOW;
  pages->gave_way[turn] = 0;
  if (pages->slots == 1 || pages->submitted < pages->slots - 1) return MARU_OK;
  uint32_t before = (pages->submitted + 1 - pages->slots) % MARU_MOST_WINDOW;
  if (pages->way[turn] == MARU_MAPPED && pages->way[before] == MARU_MAPPED) return MARU_OK;
  DO(pages, StreamWaitEvent, pages->lane[slot], pages->crossed[before], 0);
  pages->gave_way[turn] = 1;
  return MARU_OK;
}

/* Whether the slice's copies are so many that a kernel which reaches the objects itself costs a thread less. */
static int is_scattered(struct maru_pages *pages, uint32_t slot, const struct maru_segment *first,
                        const struct maru_segment *last) {
  const struct maru_job *job = &pages->job;
  uint64_t pieces = 0, all = pages->aligned;
  if (!job->scattered || first->way != MARU_STAGED || !pages->cuda->info.maps_host) return 0;
  for (const struct maru_segment *s = first; s < last; s++) {
    int one = s->rows == 1 || s->pitch == s->tokens * (uint64_t)pages->place.token_bytes;
    pieces += one ? 1 : s->rows;
    all |= s->host | (one ? 0 : s->pitch);
  }
  /* With narrower accesses a kernel has too few bytes under way on the bus. */
  if (pieces < job->scattered || all % 16) return 0;
  return maru_gather_slice(pages, slot, first, last) >= job->scattered;
}

/* How the slice travels after all. */
static uint32_t way_of(struct maru_pages *pages, uint32_t slot, const struct maru_segment *first,
                       const struct maru_segment *last) {
  pages->batch.whole = 0;
  uint32_t way = is_scattered(pages, slot, first, last) ? MARU_MAPPED : first->way;
  pages->way[pages->submitted % MARU_MOST_WINDOW] = (uint8_t)way;
  return way;
}

/* The slice has no more to do with host memory. */
static int cross(struct maru_pages *pages, uint32_t slot) {
  DO(pages, EventRecord, pages->crossed[pages->submitted % MARU_MOST_WINDOW], pages->lane[slot]);
  return MARU_OK;
}

int maru_load_slice(struct maru_pages *pages, uint32_t slot, const struct maru_segment *first,
                    const struct maru_segment *last) {
  int status;
  uint32_t way = way_of(pages, slot, first, last);
  int staged = way == MARU_STAGED || way == MARU_BOUNCED;
  if (way == MARU_BOUNCED)
    for (const struct maru_segment *s = first; s < last; s++)
      maru_segment_bounce(&pages->geometry, s, pages->bounce + slot * pages->slot_bytes, 1);
  if (!staged) STEP(open_pages(pages, slot));
  STEP(give_way(pages, slot));
  if (way != MARU_MAPPED) STEP(maru_copy_slice(pages, slot, first, last));
  if (way == MARU_MAPPED) STEP(maru_place_slice(pages, slot, first, last, way));
  STEP(cross(pages, slot));
  if (!staged) return MARU_OK;
  STEP(open_pages(pages, slot));
  STEP(maru_place_slice(pages, slot, first, last, way));
  return close_pages(pages, slot, last);
}

int maru_store_slice(struct maru_pages *pages, uint32_t slot, const struct maru_segment *first,
                     const struct maru_segment *last) {
  int status;
  uint32_t way = way_of(pages, slot, first, last);
  int staged = way == MARU_STAGED || way == MARU_BOUNCED;
  STEP(open_pages(pages, slot));
  if (staged) STEP(maru_place_slice(pages, slot, first, last, way));
  if (staged) STEP(close_pages(pages, slot, last));
  STEP(give_way(pages, slot));
  if (way != MARU_MAPPED) STEP(maru_copy_slice(pages, slot, first, last));
  if (way == MARU_MAPPED) STEP(maru_place_slice(pages, slot, first, last, way));
  return cross(pages, slot);
}

/* The event comes, by way of this lane, behind the slices before in the others. Those that were copied have crossed
 * before this one did, and kernels began before this one's, so that waiting for them holds nobody up for long. */
int maru_complete_layers(struct maru_pages *pages, uint32_t slot, uint32_t layers) {
  struct maru_layers *follow = pages->layers;
  uint32_t done = follow->submitted; /* nobody else changes it */
  int status;
  if (done >= layers) return MARU_OK;
  for (uint32_t k = 1; k < pages->slots && k < pages->submitted; k++) {
    uint32_t slice = pages->submitted - 1 - k, last = (pages->submitted - 1) % MARU_MOST_WINDOW;
    /* Where this lane has given way to that slice, it has waited for all of it. */
    if (k + 1 == pages->slots && pages->gave_way[last] && maru_is_straight(pages, slice)) continue;
    STEP(maru_await_pages(pages, pages->lane[slot], slice));
  }
  CUhandle_ event;
  STEP(maru_take_event(pages->cuda, &event, pages->text, MARU_TEXT));
  for (uint32_t layer = done; layer < layers; layer++) follow->arrived[layer] = event;
  DO(pages, EventRecord, event, pages->lane[slot]);
  maru_tell_layers(follow, layers, MARU_OK, NULL);
  return MARU_OK;
}
