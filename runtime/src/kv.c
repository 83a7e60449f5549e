// The KV: keys and values of every position, each head vector by itself in the engine's KV type.
#include <string.h>

#include "engine.h"

uint64_t clb_kv_bytes(const clb_engine *e) {
  const clb_graph *g = &e->graph;
  return 2 * g->n_layers * e->n_sequences * g->n_kv_heads * e->ctx * e->kv.row_bytes;
}

size_t clb_kv_offset(const clb_engine *e, size_t layer, size_t sequence, size_t kv_head) {
  return ((layer * e->n_sequences + sequence) * e->graph.n_kv_heads + kv_head) * e->ctx * e->kv.row_bytes;
}

void clb_kv_write(const clb_engine *e, uint8_t *head, size_t position, const float *x) {
  uint8_t *row = head + position * e->kv.row_bytes;
  if (e->kv.type == CLB_F32) {
    memcpy(row, x, e->kv.row_bytes);
  } else {
    (void)clb_quantize_row(e->kernels, e->kv.type, row, x, e->graph.head_dim);  // the type was checked at open
  }
}
