// Feed-forward networks: mixtures of experts, their shared expert, and dense layers.
//
// A batch is computed expert by expert: every distinct expert is asked of the store once and applied to all tokens that
// chose it. Each (token, slot) writes a row of its own; rows are added in the order of the router's slots, so it does
// not matter in which order experts arrive.
#include <math.h>
#include <string.h>

#include "engine.h"

typedef struct {
  clb_engine *engine;
  size_t layer, n_tokens, n_experts;
  size_t first_pair;  // of the expert being gathered
  bool shared;
} moe_job;

// ---------------------------------------------------------------------------------------------------------------------
// Grouping by expert

// Fills start, token_of, pair_of and requested; returns the number of distinct experts.
static size_t group_by_expert(const clb_scratch *s, size_t n_tokens, size_t k, size_t n_experts) {
  const size_t n_pairs = n_tokens * k;
  memset(s->start, 0, (n_experts + 1) * sizeof *s->start);
  for (size_t i = 0; i < n_pairs; i++) s->start[s->chosen[i] + 1]++;
  size_t n_requested = 0;
  for (size_t x = 0; x < n_experts; x++) {
    if (s->start[x + 1] > 0) s->requested[n_requested++] = (uint32_t)x;
    s->start[x + 1] += s->start[x];
  }
  // start[x] serves as the cursor of expert x, which leaves it at the start of x + 1: shifted back below.
  for (size_t i = 0; i < n_pairs; i++) {
    const uint32_t pair = s->start[s->chosen[i]]++;
    s->pair_of[i] = pair;
    s->token_of[pair] = (uint32_t)(i / k);
  }
  memmove(s->start + 1, s->start, n_experts * sizeof *s->start);
  s->start[0] = 0;
  return n_requested;
}

static void gather_task(void *context, size_t task, size_t worker) {
  (void)worker;
  const moe_job *job = context;
  const clb_scratch *s = &job->engine->scratch;
  const size_t h = job->engine->graph.hidden;
  memcpy(s->gathered + task * h, s->normed + s->token_of[job->first_pair + task] * h, h * sizeof(float));
}

static clb_matrix part_matrix(const clb_expert *expert, uint16_t role) {
  for (size_t i = 0; i < expert->layout->n_parts; i++) {
    const clb_part *part = &expert->layout->parts[i];
    if (part->role != role) continue;
    return (clb_matrix){.type = part->type,
                        .rows = part->rows,
                        .cols = part->cols,
                        .row_bytes = part->bytes / part->rows,
                        .data = expert->data + part->offset};
  }
  return (clb_matrix){0};  // not reached: rule 23
}

// out[t] = down(silu(gate x[t]) * up x[t])
static void feed_forward(clb_engine *e, const clb_matrix *gate, const clb_matrix *up, const clb_matrix *down,
                         const float *x, size_t n_tokens, float *out) {
  const clb_scratch *s = &e->scratch;
  const size_t h = e->graph.hidden, width = gate->rows;
  clb_linear_run(
      e,
      &(clb_linear){
          .w = gate, .up = up, .x = x, .ldx = h, .y = s->gate, .y_up = s->up, .ldy = width, .n_tokens = n_tokens},
      1);
  clb_linear_run(e, &(clb_linear){.w = down, .x = s->gate, .ldx = width, .y = out, .ldy = h, .n_tokens = n_tokens}, 1);
}

static void apply_expert(clb_engine *e, moe_job *job, const clb_expert *expert) {
  const clb_scratch *s = &e->scratch;
  const size_t first = s->start[expert->expert], n = s->start[expert->expert + 1] - first;
  const float *x = s->normed;
  if (job->n_tokens > 1) {
    job->first_pair = first;
    clb_pool_run(e->pool, gather_task, job, n);
    x = s->gathered;
  }
  const clb_matrix gate = part_matrix(expert, CLB_PART_GATE), up = part_matrix(expert, CLB_PART_UP),
                   down = part_matrix(expert, CLB_PART_DOWN);
  feed_forward(e, &gate, &up, &down, x, n, s->pairs + first * e->graph.hidden);
}

// ---------------------------------------------------------------------------------------------------------------------
// Layers

