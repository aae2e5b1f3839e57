/* The copies of a segment, without a device: see cuda_copies.h. */
#include "cuda_copies.h"

#include <string.h>

#include "place.h"

uint64_t maru_token_bytes(const struct maru_geometry *g) {
  return (uint64_t)g->heads * g->head_size * g->element_size;
}

static uint64_t row_bytes(const struct maru_geometry *g) { return maru_token_bytes(g) * g->chunk_tokens; }

int maru_check_geometry(const struct maru_geometry *g) {
  uint32_t size = g->element_size;
  if (g->planes < 1 || g->planes > MARU_PLANES || (size != 1 && size != 2 && size != 4 && size != 8))
    return MARU_E_ARGUMENT;
  if (!g->layers || !g->blocks || !g->block_size || !g->heads || !g->head_size || !g->chunk_tokens)
    return MARU_E_ARGUMENT;
  /* Numerators of maru_divide stay below 2^31, and products of 32-bit numbers do not wrap. */
  const uint64_t limit = 1u << 31;
  if ((uint64_t)g->planes * g->layers >= limit || maru_token_bytes(g) >= limit || g->block_size >= limit ||
      g->blocks >= limit)
    return MARU_E_ARGUMENT;
  return row_bytes(g) / g->chunk_tokens == maru_token_bytes(g) ? MARU_OK : MARU_E_ARGUMENT;
}

/* Whether the elements of a token follow each other in a plane's pages, and tokens follow each other in a block. */
static int is_plain(const struct maru_geometry *g, const struct maru_plane *p) {
  if (g->head_size > 1 && p->dim != 1) return 0;
  if (g->heads > 1 && p->head != g->head_size) return 0;
  return g->block_size == 1 || p->token == (uint64_t)g->heads * g->head_size;
}

/* Whether block b + 1 continues block b. */
static int is_gapless(const struct maru_geometry *g, const struct maru_plane *p) {
  return p->block == g->block_size * (uint64_t)g->heads * g->head_size;
}

/* `places`: how many blocks its tokens are in. */
static int check_segment(const struct maru_geometry *g, const struct maru_job *job, const struct maru_segment *s,
                         uint64_t slot_bytes, uint64_t *places) {
  uint64_t token = maru_token_bytes(g), first = s->token / g->block_size, within = s->token % g->block_size;
  if (!s->rows || !s->tokens || !s->host || s->way > MARU_MAPPED) return MARU_E_ARGUMENT;
  if (s->row + (uint64_t)(s->rows - 1) * s->step >= (uint64_t)g->planes * g->layers || s->tokens > g->chunk_tokens)
    return MARU_E_ARGUMENT;
  if (s->rows > 1 && (!s->step || s->pitch < token * s->tokens)) return MARU_E_ARGUMENT;
  *places = (within + s->tokens - 1) / g->block_size + 1;
  if (first < job->first_place || first - job->first_place + *places > job->block_count) return MARU_E_ARGUMENT;
  if (s->way == MARU_DIRECT) {
    uint32_t last = (s->row + (s->rows - 1) * s->step) / g->layers;
    for (uint32_t plane = s->row / g->layers; plane <= last; plane++)
      if (!is_plain(g, &g->plane[plane])) return MARU_E_ARGUMENT;
    return MARU_OK;
  }
  uint64_t lines = (uint64_t)s->rows * s->tokens;
  if (lines > 1u << 31 || lines * token > 1u << 31 || within + s->tokens >= 1u << 31) return MARU_E_ARGUMENT;
  if (s->way == MARU_MAPPED) return s->host % g->element_size ? MARU_E_ARGUMENT : MARU_OK;
  return s->offset % 16 || s->offset > slot_bytes || lines * token > slot_bytes - s->offset ? MARU_E_ARGUMENT : MARU_OK;
}

int maru_check_job(const struct maru_geometry *g, const struct maru_job *job, uint64_t slot_bytes) {
  if ((job->segment_count && !job->segments) || (job->block_count && !job->blocks) || (job->cut_count && !job->cuts))
    return MARU_E_NULL;
  if (job->direction > MARU_STORE) return MARU_E_ARGUMENT;
  for (uint32_t i = 0; i < job->block_count; i++)
    if (job->blocks[i] < 0 || (uint32_t)job->blocks[i] >= g->blocks) return MARU_E_ARGUMENT;
  uint32_t segments = 0;
  uint64_t places = 0, here;
  for (uint32_t i = 0; i < job->segment_count; i++) {
    const struct maru_segment *s = &job->segments[i];
    int status = check_segment(g, job, s, slot_bytes, &here);
    if (status) return status;
    if (i && s->slice < s[-1].slice) return MARU_E_ARGUMENT;
    if (!i || s->slice != s[-1].slice) segments = 0, places = 0;
    else if (s->way != s[-1].way) return MARU_E_ARGUMENT;
    segments++, places += here;
    if (s->way != MARU_DIRECT && (segments > MARU_PLACE_SEGMENTS || places > MARU_PLACE_BLOCKS)) return MARU_E_ARGUMENT;
  }
  return MARU_OK;
}

