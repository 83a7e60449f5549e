// Attention over the KV, in chunks of context positions.
//
// A chunk starts at a multiple of CLB_ATTENTION_CHUNK and gives, for one head, its largest score m, its sum of
// exp(score - m) and the sum of values weighted so. The chunks of a position are combined in ascending order. As this
// depends on the position alone, results do not depend on batches or threads.
#include <math.h>
#include <string.h>

#include "engine.h"

// Below this, sharing one token's attention out costs more than computing it.
enum { MIN_SHARED_PRODUCTS = 1 << 17 };

typedef struct {
  clb_engine *engine;
  const float *keys, *values;  // of the layer, [n_kv_heads, ctx, head_dim]
  size_t window, n_tokens, position;
  size_t group, head_dim;  // query heads that share a key head
  size_t units_per_task;
} attention_job;

// A head's sum over some chunks lies in memory as output[head_dim], then maximum, then sum.
static size_t stride(const attention_job *job) {
  return job->head_dim + 2;
}

// First visible position; sliding windows see `window` positions, their own included.
static size_t first_visible(const attention_job *job, size_t position) {
  return job->window > 0 && position >= job->window ? position - job->window + 1 : 0;
}

// The heads of one key head over one chunk, for one position. q [group, head_dim], out [group, head_dim + 2].
static void attend_chunk(const attention_job *job, size_t kv_head, size_t chunk, size_t position, const float *q,
                         float *scores, float *out) {
  const clb_engine *e = job->engine;
  const size_t d = job->head_dim;
  size_t begin = chunk * CLB_ATTENTION_CHUNK, end = begin + CLB_ATTENTION_CHUNK;
  if (begin < first_visible(job, position)) begin = first_visible(job, position);
  if (end > position + 1) end = position + 1;
  const size_t n = end - begin;
  const float *keys = job->keys + (kv_head * e->ctx + begin) * d;
  const float *values = job->values + (kv_head * e->ctx + begin) * d;
  clb_matmul_rows(e->kernels, CLB_F32, keys, d * sizeof(float), d, 0, n, q, d, job->group, scores, CLB_ATTENTION_CHUNK);
  const float scale = (float)e->graph.attention_scale;
  for (size_t h = 0; h < job->group; h++) {
    float *s = scores + h * CLB_ATTENTION_CHUNK, *o = out + h * stride(job);
    float max = -INFINITY;
    for (size_t i = 0; i < n; i++) {
      s[i] *= scale;
      if (s[i] > max) max = s[i];
    }
    clb_exp_f32(e->kernels, s, s, max, n);
    memset(o, 0, d * sizeof *o);
    for (size_t i = 0; i < n; i++) clb_axpy_f32(e->kernels, o, values + i * d, s[i], d);
    o[d] = max;
    o[d + 1] = clb_sum_f32(e->kernels, s, n);
  }
}

// total += part, for one head
static void combine(float *total, const float *part, size_t d) {
  const float max = total[d] > part[d] ? total[d] : part[d];
  const float a = (float)exp((double)total[d] - (double)max), b = (float)exp((double)part[d] - (double)max);
  for (size_t i = 0; i < d; i++) total[i] = total[i] * a + part[i] * b;
  total[d] = max;
  total[d + 1] = total[d + 1] * a + part[d + 1] * b;
}

static void finish(float *attended, const float *total, size_t d) {
  for (size_t i = 0; i < d; i++) attended[i] = total[i] / total[d + 1];
}

