/* Kernels of the host copy in vectors of 64 bytes, a whole cache line: for x86-64 processors from Ice Lake and Zen 4
 * on, told by their permutations of bytes (VBMI). Older ones with such vectors lower their clock for them. */
#include "host_kernels.h"

#if defined(__x86_64__) && !defined(MARU_PORTABLE)

#include <immintrin.h>

#define WIDE __attribute__((target("avx512f,avx512bw,avx512vbmi")))

/* ---- Rows ------------------------------------------------------------------------------------------------------- */

/* Each line is written by one instruction. */
WIDE static inline void stream_lines(char *to, const char *from, size_t bytes) {
  _Pragma("GCC unroll 4") for (size_t at = 0; at < bytes; at += LINE)
    _mm512_stream_si512((void *)(to + at), _mm512_loadu_si512(from + at));
}

WIDE static void stream(char *to, const char *from, const struct rows *r, size_t count, size_t ahead) {
  switch (r->bytes) {
    case 128: EACH_ROW(stream_lines, 128); break;
    case 256: EACH_ROW(stream_lines, 256); break;
    default: EACH_ROW(stream_lines, r->bytes);
  }
}

static void streamed(void) { _mm_sfence(); }

/* ---- Transposition ---------------------------------------------------------------------------------------------- */

/* 16 bytes each of four rows `apart` bytes apart. */
WIDE static inline __m512i quarters(const char *from, size_t apart) {
  __m512i all = _mm512_castsi128_si512(_mm_loadu_si128((const void *)from));
  all = _mm512_inserti32x4(all, _mm_loadu_si128((const void *)(from + apart)), 1);
  all = _mm512_inserti32x4(all, _mm_loadu_si128((const void *)(from + 2 * apart)), 2);
  return _mm512_inserti32x4(all, _mm_loadu_si128((const void *)(from + 3 * apart)), 3);
}

/* The same for the four quarters of 64 bytes: to[0], to[step], ... Each row is read once, which matters where rows are
 * so far apart that few of them fit into the first cache at a time. */
WIDE static inline void all_quarters(__m512i *to, size_t step, const char *from, size_t apart) {
  __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + apart);
  __m512i c = _mm512_loadu_si512(from + 2 * apart), d = _mm512_loadu_si512(from + 3 * apart);
  __m512i ab = _mm512_shuffle_i32x4(a, b, 0x44), cd = _mm512_shuffle_i32x4(c, d, 0x44);
  to[0] = _mm512_shuffle_i32x4(ab, cd, 0x88), to[step] = _mm512_shuffle_i32x4(ab, cd, 0xdd);
  ab = _mm512_shuffle_i32x4(a, b, 0xee), cd = _mm512_shuffle_i32x4(c, d, 0xee);
  to[2 * step] = _mm512_shuffle_i32x4(ab, cd, 0x88), to[3 * step] = _mm512_shuffle_i32x4(ab, cd, 0xdd);
}

/* name_lines: four squares of WIDTH x WIDTH elements below each other, one in each quarter of the vectors, become WIDTH
 * lines, as in host_portable.c. What is fetched from `soon` on is spread among the stores: so neither has to queue.
 * name: a matrix whose rows are a multiple of a line's elements and its columns of a vector's, in blocks of a line's
 * elements both ways, then four squares at a time. */
