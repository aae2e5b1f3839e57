/* How the host copy moves rows and matrices: what host_copy.c needs of host_portable.c and, on processors that have
 * such vectors, of host_avx512.c. Internal. */
#ifndef MARU_HOST_KERNELS_H
#define MARU_HOST_KERNELS_H

#include <stddef.h>
#include <stdint.h>

enum { LINE = 64, VECTOR = 16 };

/* So that the rows of a square stay in registers. */
#define UNROLLED _Pragma("GCC unroll 16")

/* So many times, each a stride further on either side. */
struct loop {
  size_t count, to, from;
};

/* These are passed by address and filled field by field. A copy of one would read two fields at once, which a processor
 * cannot take from the two stores that made them: it waits until all that was stored before is out. */

/* Rows of `bytes` bytes in three loops, the outermost first. */
struct rows {
  size_t bytes;
  struct loop loop[3];
};

/* A matrix of `rows` x `columns` elements of `element` bytes, to be transposed: to[c][r] = from[r][c]. */
struct matrix {
  size_t to_pitch, from_pitch, rows, columns, element;
};

/* The last three go past the caches; NULL where there is no such thing. */
struct kernels {
  /* Meanwhile a matrix of the same form at `soon` is fetched, unless that is NULL. */
  void (*transpose)(char *to, const char *from, const struct matrix *m, const char *soon);
  /* Rows of whole lines, aligned where they are written, `count` times those of the inner loops. While one is copied,
   * what lies `ahead` bytes behind it is fetched, unless that is 0. */
  void (*stream)(char *to, const char *from, const struct rows *r, size_t count, size_t ahead);
  /* The first `rows` rows of a matrix of whole vectors that become such rows; meanwhile as many bytes as are read are
   * fetched from `soon` on, unless that is NULL. Also NULL where a vector is less than a line. */
  void (*stream_transposed)(char *to, const char *from, const struct matrix *m, size_t rows, const char *soon);
  /* The end of it all: stores that follow come after it. */
  void (*streamed)(void);
};

/* For any processor, and for this one. */
extern const struct kernels maru_portable_kernels;
const struct kernels *maru_best_kernels(void);

static inline void fetch(const char *from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += LINE) __builtin_prefetch(from + at);
}

/* `copy(to, from, bytes)` for each row, with copies of the strides, so that they stay in registers. */
#define EACH_ROW(copy, bytes)                                                                              \
  do {                                                                                                     \
    const struct loop outer = r->loop[0], middle = r->loop[1], inner = r->loop[2];                         \
    for (size_t i = count; i; i--, to += outer.to, from += outer.from) {                             \
      char *to_middle = to;                                                                                \
      const char *from_middle = from;                                                                      \
      for (size_t j = middle.count; j; j--, to_middle += middle.to, from_middle += middle.from) {          \
        char *to_inner = to_middle;                                                                        \
        const char *from_inner = from_middle;                                                              \
        for (size_t k = inner.count; k; k--, to_inner += inner.to, from_inner += inner.from) {             \
          if (ahead) fetch(from_inner + ahead, bytes);                                                     \
          copy(to_inner, from_inner, bytes);                                                               \
        }                                                                                                  \
      }                                                                                                    \
    }                                                                                                      \
  } while (0)

#endif /* MARU_HOST_KERNELS_H */
