// One batch of tokens through all layers.
#include <errno.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "engine.h"

typedef struct {
  clb_engine *engine;
  size_t layer;
  const float *norm, *norm_bias;
  size_t first, to;  // token that task 0 is about, and the row it goes to
} token_job;

static colibri_status cancelled(const clb_engine *e) {
  return clb_fail(e->error, COLIBRI_CANCELLED, "cancelled");
}

// ---------------------------------------------------------------------------------------------------------------------
// Embedding

// Reads row `token` of an embedding that is not in memory into scratch.
static colibri_status read_embedding_row(clb_engine *e, uint32_t token) {
  const size_t n_bytes = e->token_embd.row_bytes;
  const uint64_t offset = e->embedding_offset + token * n_bytes;
  size_t done = 0;
  while (done < n_bytes) {
    const ssize_t n =
        pread(clb_container_fd(e->container), e->scratch.row + done, n_bytes - done, (off_t)(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      char text[256];
      clb_file_describe(n == 0 ? ENODATA : errno, offset, n_bytes, text, sizeof text);
      return clb_fail(e->error, COLIBRI_ERROR_IO, "row %u of token_embd: %s", token, text);
    }
    done += (size_t)n;
  }
  return COLIBRI_OK;
}

static void scale(float *x, float factor, size_t n) {
  for (size_t i = 0; i < n; i++) x[i] *= factor;
}

static colibri_status embed_token(clb_engine *e, uint32_t token, float *x) {
  const uint8_t *row = e->scratch.row;
  if (e->embedding_on_demand) {
    const colibri_status status = read_embedding_row(e, token);
    if (status != COLIBRI_OK) return status;
  } else {
    row = e->token_embd.data + token * e->token_embd.row_bytes;
  }
  clb_dequantize_with(e->kernels, e->token_embd.type, row, x, e->graph.hidden);
  if (e->graph.embedding_scale != 1) scale(x, (float)e->graph.embedding_scale, e->graph.hidden);
  return COLIBRI_OK;
}

// Fills scratch.x, sequence and position of every token.
static colibri_status begin(clb_engine *e, const clb_batch *batch) {
  const clb_scratch *s = &e->scratch;
  size_t t = 0;
  for (const clb_span *span = batch->spans; span < batch->spans + batch->n_spans; span++) {
    for (size_t i = 0; i < span->n_tokens; i++, t++) {
      s->sequence[t] = (uint32_t)span->sequence;
      s->position[t] = (uint32_t)(span->position + i);
      CLB_TRY(embed_token(e, span->tokens[i], s->x + t * e->graph.hidden));
    }
  }
  return COLIBRI_OK;
}

// ---------------------------------------------------------------------------------------------------------------------
// Norms and rope

void clb_rms_norm(const clb_engine *e, const float *x, const float *weight, double eps, float *out, size_t n) {
  const float mean = clb_dot_f32(e->kernels, x, x, n) / (float)n;
  const float factor = (float)(1 / sqrt((double)(mean + (float)eps)));
  for (size_t i = 0; i < n; i++) out[i] = weight ? weight[i] * (x[i] * factor) : x[i] * factor;
}

// weight * (x - mean) / sqrt(variance + eps) + bias
static void layer_norm(const clb_engine *e, const float *x, const float *weight, const float *bias, float *out,
                       size_t n) {
  const float mean = clb_sum_f32(e->kernels, x, n) / (float)n;
  for (size_t i = 0; i < n; i++) out[i] = x[i] - mean;
  const float variance = clb_dot_f32(e->kernels, out, out, n) / (float)n;
  const float factor = (float)(1 / sqrt((double)(variance + (float)e->graph.norm_eps)));
  for (size_t i = 0; i < n; i++) out[i] = weight[i] * (out[i] * factor) + bias[i];
}

static void norm_task(void *context, size_t task, size_t worker) {
  (void)worker;
  const token_job *job = context;
  const clb_scratch *s = &job->engine->scratch;
  const size_t h = job->engine->graph.hidden;
  const float *x = s->x + (job->first + task) * h;
  float *to = s->normed.x + (job->to + task) * h;
  if (!job->norm) {
    memcpy(to, x, h * sizeof *x);
  } else if (job->norm_bias) {
    layer_norm(job->engine, x, job->norm, job->norm_bias, to, h);
  } else {
    clb_rms_norm(job->engine, x, job->norm, job->engine->graph.norm_eps, to, h);
  }
}

// scratch.normed[to .. to + n_tokens) from scratch.x[first .. first + n_tokens); a copy without a weight
static void norm(clb_engine *e, const float *weight, const float *bias, size_t first, size_t n_tokens, size_t to) {
  token_job job = {.engine = e, .norm = weight, .norm_bias = bias, .first = first, .to = to};
  clb_pool_run(e->pool, norm_task, &job, n_tokens);
}

void clb_ffn_norm(clb_engine *e, size_t layer, size_t n_tokens) {
  norm(e, e->layers[layer].ffn_norm, e->layers[layer].ffn_norm_bias, 0, n_tokens, 0);
}

// The angles are products in f32, as transformers has them; their cosine is as good as double makes it.
static void fill_rope(const clb_engine *e, const clb_rope *rope, float *cosines, float *sines, size_t n_tokens) {
  const size_t half = e->graph.rope_dim / 2;
  const float factor = (float)rope->factor;
  for (size_t t = 0; t < n_tokens; t++) {
    for (size_t i = 0; i < half; i++) {
      const double angle = (double)((float)e->scratch.position[t] * (float)rope->inv_freq[i]);
      cosines[t * half + i] = (float)cos(angle) * factor;
      sines[t * half + i] = (float)sin(angle) * factor;
    }
  }
}

// Floats of scratch.cos, and of sin, that belong to one rope.
static size_t rope_stride(const clb_engine *e) {
  return e->batch_size * (e->graph.rope_dim / 2);
}

static void fill_ropes(clb_engine *e, size_t n_tokens) {
  for (size_t i = 0; i < e->graph.n_ropes; i++) {
    const size_t at = i * rope_stride(e);
    fill_rope(e, &e->graph.ropes[i], e->scratch.cos + at, e->scratch.sin + at, n_tokens);
  }
}

void clb_rotate(const clb_engine *e, size_t layer, float *head, size_t token) {
  const size_t half = e->graph.rope_dim / 2, at = e->graph.layers[layer].rope_set * rope_stride(e) + token * half;
  const float *cosines = e->scratch.cos + at, *sines = e->scratch.sin + at;
  const bool adjacent = e->graph.rope_pairing == CLB_ROPE_ADJACENT;
  const size_t step = adjacent ? 2 : 1, partner = adjacent ? 1 : half;
  for (size_t i = 0; i < half; i++) {
    const float a = head[i * step], b = head[i * step + partner];
    head[i * step] = a * cosines[i] - b * sines[i];
    head[i * step + partner] = b * cosines[i] + a * sines[i];
  }
}

static void norm_heads(const clb_engine *e, float *heads, const float *weight, size_t n_heads) {
  const size_t d = e->graph.head_dim;
  const double eps = e->graph.norm_eps;
  if (e->graph.qk_norm == CLB_QK_NORM_FULL) clb_rms_norm(e, heads, weight, eps, heads, n_heads * d);
  if (e->graph.qk_norm != CLB_QK_NORM_HEAD && e->graph.qk_norm != CLB_QK_NORM_L2) return;
  for (size_t h = 0; h < n_heads; h++) clb_rms_norm(e, heads + h * d, weight, eps, heads + h * d, d);
}

static void norm_qk(const clb_engine *e, const clb_layer *layer, float *q, float *k) {
  norm_heads(e, q, layer->q_norm, e->graph.n_heads);
  norm_heads(e, k, layer->k_norm, e->graph.n_kv_heads);
}

static void clip(const clb_engine *e, float *x, size_t n) {
  const float limit = (float)e->graph.clip_qkv;
  if (limit == 0) return;
  for (size_t i = 0; i < n; i++) {
    if (x[i] > limit) x[i] = limit;
    if (x[i] < -limit) x[i] = -limit;
  }
}

static void rotate_heads(const clb_engine *e, size_t layer, float *heads, size_t n_heads, size_t token) {
  for (size_t h = 0; h < n_heads; h++) clb_rotate(e, layer, heads + h * e->graph.head_dim, token);
}

// Queries of layers without rope grow with the logarithm of their position.
static void temper(const clb_engine *e, float *q, size_t position) {
  const clb_graph *g = &e->graph;
  if (g->temperature_scale == 0) return;
  const float steps = floorf((float)(position + 1) / (float)g->temperature_floor);
  scale(q, (float)log1p((double)steps) * (float)g->temperature_scale + 1, g->n_heads * g->head_dim);
}

// What happens to q, k and v of one token between their projection and attention; k and v go into the KV.
static void heads_task(void *context, size_t task, size_t worker) {
  (void)worker;
  const token_job *job = context;
  clb_engine *e = job->engine;
  const clb_graph *g = &e->graph;
  const clb_layer *layer = &e->layers[job->layer];
  const size_t d = g->head_dim, dv = g->value_dim, n_q = g->n_heads * d, n_k = g->n_kv_heads * d,
               n_v = g->n_kv_heads * dv;
  float *q = e->scratch.q + task * n_q, *k = e->scratch.k + task * n_k, *v = e->scratch.v + task * n_v;
  const bool rope = g->layers[job->layer].rope, normed = rope || g->qk_norm != CLB_QK_NORM_L2;
  if (normed && !g->qk_norm_after_rope) norm_qk(e, layer, q, k);
  clip(e, q, n_q);
  clip(e, k, n_k);
  clip(e, v, n_v);
  if (rope) {
    rotate_heads(e, job->layer, q, g->n_heads, task);
    rotate_heads(e, job->layer, k, g->n_kv_heads, task);
  } else {
    temper(e, q, e->scratch.position[task]);
  }
  if (normed && g->qk_norm_after_rope) norm_qk(e, layer, q, k);
  for (size_t h = 0; h < g->n_kv_heads; h++) {
    const size_t row = clb_kv_row(e, job->layer, e->scratch.sequence[task], h, e->scratch.position[task]);
    clb_kv_write_key(e, row, k + h * d);
    clb_kv_write_value(e, row, v + h * dv);
  }
}

// attended *= sigmoid(gate), for one token
static void gate_task(void *context, size_t task, size_t worker) {
  (void)worker;
  const token_job *job = context;
  const size_t n = job->engine->graph.n_heads * job->engine->graph.value_dim;
  float *out = job->engine->scratch.attended.x + task * n;
  const float *gate = job->engine->scratch.attn_gate + task * n;
  for (size_t i = 0; i < n; i++) out[i] *= (float)(1 / (1 + exp(-(double)gate[i])));
}

// projected = norm(projected), for one token
static void post_norm_task(void *context, size_t task, size_t worker) {
  (void)worker;
  const token_job *job = context;
  const size_t h = job->engine->graph.hidden;
  float *x = job->engine->scratch.projected + task * h;
  clb_rms_norm(job->engine, x, job->norm, job->engine->graph.norm_eps, x, h);
}

// ---------------------------------------------------------------------------------------------------------------------
// Layers

// scratch.attended from scratch.normed
static void gqa(clb_engine *e, size_t i, const clb_batch *batch) {
  const clb_graph *g = &e->graph;
  const clb_layer *l = &e->layers[i];
  const clb_scratch *s = &e->scratch;
  const size_t n = batch->n_tokens, n_q = g->n_heads * g->head_dim, n_k = g->n_kv_heads * g->head_dim,
               n_v = g->n_kv_heads * g->value_dim, n_out = g->n_heads * g->value_dim;
  const clb_linear linears[] = {
      {.w = &l->q, .bias = l->q_bias, .x = s->normed, .y = s->q, .ldy = n_q, .n_tokens = n},
      {.w = &l->k, .bias = l->k_bias, .x = s->normed, .y = s->k, .ldy = n_k, .n_tokens = n},
      {.w = &l->v, .bias = l->v_bias, .x = s->normed, .y = s->v, .ldy = n_v, .n_tokens = n},
      {.w = &l->attn_gate, .x = s->normed, .y = s->attn_gate, .ldy = n_out, .n_tokens = n},
  };
  token_job job = {.engine = e, .layer = i};
  clb_linear_run(e, linears, g->attention_gate ? 4 : 3);
  clb_pool_run(e->pool, heads_task, &job, n);
  clb_attention(e, i, batch, s->q, s->attended.x);
  if (g->attention_gate) clb_pool_run(e->pool, gate_task, &job, n);
}

static void attention_block(clb_engine *e, size_t i, const clb_batch *batch) {
  const clb_graph *g = &e->graph;
  const clb_layer *l = &e->layers[i];
  const clb_scratch *s = &e->scratch;
  const size_t n = batch->n_tokens;
  norm(e, l->attn_norm, l->attn_norm_bias, 0, n, 0);
  clb_quantize(e, s->normed, n, g->hidden, e->kinds[i].attention);
  if (g->attention == CLB_ATTENTION_MLA) {
    clb_mla(e, i, batch);
  } else {
    gqa(e, i, batch);
  }
  clb_quantize(e, s->attended, n, l->o.cols, e->kinds[i].attended);
  const clb_linear o = {
      .w = &l->o, .bias = l->o_bias, .x = s->attended, .y = s->projected, .ldy = g->hidden, .n_tokens = n};
  clb_linear_run(e, &o, 1);
  if (l->attn_post_norm) {
    clb_pool_run(e->pool, post_norm_task, &(token_job){.engine = e, .norm = l->attn_post_norm}, n);
  }
  clb_axpy_f32(e->kernels, s->x, s->projected, (float)g->residual_scale, n * g->hidden);
}

// The logits of a span, divided, checked and capped: a capped infinity would be a finite number.
static colibri_status finish_logits(const clb_engine *e, const clb_span *span) {
  const size_t vocab = e->graph.vocab, first = span->position + span->n_tokens - span->n_logits;
  const float cap = (float)e->graph.logit_softcap;
  for (size_t i = 0; i < span->n_logits * vocab; i++) {
    span->logits[i] /= (float)e->graph.logit_divisor;
    if (isfinite(span->logits[i])) continue;
    return clb_fail(e->error, COLIBRI_ERROR_NUMERIC,
                    "position %zu: the logit of token %zu is not finite; 'colibri verify' finds NaN in weights",
                    first + i / vocab, i % vocab);
  }
  if (cap > 0) clb_softcap_f32(e->kernels, span->logits, span->logits, cap, span->n_logits * vocab);
  return COLIBRI_OK;
}

typedef struct {
  colibri_metrics times;
  clb_store_metrics store;
} layer_start;

static layer_start start_layer(const clb_engine *e) {
  layer_start start = {.times = e->metrics};
  clb_store_get_metrics(e->store, &start.store);
  return start;
}

// Adds what happened since to the layer's counters.
static void end_layer(const clb_engine *e, size_t layer, const layer_start *start) {
  colibri_layer_metrics *m = &e->layer_metrics[layer];
  clb_store_metrics store;
  clb_store_get_metrics(e->store, &store);
  const uint64_t hits = store.hits - start->store.hits;
  m->attention_seconds += e->metrics.attention_seconds - start->times.attention_seconds;
  m->router_seconds += e->metrics.router_seconds - start->times.router_seconds;
  m->experts_seconds += e->metrics.experts_seconds - start->times.experts_seconds;
  m->io_wait_seconds += e->metrics.io_wait_seconds - start->times.io_wait_seconds;
  m->expert_hits += hits;
  m->expert_requests += hits + store.misses - start->store.misses;
  m->reads += store.reads - start->store.reads;
  m->bytes_read += store.bytes_read - start->store.bytes_read;
}

// Logits of spans that lie one after the other in memory are one product: the head is read once for all of them.
static void multiply_head(clb_engine *e, const clb_batch *batch) {
  const size_t vocab = e->graph.vocab;
  size_t row = 0;
  for (size_t i = 0; i < batch->n_spans;) {
    clb_linear l = {.w = &e->output, .x = clb_rows_from(e->scratch.normed, row), .y = batch->spans[i].logits};
    l.ldy = vocab;
    l.bias = e->output_bias;
    for (; i < batch->n_spans; i++) {
      const clb_span *span = &batch->spans[i];
      if (l.n_tokens == 0) l.y = span->logits;
      if (span->n_logits > 0 && span->logits != l.y + l.n_tokens * vocab) break;
      l.n_tokens += span->n_logits;
    }
    if (l.n_tokens > 0) clb_linear_run(e, &l, 1);
    row += l.n_tokens;
  }
}

static colibri_status head(clb_engine *e, const clb_batch *batch) {
  size_t end = 0, n_rows = 0;
  for (size_t i = 0; i < batch->n_spans; i++) {
    const clb_span *span = &batch->spans[i];
    end += span->n_tokens;
    norm(e, e->output_norm, e->output_norm_bias, end - span->n_logits, span->n_logits, n_rows);
    n_rows += span->n_logits;
  }
  clb_quantize(e, e->scratch.normed, n_rows, e->graph.hidden, clb_kinds_of(e, e->output.type));
  multiply_head(e, batch);
  for (size_t i = 0; i < batch->n_spans; i++) CLB_TRY(finish_logits(e, &batch->spans[i]));
  return COLIBRI_OK;
}

static colibri_status layer(clb_engine *e, size_t i, const clb_batch *batch) {
  const double start = clb_seconds();
  const layer_start before = start_layer(e);
  attention_block(e, i, batch);
  clb_ffn_norm(e, i, batch->n_tokens);
  clb_quantize(e, e->scratch.normed, batch->n_tokens, e->graph.hidden, e->kinds[i].feed_forward);
  e->metrics.attention_seconds += clb_seconds() - start;
  if (e->graph.layers[i].moe) {
    CLB_TRY(clb_moe(e, i, batch->n_tokens));
  } else {
    clb_dense(e, i, batch->n_tokens);
  }
  end_layer(e, i, &before);
  return COLIBRI_OK;
}

static colibri_status forward(clb_engine *e, const clb_batch *batch) {
  const double start = clb_seconds();
  CLB_TRY(begin(e, batch));
  fill_ropes(e, batch->n_tokens);
  e->metrics.head_seconds += clb_seconds() - start;
  for (size_t i = 0; i < e->graph.n_layers; i++) {
    if (atomic_load(&e->cancelled)) return cancelled(e);
    CLB_TRY(layer(e, i, batch));
  }
  if (atomic_load(&e->cancelled)) return cancelled(e);
  const double before = clb_seconds();
  CLB_TRY(head(e, batch));
  e->metrics.head_seconds += clb_seconds() - before;
  return COLIBRI_OK;
}

colibri_status clb_forward(clb_engine *e, const clb_batch *batch) {
  const double start = clb_seconds();
  const colibri_status status = forward(e, batch);
  e->metrics.seconds += clb_seconds() - start;
  if (status != COLIBRI_OK) return status;
  e->metrics.tokens += batch->n_tokens;
  e->metrics.evals++;
  return COLIBRI_OK;
}
