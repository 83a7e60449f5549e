#include "graph.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "blocks.h"

// Sizes beyond these belong to no model; below them no product of three overflows 64 bits.
enum { MAX_LAYERS = 4096, MAX_WIDTH = 1 << 20, MAX_HEADS = 1 << 12, MAX_HEAD_DIM = 1 << 14 };
static const uint64_t MAX_VOCAB = UINT64_C(1) << 28, MAX_CONTEXT = UINT64_C(1) << 31;

typedef struct {
  const clb_container *container;
  clb_graph *graph;
  clb_error error;
} loader;

// ---------------------------------------------------------------------------------------------------------------------
// Spec keys

static const char *const KNOWN_GRAPH_KEYS[] = {
    "attention",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "attention_scale",
    "qkv_bias",
    "o_bias",
    "qk_norm",
    "clip_qkv",
    "windows",
    "norm",
    "norm_eps",
    "rope_dim",
    "rope_pairing",
    "rope_inv_freq",
    "rope_factor",
    "rope_inv_freq_long",
    "rope_factor_long",
    "rope_original_context",
    "activation",
    "router_score",
    "router_norm",
    "router_scale",
    "shared_width",
    "shared_gated",
    "dense_width",
    "value_dim",
    "q_lora",
    "kv_lora",
    "latent_norm_eps",
    "attention_gate",
    "rope_layers",
    "pre_norm",
    "post_norm",
    "embedding_scale",
    "router_select_bias",
    "router_groups",
    "router_top_groups",
    "router_group_score",
    "router_norm_add",
    "router_norm_min",
    "residual_scale",
    "logit_divisor",
    "activation_alpha",
    "activation_limit",
    "temperature_floor",
    "temperature_scale",
    "sinks",
    "router_bias",
    "output_bias",
    "qk_norm_after_rope",
    "experts_scale_input",
    "chunks",
    "router_jitter",
    "attention_softcap",
    "logit_softcap",
    "rope_of_layer",
    "rope_inv_freq_more",
    "rope_factor_more",
};

static bool is_known_graph_key(const char *key, size_t n_bytes) {
  for (size_t i = 0; i < sizeof KNOWN_GRAPH_KEYS / sizeof *KNOWN_GRAPH_KEYS; i++) {
    if (strlen(KNOWN_GRAPH_KEYS[i]) == n_bytes && memcmp(KNOWN_GRAPH_KEYS[i], key, n_bytes) == 0) return true;
  }
  return false;
}

static colibri_status check_keys_known(const loader *l) {
  static const char prefix[] = "graph.";
  const size_t n_prefix = sizeof prefix - 1;
  for (size_t i = 0; i < clb_spec_n_keys(l->container); i++) {
    const clb_kv *kv = clb_spec_at(l->container, i);
    if (kv->key_bytes < n_prefix || memcmp(kv->key, prefix, n_prefix) != 0) continue;
    if (!is_known_graph_key(kv->key + n_prefix, kv->key_bytes - n_prefix)) {
      return clb_fail(l->error, COLIBRI_ERROR_UNSUPPORTED,
                      "spec: the switch %.*s is not known to this version; it can inspect and verify this container, "
                      "but not execute it",
                      (int)kv->key_bytes, kv->key);
    }
  }
  return COLIBRI_OK;
}

static colibri_status check_executable(const loader *l) {
  bool executable = false;
  if (!clb_spec_bool(l->container, "executable", &executable)) {
    return clb_fail(l->error, COLIBRI_ERROR_FORMAT, "spec: key 'executable' (bool) is missing");
  }
  if (executable) return COLIBRI_OK;
  const char *why = "the spec does not say why";
  size_t n_bytes = strlen(why);
  clb_spec_string(l->container, "executable_lacks", &why, &n_bytes);
  return clb_fail(l->error, COLIBRI_ERROR_UNSUPPORTED, "this container cannot be executed: %.*s", (int)n_bytes, why);
}

static colibri_status bad_key(const loader *l, const char *key, const char *type) {
  return clb_fail(l->error, COLIBRI_ERROR_FORMAT, "spec: expected key '%s' of type %s, found %s", key, type,
                  clb_spec_find(l->container, key) ? "another type" : "no such key");
}

static colibri_status read_u64(const loader *l, const char *key, uint64_t min, uint64_t max, uint64_t *out) {
  if (!clb_spec_u64(l->container, key, out)) return bad_key(l, key, "u64");
  if (*out >= min && *out <= max) return COLIBRI_OK;
  return clb_fail(l->error, COLIBRI_ERROR_FORMAT, "spec: %s: expected %llu to %llu, found %llu", key,
                  (unsigned long long)min, (unsigned long long)max, (unsigned long long)*out);
}

// A finite number that fits f32, in which it is used.
static colibri_status read_f64(const loader *l, const char *key, double min, double *out) {
  if (!clb_spec_f64(l->container, key, out)) return bad_key(l, key, "f64");
  if (isfinite((float)*out) && *out >= min) return COLIBRI_OK;
  return clb_fail(l->error, COLIBRI_ERROR_FORMAT, "spec: %s: expected a finite number from %g, found %g", key, min,
                  *out);
}

// Keys that may be absent leave *out as it is.
static bool has(const loader *l, const char *key) {
  return clb_spec_find(l->container, key) != NULL;
}

static colibri_status read_bool(const loader *l, const char *key, bool *out) {
  return clb_spec_bool(l->container, key, out) ? COLIBRI_OK : bad_key(l, key, "bool");
}

