// The engine: a container's weights in memory, its KV, scratch, and the functions that compute with them.
//
// B is the batch size, H the hidden size, E the most experts of a layer, K top_k. All activations are f32, row-major.
#ifndef CLB_ENGINE_H
#define CLB_ENGINE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "aligned_io.h"
#include "blocks.h"
#include "colibri.h"
#include "container.h"
#include "errors.h"
#include "graph.h"
#include "pool.h"
#include "store.h"

// Context positions whose attention is summed up by itself; the chunks of a position are then combined in order.
enum { CLB_ATTENTION_CHUNK = 256 };

typedef struct {
  uint32_t type;
  size_t rows, cols, row_bytes;
  const uint8_t *data;
} clb_matrix;

typedef struct {
  clb_matrix q, k, v, o, router;
  clb_matrix gate, up, down;  // of the shared expert, or of a dense layer
  const float *attn_norm, *ffn_norm, *q_norm, *k_norm, *q_bias, *k_bias, *v_bias, *o_bias, *shared_router;
} clb_layer;

typedef struct {
  void *pages;
  size_t n_bytes;
} clb_arena;

typedef struct {
  float *x;             // [B, H] the residual stream
  float *normed;        // [B, H]
  float *q;             // [B, n_heads, head_dim]
  float *k, *v;         // [B, n_kv_heads, head_dim]
  float *attended;      // [B, n_heads, head_dim]
  float *projected;     // [B, H] attention's, the shared expert's or a dense layer's output
  float *cos, *sin;     // [B, rope_dim / 2]
  float *scores;        // [threads, n_heads / n_kv_heads, CHUNK]
  float *partial;       // [max(chunks, threads), n_heads, head_dim + 2]: output, maximum, sum
  float *router;        // [B, E]
  float *weights;       // [B, K]
  float *gathered;      // [B, H] one expert's inputs
  float *gate, *up;     // [B, widest feed-forward network]
  float *pairs;         // [B * K, H] output of each (token, slot), grouped by expert
  float *logits;        // [vocab] of the sanity check
  uint32_t *chosen;     // [B, K] experts
  uint32_t *pair_of;    // [B, K] row of `pairs`
  uint32_t *token_of;   // [B * K] token of a row of `pairs`
  uint32_t *start;      // [E + 1] first row of `pairs` of an expert
  uint32_t *requested;  // [E] distinct experts
  uint8_t *row;         // one row of the embedding as stored
} clb_scratch;

typedef struct {
  uint32_t *experts;
  float *weights;
  size_t n_positions;
} clb_trace;

typedef struct {
  clb_container *container;
  clb_graph graph;
  uint64_t ctx, batch_size, cache_bytes;
  size_t n_threads, io_threads;
  colibri_check check;

  const clb_kernels *kernels;
  clb_pool *pool;
  clb_store *store;
  clb_file file;

  clb_arena resident, vectors, kv, scratch_memory;
  clb_layer *layers;  // [n_layers]
  clb_matrix token_embd, output;
  const float *output_norm;
  bool embedding_on_demand;  // token_embd.data is NULL; rows are read when needed
  uint64_t embedding_offset;
  float *keys, *values;  // [n_layers, n_kv_heads, ctx, head_dim]
  clb_scratch scratch;

  clb_trace trace;
  colibri_metrics metrics;  // but for what the store counts
  _Atomic bool cancelled;
  clb_error error;
} clb_engine;

// load.c: opening. clb_engine_plan reads metadata and decides every size; clb_engine_open does the rest.
colibri_status clb_engine_plan(clb_engine *e, const char *path, const colibri_options *options, colibri_memory *memory);
colibri_status clb_engine_open(clb_engine *e);
void clb_engine_close(clb_engine *e);

// forward.c: evaluates n_tokens <= batch_size tokens at `position`. The logits of the last n_logits of them go to
// `logits` [n_logits, vocab].
colibri_status clb_forward(clb_engine *e, const uint32_t *tokens, size_t n_tokens, size_t position, float *logits,
                           size_t n_logits);

// attention.c: scratch.attended from scratch.q and the KV, of tokens at position, position + 1, ...
void clb_attention(clb_engine *e, size_t layer, size_t n_tokens, size_t position);

// router.c: scratch.chosen and scratch.weights of every token, from scratch.normed. False, and the token in *bad, when
// scores are not finite. The trace is of what was chosen last.
bool clb_route(clb_engine *e, size_t layer, size_t n_tokens, size_t *bad);
void clb_record_trace(const clb_engine *e, size_t layer, size_t n_tokens, size_t position);

// moe.c: adds the feed-forward network of scratch.normed to scratch.x.
colibri_status clb_moe(clb_engine *e, size_t layer, size_t n_tokens, size_t position);
void clb_dense(clb_engine *e, size_t layer, size_t n_tokens);

// linear.c: y[t, r] = w[r] . x[t] (+ bias[r]); with `up`: y[t, r] = silu(w[r] . x[t]) * (up[r] . x[t]).
typedef struct {
  const clb_matrix *w, *up;
  const float *x, *bias;
  float *y, *y_up;  // y_up: as large as y, overwritten
  size_t n_tokens, ldx, ldy;
} clb_linear;

enum { CLB_MAX_LINEARS = 4 };

// Up to CLB_MAX_LINEARS at once. One thread computes each element.
void clb_linear_run(clb_engine *e, const clb_linear *linears, size_t n);

// memory.c
uint64_t clb_available_memory(void);  // bytes the system and the control group have to give; 0 when unknown
size_t clb_available_cpus(void);
double clb_seconds(void);  // of a monotonic clock

#endif
