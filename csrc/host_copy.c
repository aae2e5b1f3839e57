/* Copies between pages in host memory and objects: see maru.h for what is promised. */
#include "maru.h"

#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum {
  LINE = 64,
  VECTOR = 16,
  /* Bytes of a tile: what is read for it, the tile, and what is read for the next one all fit into the first cache. */
  TILE = 8192,
  /* How far ahead rows are fetched: processors do it by themselves only for what lies in a row for long. */
  AHEAD = 4096,
  /* Rows from this length on are long. */
  LONG = 1024,
};

static inline void fetch(const char *from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += LINE) __builtin_prefetch(from + at);
}

/* ---- Rows ------------------------------------------------------------------------------------------------------- */

/* `outer` times `inner` rows of `bytes` bytes, each step apart by a stride of its own on either side. Of a row that is
 * `ahead` steps of the outer loop further on, what will be read is fetched, if not 0. */
struct rows {
  size_t bytes, outer, inner;
  size_t to_outer, to_inner, from_outer, from_inner;
  size_t ahead;
};

#if defined(__SSE2__)

/* Whole cache lines to memory without reading them before. `to` is aligned to a line, `bytes` a multiple of it. */
static inline void stream_lines(char *to, const char *from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += LINE) {
    __m128i a = _mm_loadu_si128((const __m128i *)(from + at)), b = _mm_loadu_si128((const __m128i *)(from + at + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(from + at + 32)),
            d = _mm_loadu_si128((const __m128i *)(from + at + 48));
    _mm_stream_si128((__m128i *)(to + at), a);
    _mm_stream_si128((__m128i *)(to + at + 16), b);
    _mm_stream_si128((__m128i *)(to + at + 32), c);
    _mm_stream_si128((__m128i *)(to + at + 48), d);
  }
}

static void streams_done(void) { _mm_sfence(); }
enum { CAN_STREAM = 1 };

#else

static inline void stream_lines(char *to, const char *from, size_t bytes) { memcpy(to, from, bytes); }
static void streams_done(void) {}
enum { CAN_STREAM = 0 };

#endif

/* A row whose ends may share their lines with something else. */
static void stream_row(char *to, const char *from, size_t bytes) {
  size_t head = -(uintptr_t)to & (LINE - 1), body = (bytes - head) & ~(size_t)(LINE - 1);
  memcpy(to, from, head);
  stream_lines(to + head, from + head, body);
  memcpy(to + head + body, from + head + body, bytes - head - body);
}

static inline void copy_vectors(char *to, const char *from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += VECTOR) memcpy(to + at, from + at, VECTOR);
}

#define EACH_ROW(copy)                                                                     \
  for (size_t i = 0; i < r->outer; i++)                                                    \
    for (size_t j = 0; j < r->inner; j++) {                                                \
      const char *source = from + i * r->from_outer + j * r->from_inner;                   \
      if (i < fetched) fetch(source + r->ahead * r->from_outer, r->bytes);                 \
      copy(to + i * r->to_outer + j * r->to_inner, source, r->bytes);                      \
    }

static void copy_rows(char *to, const char *from, const struct rows *r, int stream) {
  size_t places = (uintptr_t)to | r->bytes | (r->outer > 1 ? r->to_outer : 0) | (r->inner > 1 ? r->to_inner : 0);
  size_t fetched = r->ahead && r->ahead < r->outer ? r->outer - r->ahead : 0;
  if (stream && !(places & (LINE - 1))) {
    EACH_ROW(stream_lines);
  } else if (stream && r->bytes >= LONG) {
    EACH_ROW(stream_row);
  } else if (r->bytes <= 16 * VECTOR && !(r->bytes & (VECTOR - 1))) {
    EACH_ROW(copy_vectors);
  } else {
    EACH_ROW(memcpy);
  }
}

/* ---- Transposition ---------------------------------------------------------------------------------------------- */

/* So that the rows of a square stay in registers. */
#define UNROLLED _Pragma("GCC unroll 16")

#if defined(__clang__)
#define ZIP(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define ZIP(a, b, ...) __builtin_shuffle(a, b, (__typeof__(a)){__VA_ARGS__})
#endif

/* transpose_N: to[c][r] = from[r][c] for elements of N bytes. Squares of WIDTH x WIDTH are done in vectors: interleaving
 * row i with row i + WIDTH/2 for all i, log2(WIDTH) times, is a transposition. Meanwhile as many rows from `next` on are
 * fetched, if not NULL. */
