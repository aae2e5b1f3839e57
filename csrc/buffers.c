/* Exports of Python's buffers, all of a request in one call: see maru.h. */
#include "maru.h"

uint32_t maru_buffers_take(maru_get_buffer get, maru_release_buffer release, void *const *objects, uint32_t count,
                           struct maru_buffer *views) {
  for (uint32_t i = 0; i < count; i++) {
    if (!get(objects[i], &views[i], 0)) continue;
    maru_buffers_release(release, views, i);
    return i;
  }
  return count;
}

void maru_buffers_release(maru_release_buffer release, struct maru_buffer *views, uint32_t count) {
  while (count--) release(&views[count]);
}
