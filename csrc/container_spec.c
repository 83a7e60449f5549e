// The key-value sections, the spec and the blobs: rules 11 to 13.
#include <stdio.h>
#include <stdlib.h>

#include "container_internal.h"

enum {
  KV_MAX_ENTRIES = 4096,
  KV_MAX_BYTES = 8 << 20,
  KV_MAX_ELEMENTS = 1 << 18,  // of all arrays of a section
  KV_MAX_KEY = 128,
  MAX_BLOBS = 1024,
  BLOB_ENTRY = 32,
};

// ---------------------------------------------------------------------------------------------------------------------
// Key-value sections

// Rule 11: the value of one entry, `left` bytes from the section's end. Its unpadded size goes to *n_bytes.
static bool check_kv_value(loader *r, const char *place, uint32_t type, uint32_t n, const uint8_t *value, uint64_t left,
                           uint64_t *n_bytes) {
  if (type < CLB_KV_U64 || type > CLB_KV_STRING_ARRAY) {
    return clb_refuse(r, "rule 11: %s: type is %" PRIu32 ", expected 1 ... 8", place, type);
  }
  if (type <= CLB_KV_BOOL && n != 1) return clb_refuse(r, "rule 11: %s: n is %" PRIu32 ", expected 1", place, n);
  *n_bytes = type == CLB_KV_STRING ? n : type == CLB_KV_STRING_ARRAY ? (uint64_t)n * 4 : (uint64_t)n * 8;
  if (*n_bytes > left) {
    return clb_refuse(
        r, "rule 11: %s: the value needs %" PRIu64 " bytes, expected at most the %" PRIu64 " left in the section",
        place, *n_bytes, left);
  }
  if (type == CLB_KV_BOOL && get_u64(value) > 1) {
    return clb_refuse(r, "rule 11: %s: the bool is %" PRIu64 ", expected 0 or 1", place, get_u64(value));
  }
  if (type == CLB_KV_F64 || type == CLB_KV_F64_ARRAY) {
    for (uint32_t i = 0; i < n; i++) {
      if ((get_u64(value + (uint64_t)8 * i) >> 52 & 0x7ff) == 0x7ff) {
        return clb_refuse(r, "rule 11: %s: number %" PRIu32 " is not finite", place, i);
      }
    }
  }
  if (type == CLB_KV_STRING && !clb_is_utf8_without_nul(value, n)) {
    return clb_refuse(r, "rule 11: %s: the string is not UTF-8 without NUL", place);
  }
  if (type != CLB_KV_STRING_ARRAY) return true;

  uint64_t at = 0;
  for (uint32_t i = 0; i < n; i++) {
    if (left - at < 4 || get_u32(value + at) > left - at - 4) {
      return clb_refuse(r, "rule 11: %s: string %" PRIu32 " reaches past the section", place, i);
    }
    uint32_t string_bytes = get_u32(value + at);
    if (!clb_is_utf8_without_nul(value + at + 4, string_bytes)) {
      return clb_refuse(r, "rule 11: %s: string %" PRIu32 " is not UTF-8 without NUL", place, i);
    }
    at += 4 + (uint64_t)string_bytes;
  }
  *n_bytes = at;
  return true;
}

static bool check_key(const uint8_t *key, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    bool ok = (key[i] >= 'a' && key[i] <= 'z') || (key[i] >= '0' && key[i] <= '9') || key[i] == '_' || key[i] == '.';
    if (!ok) return false;
  }
  return true;
}

