// Replaying what a model asked of the expert store, for other sizes of the cache, and how long requests take.
#ifndef CLB_SIMULATE_H
#define CLB_SIMULATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
  uint64_t hits, misses;
  uint64_t bytes_read;  // by misses; not by preloading
} clb_simulation;

/* Asks the expert store of the container at `path`, as it is when nothing is really read, for experts [n_tokens,
 * n_rows, k] token after token and row after row; rows[n_rows] are row numbers. With `preload` the cache is filled with
 * the first blocks of the file before. by_misses[2][k + 1], unless NULL: how many requests missed 0, 1, ... k experts
 * until something was evicted, and from that request on. False, and a one-line `error`, for a container or a list that
 * cannot be. */
bool clb_simulate(const char *path, uint64_t cache_bytes, bool preload, const uint32_t *rows, size_t n_rows,
                  const uint32_t *experts, size_t n_tokens, size_t k, clb_simulation *out, uint64_t *by_misses,
                  char *error, size_t error_bytes);

// Requests that missed a number of experts: how many, and what they took and read together.
typedef struct {
  uint64_t n;
  double seconds;
  uint64_t bytes_read;
} clb_request_time;

/* Asks a store of its own for random experts of random rows, 1 to k at a time in turns, and waits for all of each: what
 * a request costs the one who computes nothing meanwhile. times[2][k + 1] by misses: first until the cache is full,
 * whose memory is used for the first time, then for about `seconds` with a full one. (A drive so slow that filling
 * takes four times as long is timed with the cache it has filled.) The cache is small, a few blocks stay in it.
 * `direct`: past the page cache, else memory may have answered. io_threads as in store.h. False, and a one-line
 * `error`, where that cannot be. */
bool clb_time_requests(const char *path, size_t k, uint32_t io_threads, double seconds, clb_request_time *times,
                       bool *direct, char *error, size_t error_bytes);

#endif
