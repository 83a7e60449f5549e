// Attention over the KV, in chunks of context positions.
//
// A chunk starts at a multiple of CLB_ATTENTION_CHUNK and gives, for one head, its largest score m, its sum of
// exp(score - m) and the sum of values weighted so. The chunks of a position are combined in ascending order. As this
// depends on the position alone, results do not depend on batches or threads.
//
// A prompt is computed by tiles of consecutive positions, which share the reading of keys and the decoding of values.
#include <math.h>
#include <string.h>

#include "engine.h"

// Below this, sharing one token's attention out costs more than computing it.
enum { MIN_SHARED_PRODUCTS = 1 << 17, MAX_GROUP_HEADS = 16 };

typedef struct {
  clb_engine *engine;
  const clb_batch *batch;
  const float *sinks;  // [n_heads], or NULL
  const float *q;      // [B, n_heads, key_dim]
  float *out;          // [B, n_heads, value_dim]
  size_t layer, window, chunk;
  size_t group, n_groups;         // query heads that are computed together, which share a key head; all such groups
  size_t key_dim, value_dim;      // of the KV
  size_t key_bytes, value_bytes;  // of a row; values may be the beginnings of keys
} attention_job;

// Consecutive positions of a sequence and one group of heads.
typedef struct {
  const uint8_t *keys, *values;  // of the key head, from position 0
  size_t token, position, n;     // token: of the batch
  size_t group;
} tile;

typedef struct {
  size_t begin, end;
} range;

// A head's sum over some chunks lies in memory as output[value_dim], then maximum, then sum. A sum of 0 tells that no
// position was seen: otherwise the largest score adds 1.
static size_t stride(const attention_job *job) {
  return job->value_dim + 2;
}

// First visible position; sliding windows see `window` positions, their own included, chunks from their start on.
static size_t first_visible(const attention_job *job, size_t position) {
  if (job->chunk > 0) return position / job->chunk * job->chunk;
  return job->window > 0 && position >= job->window ? position - job->window + 1 : 0;
}

// What `position` sees of [begin, end).
static range visible(const attention_job *job, size_t position, range within) {
  const size_t first = first_visible(job, position), last = position + 1;
  if (within.begin < first) within.begin = first;
  if (within.end > last) within.end = last;
  if (within.end < within.begin) within.end = within.begin;
  return within;
}

static tile make_tile(const attention_job *job, size_t token, size_t n, size_t group) {
  const clb_engine *e = job->engine;
  const size_t kv_head = group * e->graph.kv_heads / job->n_groups;
  const size_t row = clb_kv_row(e, job->layer, e->scratch.sequence[token], kv_head, 0);
  const uint8_t *values = e->graph.kv_values_in_keys ? e->kv.keys : e->kv.values;
  return (tile){.keys = e->kv.keys + row * job->key_bytes,
                .values = values + row * job->value_bytes,
                .token = token,
                .position = e->scratch.position[token],
                .n = n,
                .group = group};
}

// ---------------------------------------------------------------------------------------------------------------------
// One chunk

// Values of [begin, end), [end - begin, value_dim].
static const float *values_of(const attention_job *job, const tile *t, range r, size_t worker) {
  const clb_engine *e = job->engine;
  const uint8_t *rows = t->values + r.begin * job->value_bytes;
  const size_t d = job->value_dim;
  float *to = e->scratch.values + worker * CLB_ATTENTION_CHUNK * d;
  if (e->graph.kv_values_in_keys) {
    for (size_t i = 0; i < r.end - r.begin; i++) {
      clb_dequantize_with(e->kernels, e->kv.type, rows + i * job->value_bytes, to + i * d, d);
    }
    return to;
  }
  if (e->kv.type == CLB_F32) return (const float *)(const void *)rows;
  clb_dequantize_with(e->kernels, e->kv.type, rows, to, (r.end - r.begin) * d);
  return to;
}

// Makes weights of scores[n], in place, and notes their maximum and sum behind the output.
static void weigh(const attention_job *job, float *s, size_t n, float *out) {
  const clb_engine *e = job->engine;
  const float scale = (float)e->graph.attention_scale, cap = (float)e->graph.attention_softcap;
  float max = -INFINITY;
  for (size_t i = 0; i < n; i++) s[i] *= scale;
  if (cap > 0) clb_softcap_f32(e->kernels, s, s, cap, n);
  for (size_t i = 0; i < n; i++) {
    if (s[i] > max) max = s[i];
  }
  clb_exp_f32(e->kernels, s, s, max, n);
  memset(out, 0, job->value_dim * sizeof *out);
  out[job->value_dim] = max;
  out[job->value_dim + 1] = n > 0 ? clb_sum_f32(e->kernels, s, n) : 0;
}