#define TRANSPOSE(name, element, WIDTH, ROUNDS, LOW, HIGH)                                                            \
  typedef element name##_row __attribute__((vector_size(VECTOR)));                                                    \
  static inline void name##_square(char *to, size_t to_pitch, const char *from, size_t from_pitch) {                  \
    name##_row a[WIDTH], b[WIDTH];                                                                                    \
    UNROLLED for (int i = 0; i < WIDTH; i++) memcpy(&a[i], from + i * from_pitch, VECTOR);                            \
    UNROLLED for (int round = 0; round < ROUNDS; round++) {                                                           \
      UNROLLED for (int i = 0; i < WIDTH / 2; i++) {                                                                  \
        b[2 * i] = ZIP(a[i], a[i + WIDTH / 2], LOW);                                                                  \
        b[2 * i + 1] = ZIP(a[i], a[i + WIDTH / 2], HIGH);                                                             \
      }                                                                                                               \
      memcpy(a, b, sizeof a);                                                                                         \
    }                                                                                                                 \
    UNROLLED for (int i = 0; i < WIDTH; i++) memcpy(to + i * to_pitch, &a[i], VECTOR);                                \
  }                                                                                                                   \
  static void name(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t rows, size_t columns,       \
                   const char *next) {                                                                                \
    size_t size = sizeof(element), whole_rows = rows - rows % WIDTH, whole_columns = columns - columns % WIDTH;       \
    for (size_t r = 0; r < whole_rows; r += WIDTH) {                                                                  \
      for (size_t i = 0; next && i < WIDTH; i++) fetch(next + (r + i) * from_pitch, columns * size);                  \
      for (size_t c = 0; c < whole_columns; c += WIDTH)                                                               \
        name##_square(to + c * to_pitch + r * size, to_pitch, from + r * from_pitch + c * size, from_pitch);          \
    }                                                                                                                 \
    for (size_t r = 0; r < rows; r++)                                                                                 \
      for (size_t c = r < whole_rows ? whole_columns : 0; c < columns; c++)                                           \
        memcpy(to + c * to_pitch + r * size, from + r * from_pitch + c * size, size);                                 \
  }

#define LOW_1 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH_1 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define LOW_2 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH_2 4, 12, 5, 13, 6, 14, 7, 15
#define LOW_4 0, 4, 1, 5
#define HIGH_4 2, 6, 3, 7
#define LOW_8 0, 2
#define HIGH_8 1, 3

TRANSPOSE(transpose_1, uint8_t, 16, 4, LOW_1, HIGH_1)
TRANSPOSE(transpose_2, uint16_t, 8, 3, LOW_2, HIGH_2)
TRANSPOSE(transpose_4, uint32_t, 4, 2, LOW_4, HIGH_4)
TRANSPOSE(transpose_8, uint64_t, 2, 1, LOW_8, HIGH_8)

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* A matrix of `rows` x `columns` elements of `element` bytes, to be transposed. */
struct matrix {
  size_t to_pitch, from_pitch, rows, columns, element;
};

static void transpose_tile(char *tile, const char *from, const struct matrix *m, const char *next) {
  size_t pitch = m->rows * m->element;
  switch (m->element) {
    case 1: transpose_1(tile, pitch, from, m->from_pitch, m->rows, m->columns, next); break;
    case 2: transpose_2(tile, pitch, from, m->from_pitch, m->rows, m->columns, next); break;
    case 4: transpose_4(tile, pitch, from, m->from_pitch, m->rows, m->columns, next); break;
    default: transpose_8(tile, pitch, from, m->from_pitch, m->rows, m->columns, next); break;
  }
}

/* By way of tiles in the cache: so what is written are rows of whole lines, not vectors far apart. `next`: a matrix of the
 * same form that comes after this one, or NULL. */
static void transpose(char *to, const char *from, const struct matrix *m, int stream, const char *next) {
  char tile[TILE] __attribute__((aligned(LINE)));
  size_t rows = least(m->rows, TILE / LINE), columns = TILE / (rows * m->element);
  columns -= columns % (LINE / m->element);
  for (size_t r = 0; r < m->rows; r += rows)
    for (size_t c = 0; c < m->columns; c += columns) {
      struct matrix part = *m;
      part.rows = least(rows, m->rows - r), part.columns = least(columns, m->columns - c);
      const char *source = from + r * m->from_pitch + c * m->element;
      const char *after = next;
      if (c + columns < m->columns) after = source + columns * m->element;
      else if (r + rows < m->rows) after = from + (r + rows) * m->from_pitch;
      transpose_tile(tile, source, &part, after);
      size_t bytes = part.rows * m->element;
      struct rows out = {bytes, part.columns, 1, m->to_pitch, 0, bytes, 0, 0};
      if (m->to_pitch == bytes) out.bytes *= part.columns, out.outer = 1;
      copy_rows(to + c * m->to_pitch + r * m->element, tile, &out, stream);
    }
}

/* ---- Pages ------------------------------------------------------------------------------------------------------ */

/* The strides of a loop on either side, in bytes. */
struct step {
  size_t page, object;
};

static struct rows rows_of(size_t bytes, size_t outer, struct step far, size_t inner, struct step near, int store) {
  if (store) return (struct rows){bytes, outer, inner, far.object, near.object, far.page, near.page, 0};
  return (struct rows){bytes, outer, inner, far.page, near.page, far.object, near.object, 0};
}