// One of the words, by its number.
static colibri_status read_word(const loader *l, const char *key, const char *const *words, size_t n_words,
                                size_t *out) {
  const char *value;
  size_t n_bytes;
  if (!clb_spec_string(l->container, key, &value, &n_bytes)) return bad_key(l, key, "string");
  for (size_t i = 0; i < n_words; i++) {
    if (strlen(words[i]) == n_bytes && memcmp(words[i], value, n_bytes) == 0) {
      *out = i;
      return COLIBRI_OK;
    }
  }
  return clb_fail(l->error, COLIBRI_ERROR_UNSUPPORTED, "spec: %s = '%.*s' is not known to this version", key,
                  (int)(n_bytes < 64 ? n_bytes : 64), value);
}

#define COUNT(array) (sizeof(array) / sizeof *(array))

// What the KV holds: keys and values of each key head, or for latent attention one row that is both.
static colibri_status read_kv_sizes(loader *l) {
  clb_graph *g = l->graph;
  g->kv_heads = g->n_kv_heads;
  g->kv_key_dim = g->head_dim;
  g->kv_value_dim = g->value_dim;
  if (g->attention != CLB_ATTENTION_MLA) return COLIBRI_OK;
  if (g->qk_norm != CLB_QK_NORM_NONE || g->clip_qkv > 0 || g->attention_gate) {
    return clb_fail(
        l->error, COLIBRI_ERROR_UNSUPPORTED,
        "spec: latent attention with graph.qk_norm, clip_qkv or attention_gate is not known to this version");
  }
  CLB_TRY(read_u64(l, "graph.q_lora", 0, MAX_WIDTH, &g->q_lora));
  CLB_TRY(read_u64(l, "graph.kv_lora", 1, MAX_WIDTH, &g->kv_lora));
  CLB_TRY(read_f64(l, "graph.latent_norm_eps", 0, &g->latent_norm_eps));
  g->kv_heads = 1;
  g->kv_key_dim = g->kv_lora + g->rope_dim;
  g->kv_value_dim = g->kv_lora;
  g->kv_values_in_keys = true;
  return COLIBRI_OK;
}

static colibri_status read_sizes(loader *l) {
  clb_graph *g = l->graph;
  CLB_TRY(read_u64(l, "n_layers", 1, MAX_LAYERS, &g->n_layers));
  CLB_TRY(read_u64(l, "hidden_size", 1, MAX_WIDTH, &g->hidden));
  CLB_TRY(read_u64(l, "vocab_size", 1, MAX_VOCAB, &g->vocab));
  CLB_TRY(read_u64(l, "context_length", 1, MAX_CONTEXT, &g->context_length));
  CLB_TRY(read_u64(l, "n_tokens", 1, g->vocab, &g->n_tokens));
  CLB_TRY(read_u64(l, "top_k", 1, 65536, &g->top_k));
  CLB_TRY(read_u64(l, "graph.n_heads", 1, MAX_HEADS, &g->n_heads));
  CLB_TRY(read_u64(l, "graph.n_kv_heads", 1, g->n_heads, &g->n_kv_heads));
  CLB_TRY(read_u64(l, "graph.head_dim", 1, MAX_HEAD_DIM, &g->head_dim));
  CLB_TRY(read_u64(l, "graph.rope_dim", 0, g->head_dim, &g->rope_dim));
  g->value_dim = g->head_dim;
  if (has(l, "graph.value_dim")) CLB_TRY(read_u64(l, "graph.value_dim", 1, MAX_HEAD_DIM, &g->value_dim));
  CLB_TRY(read_u64(l, "graph.shared_width", 0, MAX_WIDTH, &g->shared_width));
  CLB_TRY(read_u64(l, "graph.dense_width", 0, MAX_WIDTH, &g->dense_width));
  if (g->n_heads % g->n_kv_heads != 0) {
    return clb_fail(l->error, COLIBRI_ERROR_FORMAT, "spec: graph.n_heads = %llu is no multiple of n_kv_heads = %llu",
                    (unsigned long long)g->n_heads, (unsigned long long)g->n_kv_heads);
  }
  if (g->rope_dim % 2 != 0) {
    return clb_fail(l->error, COLIBRI_ERROR_FORMAT, "spec: graph.rope_dim: expected an even number, found %llu",
                    (unsigned long long)g->rope_dim);
  }
  return read_kv_sizes(l);
}

// Switches that came after the first release: without the key, the value is what it was then.
static colibri_status read_added_switches(loader *l) {
  clb_graph *g = l->graph;
  g->pre_norm = true;
  g->embedding_scale = g->residual_scale = g->logit_divisor = g->temperature_floor = 1;
  const struct {
    const char *key;
    bool *out;
  } bools[] = {
      {"graph.attention_gate", &g->attention_gate},
      {"graph.pre_norm", &g->pre_norm},
      {"graph.post_norm", &g->post_norm},
      {"graph.router_select_bias", &g->router_select_bias},
      {"graph.sinks", &g->sinks},
      {"graph.router_bias", &g->router_bias},
      {"graph.output_bias", &g->output_bias},
      {"graph.qk_norm_after_rope", &g->qk_norm_after_rope},
      {"graph.experts_scale_input", &g->experts_scale_input},
  };
  const struct {
    const char *key;
    double min, *out;
  } numbers[] = {
      {"graph.embedding_scale", -INFINITY, &g->embedding_scale},
      {"graph.router_norm_add", 0, &g->router_norm_add},
      {"graph.router_norm_min", 0, &g->router_norm_min},
      {"graph.residual_scale", -INFINITY, &g->residual_scale},
      {"graph.logit_divisor", FLT_MIN, &g->logit_divisor},
      {"graph.temperature_floor", FLT_MIN, &g->temperature_floor},
      {"graph.temperature_scale", -INFINITY, &g->temperature_scale},
      {"graph.attention_softcap", FLT_MIN, &g->attention_softcap},
      {"graph.logit_softcap", FLT_MIN, &g->logit_softcap},
  };
  for (size_t i = 0; i < COUNT(bools); i++) {
    if (has(l, bools[i].key)) CLB_TRY(read_bool(l, bools[i].key, bools[i].out));
  }
  for (size_t i = 0; i < COUNT(numbers); i++) {
    if (has(l, numbers[i].key)) CLB_TRY(read_f64(l, numbers[i].key, numbers[i].min, numbers[i].out));
  }
  return COLIBRI_OK;
}

