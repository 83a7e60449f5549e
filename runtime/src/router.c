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

static bool sigmoid(const clb_engine *e, float *p, size_t n) {
  (void)e;
  for (size_t i = 0; i < n; i++) {
    if (!isfinite(p[i])) return false;
    p[i] = (float)(1 / (1 + exp(-(double)p[i])));
  }
  return true;
}

static bool plain(const clb_engine *e, float *p, size_t n) {
  (void)e;
  for (size_t i = 0; i < n; i++) {
    if (!isfinite(p[i])) return false;
  }
  return true;
}

static void score_weights(const clb_engine *e, const float *p, size_t n, const uint32_t *chosen, float *weights) {
  (void)n;
  for (size_t s = 0; s < e->graph.top_k; s++) weights[s] = p[chosen[s]];
}

static void sigmoid_weights(const clb_engine *e, const float *p, size_t n, const uint32_t *chosen, float *weights) {
  score_weights(e, p, n, chosen, weights);
  sigmoid(e, weights, e->graph.top_k);
}

static bool contains(const uint32_t *chosen, size_t n, size_t expert) {
  for (size_t i = 0; i < n; i++) {
    if (chosen[i] == expert) return true;
  }
  return false;
}

// The share of each chosen expert in a softmax over what is left without the better ones, of which only those near
// enough to it count (SparseMixer-v2, arXiv 2409.12136, as evaluated).
static void sparsemixer_weights(const clb_engine *e, const float *p, size_t n, const uint32_t *chosen, float *weights) {
  const float threshold = (float)(2 * e->graph.router_jitter);
  for (size_t s = 0; s < e->graph.top_k; s++) {
    const float max = p[chosen[s]];
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
      const float size = fabsf(p[i]), factor = size > max ? size : max;
      if ((max - p[i]) / factor > threshold || contains(chosen, s, i)) continue;
      sum += exp((double)p[i] - (double)max);
    }
    weights[s] = (float)(1 / sum);
  }
}

// Logits to the scores of the choice, in place, false when one is not finite; and scores to the weights of the chosen.
typedef bool (*score_function)(const clb_engine *e, float *p, size_t n);
typedef void (*weight_function)(const clb_engine *e, const float *p, size_t n, const uint32_t *chosen, float *weights);

static const struct {
  score_function score;
  weight_function weigh;
} KINDS[] = {
    [CLB_SCORE_SOFTMAX] = {softmax, score_weights},
    [CLB_SCORE_SIGMOID] = {sigmoid, score_weights},
    [CLB_SCORE_TOPK_SIGMOID] = {plain, sigmoid_weights},
    [CLB_SCORE_SPARSEMIXER] = {plain, sparsemixer_weights},
};

// How good a group of experts is by the scores of its members.
typedef float (*group_function)(const float *p, size_t n);

static float largest(const float *p, size_t n) {
  float max = p[0];
  for (size_t i = 1; i < n; i++) max = p[i] > max ? p[i] : max;
  return max;
}

static float largest_two(const float *p, size_t n) {
  float max = -INFINITY, second = -INFINITY;
  for (size_t i = 0; i < n; i++) {
    if (p[i] > max) {
      second = max;
      max = p[i];
    } else if (p[i] > second) {
      second = p[i];
    }
  }
  return max + second;
}
static const group_function GROUP_SCORES[] = {[CLB_GROUP_SCORE_MAX] = largest, [CLB_GROUP_SCORE_TOP2] = largest_two};

// Experts outside the best groups cannot be chosen.
static void mask_groups(const clb_graph *g, float *selection, size_t n) {
  float scores[CLB_MAX_ROUTER_GROUPS], best[CLB_MAX_ROUTER_GROUPS];
  uint32_t chosen[CLB_MAX_ROUTER_GROUPS];
  bool alive[CLB_MAX_ROUTER_GROUPS] = {false};
  const size_t size = n / g->router_groups;
  for (size_t i = 0; i < g->router_groups; i++) {
    scores[i] = GROUP_SCORES[g->router_group_score](selection + i * size, size);
  }
  choose_top(scores, g->router_groups, g->router_top_groups, chosen, best);
  for (size_t i = 0; i < g->router_top_groups; i++) alive[chosen[i]] = true;
  for (size_t i = 0; i < n; i++) {
    if (!alive[i / size]) selection[i] = -INFINITY;
  }
}

static void scale_weights(const clb_graph *g, float *weights) {
  if (g->router_norm) {
    float sum = 0;
    for (size_t s = 0; s < g->top_k; s++) sum += weights[s];
    sum += (float)g->router_norm_add;
    if (sum < (float)g->router_norm_min) sum = (float)g->router_norm_min;
    for (size_t s = 0; s < g->top_k; s++) weights[s] /= sum;
  }
  for (size_t s = 0; s < g->top_k; s++) weights[s] *= (float)g->router_scale;
}

// One token: chosen[k], best first, and their weights. `bias` shifts the choice and not the weights.
static bool route_token(const clb_engine *e, float *scores, size_t n_experts, const float *bias, uint32_t *chosen,
                        float *weights) {
  const clb_graph *g = &e->graph;
  if (!KINDS[g->router_score].score(e, scores, n_experts)) return false;
  float *selection = e->scratch.selection;
  memcpy(selection, scores, n_experts * sizeof *scores);
  if (bias) clb_axpy_f32(e->kernels, selection, bias, 1, n_experts);
  if (g->router_groups > 1) mask_groups(g, selection, n_experts);
  choose_top(selection, n_experts, g->top_k, chosen, weights);
  KINDS[g->router_score].weigh(e, scores, n_experts, chosen, weights);
  scale_weights(g, weights);
  return true;
}

bool clb_route(clb_engine *e, size_t layer, size_t n_tokens, size_t *bad) {
  const clb_graph *g = &e->graph;
  const clb_scratch *s = &e->scratch;
  const size_t n_experts = g->layers[layer].n_experts, k = g->top_k;
  clb_linear_run(e,
                 &(clb_linear){.w = &e->layers[layer].router,
                               .bias = e->layers[layer].router_bias,
                               .x = s->normed,
                               .y = s->router,
                               .ldy = n_experts,
                               .n_tokens = n_tokens,
                               .exact = true},
                 1);
  for (size_t t = 0; t < n_tokens; t++) {
    *bad = t;
    if (!route_token(e, s->router + t * n_experts, n_experts, e->layers[layer].select_bias, s->chosen + t * k,
                     s->weights + t * k)) {
      return false;
    }
  }
  return true;
}
