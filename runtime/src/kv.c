// The KV: keys and values of every position, each head vector by itself in the engine's KV type.
#include <string.h>

#include "engine.h"

uint64_t clb_kv_rows(const clb_engine *e) {
  return e->graph.n_layers * e->n_sequences * e->graph.kv_heads * e->ctx;
}

size_t clb_kv_row(const clb_engine *e, size_t layer, size_t sequence, size_t kv_head, size_t position) {
  return ((layer * e->n_sequences + sequence) * e->graph.kv_heads + kv_head) * e->ctx + position;
}

static void write_row(const clb_engine *e, uint8_t *row, const float *x, size_t n) {
  if (e->kv.type == CLB_F32) {
    memcpy(row, x, n * sizeof *x);
  } else {
    (void)clb_quantize_row(e->kernels, e->kv.type, row, x, n);  // the type was checked at open
  }
}

void clb_kv_write_key(const clb_engine *e, size_t row, const float *x) {
  write_row(e, e->kv.keys + row * e->kv.key_bytes, x, e->graph.kv_key_dim);
}

void clb_kv_write_value(const clb_engine *e, size_t row, const float *x) {
  write_row(e, e->kv.values + row * e->kv.value_bytes, x, e->graph.kv_value_dim);
}
