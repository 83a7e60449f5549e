// One batch of tokens through all layers.
#include <errno.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "engine.h"

typedef struct {
  clb_engine *engine;
  size_t layer, position;
  const float *norm;
  size_t first;  // token that task 0 is about
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

static colibri_status embed(clb_engine *e, const uint32_t *tokens, size_t n_tokens) {
  for (size_t t = 0; t < n_tokens; t++) {
    const uint8_t *row = e->scratch.row;
    if (e->embedding_on_demand) {
      const colibri_status status = read_embedding_row(e, tokens[t]);
      if (status != COLIBRI_OK) return status;
    } else {
      row = e->token_embd.data + tokens[t] * e->token_embd.row_bytes;
    }
    clb_dequantize_with(e->kernels, e->token_embd.type, row, e->scratch.x + t * e->graph.hidden, e->graph.hidden);
  }
  return COLIBRI_OK;
}

// ---------------------------------------------------------------------------------------------------------------------
// Norms and rope

static void rms_norm(const clb_engine *e, const float *x, const float *weight, float *out, size_t n) {
  const float mean = clb_dot_f32(e->kernels, x, x, n) / (float)n;
  const float scale = (float)(1 / sqrt((double)(mean + (float)e->graph.norm_eps)));
  for (size_t i = 0; i < n; i++) out[i] = weight[i] * (x[i] * scale);
}

static void norm_task(void *context, size_t task, size_t worker) {
  (void)worker;
  const token_job *job = context;
  const clb_scratch *s = &job->engine->scratch;
  const size_t h = job->engine->graph.hidden;
  rms_norm(job->engine, s->x + (job->first + task) * h, job->norm, s->normed + task * h, h);
}

// scratch.normed[0 .. n_tokens) from scratch.x[first .. first + n_tokens)
static void norm(clb_engine *e, const float *weight, size_t first, size_t n_tokens) {
  clb_pool_run(e->pool, norm_task, &(token_job){.engine = e, .norm = weight, .first = first}, n_tokens);
}

// The angles are products in f32, as transformers has them; their cosine is as good as double makes it.
static void fill_rope(clb_engine *e, size_t n_tokens, size_t position) {
  const size_t half = e->graph.rope_dim / 2;
  const float factor = (float)e->graph.rope_factor;
  for (size_t t = 0; t < n_tokens; t++) {
    for (size_t i = 0; i < half; i++) {
      const double angle = (double)((float)(position + t) * (float)e->graph.rope_inv_freq[i]);
      e->scratch.cos[t * half + i] = (float)cos(angle) * factor;
      e->scratch.sin[t * half + i] = (float)sin(angle) * factor;
    }
  }
}

static void rotate(const clb_engine *e, float *head, size_t token) {
  const size_t half = e->graph.rope_dim / 2;
  const float *cosines = e->scratch.cos + token * half, *sines = e->scratch.sin + token * half;
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
  if (e->graph.qk_norm == CLB_QK_NORM_FULL) rms_norm(e, heads, weight, heads, n_heads * d);
  if (e->graph.qk_norm != CLB_QK_NORM_HEAD) return;
  for (size_t h = 0; h < n_heads; h++) rms_norm(e, heads + h * d, weight, heads + h * d, d);
}

static void clip(const clb_engine *e, float *x, size_t n) {
  const float limit = (float)e->graph.clip_qkv;
  if (limit == 0) return;
  for (size_t i = 0; i < n; i++) {
    if (x[i] > limit) x[i] = limit;
    if (x[i] < -limit) x[i] = -limit;
  }
}

// What happens to q, k and v of one token between their projection and attention; k and v go into the KV.
static void heads_task(void *context, size_t task, size_t worker) {
  (void)worker;
  const token_job *job = context;
  clb_engine *e = job->engine;
  const clb_graph *g = &e->graph;
  const clb_layer *layer = &e->layers[job->layer];
  const size_t d = g->head_dim, n_q = g->n_heads * d, n_kv = g->n_kv_heads * d;
  float *q = e->scratch.q + task * n_q, *k = e->scratch.k + task * n_kv, *v = e->scratch.v + task * n_kv;
  norm_heads(e, q, layer->q_norm, g->n_heads);
  norm_heads(e, k, layer->k_norm, g->n_kv_heads);
  clip(e, q, n_q);
  clip(e, k, n_kv);
  clip(e, v, n_kv);
  for (size_t h = 0; h < g->n_heads; h++) rotate(e, q + h * d, task);
  for (size_t h = 0; h < g->n_kv_heads; h++) {
    rotate(e, k + h * d, task);
    const size_t at = ((job->layer * g->n_kv_heads + h) * e->ctx + job->position + task) * d;
    memcpy(e->keys + at, k + h * d, d * sizeof(float));
    memcpy(e->values + at, v + h * d, d * sizeof(float));
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Layers

static void attention_block(clb_engine *e, size_t i, size_t n_tokens, size_t position) {
  const clb_graph *g = &e->graph;
  const clb_layer *l = &e->layers[i];
  const clb_scratch *s = &e->scratch;
  const size_t n_q = g->n_heads * g->head_dim, n_kv = g->n_kv_heads * g->head_dim;
  norm(e, l->attn_norm, 0, n_tokens);
  const clb_linear qkv[] = {
      {.w = &l->q, .bias = l->q_bias, .x = s->normed, .ldx = g->hidden, .y = s->q, .ldy = n_q, .n_tokens = n_tokens},
      {.w = &l->k, .bias = l->k_bias, .x = s->normed, .ldx = g->hidden, .y = s->k, .ldy = n_kv, .n_tokens = n_tokens},
      {.w = &l->v, .bias = l->v_bias, .x = s->normed, .ldx = g->hidden, .y = s->v, .ldy = n_kv, .n_tokens = n_tokens},
  };
  clb_linear_run(e, qkv, 3);
  clb_pool_run(e->pool, heads_task, &(token_job){.engine = e, .layer = i, .position = position}, n_tokens);
  clb_attention(e, i, n_tokens, position);
  clb_linear_run(e,
                 &(clb_linear){.w = &l->o,
                               .bias = l->o_bias,
                               .x = s->attended,
                               .ldx = n_q,
                               .y = s->projected,
                               .ldy = g->hidden,
                               .n_tokens = n_tokens},
                 1);
  clb_axpy_f32(e->kernels, s->x, s->projected, 1, n_tokens * g->hidden);
}

static colibri_status head(clb_engine *e, size_t n_tokens, size_t position, float *logits, size_t n_logits) {
  const size_t h = e->graph.hidden, vocab = e->graph.vocab, first = n_tokens - n_logits;
  if (n_logits == 0) return COLIBRI_OK;
  norm(e, e->output_norm, first, n_logits);
  clb_linear_run(
      e,
      &(clb_linear){.w = &e->output, .x = e->scratch.normed, .ldx = h, .y = logits, .ldy = vocab, .n_tokens = n_logits},
      1);
  for (size_t i = 0; i < n_logits * vocab; i++) {
    if (isfinite(logits[i])) continue;
    return clb_fail(e->error, COLIBRI_ERROR_NUMERIC,
                    "position %zu: the logit of token %zu is not finite; 'colibri verify' finds NaN in weights",
                    position + first + i / vocab, i % vocab);
  }
  return COLIBRI_OK;
}

colibri_status clb_forward(clb_engine *e, const uint32_t *tokens, size_t n_tokens, size_t position, float *logits,
                           size_t n_logits) {
  const double start = clb_seconds();
  colibri_status status = embed(e, tokens, n_tokens);
  if (status != COLIBRI_OK) return status;
  fill_rope(e, n_tokens, position);
  double time = clb_seconds();
  e->metrics.head_seconds += time - start;
  for (size_t i = 0; i < e->graph.n_layers; i++) {
    if (atomic_load(&e->cancelled)) return cancelled(e);
    attention_block(e, i, n_tokens, position);
    norm(e, e->layers[i].ffn_norm, 0, n_tokens);
    e->metrics.attention_seconds += clb_seconds() - time;
    if (e->graph.layers[i].moe) {
      status = clb_moe(e, i, n_tokens, position);
      if (status != COLIBRI_OK) return status;
    } else {
      clb_dense(e, i, n_tokens);
    }
    time = clb_seconds();
  }
  if (atomic_load(&e->cancelled)) return cancelled(e);
  status = head(e, n_tokens, position, logits, n_logits);
  e->metrics.head_seconds += clb_seconds() - time;
  e->metrics.seconds += clb_seconds() - start;
  e->metrics.tokens += n_tokens;
  e->metrics.evals++;
  return status;
}