// Numbers without which a switch has no meaning.
static colibri_status read_constants(loader *l) {
  clb_graph *g = l->graph;
  if (g->activation == CLB_ACTIVATION_SWIGLU_OAI) {
    CLB_TRY(read_f64(l, "graph.activation_alpha", FLT_MIN, &g->activation_alpha));
    CLB_TRY(read_f64(l, "graph.activation_limit", FLT_MIN, &g->activation_limit));
  }
  if (g->router_score != CLB_SCORE_SPARSEMIXER) return COLIBRI_OK;
  return read_f64(l, "graph.router_jitter", 0, &g->router_jitter);
}

// Experts in groups, of which the best are chosen first.
static colibri_status read_groups(loader *l) {
  static const char *const score[] = {"max", "top2"};
  clb_graph *g = l->graph;
  size_t word = 0;
  g->router_groups = g->router_top_groups = 1;
  if (!has(l, "graph.router_groups")) return COLIBRI_OK;
  CLB_TRY(read_u64(l, "graph.router_groups", 1, CLB_MAX_ROUTER_GROUPS, &g->router_groups));
  CLB_TRY(read_u64(l, "graph.router_top_groups", 1, g->router_groups, &g->router_top_groups));
  CLB_TRY(read_word(l, "graph.router_group_score", score, COUNT(score), &word));
  g->router_group_score = (clb_group_score)word;
  return COLIBRI_OK;
}

static colibri_status read_switches(loader *l) {
  static const char *const attention[] = {"gqa", "mla"}, *const norm[] = {"rms", "layer"},
                           *const activation[] = {"silu", "swiglu_oai"},
                           *const score[] = {"softmax", "sigmoid", "topk_sigmoid", "sparsemixer"},
                           *const qk_norm[] = {"none", "head", "full", "l2"}, *const pairing[] = {"half", "adjacent"};
  clb_graph *g = l->graph;
  size_t word = 0;
  CLB_TRY(read_word(l, "graph.attention", attention, COUNT(attention), &word));
  g->attention = (clb_attention_kind)word;
  CLB_TRY(read_word(l, "graph.norm", norm, COUNT(norm), &word));
  g->norm = (clb_norm)word;
  CLB_TRY(read_word(l, "graph.activation", activation, COUNT(activation), &word));
  g->activation = (clb_activation)word;
  CLB_TRY(read_word(l, "graph.router_score", score, COUNT(score), &word));
  g->router_score = (clb_router_score)word;
  CLB_TRY(read_word(l, "graph.qk_norm", qk_norm, COUNT(qk_norm), &word));
  g->qk_norm = (clb_qk_norm)word;
  CLB_TRY(read_word(l, "graph.rope_pairing", pairing, COUNT(pairing), &word));
  g->rope_pairing = (clb_rope_pairing)word;
  CLB_TRY(read_f64(l, "graph.attention_scale", -INFINITY, &g->attention_scale));
  CLB_TRY(read_f64(l, "graph.clip_qkv", 0, &g->clip_qkv));
  CLB_TRY(read_f64(l, "graph.norm_eps", 0, &g->norm_eps));
  CLB_TRY(read_f64(l, "graph.rope_factor", -INFINITY, &g->ropes[0].factor));
  CLB_TRY(read_f64(l, "graph.router_scale", -INFINITY, &g->router_scale));
  CLB_TRY(read_bool(l, "graph.qkv_bias", &g->qkv_bias));
  CLB_TRY(read_bool(l, "graph.o_bias", &g->o_bias));
  CLB_TRY(read_bool(l, "graph.router_norm", &g->router_norm));
  CLB_TRY(read_bool(l, "graph.shared_gated", &g->shared_gated));
  CLB_TRY(read_added_switches(l));
  CLB_TRY(read_constants(l));
  return read_groups(l);
}

static colibri_status read_u64_array(const loader *l, const char *key, uint64_t n_expected, const uint64_t **out) {
  size_t n;
  if (!clb_spec_u64_array(l->container, key, out, &n)) return bad_key(l, key, "array of u64");
  if (n == n_expected) return COLIBRI_OK;
  return clb_fail(l->error, COLIBRI_ERROR_FORMAT, "spec: %s: expected %llu entries, found %zu", key,
                  (unsigned long long)n_expected, n);
}

static colibri_status check_flags(const loader *l, const char *key, const uint64_t *flags) {
  for (size_t i = 0; i < l->graph->n_layers; i++) {
    if (flags[i] <= 1) continue;
    return clb_fail(l->error, COLIBRI_ERROR_FORMAT, "spec: %s[%zu]: expected 0 or 1, found %llu", key, i,
                    (unsigned long long)flags[i]);
  }
  return COLIBRI_OK;
}