// Adds to each query's output the values it sees, in order of positions. What all queries see is done for all at once.
static void add_values(const attention_job *job, const tile *t, range chunk, const float *scores, const float *values,
                       float *out) {
  const clb_kernels *k = job->engine->kernels;
  const size_t d = job->value_dim, n_queries = t->n * job->group;
  range common = {visible(job, t->position + t->n - 1, chunk).begin, visible(job, t->position, chunk).end};
  if (common.begin > chunk.end) common.begin = chunk.end;
  if (common.end < common.begin) common.end = common.begin;
  for (size_t q = 0; q < n_queries; q++) {
    const range r = visible(job, t->position + q / job->group, chunk);
    for (size_t i = r.begin; i < r.end && i < common.begin; i++) {
      clb_axpy_f32(k, out + q * stride(job), values + (i - chunk.begin) * d,
                   scores[q * CLB_ATTENTION_CHUNK + i - chunk.begin], d);
    }
  }
  const size_t skipped = common.begin - chunk.begin;
  clb_mix_f32(k, out, stride(job), scores + skipped, CLB_ATTENTION_CHUNK, values + skipped * d,
              common.end - common.begin, n_queries, d);
  for (size_t q = 0; q < n_queries; q++) {
    const range r = visible(job, t->position + q / job->group, chunk);
    for (size_t i = r.begin > common.end ? r.begin : common.end; i < r.end; i++) {
      clb_axpy_f32(k, out + q * stride(job), values + (i - chunk.begin) * d,
                   scores[q * CLB_ATTENTION_CHUNK + i - chunk.begin], d);
    }
  }
}

// A tile over one chunk. q [n, group, key_dim], out [n, group, value_dim + 2].
static void attend_chunk(const attention_job *job, const tile *t, size_t chunk, const float *q, size_t worker,
                         float *out) {
  const clb_engine *e = job->engine;
  const size_t last = t->position + t->n - 1, n_queries = t->n * job->group;
  float *scores = e->scratch.scores + worker * CLB_ATTENTION_TILE * job->group * CLB_ATTENTION_CHUNK;
  range r = {chunk * CLB_ATTENTION_CHUNK, (chunk + 1) * CLB_ATTENTION_CHUNK};
  if (r.begin < first_visible(job, t->position)) r.begin = first_visible(job, t->position);
  if (r.end > last + 1) r.end = last + 1;
  clb_matmul_rows(e->kernels, e->kv.type, t->keys + r.begin * job->key_bytes, job->key_bytes, job->key_dim, 0,
                  r.end - r.begin, q, job->key_dim, n_queries, scores, CLB_ATTENTION_CHUNK);
  for (size_t i = 0; i < n_queries; i++) {
    const range seen = visible(job, t->position + i / job->group, r);
    weigh(job, scores + i * CLB_ATTENTION_CHUNK + (seen.begin - r.begin), seen.end - seen.begin, out + i * stride(job));
  }
  add_values(job, t, r, scores, values_of(job, t, r, worker), out);
}

// total += part, for one head
static void combine(float *total, const float *part, size_t d) {
  if (part[d + 1] == 0) return;
  if (total[d + 1] == 0) {
    memcpy(total, part, (d + 2) * sizeof *total);
    return;
  }
  const float max = total[d] > part[d] ? total[d] : part[d];
  const float a = (float)exp((double)total[d] - (double)max), b = (float)exp((double)part[d] - (double)max);
  for (size_t i = 0; i < d; i++) total[i] = total[i] * a + part[i] * b;
  total[d] = max;
  total[d + 1] = total[d + 1] * a + part[d + 1] * b;
}

