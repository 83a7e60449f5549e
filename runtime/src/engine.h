// The engine: a container's weights in memory, its KV, scratch, and the functions that compute with them.
//
// B is the batch size, H the hidden size, E the most experts of a layer, K top_k, G the largest of B and K. Activations
// are f32, row-major; in fast precision the inputs of products with quantized weights are quantized as well (fast.h).
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
#include "cpus.h"
#include "errors.h"
#include "fast.h"
#include "graph.h"
#include "memory.h"
#include "pool.h"
#include "store.h"

enum {
  CLB_ATTENTION_CHUNK = 256,  // positions whose attention is summed up by itself; chunks are then combined in order
  CLB_ATTENTION_TILE = 8,     // consecutive positions of a prompt that are computed together
  CLB_MAX_GROUP = 32,         // experts computed in one job
};

typedef struct {
  uint32_t type;
  size_t rows, cols, row_bytes;
  const uint8_t *data;
} clb_matrix;

typedef struct {
  clb_matrix q, k, v, o, attn_gate, router;
  clb_matrix q_a, kv_a, kv_b, k_b, v_b;  // of latent attention; q is then its q_b
  clb_matrix gate, up, down;             // of the shared expert, or of a dense layer
  const float *attn_norm, *ffn_norm, *q_norm, *k_norm, *q_bias, *k_bias, *v_bias, *o_bias, *shared_router;
  const float *attn_norm_bias, *ffn_norm_bias, *sinks, *router_bias;
  const float *attn_post_norm, *ffn_post_norm, *select_bias, *q_a_norm, *q_a_bias, *kv_a_norm, *kv_a_bias;
} clb_layer;

typedef struct {
  void *pages;
  size_t n_bytes;
} clb_arena;

// Forms of activations, a set: bit k for the clb_fast_x_kind k, bit 0 for floats.
typedef uint8_t clb_kinds;

// Rows of activations: as floats, and in fast precision as clb_quantize leaves them, by kind; NULL and 0 for a kind
// that no layer needs. A product takes what suits it.
typedef struct {
  float *x;                          // [n, ld]
  uint8_t *codes[CLB_FAST_X_KINDS];  // [n, code_bytes]
  size_t ld, code_bytes[CLB_FAST_X_KINDS];
} clb_rows;

// What the weights of a layer need of the activations that they read.
typedef struct {
  clb_kinds attention;     // normed
  clb_kinds q_latent;      // q_latent
  clb_kinds attended;      // attended
  clb_kinds feed_forward;  // normed, for all experts and for what all tokens go through
  clb_kinds experts;       // gathered
  clb_kinds hidden, wide;  // hidden, wide
} clb_layer_kinds;

typedef struct {
  float *x;             // [B, H] the residual stream
  clb_rows normed;      // [B, H]
  float *q;             // [B, n_heads, head_dim]
  float *k, *v;         // [B, n_kv_heads, head_dim], [B, n_kv_heads, value_dim]
  clb_rows attended;    // [B, n_heads * value_dim]
  float *attn_gate;     // [B, n_heads * value_dim]
  clb_rows q_latent;    // [B, q_lora]
  float *kv_latent;     // [B, kv_lora + rope_dim]
  float *absorbed;      // [B, n_heads, kv_lora + rope_dim] queries of latent attention, as rows of the KV
  float *mixed;         // [B, n_heads, kv_lora] sums of latents
  float *latent_row;    // [threads, kv_lora] a row of kv_b
  float *projected;     // [B, H] attention's, the shared expert's or a dense layer's output
  float *cos, *sin;     // [n_ropes, B, rope_dim / 2]
  float *scores;        // [threads, TILE, heads of a group, CHUNK]
  float *queries;       // [threads, TILE, heads of a group, kv_key_dim]
  float *partial;       // see place_attention: output[kv_value_dim], maximum, sum of heads
  float *values;        // [threads, CHUNK, kv_value_dim] decoded from the KV
  float *router;        // [B, E]
  float *selection;     // [E] scores by which experts are chosen
  float *weights;       // [B, K]
  clb_rows gathered;    // [G, H] inputs of a group of experts
  clb_rows hidden;      // [G, widest expert] activated gate times up, of a group
  float *up;            // [G, widest expert]
  float *bias;          // [MAX_GROUP, 2 * widest expert + H] biases of a group of experts
  clb_rows wide;        // [B, shared or dense width]: the same of the network that all tokens go through
  float *wide_up;       // [B, shared or dense width]
  float *pairs;         // [B * K, H] output of each (token, slot), grouped by expert
  float *logits;        // [vocab] of the sanity check
  uint32_t *chosen;     // [B, K] experts
  uint32_t *pair_of;    // [B, K] row of `pairs`
  uint32_t *token_of;   // [B * K] token of a row of `pairs`
  uint32_t *start;      // [E + 1] first row of `pairs` of an expert
  uint32_t *requested;  // [E] distinct experts
  uint32_t *sequence;   // [B] of a token
  uint32_t *position;   // [B] of a token in its sequence
  uint8_t *row;         // one row of the embedding as stored
} clb_scratch;