// The entry at *at, which moves behind it.
static bool parse_kv_entry(loader *r, const char *name, const section *s, uint32_t i, uint64_t *at, clb_kv *out) {
  const uint8_t *e = s->p + *at;
  uint64_t left = s->bytes - *at;
  if (left < 8) return clb_refuse(r, "rule 11: %s: entry %" PRIu32 " reaches past the section", name, i);
  uint32_t key_bytes = get_u16(e);
  if (key_bytes < 1 || key_bytes > KV_MAX_KEY || e[3] != 0) {
    return clb_refuse(
        r, "rule 11: %s: entry %" PRIu32 ": key_bytes is %" PRIu32 " and byte 3 is %u, expected 1 ... 128 and 0", name,
        i, key_bytes, e[3]);
  }
  uint64_t value_at = 8 + align_up(key_bytes, 8);
  if (value_at > left) return clb_refuse(r, "rule 11: %s: entry %" PRIu32 " reaches past the section", name, i);
  quoted q = clb_quote(e + 8, key_bytes);
  if (!check_key(e + 8, key_bytes)) {
    return clb_refuse(r, "rule 11: %s: entry %" PRIu32 ": the key %s has a character outside a-z 0-9 _ .", name, i,
                      q.s);
  }
  char place[160];
  snprintf(place, sizeof place, "%s: key %s", name, q.s);
  *out = (clb_kv){(const char *)(e + 8), key_bytes, e[2], get_u32(e + 4), e + value_at};
  uint64_t value_bytes = 0;
  if (!check_kv_value(r, place, out->type, out->n, out->value, left - value_at, &value_bytes)) return false;
  uint64_t padded = align_up(value_bytes, 8);
  if (padded > left - value_at) return clb_refuse(r, "rule 11: %s: its padding reaches past the section", place);
  if (!is_zero(e + 8 + key_bytes, value_at - 8 - key_bytes) ||
      !is_zero(out->value + value_bytes, padded - value_bytes)) {
    return clb_refuse(r, "rule 11: %s: its padding is not zero", place);
  }
  *at += value_at + padded;
  return true;
}

