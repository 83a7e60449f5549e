// Replaying what a model asked of the expert store, for other sizes of the cache.
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
 * the first blocks of the file before. False, and a one-line `error`, for a container or a list that cannot be. */
bool clb_simulate(const char *path, uint64_t cache_bytes, bool preload, const uint32_t *rows, size_t n_rows,
                  const uint32_t *experts, size_t n_tokens, size_t k, clb_simulation *out, char *error,
                  size_t error_bytes);

#endif
