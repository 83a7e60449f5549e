// Replaying what a model asked of the expert store: the store itself, on a backend that brings nothing.
#include "simulate.h"

#include <stdio.h>

#include "store_internal.h"

static bool serve(clb_store *s, size_t row, const uint32_t *experts, size_t k) {
  if (!clb_store_begin(s, row, experts, k)) return false;
  clb_expert e;
  clb_store_status status;
  while ((status = clb_store_next(s, &e)) == CLB_STORE_READY) clb_store_release(s, e.slot);
  clb_store_end(s);
  return status == CLB_STORE_DONE;
}

static bool replay(clb_store *s, const uint32_t *rows, size_t n_rows, const uint32_t *experts, size_t n_tokens,
                   size_t k) {
  for (size_t i = 0; i < n_tokens * n_rows; i++) {
    if (!serve(s, rows[i % n_rows], experts + i * k, k)) return false;
  }
  return true;
}

bool clb_simulate(const char *path, uint64_t cache_bytes, bool preload, const uint32_t *rows, size_t n_rows,
                  const uint32_t *experts, size_t n_tokens, size_t k, clb_simulation *out, char *error,
                  size_t error_bytes) {
  *out = (clb_simulation){0};
  clb_container *container = clb_container_open(path, error, error_bytes);
  if (container == NULL) return false;
  clb_store *s = clb_store_open_dry(container, cache_bytes, error, error_bytes);
  bool ok = s != NULL;
  clb_store_metrics before = {0}, after = {0};
  if (ok) {
    ok = !preload || clb_store_preload(s, cache_bytes);
    clb_store_get_metrics(s, &before);
    ok = ok && replay(s, rows, n_rows, experts, n_tokens, k);
    clb_store_get_metrics(s, &after);
    if (!ok) snprintf(error, error_bytes, "%s", clb_store_error(s));
  }
  *out = (clb_simulation){after.hits - before.hits, after.misses - before.misses, after.bytes_read - before.bytes_read};
  clb_store_close(s);
  clb_container_close(container);
  return ok;
}
