// Which forms of its inputs every layer needs: in fast precision activations are quantized for the weights that read
// them, and weights of different types may read the same ones.
#include <stdlib.h>

#include "engine.h"

clb_kinds clb_kinds_of(const clb_engine *e, uint32_t type) {
  return (clb_kinds)(1u << (e->precision == COLIBRI_EXACT ? CLB_FAST_X_NONE : clb_fast_kind(type)));
}

static clb_kinds kinds_of_tensors(const clb_engine *e, const clb_tensor *const *tensors, size_t n) {
  clb_kinds kinds = 0;
  for (size_t i = 0; i < n; i++) {
    if (tensors[i]) kinds |= clb_kinds_of(e, tensors[i]->type);
  }
  return kinds;
}

// What the experts of a layer read: gate and up, and down.
static void add_experts(const clb_engine *e, const clb_graph_layer *l, clb_layer_kinds *kinds) {
  for (size_t expert = 0; expert < l->n_experts; expert++) {
    clb_block block;
    if (!clb_container_block(e->container, l->row, expert, &block)) continue;
    const clb_layout *layout = clb_container_layout(e->container, block.layout);
    for (size_t i = 0; i < layout->n_parts; i++) {
      const clb_part *part = &layout->parts[i];
      if (part->role >= CLB_PART_GATE_BIAS) continue;
      *(part->role == CLB_PART_DOWN ? &kinds->hidden : &kinds->experts) |= clb_kinds_of(e, part->type);
    }
  }
}

static clb_layer_kinds kinds_of_layer(const clb_engine *e, const clb_graph_layer *l) {
  const bool latent = e->graph.q_lora > 0;
  const clb_tensor *const attention[] = {latent ? NULL : l->q, l->k, l->v, l->attn_gate, l->q_a, l->kv_a};
  const clb_tensor *const feed_forward[] = {l->gate, l->up};
  clb_layer_kinds kinds = {.attention = kinds_of_tensors(e, attention, sizeof attention / sizeof *attention),
                           .q_latent = latent ? kinds_of_tensors(e, &l->q, 1) : 0,
                           .attended = kinds_of_tensors(e, &l->o, 1),
                           .feed_forward = kinds_of_tensors(e, feed_forward, 2),
                           .wide = kinds_of_tensors(e, &l->down, 1)};
  if (!l->moe) return kinds;
  add_experts(e, l, &kinds);
  if (!e->graph.experts_scale_input) kinds.feed_forward |= kinds.experts;
  return kinds;
}

colibri_status clb_kinds_plan(clb_engine *e) {
  e->kinds = calloc(e->graph.n_layers, sizeof *e->kinds);
  if (!e->kinds) return clb_fail(e->error, COLIBRI_ERROR_MEMORY, "no memory for the layer table");
  for (size_t i = 0; i < e->graph.n_layers; i++) e->kinds[i] = kinds_of_layer(e, &e->graph.layers[i]);
  return COLIBRI_OK;
}

clb_layer_kinds clb_kinds_of_all(const clb_engine *e) {
  clb_layer_kinds all = {.attention = clb_kinds_of(e, e->output.type)};
  for (size_t i = 0; i < e->graph.n_layers; i++) {
    const clb_layer_kinds *k = &e->kinds[i];
    all.attention |= k->attention;
    all.q_latent |= k->q_latent;
    all.attended |= k->attended;
    all.feed_forward |= k->feed_forward;
    all.experts |= k->experts;
    all.hidden |= k->hidden;
    all.wide |= k->wide;
  }
  return all;
}