// All chunks of one (token, key head), in scratch of the thread.
static void attend_unit(const attention_job *job, size_t unit, size_t worker) {
  const clb_engine *e = job->engine;
  const size_t d = job->head_dim, heads = job->group;
  const size_t kv_head = unit / job->n_tokens, token = unit % job->n_tokens, position = job->position + token;
  const size_t offset = (token * e->graph.n_heads + kv_head * heads) * d;
  float *scores = e->scratch.scores + worker * heads * CLB_ATTENTION_CHUNK;
  // Two accumulators of a group of heads; there are at least two groups' room per thread (see load.c).
  float *total = e->scratch.partial + worker * 2 * heads * stride(job), *part = total + heads * stride(job);
  const size_t first = first_visible(job, position) / CLB_ATTENTION_CHUNK, last = position / CLB_ATTENTION_CHUNK;
  attend_chunk(job, kv_head, first, position, e->scratch.q + offset, scores, total);
  for (size_t chunk = first + 1; chunk <= last; chunk++) {
    attend_chunk(job, kv_head, chunk, position, e->scratch.q + offset, scores, part);
    for (size_t h = 0; h < heads; h++) combine(total + h * stride(job), part + h * stride(job), d);
  }
  for (size_t h = 0; h < heads; h++) finish(e->scratch.attended + offset + h * d, total + h * stride(job), d);
}

static void units_task(void *context, size_t task, size_t worker) {
  const attention_job *job = context;
  size_t end = (task + 1) * job->units_per_task, n_units = job->n_tokens * job->engine->graph.n_kv_heads;
  for (size_t unit = task * job->units_per_task; unit < end && unit < n_units; unit++) attend_unit(job, unit, worker);
}

// One token with several chunks: a task is a (chunk, key head), the results are combined afterwards.
static void chunk_task(void *context, size_t task, size_t worker) {
  const attention_job *job = context;
  const clb_engine *e = job->engine;
  const size_t n_kv = e->graph.n_kv_heads, kv_head = task % n_kv, index = task / n_kv;
  const size_t chunk = first_visible(job, job->position) / CLB_ATTENTION_CHUNK + index;
  attend_chunk(job, kv_head, chunk, job->position, e->scratch.q + kv_head * job->group * job->head_dim,
               e->scratch.scores + worker * job->group * CLB_ATTENTION_CHUNK,
               e->scratch.partial + (index * e->graph.n_heads + kv_head * job->group) * stride(job));
}

static void attend_one_token(attention_job *job) {
  clb_engine *e = job->engine;
  const size_t n_chunks =
      job->position / CLB_ATTENTION_CHUNK - first_visible(job, job->position) / CLB_ATTENTION_CHUNK + 1;
  const size_t n_tasks = n_chunks * e->graph.n_kv_heads;
  if (n_chunks * CLB_ATTENTION_CHUNK * e->graph.n_heads * job->head_dim < MIN_SHARED_PRODUCTS) {
    for (size_t task = 0; task < n_tasks; task++) chunk_task(job, task, 0);
  } else {
    clb_pool_run(e->pool, chunk_task, job, n_tasks);
  }
  for (size_t h = 0; h < e->graph.n_heads; h++) {
    float *total = e->scratch.partial + h * stride(job);
    for (size_t c = 1; c < n_chunks; c++) combine(total, total + c * e->graph.n_heads * stride(job), job->head_dim);
    finish(e->scratch.attended + h * job->head_dim, total, job->head_dim);
  }
}

void clb_attention(clb_engine *e, size_t layer, size_t n_tokens, size_t position) {
  const clb_graph *g = &e->graph;
  const size_t layer_floats = g->n_kv_heads * e->ctx * g->head_dim;
  attention_job job = {
      .engine = e,
      .keys = e->keys + layer * layer_floats,
      .values = e->values + layer * layer_floats,
      .window = g->layers[layer].window,
      .n_tokens = n_tokens,
      .position = position,
      .group = g->n_heads / g->n_kv_heads,
      .head_dim = g->head_dim,
  };
  const size_t n_units = n_tokens * g->n_kv_heads, max_tasks = 1 << 12;
  job.units_per_task = (n_units + max_tasks - 1) / max_tasks;
  if (n_tokens == 1) {
    attend_one_token(&job);
  } else {
    clb_pool_run(e->pool, units_task, &job, (n_units + job.units_per_task - 1) / job.units_per_task);
  }
}
