// Feed-forward networks: mixtures of experts, their shared expert, and dense layers.
//
// A batch is computed expert by expert: every distinct expert is asked of the store once and applied to all tokens that
// chose it. Experts that are in memory at the same time are computed in the same job, together with the shared expert,
// while others are being read. Each (token, slot) writes a row of its own; rows are added in the order of the router's
// slots, so it does not matter in which order experts arrive.
#include <math.h>
#include <string.h>

#include "engine.h"

// Experts that are computed together: inputs and hidden activations are rows of scratch, one expert's after another's.
typedef struct {
  size_t n, n_rows;
  uint32_t expert[CLB_MAX_GROUP];
  size_t slot[CLB_MAX_GROUP], first_pair[CLB_MAX_GROUP];
  size_t first_row[CLB_MAX_GROUP + 1];
  clb_matrix gate[CLB_MAX_GROUP], up[CLB_MAX_GROUP], down[CLB_MAX_GROUP];
  const float *gate_bias[CLB_MAX_GROUP], *up_bias[CLB_MAX_GROUP], *down_bias[CLB_MAX_GROUP];  // NULL for none
} expert_group;

typedef struct {
  clb_engine *engine;
  size_t layer, n_tokens;
  size_t most;       // experts of a group
  bool shared;       // the layer has a shared expert
  bool shared_done;  // and it was computed
  expert_group *group;
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

// ---------------------------------------------------------------------------------------------------------------------
// Groups of experts

static size_t n_tokens_of(const clb_engine *e, uint32_t expert) {
  return e->scratch.start[expert + 1] - e->scratch.start[expert];
}

static size_t group_rows(const clb_engine *e) {
  return e->batch_size > e->graph.top_k ? e->batch_size : e->graph.top_k;
}

// While a request does not fit into the cache, an expert that is held keeps another one from being read.
static size_t largest_group(const clb_engine *e, size_t n_requested) {
  return n_requested > e->cache_blocks ? 1 : CLB_MAX_GROUP;
}

static bool fits(const moe_job *job, const clb_expert *expert) {
  const clb_engine *e = job->engine;
  const expert_group *g = job->group;
  return g->n < job->most && g->n_rows + n_tokens_of(e, expert->expert) <= group_rows(e);
}

// Biases of an expert, decoded into scratch.
static void add_biases(const clb_engine *e, expert_group *g, size_t i, const clb_layout *layout, const uint8_t *data) {
  const float **const biases[] = {&g->gate_bias[i], &g->up_bias[i], &g->down_bias[i]};
  float *to = e->scratch.bias + i * (2 * e->graph.max_width + e->graph.hidden);
  for (size_t b = 0; b < sizeof biases / sizeof *biases; b++) *biases[b] = NULL;
  for (size_t p = 0; p < layout->n_parts; p++) {
    const clb_part *part = &layout->parts[p];
    if (part->role < CLB_PART_GATE_BIAS) continue;
    clb_dequantize_with(e->kernels, part->type, data + part->offset, to, part->cols);
    *biases[part->role - CLB_PART_GATE_BIAS] = to;
    to += part->cols;
  }
}

static void add_expert(const clb_engine *e, expert_group *g, const clb_expert *expert) {
  const size_t i = g->n++;
  g->expert[i] = expert->expert;
  g->slot[i] = expert->slot;
  g->first_pair[i] = e->scratch.start[expert->expert];
  g->first_row[i] = g->n_rows;
  g->n_rows += n_tokens_of(e, expert->expert);
  g->first_row[g->n] = g->n_rows;
  g->gate[i] = part_matrix(expert, CLB_PART_GATE);
  g->up[i] = part_matrix(expert, CLB_PART_UP);
  g->down[i] = part_matrix(expert, CLB_PART_DOWN);
  add_biases(e, g, i, expert->layout, expert->data);
}

// The router's weight of a row of `pairs`, which is one of the token's slots.
static float weight_of(const clb_engine *e, size_t pair) {
  size_t i = e->scratch.token_of[pair] * e->graph.top_k;
  while (e->scratch.pair_of[i] != pair) i++;
  return e->scratch.weights[i];
}

// The inputs of one row of a group, as the products take them; those that are scaled have no codes yet.
static void gather_task(void *context, size_t task, size_t worker) {
  (void)worker;
  const moe_job *job = context;
  const clb_engine *e = job->engine;
  const expert_group *g = job->group;
  size_t i = 0;
  while (task >= g->first_row[i + 1]) i++;
  const size_t pair = g->first_pair[i] + task - g->first_row[i];
  const clb_rows from = clb_rows_from(e->scratch.normed, e->scratch.token_of[pair]);
  const clb_rows to = clb_rows_from(e->scratch.gathered, task);
  if (e->graph.experts_scale_input) {
    const float weight = weight_of(e, pair);
    for (size_t j = 0; j < e->graph.hidden; j++) to.x[j] = from.x[j] * weight;
    return;
  }
  const clb_kinds kinds = clb_kinds_of(e, g->gate[i].type) | clb_kinds_of(e, g->up[i].type);
  if (kinds >> CLB_FAST_X_NONE & 1) memcpy(to.x, from.x, e->graph.hidden * sizeof *to.x);
  for (size_t kind = CLB_FAST_X_NONE + 1; kind < CLB_FAST_X_KINDS; kind++) {
    if (kinds >> kind & 1) memcpy(to.codes[kind], from.codes[kind], from.code_bytes[kind]);
  }
}

// Rows of experts that are equally wide, and whose down projections take the same, in one go.
static void quantize_hidden(clb_engine *e, const expert_group *g) {
  for (size_t i = 0, end; i < g->n; i = end) {
    const size_t width = g->gate[i].rows;
    const clb_kinds kinds = clb_kinds_of(e, g->down[i].type);
    for (end = i + 1; end < g->n && g->gate[end].rows == width; end++) {
      if (clb_kinds_of(e, g->down[end].type) != kinds) break;
    }
    const clb_rows rows = clb_rows_from(e->scratch.hidden, g->first_row[i]);
    clb_quantize(e, rows, g->first_row[end] - g->first_row[i], width, kinds);
  }
}

// The network that all tokens of a layer go through, its first half and its second: the shared expert or a dense layer.
static clb_linear wide_in(const clb_engine *e, size_t layer, size_t n_tokens) {
  const clb_layer *l = &e->layers[layer];
  const clb_scratch *s = &e->scratch;
  return (clb_linear){.w = &l->gate,
                      .up = &l->up,
                      .x = s->normed,
                      .y = s->wide.x,
                      .y_up = s->wide_up,
                      .ldy = s->wide.ld,
                      .n_tokens = n_tokens};
}

static clb_linear wide_out(const clb_engine *e, size_t layer, size_t n_tokens) {
  return (clb_linear){.w = &e->layers[layer].down,
                      .x = e->scratch.wide,
                      .y = e->scratch.projected,
                      .ldy = e->graph.hidden,
                      .n_tokens = n_tokens};
}

static void observe_task(void *context, size_t task, size_t worker) {
  (void)worker;
  const moe_job *job = context;
  const clb_engine *e = job->engine;
  const expert_group *g = job->group;
  const size_t row = g->first_row[task];
  clb_expert_rows rows = {.expert = g->expert[task],
                          .first_pair = g->first_pair[task],
                          .n = g->first_row[task + 1] - row,
                          .width = g->gate[task].rows,
                          .hidden = clb_rows_from(e->scratch.hidden, row)};
  if (e->graph.experts_scale_input) rows.scaled = clb_rows_from(e->scratch.gathered, row);
  clb_observe_expert(e, job->layer, &rows);
}

// out[t] = down(activation(gate x[t], up x[t])) of all experts of the group, and of the shared expert if it is still to
// do.
static void compute_group(moe_job *job) {
  clb_engine *e = job->engine;
  const clb_scratch *s = &e->scratch;
  const expert_group *g = job->group;
  const clb_layer_kinds *kinds = &e->kinds[job->layer];
  const bool shared = job->shared && !job->shared_done, gathered = job->n_tokens > 1 || e->graph.experts_scale_input;
  clb_linear in[CLB_MAX_LINEARS], out[CLB_MAX_LINEARS];
  for (size_t i = 0; i < g->n; i++) {
    const size_t row = g->first_row[i], n = g->first_row[i + 1] - row;
    const clb_rows hidden = clb_rows_from(s->hidden, row);
    in[i] = (clb_linear){.w = &g->gate[i], .up = &g->up[i], .y = hidden.x, .y_up = s->up + row * hidden.ld};
    in[i].x = gathered ? clb_rows_from(s->gathered, row) : s->normed;
    in[i].bias = g->gate_bias[i];
    in[i].up_bias = g->up_bias[i];
    in[i].ldy = hidden.ld;
    in[i].n_tokens = n;
    out[i] = (clb_linear){.w = &g->down[i], .x = hidden, .y = s->pairs + g->first_pair[i] * e->graph.hidden};
    out[i].ldy = e->graph.hidden;
    out[i].bias = g->down_bias[i];
    out[i].n_tokens = n;
  }
  in[g->n] = wide_in(e, job->layer, job->n_tokens);
  out[g->n] = wide_out(e, job->layer, job->n_tokens);
  if (gathered) clb_pool_run(e->pool, gather_task, job, g->n_rows);
  if (e->graph.experts_scale_input) clb_quantize(e, s->gathered, g->n_rows, e->graph.hidden, kinds->experts);
  clb_linear_run(e, in, g->n + shared);
  if (e->observer.to.inputs) clb_pool_run(e->pool, observe_task, job, g->n);
  quantize_hidden(e, g);
  if (shared) clb_quantize(e, s->wide, job->n_tokens, e->layers[job->layer].gate.rows, kinds->wide);
  clb_linear_run(e, out, g->n + shared);
  job->shared_done = true;
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
  float *sum = s->gathered.x + task * h;  // free by now
  memset(sum, 0, h * sizeof *sum);
  for (size_t slot = 0; slot < k; slot++) {
    const size_t i = task * k + slot;
    const float weight = e->graph.experts_scale_input ? 1 : s->weights[i];
    clb_axpy_f32(e->kernels, sum, s->pairs + s->pair_of[i] * h, weight, h);
  }
  if (job->shared) {
    float scale = 1;
    if (e->graph.shared_gated) {
      const float score = clb_dot_f32(e->kernels, e->layers[job->layer].shared_router, s->normed.x + task * h, h);
      scale = (float)(1 / (1 + exp(-(double)score)));
    }
    clb_axpy_f32(e->kernels, sum, s->projected + task * h, scale, h);
  }
  const float *post_norm = e->layers[job->layer].ffn_post_norm;
  if (post_norm) clb_rms_norm(e, sum, post_norm, e->graph.norm_eps, sum, h);
  clb_axpy_f32(e->kernels, s->x + task * h, sum, (float)e->graph.residual_scale, h);
}

// The next expert of the request, or what prevents it, waiting only if `wait`. Threads that spin would take time from
// those that read.
static clb_store_status next_expert(clb_engine *e, clb_expert *expert, bool wait) {
  clb_store_status status = clb_store_try_next(e->store, expert);
  if (status != CLB_STORE_PENDING || !wait) return status;
  clb_pool_rest(e->pool);
  const double before = clb_seconds();
  status = clb_store_next(e->store, expert);
  e->metrics.io_wait_seconds += clb_seconds() - before;
  return status;
}

static void release_group(clb_engine *e, expert_group *g) {
  for (size_t i = 0; i < g->n; i++) clb_store_release(e->store, g->slot[i]);
  g->n = g->n_rows = 0;
}

// Computes the request's experts in groups of what is ready. The shared expert comes first if nothing is.
static clb_store_status apply_request(moe_job *job) {
  clb_engine *e = job->engine;
  expert_group *g = job->group;
  for (;;) {
    clb_expert expert;
    const bool idle = g->n == 0 && (!job->shared || job->shared_done);
    const clb_store_status status = next_expert(e, &expert, idle);
    if (status == CLB_STORE_READY && fits(job, &expert)) {
      add_expert(e, g, &expert);
      continue;
    }
    if (idle && status != CLB_STORE_READY) return status;
    compute_group(job);
    release_group(e, g);
    if (status == CLB_STORE_READY) add_expert(e, g, &expert);
  }
}

static colibri_status apply_experts(clb_engine *e, moe_job *job, size_t n_requested) {
  if (!clb_store_begin(e->store, e->graph.layers[job->layer].row, e->scratch.requested, n_requested)) {
    return clb_fail(e->error, COLIBRI_ERROR_IO, "%s", clb_store_error(e->store));
  }
  job->most = largest_group(e, n_requested);
  const double before = clb_seconds(), waited = e->metrics.io_wait_seconds;
  clb_prefetch_after(e, job->layer, job->n_tokens);  // after the request, whose reads come first
  const clb_store_status status = apply_request(job);
  e->metrics.experts_seconds += clb_seconds() - before - (e->metrics.io_wait_seconds - waited);
  colibri_status result = COLIBRI_OK;
  if (status != CLB_STORE_DONE) result = clb_fail(e->error, COLIBRI_ERROR_IO, "%s", clb_store_error(e->store));
  clb_store_end(e->store);
  return result;
}

colibri_status clb_moe(clb_engine *e, size_t layer, size_t n_tokens) {
  expert_group group = {0};
  moe_job job = {
      .engine = e, .layer = layer, .n_tokens = n_tokens, .shared = e->graph.shared_width > 0, .group = &group};
  size_t bad = 0;
  const double before = clb_seconds();
  if (!clb_route(e, layer, n_tokens, &bad)) {
    return clb_fail(e->error, COLIBRI_ERROR_NUMERIC,
                    "layer %zu, position %u: the router's scores are not finite; 'colibri verify' finds NaN in weights",
                    layer, e->scratch.position[bad]);
  }
  clb_observe_choices(e, layer, n_tokens);
  const size_t n_requested = group_by_expert(&e->scratch, n_tokens, e->graph.top_k, e->graph.layers[layer].n_experts);
  e->metrics.router_seconds += clb_seconds() - before;
  CLB_TRY(apply_experts(e, &job, n_requested));
  const double adding = clb_seconds();
  clb_pool_run(e->pool, add_task, &job, n_tokens);
  e->metrics.experts_seconds += clb_seconds() - adding;
  return COLIBRI_OK;
}

void clb_dense(clb_engine *e, size_t layer, size_t n_tokens) {
  const double before = clb_seconds();
  const clb_linear in = wide_in(e, layer, n_tokens), out = wide_out(e, layer, n_tokens);
  clb_linear_run(e, &in, 1);
  clb_quantize(e, e->scratch.wide, n_tokens, e->layers[layer].gate.rows, e->kinds[layer].wide);
  clb_linear_run(e, &out, 1);
  const size_t h = e->graph.hidden;
  const float *post_norm = e->layers[layer].ffn_post_norm;
  float *y = e->scratch.projected;
  for (size_t t = 0; post_norm && t < n_tokens; t++) {
    clb_rms_norm(e, y + t * h, post_norm, e->graph.norm_eps, y + t * h, h);
  }
  clb_axpy_f32(e->kernels, e->scratch.x, y, (float)e->graph.residual_scale, n_tokens * h);
  e->metrics.experts_seconds += clb_seconds() - before;
}