/* Elements of which those of one head follow each other on both sides, and whatever more does. */
static void copy_whole_heads(const struct maru_geometry *g, const struct maru_plane *plane, char *page, char *object,
                             size_t tokens, int store, int stream) {
  size_t size = g->element_size, row = g->head_size * size, all = g->heads * row;
  struct step token = {plane->token * size, all}, head = {plane->head * size, row};
  struct rows r = rows_of(row, tokens, token, g->heads, head, store);
  if (g->heads == 1 || head.page == row) {
    r.bytes = all, r.inner = 1;
    if (token.page == all) r.bytes *= tokens, r.outer = 1;
  }
  if (r.bytes < LONG) r.ahead = AHEAD / (r.bytes * r.inner) + 1;
  copy_rows(store ? object : page, store ? page : object, &r, stream);
}

/* Elements of which those of one head are apart in the pages. */
static void copy_elements(const struct maru_geometry *g, const struct maru_plane *plane, char *page, char *object,
                          size_t tokens, int store, int stream) {
  size_t size = g->element_size, row = g->head_size * size, all = g->heads * row, pitch = plane->dim * size;
  struct step token = {plane->token * size, all}, element = {pitch, size}, head = {plane->head * size, row};
  struct matrix m = {pitch, all, tokens, g->head_size, size};
  if (store) m = (struct matrix){all, pitch, g->head_size, tokens, size};
  for (size_t number = 0; number < g->heads; number++, page += head.page, object += head.object) {
    char *to = store ? object : page, *from = store ? page : object;
    if (plane->token == 1) {
      const char *next = number + 1 < g->heads ? from + (store ? head.page : head.object) : NULL;
      transpose(to, from, &m, stream, next);
    } else {
      struct rows r = rows_of(size, tokens, token, g->head_size, element, store);
      copy_rows(to, from, &r, 0);
    }
  }
}

/* Whether tokens of any two blocks that follow each other lie as those of one do. */
static int is_gapless(const struct maru_geometry *g) {
  for (uint32_t n = 0; n < g->planes; n++)
    if (g->plane[n].block != g->block_size * g->plane[n].token) return 0;
  return 1;
}

static int is_sound(const struct maru_copy_job *job) {
  const struct maru_geometry *g = job->geometry;
  uint32_t size = g->element_size;
  if (job->direction > MARU_STORE || !g->planes || g->planes > MARU_PLANES) return 0;
  if (size != 1 && size != 2 && size != 4 && size != 8) return 0;
  if (!g->heads || !g->head_size || !job->layers) return 0;
  int gapless = is_gapless(g);
  for (uint32_t i = 0; i < job->piece_count; i++) {
    const struct maru_piece *p = &job->pieces[i];
    if (!p->tokens || p->block >= g->blocks || p->slot >= g->block_size) return 0;
    uint64_t blocks = gapless ? g->blocks - p->block : 1;
    if ((uint64_t)p->slot + p->tokens > blocks * g->block_size) return 0;
    if ((uint64_t)p->token + p->tokens > g->chunk_tokens) return 0;
    if ((uint64_t)p->layer + job->layers > g->layers || (uint64_t)p->row + job->layers > job->object_layers) return 0;
  }
  return 1;
}

uint32_t maru_copy_abi_version(void) { return MARU_ABI_VERSION; }

int maru_copy_pieces(struct maru_copy_job *job) {
  if (!job || !job->geometry || !job->layer_addresses || !job->pieces) return MARU_E_NULL;
  if (!is_sound(job)) return MARU_E_ARGUMENT;
  const struct maru_geometry *g = job->geometry;
  size_t size = g->element_size, token_bytes = (size_t)g->heads * g->head_size * size;
  int store = job->direction == MARU_STORE, stream = CAN_STREAM && job->past_caches;
  uint64_t units = (uint64_t)job->piece_count * job->layers, unit;
  while ((unit = __atomic_fetch_add(&job->taken, 1, __ATOMIC_RELAXED)) < units) {
    const struct maru_piece *p = &job->pieces[unit / job->layers];
    size_t step = unit % job->layers, row = p->row + step;
    char *layer = (char *)(uintptr_t)job->layer_addresses[p->layer + step];
    for (uint32_t number = 0; number < g->planes; number++) {
      const struct maru_plane *plane = &g->plane[number];
      size_t first = plane->offset + p->block * plane->block + p->slot * plane->token;
      size_t at = ((number * (size_t)job->object_layers + row) * g->chunk_tokens + p->token) * token_bytes;
      char *page = layer + first * size, *object = (char *)(uintptr_t)p->object + at;
      if (plane->dim == 1 || g->head_size == 1)
        copy_whole_heads(g, plane, page, object, p->tokens, store, stream);
      else
        copy_elements(g, plane, page, object, p->tokens, store, stream);
    }
  }
  if (stream) streams_done();
  return MARU_OK;
}
