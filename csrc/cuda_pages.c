/* Pages of an engine rank: how they are described to kernels, and what there is on the device for moving them. */
#include <stdlib.h>
#include <string.h>

#include "cuda_internal.h"

/* What every driver takes as parameters of a launch. */
_Static_assert(sizeof(struct maru_place) <= 4096, "fewer segments or blocks");

/* Fold heads into one where they follow each other without a gap, so that any size of head gets wide accesses. */
static void fold_heads(struct maru_geometry *g) {
  int follow = 1;
  for (uint32_t n = 0; n < g->planes; n++) {
    struct maru_plane *p = &g->plane[n];
    if (g->head_size == 1) p->dim = 1;
    if (g->heads == 1) p->head = g->head_size;
    follow &= p->dim == 1 && p->head == g->head_size;
  }
  if (follow) g->head_size *= g->heads, g->heads = 1;
}

static void describe(struct maru_pages *pages) {
  struct maru_geometry g = pages->geometry;
  struct maru_place *place = &pages->place;
  uint64_t size = g.element_size, all = 16;
  fold_heads(&g);
  uint64_t head_bytes = g.head_size * size;
  for (uint32_t n = 0; n < g.planes; n++) {
    const struct maru_plane *p = &g.plane[n];
    place->plane[n] = (struct maru_place_plane){p->offset * size, p->block * size, p->token * size, p->head * size, 0};
    if (p->dim != 1) head_bytes = size;
    all |= place->plane[n].offset | place->plane[n].block | place->plane[n].token;
    if (g.heads > 1) all |= place->plane[n].head;
  }
  for (uint32_t layer = 0; layer < g.layers; layer++) all |= pages->layer_addresses[layer];
  all |= head_bytes | maru_token_bytes(&g);
  pages->aligned = all & -all;
  pages->geometry = g;
  place->layer_addresses = pages->staging + pages->slots * pages->slot_bytes;
  place->block_size = maru_divisor_of(g.block_size);
  place->layers = maru_divisor_of(g.layers);
  place->token_bytes = (uint32_t)maru_token_bytes(&g);
}

static int make_streams(struct maru_pages *pages, char *text, size_t room) {
  const struct maru_driver *driver = &pages->cuda->driver;
  TRY(EventCreate, &pages->began, CU_EVENT_DISABLE_TIMING_);
  for (uint32_t k = 0; k < pages->slots; k++) {
    /* Placing goes before an engine's own kernels when both wait for a multiprocessor: it takes microseconds, and bytes
     * on the bus wait for it. The driver takes the nearest priority that it has. */
    TRY(StreamCreate, &pages->lane[k], CU_STREAM_NON_BLOCKING_, -100);
    TRY(EventCreate, &pages->placed[k], CU_EVENT_DISABLE_TIMING_);
  }
  for (uint32_t k = 0; k < MARU_MOST_WINDOW; k++)
    TRY(EventCreate, &pages->crossed[k], CU_EVENT_DISABLE_TIMING_ | CU_EVENT_BLOCKING_SYNC_);
  TRY(MemcpyHtoD, pages->place.layer_addresses, pages->layer_addresses, pages->geometry.layers * sizeof(uint64_t));
  return MARU_OK;
}

int maru_cuda_bind(struct maru_cuda *cuda, const struct maru_geometry *geometry, const uint64_t *layer_addresses,
                   uint64_t staging, uint64_t slot_bytes, uint32_t slots, struct maru_pages **out, char *text,
                   size_t room) {
  if (!cuda || !geometry || !layer_addresses || !out) return MARU_E_NULL;
  *out = NULL;
  if (maru_check_geometry(geometry) || !slots || slots > MARU_MOST_SLOTS || !slot_bytes || slot_bytes >= 1u << 31)
    return MARU_E_ARGUMENT;
  if (slot_bytes % 16 || staging % 16) return MARU_E_ARGUMENT;
  for (uint32_t layer = 0; layer < geometry->layers; layer++)
    if (!layer_addresses[layer] || layer_addresses[layer] % geometry->element_size) return MARU_E_ARGUMENT;
  struct maru_pages *pages = calloc(1, sizeof *pages);
  uint64_t *addresses = malloc(geometry->layers * sizeof *addresses);
  if (!pages || !addresses) {
    free(pages), free(addresses);
    return MARU_E_MEMORY;
  }
  memcpy(addresses, layer_addresses, geometry->layers * sizeof *addresses);
  pages->cuda = cuda;
  pages->geometry = *geometry;
  pages->layer_addresses = addresses;
  pages->staging = staging, pages->slot_bytes = slot_bytes, pages->slots = slots;
  describe(pages);
  struct maru_entered before = maru_enter(cuda);
  int status = make_streams(pages, text, room);
  maru_leave(cuda, before);
  if (status)
    maru_cuda_unbind(pages);
  else
    *out = pages;
  return status;
}

void maru_settle(const struct maru_pages *pages) {
  const struct maru_driver *driver = &pages->cuda->driver;
  for (uint32_t k = 0; k < pages->slots; k++) {
    if (!pages->lane[k] || !driver->StreamSynchronize(pages->lane[k])) continue;
    /* It may have told what went wrong before instead of waiting, or the context was not current after all. */
    struct maru_entered before = maru_enter(pages->cuda);
    driver->StreamSynchronize(pages->lane[k]);
    maru_leave(pages->cuda, before);
  }
}

void maru_cuda_unbind(struct maru_pages *pages) {
  if (!pages) return;
  const struct maru_driver *driver = &pages->cuda->driver;
  struct maru_entered before = maru_enter(pages->cuda);
  maru_settle(pages);
  for (uint32_t k = 0; k < pages->slots; k++) {
    if (pages->placed[k]) driver->EventDestroy(pages->placed[k]);
    if (pages->lane[k]) driver->StreamDestroy(pages->lane[k]);
  }
  for (uint32_t k = 0; k < MARU_MOST_WINDOW; k++)
    if (pages->crossed[k]) driver->EventDestroy(pages->crossed[k]);
  if (pages->began) driver->EventDestroy(pages->began);
  maru_leave(pages->cuda, before);
  free(pages->layer_addresses);
  free(pages);
}

int maru_cuda_set_bounce(struct maru_pages *pages, uint64_t bounce) {
  if (!pages) return MARU_E_NULL;
  pages->bounce = bounce;
  return MARU_OK;
}

const char *maru_cuda_error(const struct maru_pages *pages) { return pages ? pages->text : "no pages"; }