// Which rope each layer has; all the first one without the key.
static colibri_status read_rope_of_layer(loader *l) {
  clb_graph *g = l->graph;
  const uint64_t *sets;
  if (!has(l, "graph.rope_of_layer")) return COLIBRI_OK;
  CLB_TRY(read_u64_array(l, "graph.rope_of_layer", g->n_layers, &sets));
  for (size_t i = 0; i < g->n_layers; i++) {
    if (sets[i] >= g->n_ropes) {
      return clb_fail(l->error, COLIBRI_ERROR_FORMAT,
                      "spec: graph.rope_of_layer[%zu]: expected less than %zu, found %llu", i, g->n_ropes,
                      (unsigned long long)sets[i]);
    }
    g->layers[i].rope_set = (size_t)sets[i];
  }
  return COLIBRI_OK;
}

// What differs by layer. rope_layers and chunks are optional: all layers rotate, none has chunks.
static colibri_status read_layers(loader *l) {
  clb_graph *g = l->graph;
  const uint64_t *moe, *windows, *rope = NULL, *chunks = NULL;
  CLB_TRY(read_u64_array(l, "moe_layers", g->n_layers, &moe));
  CLB_TRY(check_flags(l, "moe_layers", moe));
  CLB_TRY(read_u64_array(l, "graph.windows", g->n_layers, &windows));
  if (clb_spec_find(l->container, "graph.rope_layers")) {
    CLB_TRY(read_u64_array(l, "graph.rope_layers", g->n_layers, &rope));
    CLB_TRY(check_flags(l, "graph.rope_layers", rope));
  }
  if (clb_spec_find(l->container, "graph.chunks")) {
    CLB_TRY(read_u64_array(l, "graph.chunks", g->n_layers, &chunks));
  }
  g->layers = calloc((size_t)g->n_layers, sizeof *g->layers);
  if (!g->layers) return clb_fail(l->error, COLIBRI_ERROR_MEMORY, "no memory for the layer table");
  for (size_t i = 0; i < g->n_layers; i++) {
    g->layers[i] = (clb_graph_layer){
        .moe = moe[i] == 1, .window = windows[i], .chunk = chunks ? chunks[i] : 0, .rope = !rope || rope[i] == 1};
    g->n_moe_layers += moe[i];
  }
  return read_rope_of_layer(l);
}

// The frequencies of n_ropes ropes, one after the other.
static colibri_status read_frequencies(const loader *l, const char *key, size_t n_ropes, const double **out) {
  const uint64_t expected = n_ropes * (l->graph->rope_dim / 2);
  size_t n;
  if (!clb_spec_f64_array(l->container, key, out, &n)) return bad_key(l, key, "array of f64");
  if (n == expected) return COLIBRI_OK;
  return clb_fail(l->error, COLIBRI_ERROR_FORMAT, "spec: %s: expected %llu entries, found %zu", key,
                  (unsigned long long)expected, n);
}

// The three keys of rope for contexts beyond the original one come together.
static colibri_status read_long_rope(loader *l) {
  clb_graph *g = l->graph;
  if (!has(l, "graph.rope_inv_freq_long") && !has(l, "graph.rope_factor_long") &&
      !has(l, "graph.rope_original_context")) {
    return COLIBRI_OK;
  }
  CLB_TRY(read_frequencies(l, "graph.rope_inv_freq_long", 1, &g->long_rope.inv_freq));
  CLB_TRY(read_f64(l, "graph.rope_factor_long", -INFINITY, &g->long_rope.factor));
  return read_u64(l, "graph.rope_original_context", 1, MAX_CONTEXT, &g->rope_original_context);
}

// Ropes that other layers have, and which layers: three keys that come together.
static colibri_status read_more_ropes(loader *l) {
  clb_graph *g = l->graph;
  const double *frequencies, *factors;
  size_t n;
  g->n_ropes = 1;
  if (!has(l, "graph.rope_of_layer") && !has(l, "graph.rope_inv_freq_more") && !has(l, "graph.rope_factor_more")) {
    return COLIBRI_OK;
  }
  if (!has(l, "graph.rope_of_layer")) return bad_key(l, "graph.rope_of_layer", "array of u64");
  if (!clb_spec_f64_array(l->container, "graph.rope_factor_more", &factors, &n)) {
    return bad_key(l, "graph.rope_factor_more", "array of f64");
  }
  if (n < 1 || n >= CLB_MAX_ROPES) {
    return clb_fail(l->error, COLIBRI_ERROR_FORMAT, "spec: graph.rope_factor_more: expected 1 to %d entries, found %zu",
                    CLB_MAX_ROPES - 1, n);
  }
  CLB_TRY(read_frequencies(l, "graph.rope_inv_freq_more", n, &frequencies));
  for (size_t i = 0; i < n; i++) {
    if (!isfinite((float)factors[i])) {
      return clb_fail(l->error, COLIBRI_ERROR_FORMAT,
                      "spec: graph.rope_factor_more[%zu]: expected a number that fits f32, found %g", i, factors[i]);
    }
    g->ropes[g->n_ropes++] = (clb_rope){frequencies + i * (g->rope_dim / 2), factors[i]};
  }
  return COLIBRI_OK;
}