#define TRANSPOSE(name, BITS, WIDTH, ROUNDS)                                                                          \
  WIDE static inline void name##_lines(char *to, size_t to_pitch, const __m512i *rows, const char *soon, int past) {  \
    __m512i a[WIDTH], b[WIDTH];                                                                                       \
    UNROLLED for (int i = 0; i < WIDTH; i++) a[i] = rows[i];                                                          \
    UNROLLED for (int round = 0; round < ROUNDS; round++) {                                                           \
      UNROLLED for (int i = 0; i < WIDTH / 2; i++) {                                                                  \
        b[2 * i] = _mm512_unpacklo_epi##BITS(a[i], a[i + WIDTH / 2]);                                                 \
        b[2 * i + 1] = _mm512_unpackhi_epi##BITS(a[i], a[i + WIDTH / 2]);                                             \
      }                                                                                                               \
      UNROLLED for (int i = 0; i < WIDTH; i++) a[i] = b[i];                                                           \
    }                                                                                                                 \
    UNROLLED for (int i = 0; i < WIDTH; i++) {                                                                        \
      if (soon) fetch(soon + i * LINE, LINE);                                                                         \
      if (past) _mm512_stream_si512((void *)(to + i * to_pitch), a[i]);                                               \
      else _mm512_storeu_si512(to + i * to_pitch, a[i]);                                                              \
    }                                                                                                                 \
  }                                                                                                                   \
  WIDE static inline void name(char *to, const char *from, const struct matrix *m, size_t rows, size_t columns,       \
                               const char *soon, int past) {                                                          \
    const size_t size = BITS / 8, side = 4 * WIDTH, to_pitch = m->to_pitch, pitch = m->from_pitch;                    \
    const size_t step = soon ? WIDTH * LINE : 0;                                                                      \
    size_t c = 0;                                                                                                     \
    for (; c + side <= columns; c += side)                                                                            \
      for (size_t r = 0; r < rows; r += side) {                                                                       \
        const char *source = from + r * pitch + c * size;                                                             \
        char *target = to + c * to_pitch + r * size;                                                                  \
        __m512i quarter[4 * WIDTH];                                                                                   \
        for (size_t i = 0; i < WIDTH; i++, source += pitch) all_quarters(quarter + i, WIDTH, source, WIDTH * pitch);  \
        for (size_t i = 0; i < 4; i++, target += WIDTH * to_pitch, soon += step)                                      \
          name##_lines(target, to_pitch, quarter + i * WIDTH, soon, past);                                            \
      }                                                                                                               \
    for (; c < columns; c += WIDTH)                                                                                   \
      for (size_t r = 0; r < rows; r += side, soon += step) {                                                         \
        const char *source = from + r * pitch + c * size;                                                             \
        __m512i quarter[WIDTH];                                                                                       \
        UNROLLED for (int i = 0; i < WIDTH; i++) quarter[i] = quarters(source + i * pitch, WIDTH * pitch);            \
        name##_lines(to + c * to_pitch + r * size, to_pitch, quarter, soon, past);                                    \
      }                                                                                                               \
  }

TRANSPOSE(transpose_1, 8, 16, 4)
TRANSPOSE(transpose_2, 16, 8, 3)
TRANSPOSE(transpose_4, 32, 4, 2)
TRANSPOSE(transpose_8, 64, 2, 1)

#define TRANSPOSE_ANY(...)                   \
  switch (m->element) {                      \
    case 1: transpose_1(__VA_ARGS__); break; \
    case 2: transpose_2(__VA_ARGS__); break; \
    case 4: transpose_4(__VA_ARGS__); break; \
    default: transpose_8(__VA_ARGS__);       \
  }

WIDE static void stream_transposed(char *to, const char *from, const struct matrix *m, size_t rows, const char *soon) {
  TRANSPOSE_ANY(to, from, m, rows, m->columns, soon, 1)
}

/* Rows and columns that are left over go the portable way. */
WIDE static void transpose(char *to, const char *from, const struct matrix *m, const char *soon) {
  size_t size = m->element;
  size_t rows = m->rows - m->rows % (LINE / size), columns = m->columns - m->columns % (VECTOR / size);
  for (size_t i = 0; soon && i < m->rows; i++) fetch(soon + i * m->from_pitch, m->columns * size);
  TRANSPOSE_ANY(to, from, m, rows, columns, NULL, 0)
  if (columns < m->columns) {
    struct matrix right = {m->to_pitch, m->from_pitch, rows, m->columns - columns, size};
    maru_portable_kernels.transpose(to + columns * m->to_pitch, from + columns * size, &right, NULL);
  }
  if (rows < m->rows) {
    struct matrix below = {m->to_pitch, m->from_pitch, m->rows - rows, m->columns, size};
    maru_portable_kernels.transpose(to + rows * size, from + rows * m->from_pitch, &below, NULL);
  }
}

static const struct kernels kernels = {transpose, stream, stream_transposed, streamed};

const struct kernels *maru_best_kernels(void) {
  int wide = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vbmi");
  return wide ? &kernels : &maru_portable_kernels;
}

#else

const struct kernels *maru_best_kernels(void) { return &maru_portable_kernels; }

#endif