// A sink is one more score without a value, after all others.
static void finish(const attention_job *job, size_t head, float *attended, const float *total) {
  const size_t d = job->value_dim;
  float scale = 1, sum = total[d + 1];
  if (job->sinks) {
    const float sink = job->sinks[head], max = sink > total[d] ? sink : total[d];
    scale = (float)exp((double)total[d] - (double)max);
    sum = sum * scale + (float)exp((double)sink - (double)max);
  }
  for (size_t i = 0; i < d; i++) attended[i] = total[i] * scale / sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// All chunks

// The first head of a token's group, among the heads of all tokens.
static size_t heads_at(const attention_job *job, size_t token, size_t group) {
  return token * job->engine->graph.n_heads + group * job->group;
}

// All chunks of a tile, in scratch of the thread.
static void attend_tile(const attention_job *job, const tile *t, size_t worker) {
  const clb_scratch *s = &job->engine->scratch;
  const size_t d = job->value_dim, key_dim = job->key_dim, heads = job->group, most = CLB_ATTENTION_TILE * heads;
  float *queries = s->queries + worker * most * key_dim;
  float *total = s->partial + worker * 2 * most * stride(job), *part = total + most * stride(job);
  for (size_t i = 0; i < t->n; i++) {
    const float *q = job->q + heads_at(job, t->token + i, t->group) * key_dim;
    memcpy(queries + i * heads * key_dim, q, heads * key_dim * sizeof *queries);
  }
  const size_t first = first_visible(job, t->position) / CLB_ATTENTION_CHUNK;
  const size_t last = (t->position + t->n - 1) / CLB_ATTENTION_CHUNK;
  attend_chunk(job, t, first, queries, worker, total);
  for (size_t chunk = first + 1; chunk <= last; chunk++) {
    attend_chunk(job, t, chunk, queries, worker, part);
    for (size_t h = 0; h < t->n * heads; h++) combine(total + h * stride(job), part + h * stride(job), d);
  }
  for (size_t h = 0; h < t->n * heads; h++) {
    float *to = job->out + (heads_at(job, t->token + h / heads, t->group) + h % heads) * d;
    finish(job, t->group * heads + h % heads, to, total + h * stride(job));
  }
}

static size_t tiles_of(const clb_span *span) {
  return (span->n_tokens + CLB_ATTENTION_TILE - 1) / CLB_ATTENTION_TILE;
}

// Tiles of all spans, times groups of heads. The last tiles of a long span take longest, so they come first.
static void tile_task(void *context, size_t task, size_t worker) {
  const attention_job *job = context;
  const clb_span *span = job->batch->spans;
  size_t index = task / job->n_groups, token = 0;
  for (; index >= tiles_of(span); span++) {
    index -= tiles_of(span);
    token += span->n_tokens;
  }
  const size_t first = (tiles_of(span) - 1 - index) * CLB_ATTENTION_TILE, left = span->n_tokens - first;
  const tile t =
      make_tile(job, token + first, left < CLB_ATTENTION_TILE ? left : CLB_ATTENTION_TILE, task % job->n_groups);
  attend_tile(job, &t, worker);
}

// One token with several chunks: a task is a (chunk, group of heads), the results are combined afterwards.
static void chunk_task(void *context, size_t task, size_t worker) {
  const attention_job *job = context;
  const clb_engine *e = job->engine;
  const size_t index = task / job->n_groups;
  const tile t = make_tile(job, 0, 1, task % job->n_groups);
  const size_t chunk = first_visible(job, t.position) / CLB_ATTENTION_CHUNK + index;
  attend_chunk(job, &t, chunk, job->q + heads_at(job, 0, t.group) * job->key_dim, worker,
               e->scratch.partial + (index * e->graph.n_heads + t.group * job->group) * stride(job));
}

static void attend_one_token(attention_job *job) {
  clb_engine *e = job->engine;
  const size_t position = e->scratch.position[0];
  const size_t n_chunks = position / CLB_ATTENTION_CHUNK - first_visible(job, position) / CLB_ATTENTION_CHUNK + 1;
  const size_t n_tasks = n_chunks * job->n_groups, n_seen = position + 1 - first_visible(job, position);
  if (n_seen * e->graph.n_heads * job->key_dim < MIN_SHARED_PRODUCTS) {
    for (size_t task = 0; task < n_tasks; task++) chunk_task(job, task, 0);
  } else {
    clb_pool_run(e->pool, chunk_task, job, n_tasks);
  }
  for (size_t h = 0; h < e->graph.n_heads; h++) {
    float *total = e->scratch.partial + h * stride(job);
    for (size_t c = 1; c < n_chunks; c++) combine(total, total + c * e->graph.n_heads * stride(job), job->value_dim);
    finish(job, h, job->out + h * job->value_dim, total);
  }
}

// Query heads that are computed together: all that share a key head, or a part of them where they are many.
size_t clb_attention_groups(const clb_graph *g) {
  const size_t heads = g->n_heads / g->kv_heads;
  size_t parts = 1;
  while (heads % parts != 0 || heads / parts > MAX_GROUP_HEADS) parts++;
  return g->kv_heads * parts;
}

void clb_attention(clb_engine *e, size_t layer, const clb_batch *batch, const float *q, float *out) {
  const clb_graph *g = &e->graph;
  const size_t n_groups = clb_attention_groups(g);
  attention_job job = {
      .engine = e,
      .batch = batch,
      .sinks = e->layers[layer].sinks,
      .q = q,
      .out = out,
      .layer = layer,
      .window = g->layers[layer].window,
      .chunk = g->layers[layer].chunk,
      .group = g->n_heads / n_groups,
      .n_groups = n_groups,
      .key_dim = g->kv_key_dim,
      .value_dim = g->kv_value_dim,
      .key_bytes = e->kv.key_bytes,
      .value_bytes = g->kv_values_in_keys ? e->kv.key_bytes : e->kv.value_bytes,
  };
  size_t n_tiles = 0;
  for (size_t i = 0; i < batch->n_spans; i++) n_tiles += tiles_of(&batch->spans[i]);
  if (batch->n_tokens == 1) {
    attend_one_token(&job);
  } else {
    clb_pool_run(e->pool, tile_task, &job, n_tiles * n_groups);
  }
}
