// The types of weights and the resident directory: rules 14 to 17.
#include <stdio.h>
#include <stdlib.h>

#include "blocks.h"
#include "container_internal.h"

enum {
  MAX_TENSORS = 1 << 14,
  TENSOR_ENTRY = 128,
};

// ---------------------------------------------------------------------------------------------------------------------
// Types: what blocks.h decodes, and what is only carried

typedef struct {
  uint32_t id, block_weights, block_bytes;
} type_size;

static const type_size kCarriedTypes[] = {
    {9, 32, 40},                                         // q8_1
    {15, 256, 292},                                      // q8_k
    {24, 1, 1},     {25, 1, 2}, {26, 1, 4}, {27, 1, 8},  // i8 ... i64
    {28, 1, 8},                                          // f64
    {41, 128, 18},                                       // q1_0
};

static bool find_type(uint32_t id, type_size *out) {
  const clb_type *type = clb_type_by_id(id);
  if (type != NULL) {
    *out = (type_size){id, type->block_weights, type->block_bytes};
    return true;
  }
  for (size_t i = 0; i < sizeof kCarriedTypes / sizeof kCarriedTypes[0]; i++) {
    if (kCarriedTypes[i].id == id) {
      *out = kCarriedTypes[i];
      return true;
    }
  }
  return false;
}

