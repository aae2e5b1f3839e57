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

static uint32_t places_of(const struct maru_geometry *g, const struct maru_segment *s) {
  return (uint32_t)(((uint64_t)s->token + s->tokens - 1) / g->block_size - s->token / g->block_size + 1);
}

static int check_segment(const struct maru_geometry *g, const struct maru_job *job, const struct maru_segment *s,
                         uint64_t slot_bytes) {
  uint64_t token = maru_token_bytes(g), first = s->token / g->block_size;
  if (!s->rows || !s->tokens || !s->host || s->way > MARU_MAPPED) return MARU_E_ARGUMENT;
  if (s->row + (uint64_t)(s->rows - 1) * s->step >= (uint64_t)g->planes * g->layers || s->tokens > g->chunk_tokens)
    return MARU_E_ARGUMENT;
  if (s->rows > 1 && (!s->step || s->pitch < token * s->tokens)) return MARU_E_ARGUMENT;
  if (first < job->first_place || first - job->first_place + places_of(g, s) > job->block_count) return MARU_E_ARGUMENT;
  if (s->way == MARU_DIRECT) {
    uint32_t last = (s->row + (s->rows - 1) * s->step) / g->layers;
    for (uint32_t plane = s->row / g->layers; plane <= last; plane++)
      if (!is_plain(g, &g->plane[plane])) return MARU_E_ARGUMENT;
    return MARU_OK;
  }
  uint64_t lines = (uint64_t)s->rows * s->tokens;
  if (lines > (1u << 31) / token || s->token % g->block_size + (uint64_t)s->tokens >= 1u << 31) return MARU_E_ARGUMENT;
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
  uint64_t places = 0;
  for (uint32_t i = 0; i < job->segment_count; i++) {
    const struct maru_segment *s = &job->segments[i];
    int status = check_segment(g, job, s, slot_bytes);
    if (status) return status;
    if (i && s->slice < s[-1].slice) return MARU_E_ARGUMENT;
    if (!i || s->slice != s[-1].slice) segments = 0, places = 0;
    else if (s->way != s[-1].way) return MARU_E_ARGUMENT;
    segments++, places += places_of(g, s);
    if (s->way != MARU_DIRECT && (segments > MARU_PLACE_SEGMENTS || places > MARU_PLACE_BLOCKS)) return MARU_E_ARGUMENT;
  }
  return MARU_OK;
}

uint32_t maru_next_cut(const struct maru_job *job, uint64_t host) {
  uint32_t low = 0, high = job->cut_count;
  while (low < high) {
    uint32_t middle = low + (high - low) / 2;
    if (job->cuts[middle] > host)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

/* One copy between host memory and the device, cut where the host's registrations meet. */
static int take_cut(const struct maru_job *job, uint64_t host, uint64_t device, uint64_t bytes, struct maru_sink *sink) {
  uint64_t end = host + bytes;
  for (uint32_t i = maru_next_cut(job, host); host < end; i++) {
    uint64_t stop = i < job->cut_count ? job->cuts[i] : end;
    if (stop > end) stop = end;
    int status = job->direction == MARU_LOAD ? sink->take(sink, device, host, stop - host)
                                             : sink->take(sink, host, device, stop - host);
    if (status) return status;
    device += stop - host, host = stop;
  }
  return MARU_OK;
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
    return job->direction == MARU_LOAD ? sink->take(sink, there, here, bytes) : sink->take(sink, here, there, bytes);
  }
  if (s->way == MARU_STAGED && packed == s->pitch)
    return take_cut(job, s->host, slot + s->offset, packed * s->rows, sink);
  for (uint32_t row = 0; row < s->rows && !status; row++) {
    uint32_t which = s->row + row * s->step, plane = which / g->layers, layer = which % g->layers;
    uint64_t host = s->host + row * s->pitch;
    if (s->way == MARU_STAGED)
      status = take_cut(job, host, slot + s->offset + row * packed, packed, sink);
    else if (s->way == MARU_DIRECT)
      status = direct_row(g, layer_addresses[layer], &g->plane[plane], job, s, host, sink);
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