static colibri_status read_arrays(loader *l) {
  clb_graph *g = l->graph;
  CLB_TRY(read_frequencies(l, "graph.rope_inv_freq", 1, &g->ropes[0].inv_freq));
  CLB_TRY(read_long_rope(l));
  CLB_TRY(read_more_ropes(l));
  if (!clb_spec_i64(l->container, "bos_id", &g->bos_id)) return bad_key(l, "bos_id", "i64");
  if (!clb_spec_u64_array(l->container, "eos_ids", &g->eos_ids, &g->n_eos)) {
    return bad_key(l, "eos_ids", "array of u64");
  }
  return read_layers(l);
}

// ---------------------------------------------------------------------------------------------------------------------
// Tensors

static const struct {
  uint16_t role;
  const char *name;
} ROLE_NAMES[] = {
    {CLB_ROLE_TOKEN_EMBD, "token_embd"},
    {CLB_ROLE_OUTPUT, "output"},
    {CLB_ROLE_OUTPUT_NORM, "output_norm"},
    {CLB_ROLE_ROPE_FACTORS, "rope_factors"},
    {CLB_ROLE_ATTN_NORM, "attn_norm"},
    {CLB_ROLE_ATTN_Q, "attn_q"},
    {CLB_ROLE_ATTN_K, "attn_k"},
    {CLB_ROLE_ATTN_V, "attn_v"},
    {CLB_ROLE_ATTN_O, "attn_o"},
    {CLB_ROLE_ATTN_Q_BIAS, "attn_q_bias"},
    {CLB_ROLE_ATTN_K_BIAS, "attn_k_bias"},
    {CLB_ROLE_ATTN_V_BIAS, "attn_v_bias"},
    {CLB_ROLE_ATTN_O_BIAS, "attn_o_bias"},
    {CLB_ROLE_ATTN_Q_NORM, "attn_q_norm"},
    {CLB_ROLE_ATTN_K_NORM, "attn_k_norm"},
    {CLB_ROLE_FFN_NORM, "ffn_norm"},
    {CLB_ROLE_ROUTER, "router"},
    {CLB_ROLE_DENSE_GATE, "dense_gate"},
    {CLB_ROLE_DENSE_UP, "dense_up"},
    {CLB_ROLE_DENSE_DOWN, "dense_down"},
    {CLB_ROLE_SHARED_GATE, "shared_gate"},
    {CLB_ROLE_SHARED_UP, "shared_up"},
    {CLB_ROLE_SHARED_DOWN, "shared_down"},
    {CLB_ROLE_SHARED_ROUTER, "shared_router"},
    {CLB_ROLE_ATTN_GATE, "attn_gate"},
    {CLB_ROLE_ATTN_POST_NORM, "attn_post_norm"},
    {CLB_ROLE_ROUTER_SELECT_BIAS, "router_select_bias"},
    {CLB_ROLE_FFN_POST_NORM, "ffn_post_norm"},
    {CLB_ROLE_ATTN_Q_A, "attn_q_a"},
    {CLB_ROLE_ATTN_Q_A_NORM, "attn_q_a_norm"},
    {CLB_ROLE_ATTN_Q_B, "attn_q_b"},
    {CLB_ROLE_ATTN_KV_A, "attn_kv_a"},
    {CLB_ROLE_ATTN_KV_A_NORM, "attn_kv_a_norm"},
    {CLB_ROLE_ATTN_KV_B, "attn_kv_b"},
    {CLB_ROLE_ATTN_K_B, "attn_k_b"},
    {CLB_ROLE_ATTN_V_B, "attn_v_b"},
    {CLB_ROLE_ATTN_Q_A_BIAS, "attn_q_a_bias"},
    {CLB_ROLE_ATTN_KV_A_BIAS, "attn_kv_a_bias"},
    {CLB_ROLE_OUTPUT_BIAS, "output_bias"},
    {CLB_ROLE_OUTPUT_NORM_BIAS, "output_norm_bias"},
    {CLB_ROLE_ATTN_NORM_BIAS, "attn_norm_bias"},
    {CLB_ROLE_ATTN_SINKS, "attn_sinks"},
    {CLB_ROLE_FFN_NORM_BIAS, "ffn_norm_bias"},
    {CLB_ROLE_ROUTER_BIAS, "router_bias"},
};

static const char *role_name(uint16_t role) {
  for (size_t i = 0; i < COUNT(ROLE_NAMES); i++) {
    if (ROLE_NAMES[i].role == role) return ROLE_NAMES[i].name;
  }
  return "other";
}

static colibri_status wrong_shape(const loader *l, const clb_tensor *t, uint64_t rows, uint64_t cols) {
  char found[96] = "", expected[64];
  size_t used = 0;
  for (size_t i = 0; i < t->n_dims; i++) {
    used +=
        (size_t)snprintf(found + used, sizeof found - used, "%s%llu", i ? ", " : "", (unsigned long long)t->shape[i]);
  }
  if (rows) {
    snprintf(expected, sizeof expected, "%llu, %llu", (unsigned long long)rows, (unsigned long long)cols);
  } else {
    snprintf(expected, sizeof expected, "%llu", (unsigned long long)cols);
  }
  return clb_fail(l->error, COLIBRI_ERROR_FORMAT,
                  "tensor %.*s (%s, layer %d): expected shape [%s] by the spec, found [%s]", (int)t->name_bytes,
                  t->name, role_name(t->role), t->layer, expected, found);
}