// The residual stream of one token, plus its experts in slot order, plus the shared expert.
static void add_task(void *context, size_t task, size_t worker) {
  (void)worker;
  const moe_job *job = context;
  const clb_engine *e = job->engine;
  const clb_scratch *s = &e->scratch;
  const size_t h = e->graph.hidden, k = e->graph.top_k;
  float *sum = s->gathered + task * h;  // free by now
  memset(sum, 0, h * sizeof *sum);
  for (size_t slot = 0; slot < k; slot++) {
    const size_t i = task * k + slot;
    clb_axpy_f32(e->kernels, sum, s->pairs + s->pair_of[i] * h, s->weights[i], h);
  }
  if (job->shared) {
    float scale = 1;
    if (e->graph.shared_gated) {
      const float score = clb_dot_f32(e->kernels, e->layers[job->layer].shared_router, s->normed + task * h, h);
      scale = (float)(1 / (1 + exp(-(double)score)));
    }
    clb_axpy_f32(e->kernels, sum, s->projected + task * h, scale, h);
  }
  clb_axpy_f32(e->kernels, s->x + task * h, sum, 1, h);
}

static colibri_status apply_experts(clb_engine *e, moe_job *job, size_t n_requested) {
  const clb_layer *layer = &e->layers[job->layer];
  if (!clb_store_begin(e->store, e->graph.layers[job->layer].row, e->scratch.requested, n_requested)) {
    return clb_fail(e->error, COLIBRI_ERROR_IO, "%s", clb_store_error(e->store));
  }
  double time = clb_seconds();
  if (job->shared) {  // while the first reads are under way
    feed_forward(e, &layer->gate, &layer->up, &layer->down, e->scratch.normed, job->n_tokens, e->scratch.projected);
  }
  colibri_status status = COLIBRI_OK;
  for (;;) {
    clb_expert expert;
    const double before = clb_seconds();
    e->metrics.experts_seconds += before - time;
    const clb_store_status next = clb_store_next(e->store, &expert);
    time = clb_seconds();
    e->metrics.io_wait_seconds += time - before;
    if (next == CLB_STORE_DONE) break;
    if (next != CLB_STORE_READY) {
      status = clb_fail(e->error, COLIBRI_ERROR_IO, "%s", clb_store_error(e->store));
      break;
    }
    apply_expert(e, job, &expert);
    clb_store_release(e->store, expert.slot);
  }
  clb_store_end(e->store);
  return status;
}

colibri_status clb_moe(clb_engine *e, size_t layer, size_t n_tokens, size_t position) {
  moe_job job = {.engine = e,
                 .layer = layer,
                 .n_tokens = n_tokens,
                 .n_experts = e->graph.layers[layer].n_experts,
                 .shared = e->graph.shared_width > 0};
  size_t bad = 0;
  const double before = clb_seconds();
  if (!clb_route(e, layer, n_tokens, &bad)) {
    return clb_fail(
        e->error, COLIBRI_ERROR_NUMERIC,
        "layer %zu, position %zu: the router's scores are not finite; 'colibri verify' finds NaN in weights", layer,
        position + bad);
  }
  clb_record_trace(e, layer, n_tokens, position);
  const size_t n_requested = group_by_expert(&e->scratch, n_tokens, e->graph.top_k, job.n_experts);
  e->metrics.router_seconds += clb_seconds() - before;
  const colibri_status status = apply_experts(e, &job, n_requested);
  if (status != COLIBRI_OK) return status;
  const double adding = clb_seconds();
  clb_pool_run(e->pool, add_task, &job, n_tokens);
  e->metrics.experts_seconds += clb_seconds() - adding;
  return COLIBRI_OK;
}

void clb_dense(clb_engine *e, size_t layer, size_t n_tokens) {
  const clb_layer *l = &e->layers[layer];
  const double before = clb_seconds();
  feed_forward(e, &l->gate, &l->up, &l->down, e->scratch.normed, n_tokens, e->scratch.projected);
  clb_axpy_f32(e->kernels, e->scratch.x, e->scratch.projected, 1, n_tokens * e->graph.hidden);
  e->metrics.experts_seconds += clb_seconds() - before;
}
