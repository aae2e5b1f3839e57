/* Time of dependent loads over a range, one per cache line, in an order that no prefetcher follows. */
#include <stddef.h>
#include <stdint.h>
#include <time.h>

static uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Each line of `lines` begins with the index of the next one; nanoseconds for `count` of them. */
double chase(const char *lines, size_t count) {
  uint64_t at = 0, start = now();
  for (size_t i = 0; i < count; i++) at = *(const volatile uint64_t *)(lines + at * 64);
  uint64_t taken = now() - start;
  return at == 0 ? (double)taken : -1;
}