// The tensor of a role: a matrix [rows, cols], or a vector [cols] when rows is 0.
static colibri_status find(const loader *l, const clb_tensor **out, uint16_t role, int32_t layer, uint64_t rows,
                           uint64_t cols) {
  const clb_tensor *t = clb_container_find(l->container, role, layer);
  if (!t || t->group == CLB_GROUP_OPTIONAL) {
    if (layer < 0) return clb_fail(l->error, COLIBRI_ERROR_FORMAT, "the tensor %s is missing", role_name(role));
    return clb_fail(l->error, COLIBRI_ERROR_FORMAT, "layer %d: the tensor %s is missing", layer, role_name(role));
  }
  uint64_t found_rows = t->n_dims == 1 ? 0 : 1, found_cols = t->shape[t->n_dims - 1];
  for (size_t i = 0; i + 1 < t->n_dims; i++) found_rows *= t->shape[i];  // below 2^63 by rule 15
  bool row_vector = role == CLB_ROLE_SHARED_ROUTER && found_rows == 1;   // [1, hidden] in Hugging Face form
  if (found_cols != cols || (found_rows != rows && !row_vector)) return wrong_shape(l, t, rows, cols);
  uint64_t row_bytes;
  const clb_type *type = clb_type_by_id(t->type);
  if (!type || !clb_row_bytes(type, cols, &row_bytes)) {
    return clb_fail(l->error, COLIBRI_ERROR_UNSUPPORTED, "tensor %.*s (%s, layer %d): type number %u is not executed",
                    (int)t->name_bytes, t->name, role_name(role), layer, t->type);
  }
  *out = t;
  return COLIBRI_OK;
}

// The projections of grouped-query attention.
static colibri_status find_gqa(const loader *l, clb_graph_layer *layer, int32_t i) {
  const clb_graph *g = l->graph;
  const uint64_t h = g->hidden, q = g->n_heads * g->head_dim, k = g->n_kv_heads * g->head_dim,
                 v = g->n_kv_heads * g->value_dim;
  CLB_TRY(find(l, &layer->q, CLB_ROLE_ATTN_Q, i, q, h));
  CLB_TRY(find(l, &layer->k, CLB_ROLE_ATTN_K, i, k, h));
  CLB_TRY(find(l, &layer->v, CLB_ROLE_ATTN_V, i, v, h));
  if (g->qkv_bias) {
    CLB_TRY(find(l, &layer->q_bias, CLB_ROLE_ATTN_Q_BIAS, i, 0, q));
    CLB_TRY(find(l, &layer->k_bias, CLB_ROLE_ATTN_K_BIAS, i, 0, k));
    CLB_TRY(find(l, &layer->v_bias, CLB_ROLE_ATTN_V_BIAS, i, 0, v));
  }
  if (g->qk_norm == CLB_QK_NORM_NONE || g->qk_norm == CLB_QK_NORM_L2) return COLIBRI_OK;
  bool full = g->qk_norm == CLB_QK_NORM_FULL;
  CLB_TRY(find(l, &layer->q_norm, CLB_ROLE_ATTN_Q_NORM, i, 0, full ? q : g->head_dim));
  return find(l, &layer->k_norm, CLB_ROLE_ATTN_K_NORM, i, 0, full ? k : g->head_dim);
}

// The projections of latent attention. kv_b holds for each head the rows of its keys, then those of its values; k_b
// and v_b are the same in two tensors, k_b transposed within each head.
static colibri_status find_mla(const loader *l, clb_graph_layer *layer, int32_t i) {
  const clb_graph *g = l->graph;
  const uint64_t h = g->hidden, q = g->n_heads * g->head_dim, nope = g->head_dim - g->rope_dim;
  if (g->q_lora > 0) {
    CLB_TRY(find(l, &layer->q_a, CLB_ROLE_ATTN_Q_A, i, g->q_lora, h));
    CLB_TRY(find(l, &layer->q_a_norm, CLB_ROLE_ATTN_Q_A_NORM, i, 0, g->q_lora));
    CLB_TRY(find(l, &layer->q, CLB_ROLE_ATTN_Q_B, i, q, g->q_lora));
    if (g->qkv_bias) CLB_TRY(find(l, &layer->q_a_bias, CLB_ROLE_ATTN_Q_A_BIAS, i, 0, g->q_lora));
  } else {
    CLB_TRY(find(l, &layer->q, CLB_ROLE_ATTN_Q, i, q, h));
  }
  CLB_TRY(find(l, &layer->kv_a, CLB_ROLE_ATTN_KV_A, i, g->kv_key_dim, h));
  if (g->qkv_bias) CLB_TRY(find(l, &layer->kv_a_bias, CLB_ROLE_ATTN_KV_A_BIAS, i, 0, g->kv_key_dim));
  CLB_TRY(find(l, &layer->kv_a_norm, CLB_ROLE_ATTN_KV_A_NORM, i, 0, g->kv_lora));
  if (!clb_container_find(l->container, CLB_ROLE_ATTN_K_B, i)) {
    return find(l, &layer->kv_b, CLB_ROLE_ATTN_KV_B, i, g->n_heads * (nope + g->value_dim), g->kv_lora);
  }
  CLB_TRY(find(l, &layer->k_b, CLB_ROLE_ATTN_K_B, i, g->n_heads * g->kv_lora, nope));
  return find(l, &layer->v_b, CLB_ROLE_ATTN_V_B, i, g->n_heads * g->value_dim, g->kv_lora);
}

