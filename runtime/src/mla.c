// Latent attention: keys and values of all heads are linear in one short row per position, the latent.
//
// The KV holds, per position, the normed latent c [kv_lora] and one rotated key part r [rope_dim] that all heads share.
// With head h's key matrix K [nope, kv_lora] and value matrix V [value_dim, kv_lora], a score is
//   q_nope . (K c) + q_rope . r  =  (K^T q_nope) . c + q_rope . r
// so the query is taken into the space of latents once ("absorbed") and attention runs over the rows of the KV as if
// they belonged to one key head; the mixed latents of a head are multiplied by V at the end. One token and a batch take
// the same steps with sums in the same order, so a prompt's split into batches does not show.
#include <string.h>

#include "engine.h"

typedef struct {
  clb_engine *engine;
  size_t layer, n_tokens;
} mla_job;

// Norms the latents of one token, rotates its key part, and puts both into the KV.
static void latent_task(void *context, size_t task, size_t worker) {
  (void)worker;
  const mla_job *job = context;
  const clb_engine *e = job->engine;
  const clb_graph *g = &e->graph;
  const clb_layer *l = &e->layers[job->layer];
  if (g->q_lora > 0) {
    float *q = e->scratch.q_latent.x + task * g->q_lora;
    clb_rms_norm(e, q, l->q_a_norm, g->latent_norm_eps, q, g->q_lora);
  }
  float *kv = e->scratch.kv_latent + task * g->kv_key_dim;
  clb_rms_norm(e, kv, l->kv_a_norm, g->latent_norm_eps, kv, g->kv_lora);
  if (g->layers[job->layer].rope) clb_rotate(e, job->layer, kv + g->kv_lora, task);
  clb_kv_write_key(e, clb_kv_row(e, job->layer, e->scratch.sequence[task], 0, e->scratch.position[task]), kv);
}

// out += K^T q for all tokens, row by row of K as it is stored. Rows of the tokens are ldq and ldo floats apart.
static void absorb_rows(const clb_engine *e, const clb_matrix *kv_b, size_t first_row, size_t n_rows, const float *q,
                        size_t ldq, size_t n_tokens, float *row, float *out, size_t ldo) {
  for (size_t i = 0; i < n_rows; i++) {
    clb_dequantize_with(e->kernels, kv_b->type, kv_b->data + (first_row + i) * kv_b->row_bytes, row, kv_b->cols);
    for (size_t t = 0; t < n_tokens; t++) clb_axpy_f32(e->kernels, out + t * ldo, row, q[t * ldq + i], kv_b->cols);
  }
}

// The queries of one head, as rows of the KV.
static void absorb_task(void *context, size_t head, size_t worker) {
  const mla_job *job = context;
  const clb_engine *e = job->engine;
  const clb_graph *g = &e->graph;
  const clb_layer *l = &e->layers[job->layer];
  const size_t nope = g->head_dim - g->rope_dim, ldq = g->n_heads * g->head_dim, ldo = g->n_heads * g->kv_key_dim;
  const float *q = e->scratch.q + head * g->head_dim;
  float *out = e->scratch.absorbed + head * g->kv_key_dim;
  for (size_t t = 0; t < job->n_tokens; t++) {
    float *row = out + t * ldo;
    memset(row, 0, g->kv_lora * sizeof *row);
    memcpy(row + g->kv_lora, q + t * ldq + nope, g->rope_dim * sizeof *row);
    if (g->layers[job->layer].rope) clb_rotate(e, job->layer, row + g->kv_lora, t);
  }
  if (l->k_b.data) {  // already transposed
    clb_matmul_rows(e->kernels, l->k_b.type, l->k_b.data + head * g->kv_lora * l->k_b.row_bytes, l->k_b.row_bytes, nope,
                    0, g->kv_lora, q, ldq, job->n_tokens, out, ldo);
  } else {
    absorb_rows(e, &l->kv_b, head * (nope + g->value_dim), nope, q, ldq, job->n_tokens,
                e->scratch.latent_row + worker * g->kv_lora, out, ldo);
  }
}

// The values of one head from its mixed latents.
static void value_task(void *context, size_t head, size_t worker) {
  (void)worker;
  const mla_job *job = context;
  const clb_engine *e = job->engine;
  const clb_graph *g = &e->graph;
  const clb_layer *l = &e->layers[job->layer];
  const size_t nope = g->head_dim - g->rope_dim, d = g->value_dim;
  const clb_matrix *w = l->v_b.data ? &l->v_b : &l->kv_b;
  const size_t first = l->v_b.data ? head * d : head * (nope + d) + nope;
  clb_matmul_rows(e->kernels, w->type, w->data + first * w->row_bytes, w->row_bytes, g->kv_lora, 0, d,
                  e->scratch.mixed + head * g->kv_lora, g->n_heads * g->kv_lora, job->n_tokens,
                  e->scratch.attended.x + head * d, g->n_heads * d);
}

void clb_mla(clb_engine *e, size_t layer, const clb_batch *batch) {
  const clb_graph *g = &e->graph;
  const clb_layer *l = &e->layers[layer];
  const clb_scratch *s = &e->scratch;
  const size_t n = batch->n_tokens, n_q = g->n_heads * g->head_dim;
  const bool low_rank = g->q_lora > 0;
  const clb_linear from_hidden[] = {
      {.w = &l->kv_a, .bias = l->kv_a_bias, .x = s->normed, .y = s->kv_latent, .ldy = g->kv_key_dim, .n_tokens = n},
      {.w = low_rank ? &l->q_a : &l->q,
       .bias = l->q_a_bias,
       .x = s->normed,
       .y = low_rank ? s->q_latent.x : s->q,
       .ldy = low_rank ? g->q_lora : n_q,
       .n_tokens = n},
  };
  const clb_linear from_latent = {.w = &l->q, .x = s->q_latent, .y = s->q, .ldy = n_q, .n_tokens = n};
  mla_job job = {.engine = e, .layer = layer, .n_tokens = n};
  clb_linear_run(e, from_hidden, 2);
  clb_pool_run(e->pool, latent_task, &job, n);
  if (low_rank) {
    clb_quantize(e, s->q_latent, n, g->q_lora, e->kinds[layer].q_latent);
    clb_linear_run(e, &from_latent, 1);
  }
  clb_pool_run(e->pool, absorb_task, &job, g->n_heads);
  clb_attention(e, layer, batch, s->absorbed, s->mixed);
  clb_pool_run(e->pool, value_task, &job, g->n_heads);
}