typedef struct clb_early clb_early;

typedef struct {
  colibri_observation to;
  clb_early *early;  // NULL without to.early
} clb_observer;

typedef struct clb_prefetch clb_prefetch;

// Keys and values of every layer, sequence, key head and position, each head vector a row of `type`. Latent attention
// has keys only, of one head; its values are their first floats.
typedef struct {
  uint32_t type;
  size_t key_bytes, value_bytes;  // of a row; value_bytes is 0 where values lie in keys
  uint8_t *keys, *values;         // [n_layers, n_sequences, kv_heads, ctx, row]
} clb_kv_cache;

// Tokens to append to one sequence.
typedef struct {
  size_t sequence, position;  // position: of the first
  const uint32_t *tokens;     // [n_tokens]
  size_t n_tokens;
  float *logits;  // [n_logits, vocab] of the last n_logits tokens
  size_t n_logits;
} clb_span;

// What is evaluated at once: spans of different sequences, their tokens one after the other.
typedef struct {
  const clb_span *spans;
  size_t n_spans, n_tokens;  // n_tokens <= B
} clb_batch;

typedef struct {
  clb_container *container, *mirror;  // mirror: NULL without one
  clb_graph graph;
  uint64_t ctx, batch_size, n_sequences, cache_bytes;
  uint64_t cache_blocks;  // blocks that certainly fit into the cache
  colibri_precision precision;
  size_t n_threads, io_threads;
  colibri_check check;
  colibri_io io;
  size_t prefetch_depth;
  uint64_t preload_bytes;
  double preload_seconds;
  bool pin_threads;

  const clb_kernels *kernels;
  clb_pool *pool;
  clb_store *store;
  clb_prefetch *prefetch;  // NULL: off
  clb_file file;

  clb_arena resident, vectors, kv_memory, scratch_memory;
  clb_layer *layers;       // [n_layers]
  clb_layer_kinds *kinds;  // [n_layers]
  clb_matrix token_embd, output;
  const float *output_norm, *output_norm_bias, *output_bias;
  bool embedding_on_demand;  // token_embd.data is NULL; rows are read when needed
  uint64_t embedding_offset;
  clb_kv_cache kv;
  clb_scratch scratch;

  clb_observer observer;
  colibri_metrics metrics;               // but for what the store counts
  colibri_layer_metrics *layer_metrics;  // [n_layers]
  _Atomic bool cancelled;
  clb_error error;
} clb_engine;

// load.c: opening. clb_engine_plan reads metadata and decides every size; clb_engine_open does the rest.
colibri_status clb_engine_plan(clb_engine *e, const char *path, const colibri_options *options, colibri_memory *memory);
colibri_status clb_engine_open(clb_engine *e);
void clb_engine_close(clb_engine *e);

// forward.c: evaluates a batch. The KV of its positions and the spans' logits are written.
colibri_status clb_forward(clb_engine *e, const clb_batch *batch);

// scratch.normed from scratch.x, as the layer's feed-forward network takes it.
void clb_ffn_norm(clb_engine *e, size_t layer, size_t n_tokens);

// kv.c: rows of keys, and of values if they have any; the row of a position; storing a row.
uint64_t clb_kv_rows(const clb_engine *e);
size_t clb_kv_row(const clb_engine *e, size_t layer, size_t sequence, size_t kv_head, size_t position);
void clb_kv_write_key(const clb_engine *e, size_t row, const float *x);
void clb_kv_write_value(const clb_engine *e, size_t row, const float *x);

