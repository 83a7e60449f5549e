// Replaying what a model asked of the expert store: the store itself, on a backend that brings nothing. And timing what
// requests cost on the drive: the store itself, reading.
#include "simulate.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "store_internal.h"

static bool serve(clb_store *s, size_t row, const uint32_t *experts, size_t k) {
  if (!clb_store_begin(s, row, experts, k)) return false;
  clb_expert e;
  clb_store_status status;
  while ((status = clb_store_next(s, &e)) == CLB_STORE_READY) clb_store_release(s, e.slot);
  clb_store_end(s);
  return status == CLB_STORE_DONE;
}

static clb_store_metrics metrics_of(const clb_store *s) {
  clb_store_metrics metrics;
  clb_store_get_metrics(s, &metrics);
  return metrics;
}

static bool replay(clb_store *s, const uint32_t *rows, size_t n_rows, const uint32_t *experts, size_t n_tokens,
                   size_t k, uint64_t *by_misses) {
  for (size_t i = 0; i < n_tokens * n_rows; i++) {
    const uint64_t before = metrics_of(s).misses;
    if (!serve(s, rows[i % n_rows], experts + i * k, k)) return false;
    const clb_store_metrics after = metrics_of(s);
    const bool full = after.evictions > 0;
    if (by_misses != NULL) by_misses[full * (k + 1) + after.misses - before]++;
  }
  return true;
}

bool clb_simulate(const char *path, uint64_t cache_bytes, bool preload, const uint32_t *rows, size_t n_rows,
                  const uint32_t *experts, size_t n_tokens, size_t k, clb_simulation *out, uint64_t *by_misses,
                  char *error, size_t error_bytes) {
  *out = (clb_simulation){0};
  if (by_misses != NULL) memset(by_misses, 0, 2 * (k + 1) * sizeof *by_misses);
  clb_container *container = clb_container_open(path, error, error_bytes);
  if (container == NULL) return false;
  clb_store *s = clb_store_open_dry(container, cache_bytes, error, error_bytes);
  bool ok = s != NULL;
  if (ok) {
    ok = !preload || clb_store_preload(s, cache_bytes);
    const clb_store_metrics before = metrics_of(s);
    ok = ok && replay(s, rows, n_rows, experts, n_tokens, k, by_misses);
    const clb_store_metrics after = metrics_of(s);
    out->hits = after.hits - before.hits;
    out->misses = after.misses - before.misses;
    out->bytes_read = after.bytes_read - before.bytes_read;
    if (!ok) snprintf(error, error_bytes, "%s", clb_store_error(s));
  }
  clb_store_close(s);
  clb_container_close(container);
  return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// Timing

// Reading into the same few MiB over and over is faster than what a run does, so the cache is larger than what stays in
// a CPU's and than what memory was free a moment ago, and yet small beside the model.
enum { TIMING_CACHE_BYTES = 256 << 20, TIMING_CACHE_SHARE = 4, MOST_FILLING = 4 };

static uint64_t timing_cache(const clb_container *c, size_t k) {
  clb_store_sizes sizes;
  clb_store_measure(c, &sizes);
  uint64_t n_bytes = sizes.all_bytes / TIMING_CACHE_SHARE;
  if (n_bytes > TIMING_CACHE_BYTES) n_bytes = TIMING_CACHE_BYTES;
  const uint64_t one_request = (k + 1) / 2 * sizes.minimum_bytes;  // a minimum is two blocks
  return n_bytes > one_request ? n_bytes : one_request;
}

typedef struct {
  clb_store *store;
  const clb_container *container;
  uint64_t random;
  uint32_t *experts;  // [columns]
} timer;

static size_t draw(timer *t, size_t n) {  // xorshift64
  t->random ^= t->random << 13;
  t->random ^= t->random >> 7;
  t->random ^= t->random << 17;
  return (size_t)(t->random % n);
}

// Up to n distinct experts of a random row into t->experts; returns how many.
static size_t draw_experts(timer *t, size_t *row, size_t n) {
  *row = draw(t, clb_container_n_rows(t->container));
  const size_t n_experts = clb_container_row(t->container, *row)->n_experts;
  if (n > n_experts) n = n_experts;
  for (size_t i = 0; i < n_experts; i++) t->experts[i] = (uint32_t)i;
  for (size_t i = 0; i < n; i++) {
    const size_t j = i + draw(t, n_experts - i);
    const uint32_t kept = t->experts[i];
    t->experts[i] = t->experts[j];
    t->experts[j] = kept;
  }
  return n;
}

static bool time_requests(timer *t, size_t k, double seconds, clb_request_time *times) {
  const double start = clb_seconds();
  double now = start, end = start + MOST_FILLING * seconds;
  clb_store_metrics before = metrics_of(t->store);
  for (size_t i = 0; now < end; i++) {
    size_t row;
    const size_t n = draw_experts(t, &row, 1 + i % k);
    const double began = clb_seconds();
    if (!serve(t->store, row, t->experts, n)) return false;
    now = clb_seconds();
    const clb_store_metrics after = metrics_of(t->store);
    const bool full = after.evictions > 0;
    if (full && before.evictions == 0) end = now + seconds;
    clb_request_time *found = &times[full * (k + 1) + after.misses - before.misses];
    found->seconds += now - began;
    found->bytes_read += after.bytes_read - before.bytes_read;
    found->n++;
    before = after;
  }
  return true;
}

static bool time_container(const clb_container *c, size_t k, uint32_t io_threads, double seconds,
                           clb_request_time *times, bool *direct, char *error, size_t error_bytes) {
  const clb_store_options options = {
      .cache_bytes = timing_cache(c, k), .io_threads = io_threads, .check = CLB_CHECK_NEVER};
  timer t = {.container = c, .random = UINT64_C(0x9e3779b97f4a7c15)};
  t.store = clb_store_open(c, &options, error, error_bytes);
  if (t.store == NULL) return false;
  t.experts = calloc(clb_container_n_columns(c), sizeof *t.experts);
  bool ok = t.experts != NULL;
  if (!ok) snprintf(error, error_bytes, "no memory to time requests");
  if (ok && !time_requests(&t, k, seconds, times)) {
    snprintf(error, error_bytes, "%s", clb_store_error(t.store));
    ok = false;
  }
  *direct = metrics_of(t.store).direct;
  free(t.experts);
  clb_store_close(t.store);
  return ok;
}

bool clb_time_requests(const char *path, size_t k, uint32_t io_threads, double seconds, clb_request_time *times,
                       bool *direct, char *error, size_t error_bytes) {
  memset(times, 0, 2 * (k + 1) * sizeof *times);
  *direct = false;
  clb_container *container = clb_container_open(path, error, error_bytes);
  if (container == NULL) return false;
  bool ok = true;
  if (k > 0 && clb_container_n_rows(container) > 0) {
    ok = time_container(container, k, io_threads, seconds, times, direct, error, error_bytes);
  }
  clb_container_close(container);
  return ok;
}