static colibri_status find_attention(const loader *l, clb_graph_layer *layer, int32_t i) {
  const clb_graph *g = l->graph;
  const uint64_t h = g->hidden, out = g->n_heads * g->value_dim;
  CLB_TRY(g->attention == CLB_ATTENTION_MLA ? find_mla(l, layer, i) : find_gqa(l, layer, i));
  if (g->attention_gate) CLB_TRY(find(l, &layer->attn_gate, CLB_ROLE_ATTN_GATE, i, out, h));
  CLB_TRY(find(l, &layer->o, CLB_ROLE_ATTN_O, i, h, out));
  if (g->o_bias) CLB_TRY(find(l, &layer->o_bias, CLB_ROLE_ATTN_O_BIAS, i, 0, h));
  if (g->sinks) CLB_TRY(find(l, &layer->sinks, CLB_ROLE_ATTN_SINKS, i, 0, g->n_heads));
  return COLIBRI_OK;
}

static colibri_status find_norms(const loader *l, clb_graph_layer *layer, int32_t i) {
  const clb_graph *g = l->graph;
  const uint64_t h = g->hidden;
  if (g->pre_norm) {
    CLB_TRY(find(l, &layer->attn_norm, CLB_ROLE_ATTN_NORM, i, 0, h));
    CLB_TRY(find(l, &layer->ffn_norm, CLB_ROLE_FFN_NORM, i, 0, h));
  }
  if (g->pre_norm && g->norm == CLB_NORM_LAYER) {
    CLB_TRY(find(l, &layer->attn_norm_bias, CLB_ROLE_ATTN_NORM_BIAS, i, 0, h));
    CLB_TRY(find(l, &layer->ffn_norm_bias, CLB_ROLE_FFN_NORM_BIAS, i, 0, h));
  }
  if (!g->post_norm) return COLIBRI_OK;
  CLB_TRY(find(l, &layer->attn_post_norm, CLB_ROLE_ATTN_POST_NORM, i, 0, h));
  return find(l, &layer->ffn_post_norm, CLB_ROLE_FFN_POST_NORM, i, 0, h);
}

static colibri_status find_gated(const loader *l, clb_graph_layer *layer, int32_t i, uint16_t gate_role,
                                 uint64_t width) {
  const uint64_t h = l->graph->hidden;
  CLB_TRY(find(l, &layer->gate, gate_role, i, width, h));
  CLB_TRY(find(l, &layer->up, (uint16_t)(gate_role + 1), i, width, h));
  return find(l, &layer->down, (uint16_t)(gate_role + 2), i, h, width);
}

// Groups share the experts out evenly, have two of them if two are rated, and hold enough for the choice.
static colibri_status check_groups(const loader *l, const clb_graph_layer *layer, int32_t i) {
  const clb_graph *g = l->graph;
  if (g->router_groups == 1) return COLIBRI_OK;
  const uint64_t size = layer->n_experts / g->router_groups;
  const uint64_t least = g->router_group_score == CLB_GROUP_SCORE_TOP2 ? 2 : 1;
  if (layer->n_experts % g->router_groups == 0 && size >= least && g->top_k <= size * g->router_top_groups) {
    return COLIBRI_OK;
  }
  return clb_fail(l->error, COLIBRI_ERROR_FORMAT,
                  "layer %d: %llu experts in %llu groups, of which %llu are used, cannot give top_k = %llu", i,
                  (unsigned long long)layer->n_experts, (unsigned long long)g->router_groups,
                  (unsigned long long)g->router_top_groups, (unsigned long long)g->top_k);
}

static colibri_status find_moe(const loader *l, clb_graph_layer *layer, int32_t i) {
  clb_graph *g = l->graph;
  ptrdiff_t row = clb_container_row_of(l->container, 0, i);
  if (row < 0) return clb_fail(l->error, COLIBRI_ERROR_FORMAT, "layer %d: the expert index has no row for it", i);
  layer->row = (size_t)row;
  layer->n_experts = clb_container_row(l->container, layer->row)->n_experts;
  if (layer->n_experts > g->max_experts) g->max_experts = layer->n_experts;
  if (layer->n_experts < g->top_k) {
    return clb_fail(l->error, COLIBRI_ERROR_FORMAT, "layer %d: top_k = %llu of %llu experts", i,
                    (unsigned long long)g->top_k, (unsigned long long)layer->n_experts);
  }
  CLB_TRY(check_groups(l, layer, i));
  CLB_TRY(find(l, &layer->router, CLB_ROLE_ROUTER, i, layer->n_experts, g->hidden));
  if (g->router_bias) CLB_TRY(find(l, &layer->router_bias, CLB_ROLE_ROUTER_BIAS, i, 0, layer->n_experts));
  if (g->router_select_bias) CLB_TRY(find(l, &layer->select_bias, CLB_ROLE_ROUTER_SELECT_BIAS, i, 0, layer->n_experts));
  if (g->shared_width == 0) return COLIBRI_OK;
  CLB_TRY(find_gated(l, layer, i, CLB_ROLE_SHARED_GATE, g->shared_width));
  if (!g->shared_gated) return COLIBRI_OK;
  return find(l, &layer->shared_router, CLB_ROLE_SHARED_ROUTER, i, 0, g->hidden);
}

static bool layer_uses(const clb_graph_layer *layer, const clb_tensor *t) {
  const clb_tensor *const used[] = {
      layer->attn_norm,
      layer->q,
      layer->k,
      layer->v,
      layer->o,
      layer->q_bias,
      layer->k_bias,
      layer->v_bias,
      layer->o_bias,
      layer->q_norm,
      layer->k_norm,
      layer->ffn_norm,
      layer->router,
      layer->gate,
      layer->up,
      layer->down,
      layer->shared_router,
      layer->select_bias,
      layer->attn_gate,
      layer->attn_post_norm,
      layer->ffn_post_norm,
      layer->q_a,
      layer->q_a_norm,
      layer->q_a_bias,
      layer->kv_a,
      layer->kv_a_norm,
      layer->kv_a_bias,
      layer->kv_b,
      layer->k_b,
      layer->v_b,
      layer->attn_norm_bias,
      layer->ffn_norm_bias,
      layer->sinks,
      layer->router_bias,
  };
  for (size_t i = 0; i < COUNT(used); i++) {
    if (used[i] == t) return true;
  }
  return false;
}

