/* The placement of a slice by one launch: what place.h wants to know of it. */
#include <string.h>

#include "cuda_internal.h"

#define BLOCKS_PER_MULTIPROCESSOR 4
#define VECTORS_PER_BLOCK (MARU_PLACE_THREADS * MARU_PLACE_UNROLL)

int maru_place_slice(struct maru_pages *pages, uint32_t slot, const struct maru_segment *first,
                     const struct maru_segment *last, uint32_t way) {
  const struct maru_geometry *g = &pages->geometry;
  const struct maru_job *job = &pages->job;
  struct maru_place *place = &pages->place;
  struct maru_place_segment *here = place->segment;
  uint64_t all = pages->aligned, token = place->token_bytes, most = 0;
  place->segments = (uint32_t)(last - first), place->blocks = 0;
  for (const struct maru_segment *s = first; s < last; s++, here++) {
    uint32_t begin = s->token / g->block_size, places;
    if (way == MARU_MAPPED)
      here->packed = s->host, here->pitch = s->pitch;
    else
      here->packed = pages->staging + slot * pages->slot_bytes + s->offset, here->pitch = token * s->tokens;
    all |= here->packed | (s->rows > 1 ? here->pitch : 0);
    here->row = s->row, here->step = s->step;
    here->slot = s->token % g->block_size;
    /* Of a slice before, as a rule. */
    if (here->tokens.divisor != s->tokens) here->tokens = maru_divisor_of(s->tokens);
    if (s > first && s->token == s[-1].token && s->tokens == s[-1].tokens) {
      here->block = here[-1].block;
    } else {
      here->block = place->blocks;
      places = maru_divide(here->slot + s->tokens - 1, place->block_size) + 1;
      memcpy(&place->block[place->blocks], &job->blocks[begin - job->first_place], places * sizeof(int32_t));
      place->blocks += places;
    }
    here->vectors = (uint32_t)((uint64_t)s->rows * s->tokens * token); /* bytes, for now */
    if (here->vectors > most) most = here->vectors;
  }
  uint32_t width = 0;
  while (width < MARU_WIDTHS - 1 && !(all & (1u << width))) width++;
  while (here-- > place->segment) here->vectors >>= width;
  if (place->vector_bytes != 1u << width) {
    place->vector_bytes = 1u << width;
    place->token_vectors = maru_divisor_of((uint32_t)(token >> width));
    place->head_vectors = maru_divisor_of((uint32_t)((uint64_t)g->head_size * g->element_size >> width));
    for (uint32_t n = 0; n < g->planes; n++)
      place->plane[n].step = g->plane[n].dim == 1 ? 1u << width : g->plane[n].dim * g->element_size;
  }
  uint64_t blocks = ((most >> width) + VECTORS_PER_BLOCK - 1) / VECTORS_PER_BLOCK;
  uint32_t grid = way != first->way && job->scattered_grid ? job->scattered_grid : job->grid;
  uint64_t limit = grid ? grid : (uint64_t)pages->cuda->info.multiprocessors * BLOCKS_PER_MULTIPROCESSOR;
  if (blocks > limit) blocks = limit;
  void *parameters[] = {place};
  DO(pages, LaunchKernel, pages->cuda->kernel[job->direction][width], (unsigned)blocks, 1, 1, MARU_PLACE_THREADS, 1, 1,
     0, pages->lane[slot], parameters, NULL);
  return MARU_OK;
}
