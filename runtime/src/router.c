// The router: which experts each token goes to, and with what weight.
#include <math.h>
#include <string.h>

#include "engine.h"

// The k largest of p[n], best first, the lower index first among equals.
static void choose_top(const float *p, size_t n, size_t k, uint32_t *chosen, float *weights) {
  size_t n_chosen = 0;
  for (size_t i = 0; i < n; i++) {
    if (n_chosen == k && !(p[i] > weights[k - 1])) continue;
    if (n_chosen < k) n_chosen++;
    size_t slot = n_chosen - 1;
    for (; slot > 0 && p[i] > weights[slot - 1]; slot--) {
      chosen[slot] = chosen[slot - 1];
      weights[slot] = weights[slot - 1];
    }
    chosen[slot] = (uint32_t)i;
    weights[slot] = p[i];
  }
}

// p[n]: softmax in place. False when a score is not finite.
static bool softmax(const clb_engine *e, float *p, size_t n) {
  float max = -INFINITY;
  for (size_t i = 0; i < n; i++) {
    if (!isfinite(p[i])) return false;
    if (p[i] > max) max = p[i];
  }
  clb_exp_f32(e->kernels, p, p, max, n);
  const float sum = clb_sum_f32(e->kernels, p, n);
  for (size_t i = 0; i < n; i++) p[i] /= sum;
  return true;
}

static void scale_weights(const clb_graph *g, float *weights) {
  if (g->router_norm) {
    float sum = 0;
    for (size_t s = 0; s < g->top_k; s++) sum += weights[s];
    for (size_t s = 0; s < g->top_k; s++) weights[s] /= sum;
  }
  for (size_t s = 0; s < g->top_k; s++) weights[s] *= (float)g->router_scale;
}

bool clb_route(clb_engine *e, size_t layer, size_t n_tokens, size_t *bad) {
  const clb_graph *g = &e->graph;
  const clb_scratch *s = &e->scratch;
  const size_t n_experts = g->layers[layer].n_experts;
  clb_linear_run(e,
                 &(clb_linear){.w = &e->layers[layer].router,
                               .x = s->normed,
                               .y = s->router,
                               .ldy = n_experts,
                               .n_tokens = n_tokens,
                               .exact = true},
                 1);
  for (size_t t = 0; t < n_tokens; t++) {
    float *scores = s->router + t * n_experts, *weights = s->weights + t * g->top_k;
    *bad = t;
    if (!softmax(e, scores, n_experts)) return false;
    choose_top(scores, n_experts, g->top_k, s->chosen + t * g->top_k, weights);
    scale_weights(g, weights);
  }
  return true;
}

void clb_record_trace(const clb_engine *e, size_t layer, size_t n_tokens) {
  const clb_trace *trace = &e->trace;
  const clb_scratch *s = &e->scratch;
  if (!trace->experts) return;
  size_t moe_layer = 0;
  for (size_t i = 0; i < layer; i++) moe_layer += e->graph.layers[i].moe;
  const size_t k = e->graph.top_k;
  for (size_t t = 0; t < n_tokens; t++) {
    if (s->sequence[t] != 0 || s->position[t] >= trace->n_positions) continue;
    const size_t at = (moe_layer * trace->n_positions + s->position[t]) * k;
    memcpy(trace->experts + at, s->chosen + t * k, k * sizeof *trace->experts);
    memcpy(trace->weights + at, s->weights + t * k, k * sizeof *trace->weights);
  }
}
