/* Which copies the copy engine makes for a segment: pure arithmetic. */
#ifndef MARU_CUDA_COPIES_H
#define MARU_CUDA_COPIES_H

#include "maru.h"

/* Copies of `bytes` bytes each at one distance on both sides, less than MARU_MOST_PITCH; one has none. Host memory of
 * all rows is of one registration, which ends at `end`. */
struct maru_rows {
  uint64_t target, source, bytes, rows, target_pitch, source_pitch, end;
};
#define MARU_MOST_PITCH (1u << 31)

/* Takes copies one after another, each out of `next`; a status other than MARU_OK ends it. */
struct maru_sink {
  int (*take)(struct maru_sink *sink);
  struct maru_rows *next;
  /* The registration that was looked up last; zeros: none. */
  uint64_t begin, end;
};

/* Bytes of a token in an object's row. */
uint64_t maru_token_bytes(const struct maru_geometry *geometry);

/* Whether geometry, segments and blocks make sense together, so that nothing is addressed that is not theirs. */
int maru_check_geometry(const struct maru_geometry *geometry);
int maru_check_job(const struct maru_geometry *geometry, const struct maru_job *job, uint64_t slot_bytes);

/* Copies of one segment: between object and slot, between bounce buffer (at `host`, in place of the object) and slot, or
 * between object and pages. `slot`: where the slice's slot is. */
int maru_segment_copies(const struct maru_geometry *geometry, const uint64_t *layer_addresses, const struct maru_job *job,
                        const struct maru_segment *segment, uint64_t slot, uint64_t bounce, struct maru_sink *sink);

/* Copies of a segment between the object and the bounce buffer, made by the CPU; `to_bounce` or back. */
void maru_segment_bounce(const struct maru_geometry *geometry, const struct maru_segment *segment, uint64_t bounce,
                         int to_bounce);

#endif /* MARU_CUDA_COPIES_H */
