// Reading ahead: the experts that a later layer will probably choose are asked of the store before it gets there.
//
// The guess is what the later layer's norm and router make of the residual stream as it is now: after this layer's
// attention, before its experts. It is made while this layer's own experts are being read. Guesses change no result,
// and the store follows them only as far as they pay (store.h).
#include <stdlib.h>
#include <string.h>

#include "engine.h"

// Beyond a few tokens a batch names most experts of a layer anyway, and computes long enough to wait for none of them.
enum { MOST_TOKENS = 4 };

struct clb_prefetch {
  size_t depth;
  float *normed;      // [MOST_TOKENS, H]
  float *router;      // [MOST_TOKENS, E]
  float *weights;     // [MOST_TOKENS, K]
  uint32_t *chosen;   // [MOST_TOKENS, K]
  uint32_t *experts;  // [E], distinct, the likeliest first
  bool *named;        // [E]
};

void clb_prefetch_close(clb_prefetch *p) {
  if (!p) return;
  free(p->normed);
  free(p->router);
  free(p->weights);
  free(p->chosen);
  free(p->experts);
  free(p->named);
  free(p);
}

clb_prefetch *clb_prefetch_open(const clb_graph *g, size_t depth) {
  clb_prefetch *p = calloc(1, sizeof *p);
  if (!p) return NULL;
  p->depth = depth;
  p->normed = calloc(MOST_TOKENS * g->hidden, sizeof *p->normed);
  p->router = calloc(MOST_TOKENS * g->max_experts, sizeof *p->router);
  p->weights = calloc(MOST_TOKENS * g->top_k, sizeof *p->weights);
  p->chosen = calloc(MOST_TOKENS * g->top_k, sizeof *p->chosen);
  p->experts = calloc(g->max_experts, sizeof *p->experts);
  p->named = calloc(g->max_experts, sizeof *p->named);
  if (p->normed && p->router && p->weights && p->chosen && p->experts && p->named) return p;
  clb_prefetch_close(p);
  return NULL;
}

// The layer's router on the residual stream as it is, into p->chosen. Scratch keeps what it holds.
static bool guess(clb_engine *e, const clb_prefetch *p, size_t layer, size_t n_tokens) {
  const clb_scratch kept = e->scratch;
  size_t bad;
  e->scratch.normed.x = p->normed;
  e->scratch.router = p->router;
  e->scratch.weights = p->weights;
  e->scratch.chosen = p->chosen;
  clb_ffn_norm(e, layer, n_tokens);
  const bool finite = clb_route(e, layer, n_tokens, &bad);
  e->scratch = kept;
  return finite;
}

// The distinct experts of all tokens: first every token's best, then every token's second, ...
static size_t list_experts(const clb_prefetch *p, size_t n_tokens, size_t k, size_t n_experts) {
  size_t n = 0;
  memset(p->named, 0, n_experts * sizeof *p->named);
  for (size_t slot = 0; slot < k; slot++) {
    for (size_t t = 0; t < n_tokens; t++) {
      const uint32_t expert = p->chosen[t * k + slot];
      if (!p->named[expert]) p->experts[n++] = expert;
      p->named[expert] = true;
    }
  }
  return n;
}

void clb_prefetch_after(clb_engine *e, size_t layer, size_t n_tokens) {
  const clb_prefetch *p = e->prefetch;
  if (!p || n_tokens > MOST_TOKENS || !clb_store_wants_hints(e->store)) return;
  size_t distance = 0;
  for (size_t next = layer + 1; next < e->graph.n_layers && distance < p->depth; next++) {
    const clb_graph_layer *its = &e->graph.layers[next];
    if (!its->moe) continue;
    distance++;
    if (!guess(e, p, next, n_tokens)) continue;
    const size_t n = list_experts(p, n_tokens, e->graph.top_k, its->n_experts);
    (void)clb_store_hint(e->store, its->row, p->experts, n);
  }
}