// A bias that is there but switched off in the spec would be a silent fault, so every tensor needed at run time by its
// group must be one that is used. Rope factors are already part of graph.rope_inv_freq.
static colibri_status check_all_used(const loader *l) {
  const clb_graph *g = l->graph;
  for (size_t i = 0; i < clb_container_n_tensors(l->container); i++) {
    const clb_tensor *t = clb_container_tensor(l->container, i);
    if (t->group == CLB_GROUP_OPTIONAL || t->role == CLB_ROLE_ROPE_FACTORS) continue;
    bool used = t == g->token_embd || t == g->output || t == g->output_norm || t == g->output_norm_bias ||
                t == g->output_bias_of;
    if (t->layer >= 0 && (uint64_t)t->layer < g->n_layers) used = used || layer_uses(&g->layers[t->layer], t);
    if (!used) {
      return clb_fail(l->error, COLIBRI_ERROR_UNSUPPORTED,
                      "tensor %.*s (%s, layer %d): the graph of the spec has no use for it", (int)t->name_bytes,
                      t->name, role_name(t->role), t->layer);
    }
  }
  return COLIBRI_OK;
}

static colibri_status find_tensors(loader *l) {
  clb_graph *g = l->graph;
  CLB_TRY(find(l, &g->token_embd, CLB_ROLE_TOKEN_EMBD, -1, g->vocab, g->hidden));
  CLB_TRY(find(l, &g->output, CLB_ROLE_OUTPUT, -1, g->vocab, g->hidden));
  CLB_TRY(find(l, &g->output_norm, CLB_ROLE_OUTPUT_NORM, -1, 0, g->hidden));
  if (g->norm == CLB_NORM_LAYER) {
    CLB_TRY(find(l, &g->output_norm_bias, CLB_ROLE_OUTPUT_NORM_BIAS, -1, 0, g->hidden));
  }
  if (g->output_bias) CLB_TRY(find(l, &g->output_bias_of, CLB_ROLE_OUTPUT_BIAS, -1, 0, g->vocab));
  for (size_t i = 0; i < g->n_layers; i++) {
    clb_graph_layer *layer = &g->layers[i];
    CLB_TRY(find_norms(l, layer, (int32_t)i));
    CLB_TRY(find_attention(l, layer, (int32_t)i));
    if (layer->moe) {
      CLB_TRY(find_moe(l, layer, (int32_t)i));
    } else {
      CLB_TRY(find_gated(l, layer, (int32_t)i, CLB_ROLE_DENSE_GATE, g->dense_width));
    }
  }
  return check_all_used(l);
}

// ---------------------------------------------------------------------------------------------------------------------
// Experts

static colibri_status check_part(const loader *l, uint32_t layout, const clb_part *part) {
  if (part->permutation != 0) {
    return clb_fail(l->error, COLIBRI_ERROR_UNSUPPORTED, "layout %u: permutation %u is not known to this version",
                    layout, part->permutation);
  }
  uint64_t row_bytes;
  const clb_type *type = clb_type_by_id(part->type);
  if (!type || !clb_row_bytes(type, part->cols, &row_bytes)) {
    return clb_fail(l->error, COLIBRI_ERROR_UNSUPPORTED, "layout %u: type number %u is not executed", layout,
                    part->type);
  }
  return COLIBRI_OK;
}

static colibri_status check_layouts(const loader *l) {
  clb_graph *g = l->graph;
  for (size_t i = 0; i < clb_container_n_layouts(l->container); i++) {
    const clb_layout *layout = clb_container_layout(l->container, (uint32_t)i);
    for (size_t p = 0; p < layout->n_parts; p++) {
      CLB_TRY(check_part(l, (uint32_t)i, &layout->parts[p]));
      if (layout->parts[p].role > CLB_PART_DOWN) g->expert_bias = true;
      if (layout->parts[p].role == CLB_PART_GATE && layout->parts[p].rows > g->max_width) {
        g->max_width = layout->parts[p].rows;
      }
    }
  }
  if (g->max_width > MAX_WIDTH) {
    return clb_fail(l->error, COLIBRI_ERROR_UNSUPPORTED, "experts %llu wide are not executed by this version",
                    (unsigned long long)g->max_width);
  }
  return COLIBRI_OK;
}

colibri_status clb_graph_load(const clb_container *container, clb_graph *graph, clb_error error) {
  *graph = (clb_graph){0};
  loader l = {container, graph, error};
  CLB_TRY(check_executable(&l));
  CLB_TRY(check_keys_known(&l));
  CLB_TRY(read_switches(&l));
  CLB_TRY(read_sizes(&l));
  CLB_TRY(read_arrays(&l));
  CLB_TRY(find_tensors(&l));
  return check_layouts(&l);
}

void clb_graph_use_context(clb_graph *graph, uint64_t n_positions) {
  if (!graph->long_rope.inv_freq || n_positions <= graph->rope_original_context) return;
  graph->ropes[0] = graph->long_rope;
}

void clb_graph_free(clb_graph *graph) {
  free(graph->layers);
  *graph = (clb_graph){0};
}
