/* Jobs, slice after slice. The CPU waits only to bound what is under way, and before it uses a bounce buffer again. */
#include <stdio.h>
#include <time.h>

#include "cuda_internal.h"

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static int go_on(struct maru_pages *pages) {
  if (!pages->layers || !maru_is_cancelled(pages->layers)) return MARU_OK;
  snprintf(pages->text, MARU_TEXT, "the load was cancelled before layer %u of %u", pages->layers->submitted,
           pages->layers->count);
  return MARU_E_CANCELLED;
}

/* Sleep until a slice has crossed. */
static int await(struct maru_pages *pages, uint32_t slice) {
  double began = now();
  DO(pages, EventSynchronize, pages->crossed[slice % MARU_MOST_WINDOW]);
  pages->waited += now() - began;
  return MARU_OK;
}

/* Wait until at most `left` slices of the job are under way, and bring bounced ones home. */
static int retire(struct maru_pages *pages, uint32_t left) {
  uint32_t until = pages->submitted > left ? pages->submitted - left : 0;
  int status;
  /* The last first: the others have mostly gone by then, and a thread that sleeps once is better than one that sleeps
   * for each. It waits for one slice of each lane, but not for one that another has given way to: that has gone. */
  for (uint32_t n = 0; n < pages->slots && until > pages->retired + n; n++) {
    if (n && n + 1 == pages->slots && pages->gave_way[(until - 1) % MARU_MOST_WINDOW]) break;
    STEP(await(pages, until - 1 - n));
  }
  for (; pages->retired < until; pages->retired++) {
    uint32_t turn = pages->retired % MARU_MOST_WINDOW, slot = maru_slot_of(pages, pages->retired);
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
  const struct maru_job *job = &pages->job;
  CUhandle_ caller = (CUhandle_)(uintptr_t)job->stream;
  int status;
  if (!pages->layers) DO(pages, EventRecord, pages->began, caller);
  for (uint32_t i = 0; i < job->segment_count;) {
    uint32_t end = i + 1;
    while (end < job->segment_count && job->segments[end].slice == job->segments[i].slice) end++;
    STEP(go_on(pages));
    if (is_braked(pages, i)) break;
    if (pages->submitted - pages->retired >= job->window) STEP(retire(pages, job->window - job->burst));
    /* The CPU itself uses the slot's bounce buffer. */
    if (job->segments[i].way == MARU_BOUNCED) STEP(retire(pages, pages->slots - 1));
    uint32_t slot = maru_slot_of(pages, pages->submitted), turn = pages->submitted % MARU_MOST_WINDOW;
    pages->first[turn] = i, pages->last[turn] = end;
    STEP(job->direction == MARU_LOAD ? maru_load_slice(pages, slot, &job->segments[i], &job->segments[end])
                                     : maru_store_slice(pages, slot, &job->segments[i], &job->segments[end]));
    pages->submitted++;
    if (pages->layers) STEP(maru_complete_layers(pages, slot, job->segments[i].layers));
    pages->moved = i = end;
  }
  if (pages->layers) {
    /* Also of layers of which there was nothing to move. */
    maru_tell_layers(pages->layers, pages->layers->count, MARU_OK, NULL);
    return MARU_OK;
  }
  for (uint32_t k = 0; k < pages->slots && k < pages->submitted && !pages->finished; k++)
    STEP(maru_await_pages(pages, caller, pages->submitted - 1 - k));
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
  if (!is_idle(pages) || !job->window || job->window > MARU_MOST_WINDOW || !job->burst || job->burst > job->window)
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
    snprintf(pages->text, MARU_TEXT, "the job does not fit: %s",
             is_idle(pages) ? "a segment, a block or a limit is out of range" : "the one before was not waited for");
    return status;
  }
  pages->text[0] = 0;
  pages->job = *job;
  pages->layers = layers, pages->followed = layers != NULL;
  pages->first_slot = maru_slot_of(pages, pages->submitted);
  pages->submitted = pages->retired = pages->moved = 0;
  pages->slices = count_slices(job);
  pages->waited = 0;
  double began = now();
  struct maru_entered before = maru_enter(pages->cuda);
  status = run(pages);
  maru_leave(pages->cuda, before);
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
  if (status) maru_tell_layers(layers, 0, status, pages->text);
  return status;
}

int maru_cuda_times(const struct maru_pages *pages, double *issued, double *waited) {
  if (!pages || !issued || !waited) return MARU_E_NULL;
  *issued = pages->issued, *waited = pages->waited;
  return MARU_OK;
}

/* Wait for what comes last in each lane. */
static int arrive(struct maru_pages *pages) {
  for (uint32_t k = 0; k < pages->slots; k++) DO(pages, StreamSynchronize, pages->lane[k]);
  return MARU_OK;
}

int maru_cuda_wait(struct maru_pages *pages) {
  if (!pages) return MARU_E_NULL;
  struct maru_entered before = maru_enter(pages->cuda);
  int status = pages->failed ? MARU_E_CUDA : retire(pages, 0);
  if (!status && pages->followed) status = arrive(pages);
  if (status) {
    /* Also after an error nothing may touch pages or objects any more; a text is there already. */
    maru_settle(pages);
    pages->retired = pages->submitted;
    pages->failed = 0;
  }
  maru_leave(pages->cuda, before);
  return status;
}

int maru_cuda_run(struct maru_pages *pages, const struct maru_job *job, const int32_t *brake, uint32_t least,
                  uint32_t *moved) {
  if (!pages || !job || !moved) return MARU_E_NULL;
  *moved = 0;
  if (!is_idle(pages)) return submit(pages, job, NULL); /* which says why not */
  pages->brake = brake, pages->least = least;
  /* What is stored has left the pages, and with a brake it is waited for what is loaded to be there. */
  pages->finished = brake != NULL || job->direction == MARU_STORE;
  int status = submit(pages, job, NULL);
  pages->brake = NULL, pages->finished = 0;
  if (status == MARU_E_ARGUMENT) return status; /* nothing was started */
  /* Of a job that ended early no event tells when its last slices are placed. */
  pages->followed = brake != NULL;
  int waited = maru_cuda_wait(pages);
  if (!status) status = waited;
  if (!status) *moved = pages->moved;
  return status;
}
