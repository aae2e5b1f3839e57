/* Placement: which bytes of pages belong to which packed bytes. Used by the kernels, and by the host in tests.
 *
 * Packed bytes are rows of tokens: row r of a segment is one plane of one layer (row = plane * layers + layer), its
 * tokens follow each other, each holds all heads, each head all of its elements. They lie in staging memory on the
 * device, or in the object itself where the device reaches it. Everything here is bytes, except counts.
 */
#ifndef MARU_PLACE_H
#define MARU_PLACE_H

#include <stdint.h>

#ifdef __CUDACC__
#define MARU_BOTH static __host__ __device__ __forceinline__
#else
#define MARU_BOTH static inline
#endif

/* What one launch can take. Segments and the blocks that they need travel with the launch, as parameters, which end at
 * 4 KiB: there is no table on the device that somebody could overwrite too early. */
#define MARU_PLACE_SEGMENTS 32
#define MARU_PLACE_BLOCKS 576
/* Threads of a block, and vectors that each of them has in flight. */
#define MARU_PLACE_THREADS 256
#ifndef MARU_PLACE_UNROLL
#define MARU_PLACE_UNROLL 8
#endif

/* Division by a number that is known before the launch, for numerators below 2^31: two instructions instead of thirty. */
struct maru_divisor {
  uint32_t divisor, multiplier, shift;
};

struct maru_place_plane {
  uint64_t offset, block, token, head;
  /* From one vector of a head to the next. */
  uint64_t step;
};

struct maru_place_segment {
  /* Where row 0, token 0 of the segment lies, and how far apart rows are. */
  uint64_t packed, pitch;
  /* Vectors of the segment; below 2^31. */
  uint32_t vectors;
  /* First row, from one row to the next, first slot within its block, and where in `blocks` the block of the first token
   * is. */
  uint32_t row, step, slot, block;
  struct maru_divisor tokens;
};

/* Parameters of a launch. */
struct maru_place {
  /* Address of an array on the device: for each layer the address of its first element. */
  uint64_t layer_addresses;
  struct maru_place_plane plane[2];
  struct maru_divisor token_vectors, head_vectors, block_size, layers;
  uint32_t token_bytes, vector_bytes;
  uint32_t segments, blocks;
  struct maru_place_segment segment[MARU_PLACE_SEGMENTS];
  int32_t block[MARU_PLACE_BLOCKS];
};

MARU_BOTH uint32_t maru_high(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  return __umulhi(a, b);
#else
  return (uint32_t)(((uint64_t)a * b) >> 32);
#endif
}

MARU_BOTH uint32_t maru_divide(uint32_t n, struct maru_divisor d) { return (maru_high(n, d.multiplier) + n) >> d.shift; }

/* n / d for every n < 2^31: with s the bits of d - 1, m = floor(2^32 * (2^s - d) / d) + 1 gives
 * (m * n / 2^32 + n) / 2^s = n / d. The sum stays below 2^32 because n < 2^31. */
static inline struct maru_divisor maru_divisor_of(uint32_t d) {
  struct maru_divisor made = {d, 0, 0};
  while (((uint64_t)1 << made.shift) < d) made.shift++;
  made.multiplier = (uint32_t)(((((uint64_t)1 << made.shift) - d) << 32) / d) + 1;
  return made;
}

/* Where vector `i` of a segment lies on both sides. `blocks`: those of the launch. */
MARU_BOTH void maru_place_at(const struct maru_place *p, const struct maru_place_segment *s, const int32_t *blocks,
                             const uint64_t *layer_addresses, uint32_t i, uint64_t *page, uint64_t *packed) {
  uint32_t line = maru_divide(i, p->token_vectors), x = i - line * p->token_vectors.divisor;
  uint32_t row = maru_divide(line, s->tokens), token = line - row * s->tokens.divisor;
  uint32_t which = s->row + row * s->step, plane = maru_divide(which, p->layers);
  uint32_t layer = which - plane * p->layers.divisor;
  uint32_t place = maru_divide(s->slot + token, p->block_size), slot = s->slot + token - place * p->block_size.divisor;
  uint32_t head = maru_divide(x, p->head_vectors), vector = x - head * p->head_vectors.divisor;
  const struct maru_place_plane *at = &p->plane[plane];
  *packed = s->packed + row * s->pitch + (uint64_t)token * p->token_bytes + x * p->vector_bytes;
  *page = layer_addresses[layer] + at->offset + (uint64_t)(uint32_t)blocks[s->block + place] * at->block +
          slot * at->token + head * at->head + vector * at->step;
}

#endif /* MARU_PLACE_H */