// forward.c: out[n] = weight * x / rms(x); out may be x.
void clb_rms_norm(const clb_engine *e, const float *x, const float *weight, double eps, float *out, size_t n);

// forward.c: rotates the first rope_dim floats of a head by the layer's angles in scratch.
void clb_rotate(const clb_engine *e, size_t layer, float *head, size_t token);

// attention.c: out [B, n_heads, kv_value_dim] of the batch, from q [B, n_heads, kv_key_dim] and the KV.
void clb_attention(clb_engine *e, size_t layer, const clb_batch *batch, const float *q, float *out);

// Groups of heads that are computed apart.
size_t clb_attention_groups(const clb_graph *g);

// mla.c: scratch.attended from scratch.normed, through latent attention. Fills the KV.
void clb_mla(clb_engine *e, size_t layer, const clb_batch *batch);

// router.c: scratch.chosen and scratch.weights of every token, from scratch.normed. False, and the token in *bad, when
// scores are not finite. Router products are exact in any precision.
bool clb_route(clb_engine *e, size_t layer, size_t n_tokens, size_t *bad);

// observe.c. Of what the layer's router chose last, and of what the next one would choose of scratch.x.
colibri_status clb_observer_set(clb_engine *e, const colibri_observation *o);  // NULL ends it
void clb_observer_clear(clb_engine *e);
void clb_observe_choices(clb_engine *e, size_t layer, size_t n_tokens);

// Rows of one expert. Its inputs are those of `scaled` where the router's weight is in them (scaled.x is NULL where it
// is not), else rows token_of[first_pair ...] of scratch.normed.
typedef struct {
  uint32_t expert;
  size_t first_pair, n, width;
  clb_rows scaled, hidden;
} clb_expert_rows;

void clb_observe_expert(const clb_engine *e, size_t layer, const clb_expert_rows *rows);

// moe.c: adds the feed-forward network of scratch.normed to scratch.x.
colibri_status clb_moe(clb_engine *e, size_t layer, size_t n_tokens);
void clb_dense(clb_engine *e, size_t layer, size_t n_tokens);

// prefetch.c: guesses, for layers after this one, at the experts of the tokens whose residual stream is in scratch.x.
clb_prefetch *clb_prefetch_open(const clb_graph *g, size_t depth);  // NULL: no memory
void clb_prefetch_close(clb_prefetch *p);
void clb_prefetch_after(clb_engine *e, size_t layer, size_t n_tokens);

// activation.c: y[i] from gate[i] and up[i] as graph.activation says; y may be gate, and up is overwritten.
void clb_activate(const clb_engine *e, float *y, const float *gate, float *up, size_t n);

// linear.c: y[t, r] = w[r] . x[t] (+ bias[r]); with `up`: y = activation(y, up[r] . x[t] (+ up_bias[r])).
typedef struct {
  const clb_matrix *w, *up;
  clb_rows x;  // in fast precision, quantized already unless `exact`
  const float *bias, *up_bias;
  float *y, *y_up;  // y_up: as large as y, overwritten
  size_t n_tokens, ldy;
  bool exact;  // whatever the engine's precision
} clb_linear;

enum { CLB_MAX_LINEARS = CLB_MAX_GROUP + 1 };

// Up to CLB_MAX_LINEARS in one job. One thread computes each element.
void clb_linear_run(clb_engine *e, const clb_linear *linears, size_t n);

// Rows from `row` on.
clb_rows clb_rows_from(clb_rows rows, size_t row);

// Makes the codes of n rows of n_cols, of these kinds.
void clb_quantize(clb_engine *e, clb_rows rows, size_t n, size_t n_cols, clb_kinds kinds);

// kinds.c: what products with weights of a type take, a set of one; what those of every layer take (fills e->kinds);
// and of all layers together, the output matrix counting as attention.
clb_kinds clb_kinds_of(const clb_engine *e, uint32_t type);
colibri_status clb_kinds_plan(clb_engine *e);
clb_layer_kinds clb_kinds_of_all(const clb_engine *e);

double clb_seconds(void);  // of a monotonic clock

#endif
