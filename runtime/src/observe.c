// Recording what routers choose and what experts multiply, for statistics (colibri_observe).
#include <stdlib.h>
#include <string.h>

#include "engine.h"

enum { EARLY_TOKENS = 64 };  // tokens whose early choice is computed at once

// Room for an early choice, as the router wants it.
struct clb_early {
  float *normed;     // [EARLY_TOKENS, H]
  float *router;     // [EARLY_TOKENS, E]
  float *weights;    // [EARLY_TOKENS, K]
  uint32_t *chosen;  // [EARLY_TOKENS, K]
};

static void free_early(clb_early *a) {
  if (!a) return;
  free(a->normed);
  free(a->router);
  free(a->weights);
  free(a->chosen);
  free(a);
}

static clb_early *make_early(const clb_graph *g) {
  clb_early *a = calloc(1, sizeof *a);
  if (!a) return NULL;
  a->normed = calloc(EARLY_TOKENS * g->hidden, sizeof *a->normed);
  a->router = calloc(EARLY_TOKENS * g->max_experts, sizeof *a->router);
  a->weights = calloc(EARLY_TOKENS * g->top_k, sizeof *a->weights);
  a->chosen = calloc(EARLY_TOKENS * g->top_k, sizeof *a->chosen);
  if (a->normed && a->router && a->weights && a->chosen) return a;
  free_early(a);
  return NULL;
}

static colibri_status check(const clb_engine *e, const colibri_observation *o) {
  if (!o->experts != !o->weights) {
    return clb_fail(e->error, COLIBRI_ERROR_ARGUMENT,
                    "observation: expected room for experts and their weights, or "
                    "for neither");
  }
  if (!o->inputs != !o->hidden) {
    return clb_fail(e->error, COLIBRI_ERROR_ARGUMENT, "observation: expected room for inputs and hidden, or neither");
  }
  if (o->hidden && o->width != e->graph.max_width) {
    return clb_fail(e->error, COLIBRI_ERROR_ARGUMENT, "observation: width is %zu, the widest expert has %llu", o->width,
                    (unsigned long long)e->graph.max_width);
  }
  return COLIBRI_OK;
}

colibri_status clb_observer_set(clb_engine *e, const colibri_observation *o) {
  clb_observer_clear(e);
  if (!o) return COLIBRI_OK;
  CLB_TRY(check(e, o));
  clb_early *early = o->early ? make_early(&e->graph) : NULL;
  if (o->early && !early) return clb_fail(e->error, COLIBRI_ERROR_MEMORY, "no memory to apply routers early");
  e->observer = (clb_observer){.to = *o, .early = early};
  return COLIBRI_OK;
}

void clb_observer_clear(clb_engine *e) {
  free_early(e->observer.early);
  e->observer = (clb_observer){0};
}

static size_t moe_layer_of(const clb_engine *e, size_t layer) {
  size_t n = 0;
  for (size_t i = 0; i < layer; i++) n += e->graph.layers[i].moe;
  return n;
}

// Where choices of token t of the batch go; false: nowhere.
static bool place(const clb_engine *e, size_t moe_layer, size_t t, size_t *at) {
  const colibri_observation *o = &e->observer.to;
  const size_t s = e->scratch.sequence[t], p = e->scratch.position[t];
  *at = ((moe_layer * o->n_sequences + s) * o->n_positions + p) * e->graph.top_k;
  return s < o->n_sequences && p < o->n_positions;
}

// The router of `layer` on the residual stream of tokens [first, first + n) as it is now.
static void choose_early(clb_engine *e, size_t layer, size_t first, size_t n) {
  const clb_scratch kept = e->scratch;
  const clb_early *a = e->observer.early;
  size_t bad;
  e->scratch.x += first * e->graph.hidden;
  e->scratch.normed = (clb_rows){.x = a->normed, .ld = e->graph.hidden};
  e->scratch.router = a->router;
  e->scratch.weights = a->weights;
  e->scratch.chosen = a->chosen;
  clb_ffn_norm(e, layer, n);
  const bool finite = clb_route(e, layer, n, &bad);
  e->scratch = kept;
  if (!finite) memset(a->chosen, 0xff, n * e->graph.top_k * sizeof *a->chosen);
}

static void observe_early(clb_engine *e, size_t layer, size_t n_tokens) {
  const size_t k = e->graph.top_k, moe_layer = moe_layer_of(e, layer);
  size_t next = layer + 1;
  while (next < e->graph.n_layers && !e->graph.layers[next].moe) next++;
  size_t at;
  for (size_t first = 0; first < n_tokens; first += EARLY_TOKENS) {
    const size_t n = n_tokens - first < EARLY_TOKENS ? n_tokens - first : EARLY_TOKENS;
    if (next < e->graph.n_layers) choose_early(e, next, first, n);
    for (size_t t = 0; t < n; t++) {
      uint32_t *early = e->observer.to.early;
      if (moe_layer == 0 && place(e, 0, first + t, &at)) memset(early + at, 0xff, k * sizeof *early);
      if (next == e->graph.n_layers || !place(e, moe_layer + 1, first + t, &at)) continue;
      memcpy(early + at, e->observer.early->chosen + t * k, k * sizeof *early);
    }
  }
}

void clb_observe_choices(clb_engine *e, size_t layer, size_t n_tokens) {
  const colibri_observation *o = &e->observer.to;
  const clb_scratch *s = &e->scratch;
  const size_t k = e->graph.top_k;
  if (o->experts) {
    const size_t moe_layer = moe_layer_of(e, layer);
    size_t at;
    for (size_t t = 0; t < n_tokens; t++) {
      if (!place(e, moe_layer, t, &at)) continue;
      memcpy(o->experts + at, s->chosen + t * k, k * sizeof *o->experts);
      memcpy(o->weights + at, s->weights + t * k, k * sizeof *o->weights);
    }
  }
  if (o->early) observe_early(e, layer, n_tokens);
}

static void add_squares(double *sums, const float *x, size_t n) {
  for (size_t i = 0; i < n; i++) sums[i] += (double)x[i] * (double)x[i];
}

// One expert is one thread's, and its tokens are in their order: sums do not depend on threads or batches.
void clb_observe_expert(const clb_engine *e, size_t layer, const clb_expert_rows *rows) {
  const colibri_observation *o = &e->observer.to;
  const size_t h = e->graph.hidden, at = moe_layer_of(e, layer) * e->graph.max_experts + rows->expert;
  for (size_t i = 0; i < rows->n; i++) {
    const float *x = rows->scaled.x ? rows->scaled.x + i * rows->scaled.ld
                                    : e->scratch.normed.x + e->scratch.token_of[rows->first_pair + i] * h;
    add_squares(o->inputs + at * h, x, h);
    add_squares(o->hidden + at * o->width, rows->hidden.x + i * rows->hidden.ld, rows->width);
  }
}