bool clb_parse_kv(loader *r, enum section_kind kind, clb_kv **out, size_t *n_out) {
  const section *s = &r->c->sections[kind];
  const char *name = clb_section_names[kind];
  if (s->bytes < 8 || s->bytes > KV_MAX_BYTES) {
    return clb_refuse(r, "rule 11: %s: the section has %" PRIu64 " bytes, expected 8 ... 8 MiB", name, s->bytes);
  }
  uint32_t count = get_u32(s->p);
  if (count > KV_MAX_ENTRIES || get_u32(s->p + 4) != 0) {
    return clb_refuse(
        r, "rule 11: %s: count is %" PRIu32 " and the word behind it %" PRIu32 ", expected at most 4096 and 0", name,
        count, get_u32(s->p + 4));
  }
  clb_kv *kvs = calloc(count > 0 ? count : 1, sizeof *kvs);
  if (kvs == NULL) return clb_refuse_memory(r, name);
  *out = kvs;
  *n_out = count;
  uint64_t at = 8, n_elements = 0;
  for (uint32_t i = 0; i < count; i++) {
    if (!parse_kv_entry(r, name, s, i, &at, &kvs[i])) return false;
    n_elements += kvs[i].type >= CLB_KV_U64_ARRAY ? kvs[i].n : 0;
    if (n_elements > KV_MAX_ELEMENTS) {
      return clb_refuse(r, "rule 11: %s: the arrays have %" PRIu64 " elements, expected at most %d", name, n_elements,
                        KV_MAX_ELEMENTS);
    }
    if (i > 0 && clb_compare_names(kvs[i - 1].key, kvs[i - 1].key_bytes, kvs[i].key, kvs[i].key_bytes) >= 0) {
      quoted q = clb_quote(kvs[i].key, kvs[i].key_bytes);
      return clb_refuse(r, "rule 11: %s: key %s does not come after the one before it", name, q.s);
    }
  }
  if (at != s->bytes) {
    return clb_refuse(r, "rule 11: %s: the entries end at %" PRIu64 ", expected the end of the section, %" PRIu64, name,
                      at, s->bytes);
  }
  return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// The spec

// Section 7 of the document.
static const struct {
  const char *key;
  enum clb_kv_type type;
  bool optional;
} kSpecKeys[] = {
    {"family", CLB_KV_STRING, false},
    {"source_kind", CLB_KV_STRING, false},
    {"executable", CLB_KV_BOOL, false},
    {"executable_lacks", CLB_KV_STRING, true},
    {"tokenizer_lacks", CLB_KV_STRING, true},
    {"order", CLB_KV_STRING, false},
    {"n_layers", CLB_KV_U64, false},
    {"n_mtp_layers", CLB_KV_U64, false},
    {"hidden_size", CLB_KV_U64, false},
    {"vocab_size", CLB_KV_U64, false},
    {"context_length", CLB_KV_U64, false},
    {"top_k", CLB_KV_U64, false},
    {"expert_width", CLB_KV_U64, false},
    {"total_params", CLB_KV_U64, false},
    {"active_params", CLB_KV_U64, false},
    {"moe_layers", CLB_KV_U64_ARRAY, false},
    {"tokenizer", CLB_KV_STRING, false},
    {"bos_id", CLB_KV_I64, false},
    {"eos_ids", CLB_KV_U64_ARRAY, false},
    {"n_tokens", CLB_KV_U64, false},
    {"graph.attention", CLB_KV_STRING, false},
    {"graph.n_heads", CLB_KV_U64, false},
    {"graph.n_kv_heads", CLB_KV_U64, false},
    {"graph.head_dim", CLB_KV_U64, false},
    {"graph.attention_scale", CLB_KV_F64, false},
    {"graph.qkv_bias", CLB_KV_BOOL, false},
    {"graph.o_bias", CLB_KV_BOOL, false},
    {"graph.qk_norm", CLB_KV_STRING, false},
    {"graph.clip_qkv", CLB_KV_F64, false},
    {"graph.windows", CLB_KV_U64_ARRAY, false},
    {"graph.norm", CLB_KV_STRING, false},
    {"graph.norm_eps", CLB_KV_F64, false},
    {"graph.rope_dim", CLB_KV_U64, false},
    {"graph.rope_pairing", CLB_KV_STRING, false},
    {"graph.rope_inv_freq", CLB_KV_F64_ARRAY, false},
    {"graph.rope_factor", CLB_KV_F64, false},
    {"graph.activation", CLB_KV_STRING, false},
    {"graph.router_score", CLB_KV_STRING, false},
    {"graph.router_norm", CLB_KV_BOOL, false},
    {"graph.router_scale", CLB_KV_F64, false},
    {"graph.shared_width", CLB_KV_U64, false},
    {"graph.shared_gated", CLB_KV_BOOL, false},
    {"graph.dense_width", CLB_KV_U64, false},
    {"graph.rope_inv_freq_long", CLB_KV_F64_ARRAY, true},
    {"graph.rope_factor_long", CLB_KV_F64, true},
    {"graph.rope_original_context", CLB_KV_U64, true},
    {"graph.residual_scale", CLB_KV_F64, true},
    {"graph.logit_divisor", CLB_KV_F64, true},
    {"graph.activation_alpha", CLB_KV_F64, true},
    {"graph.activation_limit", CLB_KV_F64, true},
    {"graph.sinks", CLB_KV_BOOL, true},
    {"graph.router_bias", CLB_KV_BOOL, true},
    {"graph.output_bias", CLB_KV_BOOL, true},
    {"graph.qk_norm_after_rope", CLB_KV_BOOL, true},
    {"graph.experts_scale_input", CLB_KV_BOOL, true},
    {"graph.chunks", CLB_KV_U64_ARRAY, true},
    {"graph.router_jitter", CLB_KV_F64, true},
    {"graph.temperature_floor", CLB_KV_F64, true},
    {"graph.temperature_scale", CLB_KV_F64, true},
    {"graph.value_dim", CLB_KV_U64, true},
    {"graph.q_lora", CLB_KV_U64, true},
    {"graph.kv_lora", CLB_KV_U64, true},
    {"graph.latent_norm_eps", CLB_KV_F64, true},
    {"graph.attention_gate", CLB_KV_BOOL, true},
    {"graph.rope_layers", CLB_KV_U64_ARRAY, true},
    {"graph.pre_norm", CLB_KV_BOOL, true},
    {"graph.post_norm", CLB_KV_BOOL, true},
    {"graph.embedding_scale", CLB_KV_F64, true},
    {"graph.router_select_bias", CLB_KV_BOOL, true},
    {"graph.router_groups", CLB_KV_U64, true},
    {"graph.router_top_groups", CLB_KV_U64, true},
    {"graph.router_group_score", CLB_KV_STRING, true},
    {"graph.router_norm_add", CLB_KV_F64, true},
    {"graph.router_norm_min", CLB_KV_F64, true},
    {"graph.attention_softcap", CLB_KV_F64, true},
    {"graph.logit_softcap", CLB_KV_F64, true},
    {"graph.rope_of_layer", CLB_KV_U64_ARRAY, true},
    {"graph.rope_inv_freq_more", CLB_KV_F64_ARRAY, true},
    {"graph.rope_factor_more", CLB_KV_F64_ARRAY, true},
};

uint64_t clb_spec_seen_u64(const clb_container *c, const char *key) {
  uint64_t x = 0;
  (void)clb_spec_u64(c, key, &x);
  return x;
}

bool clb_check_spec(loader *r) {
  for (size_t i = 0; i < sizeof kSpecKeys / sizeof kSpecKeys[0]; i++) {
    const clb_kv *kv = clb_spec_find(r->c, kSpecKeys[i].key);
    if (kv == NULL && !kSpecKeys[i].optional) {
      return clb_refuse(r, "rule 12: spec: there is no key \"%s\"", kSpecKeys[i].key);
    }
    if (kv != NULL && kv->type != (uint32_t)kSpecKeys[i].type) {
      return clb_refuse(r, "rule 12: spec: key \"%s\" has type %" PRIu32 ", expected %d", kSpecKeys[i].key, kv->type,
                        (int)kSpecKeys[i].type);
    }
  }
  const uint64_t *moe_layers = NULL;
  size_t n_moe_layers = 0;
  (void)clb_spec_u64_array(r->c, "moe_layers", &moe_layers, &n_moe_layers);
  if (n_moe_layers != clb_spec_seen_u64(r->c, "n_layers")) {
    return clb_refuse(r, "rule 12: spec: moe_layers has %zu entries, expected n_layers, %" PRIu64, n_moe_layers,
                      clb_spec_seen_u64(r->c, "n_layers"));
  }
  for (size_t i = 0; i < n_moe_layers; i++) {
    if (moe_layers[i] > 1) {
      return clb_refuse(r, "rule 12: spec: moe_layers[%zu] is %" PRIu64 ", expected 0 or 1", i, moe_layers[i]);
    }
  }
  return true;
}

size_t clb_spec_n_keys(const clb_container *c) {
  return c->n_spec;
}
const clb_kv *clb_spec_at(const clb_container *c, size_t i) {
  return i < c->n_spec ? &c->spec[i] : NULL;
}

const clb_kv *clb_spec_find(const clb_container *c, const char *key) {
  size_t low = 0, high = c->n_spec, key_bytes = strlen(key);
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    int order = clb_compare_names(c->spec[middle].key, c->spec[middle].key_bytes, key, key_bytes);
    if (order == 0) return &c->spec[middle];
    if (order < 0) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return NULL;
}

static const clb_kv *find_typed(const clb_container *c, const char *key, enum clb_kv_type type) {
  const clb_kv *kv = clb_spec_find(c, key);
  return kv != NULL && kv->type == (uint32_t)type ? kv : NULL;
}

bool clb_spec_u64(const clb_container *c, const char *key, uint64_t *out) {
  const clb_kv *kv = find_typed(c, key, CLB_KV_U64);
  if (kv != NULL) *out = get_u64(kv->value);
  return kv != NULL;
}

bool clb_spec_i64(const clb_container *c, const char *key, int64_t *out) {
  const clb_kv *kv = find_typed(c, key, CLB_KV_I64);
  if (kv != NULL) memcpy(out, kv->value, sizeof *out);
  return kv != NULL;
}

bool clb_spec_f64(const clb_container *c, const char *key, double *out) {
  const clb_kv *kv = find_typed(c, key, CLB_KV_F64);
  if (kv != NULL) memcpy(out, kv->value, sizeof *out);
  return kv != NULL;
}

bool clb_spec_bool(const clb_container *c, const char *key, bool *out) {
  const clb_kv *kv = find_typed(c, key, CLB_KV_BOOL);
  if (kv != NULL) *out = get_u64(kv->value) == 1;
  return kv != NULL;
}

bool clb_spec_string(const clb_container *c, const char *key, const char **out, size_t *n_bytes) {
  const clb_kv *kv = find_typed(c, key, CLB_KV_STRING);
  if (kv == NULL) return false;
  *out = (const char *)kv->value;
  *n_bytes = kv->n;
  return true;
}

// Values lie at multiples of 8 of the metadata, which malloc aligned.
bool clb_spec_u64_array(const clb_container *c, const char *key, const uint64_t **out, size_t *n) {
  const clb_kv *kv = find_typed(c, key, CLB_KV_U64_ARRAY);
  if (kv == NULL) return false;
  *out = (const uint64_t *)(const void *)kv->value;
  *n = kv->n;
  return true;
}

bool clb_spec_f64_array(const clb_container *c, const char *key, const double **out, size_t *n) {
  const clb_kv *kv = find_typed(c, key, CLB_KV_F64_ARRAY);
  if (kv == NULL) return false;
  *out = (const double *)(const void *)kv->value;
  *n = kv->n;
  return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Blobs

// Rule 13: entry i; its name starts at *name_at, the data before it end at *data_at. All names lie within the section.
static bool check_blob(loader *r, uint32_t i, uint64_t *name_at, uint64_t *data_at) {
  const section *s = &r->c->sections[SECTION_BLOBS];
  const uint8_t *e = s->p + 8 + (uint64_t)i * BLOB_ENTRY;
  uint32_t name_offset = get_u32(e), name_bytes = get_u32(e + 4);
  uint64_t offset = get_u64(e + 8), bytes = get_u64(e + 16);
  if (name_bytes < 1 || name_bytes > MAX_NAME || get_u64(e + 24) != 0) {
    return clb_refuse(
        r, "rule 13: blob %" PRIu32 ": name_bytes is %" PRIu32 ", expected 1 ... 255 (and a zero last field)", i,
        name_bytes);
  }
  if (name_offset != *name_at) {
    return clb_refuse(r, "rule 13: blob %" PRIu32 ": its name is at %" PRIu32 ", expected at %" PRIu64, i, name_offset,
                      *name_at);
  }
  const uint8_t *name = s->p + name_offset;
  quoted q = clb_quote(name, name_bytes);
  if (!clb_is_utf8_without_nul(name, name_bytes) || memchr(name, '/', name_bytes) != NULL ||
      memchr(name, '\\', name_bytes) != NULL) {
    return clb_refuse(r, "rule 13: blob %" PRIu32 ": the name %s is not UTF-8 without NUL, / and \\", i, q.s);
  }
  if (i > 0 && clb_compare_names(s->p + get_u32(e - BLOB_ENTRY), get_u32(e - BLOB_ENTRY + 4), name, name_bytes) >= 0) {
    return clb_refuse(r, "rule 13: blob %" PRIu32 ": the name %s does not come after the one before it", i, q.s);
  }
  uint64_t expected = align_up(*data_at, 64);
  if (offset != expected || expected > s->bytes || bytes > s->bytes - expected) {
    return clb_refuse(r,
                      "rule 13: blob %s: %" PRIu64 " bytes at %" PRIu64 ", expected at %" PRIu64
                      " and within the section's %" PRIu64,
                      q.s, bytes, offset, expected, s->bytes);
  }
  if (!is_zero(s->p + *data_at, expected - *data_at))
    return clb_refuse(r, "rule 13: the gap before blob %s is not zero", q.s);
  *name_at += name_bytes;
  *data_at = offset + bytes;
  return true;
}

bool clb_check_blobs(loader *r) {
  const section *s = &r->c->sections[SECTION_BLOBS];
  if (s->bytes < 8)
    return clb_refuse(r, "rule 13: blobs: the section has %" PRIu64 " bytes, expected at least 8", s->bytes);
  uint32_t count = get_u32(s->p);
  uint64_t entries_end = 8 + (uint64_t)count * BLOB_ENTRY;
  if (count > MAX_BLOBS || get_u32(s->p + 4) != 0 || entries_end > s->bytes) {
    return clb_refuse(
        r, "rule 13: blobs: count is %" PRIu32 ", expected at most 1024 and what the section holds (and a zero word)",
        count);
  }
  uint64_t names_end = entries_end;
  for (uint32_t i = 0; i < count; i++) {
    names_end += get_u32(s->p + 8 + (uint64_t)i * BLOB_ENTRY + 4);
  }
  if (names_end > s->bytes) return clb_refuse(r, "rule 13: blobs: the names reach past the section");
  uint64_t name_at = entries_end, data_at = names_end;
  for (uint32_t i = 0; i < count; i++) {
    if (!check_blob(r, i, &name_at, &data_at)) return false;
  }
  if (data_at != s->bytes) {
    return clb_refuse(r,
                      "rule 13: blobs: the last datum ends at %" PRIu64 ", expected the end of the section, %" PRIu64,
                      data_at, s->bytes);
  }
  return true;
}

const uint8_t *clb_container_blob(const clb_container *c, const char *name, uint64_t *n_bytes) {
  const section *s = &c->sections[SECTION_BLOBS];
  uint32_t count = get_u32(s->p);
  for (uint32_t i = 0; i < count; i++) {
    const uint8_t *e = s->p + 8 + (uint64_t)i * BLOB_ENTRY;
    if (clb_compare_names(s->p + get_u32(e), get_u32(e + 4), name, strlen(name)) == 0) {
      *n_bytes = get_u64(e + 16);
      return s->p + get_u64(e + 8);
    }
  }
  return NULL;
}
