/* Kernels of the host copy that need nothing but vectors of 16 bytes, which every x86-64 and 64-bit Arm has. */
#include "host_kernels.h"

#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>

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

static void stream(char *to, const char *from, const struct rows *r, size_t count, size_t ahead) {
  EACH_ROW(stream_lines, r->bytes);
}

static void streamed(void) { _mm_sfence(); }

#else

#define stream NULL
#define streamed NULL

#endif

#if defined(__clang__)
#define ZIP(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define ZIP(a, b, ...) __builtin_shuffle(a, b, (__typeof__(a)){__VA_ARGS__})
#endif

/* Squares of WIDTH x WIDTH elements are done in vectors: interleaving row i with row i + WIDTH/2 for all i, log2(WIDTH)
 * times, is a transposition. */
#define TRANSPOSE(name, type, WIDTH, ROUNDS, LOW, HIGH)                                                               \
  typedef type name##_row __attribute__((vector_size(VECTOR)));                                                       \
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
  static void name(char *to, const char *from, const struct matrix *m, const char *soon) {                            \
    size_t size = sizeof(type), whole_rows = m->rows - m->rows % WIDTH;                                               \
    size_t whole_columns = m->columns - m->columns % WIDTH;                                                           \
    for (size_t r = 0; r < whole_rows; r += WIDTH) {                                                                  \
      for (size_t i = 0; soon && i < WIDTH; i++) fetch(soon + (r + i) * m->from_pitch, m->columns * size);            \
      for (size_t c = 0; c < whole_columns; c += WIDTH)                                                               \
        name##_square(to + c * m->to_pitch + r * size, m->to_pitch, from + r * m->from_pitch + c * size,              \
                      m->from_pitch);                                                                                 \
    }                                                                                                                 \
    for (size_t r = 0; r < m->rows; r++)                                                                              \
      for (size_t c = r < whole_rows ? whole_columns : 0; c < m->columns; c++)                                        \
        memcpy(to + c * m->to_pitch + r * size, from + r * m->from_pitch + c * size, size);                           \
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

static void transpose(char *to, const char *from, const struct matrix *m, const char *soon) {
  switch (m->element) {
    case 1: transpose_1(to, from, m, soon); break;
    case 2: transpose_2(to, from, m, soon); break;
    case 4: transpose_4(to, from, m, soon); break;
    default: transpose_8(to, from, m, soon); break;
  }
}

const struct kernels maru_portable_kernels = {transpose, stream, NULL, streamed};