/* Where the registration ends that `host` is of. */
static uint64_t registered_until(const struct maru_job *job, uint64_t host, struct maru_sink *sink) {
  if (host >= sink->begin && host < sink->end) return sink->end;
  uint32_t low = 0, high = job->cut_count;
  while (low < high) {
    uint32_t middle = low + (high - low) / 2;
    if (job->cuts[middle] > host)
      high = middle;
    else
      low = middle + 1;
  }
  sink->begin = low ? job->cuts[low - 1] : 0;
  return sink->end = low < job->cut_count ? job->cuts[low] : UINT64_MAX;
}

static int take_rows(const struct maru_job *job, uint64_t host, uint64_t host_pitch, uint64_t device,
                     uint64_t device_pitch, uint64_t bytes, uint64_t rows, struct maru_sink *sink) {
  int load = job->direction == MARU_LOAD;
  *sink->next = (struct maru_rows){
      .target = load ? device : host,
      .source = load ? host : device,
      .bytes = bytes,
      .rows = rows,
      .target_pitch = load ? device_pitch : host_pitch,
      .source_pitch = load ? host_pitch : device_pitch,
      .end = registered_until(job, host, sink),
  };
  return sink->take(sink);
}

/* One copy between host memory and the device, cut where the host's registrations meet. */
static int take_cut(const struct maru_job *job, uint64_t host, uint64_t device, uint64_t bytes, struct maru_sink *sink) {
  for (uint64_t end = host + bytes; host < end;) {
    uint64_t stop = registered_until(job, host, sink);
    if (stop > end) stop = end;
    int status = take_rows(job, host, 0, device, 0, stop - host, 1, sink);
    if (status) return status;
    device += stop - host, host = stop;
  }
  return MARU_OK;
}

/* The rows of a staged segment. */
static int staged_rows(const struct maru_job *job, const struct maru_segment *s, uint64_t device, uint64_t packed,
                       struct maru_sink *sink) {
  uint64_t bytes = (s->rows - 1) * s->pitch + packed;
  if (packed == s->pitch) return take_cut(job, s->host, device, packed * s->rows, sink);
  if (s->pitch < MARU_MOST_PITCH && registered_until(job, s->host, sink) - s->host >= bytes)
    return take_rows(job, s->host, s->pitch, device, packed, packed, s->rows, sink);
  int status = MARU_OK;
  for (uint32_t row = 0; row < s->rows && !status; row++)
    status = take_cut(job, s->host + row * s->pitch, device + row * packed, packed, sink);
  return status;
}

static int direct_row(const struct maru_geometry *g, uint64_t layer, const struct maru_plane *p,
                      const struct maru_job *job, const struct maru_segment *s, uint64_t host, struct maru_sink *sink) {
  uint64_t bytes = maru_token_bytes(g), size = g->element_size;
  int gapless = is_gapless(g, p);
  uint32_t token = s->token, end = s->token + s->tokens;
  while (token < end) {
    uint32_t place = token / g->block_size - job->first_place, slot = token % g->block_size;
    uint64_t page = layer + (p->offset + job->blocks[place] * p->block + slot * p->token) * size;
    uint64_t count = g->block_size - slot;
    while (gapless && count < end - token && job->blocks[place + 1] == job->blocks[place] + 1)
      count += g->block_size, place++;
    if (count > end - token) count = end - token;
    int status = take_cut(job, host, page, count * bytes, sink);
    if (status) return status;
    token += (uint32_t)count, host += count * bytes;
  }
  return MARU_OK;
}

int maru_segment_copies(const struct maru_geometry *g, const uint64_t *layer_addresses, const struct maru_job *job,
                        const struct maru_segment *s, uint64_t slot, uint64_t bounce, struct maru_sink *sink) {
  uint64_t packed = maru_token_bytes(g) * s->tokens;
  int status = MARU_OK;
  if (s->way == MARU_BOUNCED) {
    uint64_t here = bounce + s->offset, there = slot + s->offset, bytes = packed * s->rows;
    return take_rows(job, here, 0, there, 0, bytes, 1, sink);
  }
  if (s->way == MARU_STAGED) return staged_rows(job, s, slot + s->offset, packed, sink);
  for (uint32_t row = 0; row < s->rows && s->way == MARU_DIRECT && !status; row++) {
    uint32_t which = s->row + row * s->step, plane = which / g->layers, layer = which % g->layers;
    status = direct_row(g, layer_addresses[layer], &g->plane[plane], job, s, s->host + row * s->pitch, sink);
  }
  return status;
}

void maru_segment_bounce(const struct maru_geometry *g, const struct maru_segment *s, uint64_t bounce, int to_bounce) {
  uint64_t pitch = s->pitch, packed = maru_token_bytes(g) * s->tokens, rows = s->rows;
  if (packed == pitch) packed *= rows, rows = 1;
  for (uint64_t row = 0; row < rows; row++) {
    char *object = (char *)(uintptr_t)(s->host + row * pitch);
    char *here = (char *)(uintptr_t)(bounce + s->offset + row * packed);
    if (to_bounce)
      memcpy(here, object, packed);
    else
      memcpy(object, here, packed);
  }
}
