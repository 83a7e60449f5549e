// What a container's spec asks to compute, checked: sizes, switches, and the tensors of every layer.
//
// A switch of the spec that is not known here is refused by name, as are tensors the graph would not use: what a
// container says is either computed or reported, never passed over.
#ifndef CLB_GRAPH_H
#define CLB_GRAPH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "container.h"
#include "errors.h"

typedef enum { CLB_QK_NORM_NONE, CLB_QK_NORM_HEAD, CLB_QK_NORM_FULL, CLB_QK_NORM_L2 } clb_qk_norm;
typedef enum { CLB_NORM_RMS, CLB_NORM_LAYER } clb_norm;
typedef enum { CLB_ACTIVATION_SILU, CLB_ACTIVATION_SWIGLU_OAI } clb_activation;
typedef enum { CLB_ROPE_HALF, CLB_ROPE_ADJACENT } clb_rope_pairing;
typedef enum { CLB_ATTENTION_GQA, CLB_ATTENTION_MLA } clb_attention_kind;

// What a router makes of its logits, and how a group of experts is rated. In the order of the words in graph.c.
typedef enum {
  CLB_SCORE_SOFTMAX,
  CLB_SCORE_SIGMOID,
  CLB_SCORE_TOPK_SIGMOID,
  CLB_SCORE_SPARSEMIXER,
} clb_router_score;
typedef enum { CLB_GROUP_SCORE_MAX, CLB_GROUP_SCORE_TOP2 } clb_group_score;

enum { CLB_MAX_ROUTER_GROUPS = 256, CLB_MAX_ROPES = 16 };

// Angular frequencies [rope_dim / 2], of the container, and what multiplies cos and sin.
typedef struct {
  const double *inv_freq;
  double factor;
} clb_rope;

// Tensors of one layer, by role; NULL where the graph has none.
typedef struct {
  const clb_tensor *attn_norm, *q, *k, *v, *o, *q_bias, *k_bias, *v_bias, *o_bias, *q_norm, *k_norm;
  const clb_tensor *attn_gate, *attn_post_norm, *ffn_post_norm, *attn_norm_bias, *ffn_norm_bias, *sinks;
  const clb_tensor *q_a, *q_a_norm, *kv_a, *kv_a_norm, *kv_b, *k_b, *v_b, *q_a_bias, *kv_a_bias;  // latent attention
  const clb_tensor *ffn_norm, *router, *router_bias, *select_bias;
  const clb_tensor *gate, *up, *down, *shared_router;  // gate, up, down: shared or dense
  bool moe, rope;
  uint64_t n_experts;
  size_t rope_set;  // of clb_graph.ropes
  size_t row;       // of the expert index
  uint64_t window;  // 0: all
  uint64_t chunk;   // positions are seen from the last multiple of this on; 0: all
} clb_graph_layer;

typedef struct {
  uint64_t n_layers, n_moe_layers, hidden, vocab, context_length, n_tokens;
  uint64_t n_heads, n_kv_heads, head_dim, value_dim, rope_dim;
  uint64_t q_lora, kv_lora;                     // latent attention; q_lora 0: q comes from the hidden state
  uint64_t kv_heads, kv_key_dim, kv_value_dim;  // what the KV holds of a position
  bool kv_values_in_keys;                       // values are the first kv_value_dim floats of the keys
  uint64_t top_k, max_experts, max_width, shared_width, dense_width;
  uint64_t router_groups, router_top_groups;  // 1, 1: no groups
  double attention_scale, clip_qkv, norm_eps, latent_norm_eps;
  double attention_softcap, logit_softcap;  // bounds of scores and logits; 0: none
  double embedding_scale, residual_scale, logit_divisor;
  double router_scale, router_norm_add, router_norm_min;
  double router_jitter;                         // of CLB_SCORE_SPARSEMIXER
  double activation_alpha, activation_limit;    // of CLB_ACTIVATION_SWIGLU_OAI
  double temperature_floor, temperature_scale;  // of layers without rope; scale 0: off
  bool qkv_bias, o_bias, router_norm, shared_gated, attention_gate, pre_norm, post_norm, router_select_bias;
  bool sinks, router_bias, output_bias, expert_bias, qk_norm_after_rope;
  bool experts_scale_input;  // the router's weight multiplies an expert's input, not its output
  clb_norm norm;
  clb_activation activation;
  clb_attention_kind attention;
  clb_router_score router_score;
  clb_group_score router_group_score;
  clb_qk_norm qk_norm;
  clb_rope_pairing rope_pairing;
  clb_rope ropes[CLB_MAX_ROPES];
  size_t n_ropes;
  clb_rope long_rope;  // the first one for contexts of more than rope_original_context positions; NULL: there is none
  uint64_t rope_original_context;
  int64_t bos_id;
  const uint64_t *eos_ids;  // [n_eos], of the container
  size_t n_eos;
  const clb_tensor *token_embd, *output, *output_norm, *output_norm_bias, *output_bias_of;
  clb_graph_layer *layers;  // [n_layers]
} clb_graph;

// Fills `graph`, which points into `container`. Free it in any case.
colibri_status clb_graph_load(const clb_container *container, clb_graph *graph, clb_error error);
// Chooses what depends on the positions that a sequence may have. Call it once, before anything is computed.
void clb_graph_use_context(clb_graph *graph, uint64_t n_positions);
void clb_graph_free(clb_graph *graph);

#endif