bool clb_size_of_shape(loader *r, int rule, const char *place, uint32_t type, const uint64_t *shape, size_t n_dims,
                       uint64_t *n_bytes) {
  type_size t;
  if (!find_type(type, &t))
    return clb_refuse(r, "rule %d: %s: type is %" PRIu32 ", expected a type of section 8", rule, place, type);
  uint64_t weights = 1;
  for (size_t i = 0; i < n_dims; i++) {
    if (shape[i] < 1 || shape[i] > kMaxDimension) {
      return clb_refuse(r, "rule %d: %s: shape[%zu] is %" PRIu64 ", expected 1 ... 2^48", rule, place, i, shape[i]);
    }
    if (__builtin_mul_overflow(weights, shape[i], &weights) || weights >= kMaxSize) {
      return clb_refuse(r, "rule %d: %s: the product of its shape is 2^63 or more", rule, place);
    }
  }
  if (shape[n_dims - 1] % t.block_weights != 0) {
    return clb_refuse(
        r, "rule %d: %s: its last dimension is %" PRIu64 ", expected a multiple of %" PRIu32 " for type %" PRIu32, rule,
        place, shape[n_dims - 1], t.block_weights, type);
  }
  if (__builtin_mul_overflow(weights / t.block_weights, (uint64_t)t.block_bytes, n_bytes) || *n_bytes >= kMaxSize) {
    return clb_refuse(r, "rule %d: %s: its size is 2^63 bytes or more", rule, place);
  }
  return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Resident directory

typedef struct {
  uint16_t first, last;
} role_range;

static const role_range kRoleRanges[] = {{0, 8}, {16, 28}, {30, 31}, {32, 35}, {38, 39}, {40, 42}, {48, 51}, {64, 73}};

static bool is_known_role(uint16_t role) {
  for (size_t i = 0; i < sizeof kRoleRanges / sizeof kRoleRanges[0]; i++) {
    if (role >= kRoleRanges[i].first && role <= kRoleRanges[i].last) return true;
  }
  return false;
}

static quoted tensor_name(const clb_tensor *t) {
  return clb_quote(t->name, t->name_bytes);
}

// The fields of entry i, and rules 14 to 17 as far as they concern one entry.
static bool parse_tensor(loader *r, size_t i, uint32_t name_at, const section *names) {
  const uint8_t *e = r->c->sections[SECTION_RESIDENT].p + 16 + i * TENSOR_ENTRY;
  clb_tensor *t = &r->c->tensors[i];
  uint32_t name_offset = get_u32(e + 72), name_bytes = get_u32(e + 76);
  if (name_bytes < 1 || name_bytes > MAX_NAME || name_offset != name_at || name_bytes > names->bytes - name_at) {
    return clb_refuse(r,
                      "rule 16: tensor %zu: its name has %" PRIu32 " bytes at %" PRIu32
                      ", expected 1 ... 255 at %" PRIu32 " and within the names",
                      i, name_bytes, name_offset, name_at);
  }
  *t = (clb_tensor){.name = (const char *)names->p + name_offset,
                    .name_bytes = name_bytes,
                    .type = get_u32(e + 16),
                    .role = get_u16(e + 20),
                    .group = get_u16(e + 22),
                    .layer = get_i32(e + 24),
                    .alias = (get_u32(e + 28) & 1) != 0,
                    .alias_of = get_u32(e + 32),
                    .n_dims = get_u32(e + 36),
                    .offset = get_u64(e),
                    .bytes = get_u64(e + 8),
                    .crc32c = get_u32(e + 80),
                    .sha256 = e + 96};
  for (size_t d = 0; d < 4; d++) t->shape[d] = get_u64(e + 40 + 8 * d);
  quoted q = tensor_name(t);
  if (!clb_is_utf8((const uint8_t *)t->name, name_bytes))
    return clb_refuse(r, "rule 16: tensor %zu: the name %s is not UTF-8", i, q.s);
  if (t->n_dims < 1 || t->n_dims > 4) {
    return clb_refuse(r, "rule 15: tensor %s: n_dims is %" PRIu32 ", expected 1 ... 4", q.s, t->n_dims);
  }
  for (uint32_t d = t->n_dims; d < 4; d++) {
    if (t->shape[d] != 0) return clb_refuse(r, "rule 15: tensor %s: unused shape[%" PRIu32 "] is not zero", q.s, d);
  }
  char place[160];
  snprintf(place, sizeof place, "tensor %s", q.s);
  uint64_t bytes = 0;
  if (!clb_size_of_shape(r, 15, place, t->type, t->shape, t->n_dims, &bytes)) return false;
  if (t->bytes != bytes) {
    return clb_refuse(r, "rule 15: tensor %s: bytes is %" PRIu64 ", expected %" PRIu64 " from its type and shape", q.s,
                      t->bytes, bytes);
  }
  if (get_u32(e + 28) > 1 || !is_zero(e + 84, 12) || (!t->alias && t->alias_of != 0)) {
    return clb_refuse(
        r, "rule 14: tensor %s: an undescribed flag or byte is not zero, or alias_of is set without being an alias",
        q.s);
  }
  return true;
}

// Rules 14 (group order) and 17, given the tensor before.
static bool check_tensor_place(loader *r, size_t i) {
  const clb_tensor *t = &r->c->tensors[i];
  quoted q = tensor_name(t);
  if (t->group < CLB_GROUP_EVERY_TOKEN || t->group > CLB_GROUP_OPTIONAL || (i > 0 && t->group < t[-1].group)) {
    return clb_refuse(r, "rule 14: tensor %s: group is %u, expected 1 ... 3 and not below the one before it", q.s,
                      t->group);
  }
  uint64_t n_layers;
  if (__builtin_add_overflow(clb_spec_seen_u64(r->c, "n_layers"), clb_spec_seen_u64(r->c, "n_mtp_layers"), &n_layers))
    n_layers = UINT64_MAX;
  if (t->layer < -1 || (t->layer >= 0 && (uint64_t)t->layer >= n_layers)) {
    return clb_refuse(r, "rule 17: tensor %s: layer is %" PRId32 ", expected -1 or less than %" PRIu64, q.s, t->layer,
                      n_layers);
  }
  if (t->group != CLB_GROUP_OPTIONAL && (t->role == CLB_ROLE_OTHER || !is_known_role(t->role))) {
    return clb_refuse(r, "rule 17: tensor %s: role is %u, expected one of the table other than 0 in group %u", q.s,
                      t->role, t->group);
  }
  return true;
}

// Rule 14: an alias repeats what its target says.
static bool check_alias(loader *r, size_t i) {
  const clb_container *c = r->c;
  const clb_tensor *t = &c->tensors[i];
  quoted q = tensor_name(t);
  if (t->alias_of >= c->n_tensors || c->tensors[t->alias_of].alias) {
    return clb_refuse(r,
                      "rule 14: tensor %s: alias_of is %" PRIu32 ", expected an entry below %zu that is not an alias",
                      q.s, t->alias_of, c->n_tensors);
  }
  const clb_tensor *target = &c->tensors[t->alias_of];
  if (t->offset != target->offset || t->bytes != target->bytes || t->type != target->type ||
      t->n_dims != target->n_dims || memcmp(t->shape, target->shape, sizeof t->shape) != 0 ||
      t->crc32c != target->crc32c || memcmp(t->sha256, target->sha256, 32) != 0) {
    return clb_refuse(
        r,
        "rule 14: tensor %s: offset, bytes, type, shape or checksums differ from those of the tensor it is an "
        "alias of",
        q.s);
  }
  return true;
}

// Rule 14: tensors follow each other from data_offset to expert_offset.
static bool check_tensor_sequence(loader *r) {
  const clb_container *c = r->c;
  uint64_t end = c->data_offset;
  uint16_t group = 0;
  for (size_t i = 0; i < c->n_tensors; i++) {
    const clb_tensor *t = &c->tensors[i];
    if (t->alias) {
      if (!check_alias(r, i)) return false;
      continue;
    }
    uint64_t expected = align_up(end, t->group != group ? c->alignment : 64);
    if (t->offset != expected || expected > c->expert_offset || t->bytes > c->expert_offset - expected) {
      quoted q = tensor_name(t);
      return clb_refuse(r,
                        "rule 14: tensor %s: %" PRIu64 " bytes at offset %" PRIu64 ", expected at %" PRIu64
                        " and within expert_offset, %" PRIu64,
                        q.s, t->bytes, t->offset, expected, c->expert_offset);
    }
    end = t->offset + t->bytes;
    group = t->group;
  }
  if (align_up(end, c->alignment) != c->expert_offset) {
    return clb_refuse(
        r, "rule 14: page 0: expert_offset is %" PRIu64 ", expected %" PRIu64 ", the aligned end of the last tensor",
        c->expert_offset, align_up(end, c->alignment));
  }
  return true;
}

typedef struct {
  const char *p;
  uint32_t n_bytes;
} name_ref;

static int compare_name_refs(const void *a, const void *b) {
  const name_ref *x = a, *y = b;
  return clb_compare_names(x->p, x->n_bytes, y->p, y->n_bytes);
}

static bool check_names_unique(loader *r) {
  const clb_container *c = r->c;
  if (c->n_tensors == 0) return true;
  name_ref *names = malloc(c->n_tensors * sizeof *names);
  if (names == NULL) return clb_refuse_memory(r, "tensor names");
  for (size_t i = 0; i < c->n_tensors; i++) names[i] = (name_ref){c->tensors[i].name, c->tensors[i].name_bytes};
  qsort(names, c->n_tensors, sizeof *names, compare_name_refs);
  bool ok = true;
  for (size_t i = 1; i < c->n_tensors && ok; i++) {
    if (compare_name_refs(&names[i - 1], &names[i]) == 0) {
      quoted q = clb_quote(names[i].p, names[i].n_bytes);
      ok = clb_refuse(r, "rule 16: two tensors have the name %s", q.s);
    }
  }
  free(names);
  return ok;
}

static int compare_roles(const void *a, const void *b) {
  const role_key *x = a, *y = b;
  if (x->role != y->role) return x->role < y->role ? -1 : 1;
  return (x->layer > y->layer) - (x->layer < y->layer);
}

// Rule 17: a role once per layer; leaves the table for clb_container_find.
static bool index_roles(loader *r) {
  clb_container *c = r->c;
  c->by_role = malloc((c->n_tensors > 0 ? c->n_tensors : 1) * sizeof *c->by_role);
  if (c->by_role == NULL) return clb_refuse_memory(r, "tensor roles");
  for (size_t i = 0; i < c->n_tensors; i++) {
    const clb_tensor *t = &c->tensors[i];
    if (t->role == CLB_ROLE_OTHER || !is_known_role(t->role)) continue;
    c->by_role[c->n_by_role++] = (role_key){t->role, t->layer, (uint32_t)i};
  }
  qsort(c->by_role, c->n_by_role, sizeof *c->by_role, compare_roles);
  for (size_t i = 1; i < c->n_by_role; i++) {
    if (compare_roles(&c->by_role[i - 1], &c->by_role[i]) == 0) {
      quoted q = tensor_name(&c->tensors[c->by_role[i].tensor]), p = tensor_name(&c->tensors[c->by_role[i - 1].tensor]);
      return clb_refuse(r, "rule 17: tensors %s and %s both have role %u in layer %" PRId32, p.s, q.s,
                        c->by_role[i].role, c->by_role[i].layer);
    }
  }
  return true;
}

bool clb_parse_directory(loader *r) {
  clb_container *c = r->c;
  const section *s = &c->sections[SECTION_RESIDENT];
  if (s->bytes < 16)
    return clb_refuse(r, "rule 16: resident directory: the section has %" PRIu64 " bytes, expected 16", s->bytes);
  uint32_t n_tensors = get_u32(s->p);
  uint64_t names_bytes = get_u64(s->p + 8), names_at = 16 + (uint64_t)n_tensors * TENSOR_ENTRY;
  if (n_tensors > MAX_TENSORS || get_u32(s->p + 4) != TENSOR_ENTRY || names_at > s->bytes ||
      names_bytes != s->bytes - names_at) {
    return clb_refuse(r,
                      "rule 16: resident directory: %" PRIu32 " entries of %" PRIu32 " bytes and %" PRIu64
                      " bytes of names, expected at most 16384, 128, and together the section's %" PRIu64,
                      n_tensors, get_u32(s->p + 4), names_bytes, s->bytes);
  }
  c->tensors = calloc(n_tensors > 0 ? n_tensors : 1, sizeof *c->tensors);
  if (c->tensors == NULL) return clb_refuse_memory(r, "resident directory");
  c->n_tensors = n_tensors;
  section names = {s->p + names_at, names_bytes};
  uint32_t name_at = 0;
  for (size_t i = 0; i < n_tensors; i++) {
    if (!parse_tensor(r, i, name_at, &names) || !check_tensor_place(r, i)) return false;
    name_at += c->tensors[i].name_bytes;
  }
  if (name_at != names_bytes) {
    return clb_refuse(r, "rule 16: resident directory: the names end at %" PRIu32 ", expected %" PRIu64, name_at,
                      names_bytes);
  }
  return check_names_unique(r) && index_roles(r) && check_tensor_sequence(r);
}

// ---------------------------------------------------------------------------------------------------------------------
// What a container holds

size_t clb_container_n_tensors(const clb_container *c) {
  return c->n_tensors;
}

const clb_tensor *clb_container_tensor(const clb_container *c, size_t i) {
  return i < c->n_tensors ? &c->tensors[i] : NULL;
}

const clb_tensor *clb_container_find(const clb_container *c, uint16_t role, int32_t layer) {
  if (c->n_by_role == 0) return NULL;
  role_key key = {role, layer, 0};
  const role_key *found = bsearch(&key, c->by_role, c->n_by_role, sizeof key, compare_roles);
  return found == NULL ? NULL : &c->tensors[found->tensor];
}
