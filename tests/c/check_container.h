// What must hold of every container that was opened: a caller relies on it without checks of its own.
#ifndef CLB_TEST_CHECK_CONTAINER_H
#define CLB_TEST_CHECK_CONTAINER_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "container.h"

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) {                                                       \
      fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      abort();                                                                \
    }                                                                         \
  } while (0)

static volatile uint64_t sink;

static void touch(const void *p, uint64_t n) {
  const uint8_t *bytes = p;
  uint64_t sum = 0;
  for (uint64_t i = 0; i < n; i++) sum += bytes[i];
  sink += sum;
}

static void check_tensors(const clb_container *c) {
  for (size_t i = 0; i < clb_container_n_tensors(c); i++) {
    const clb_tensor *t = clb_container_tensor(c, i);
    CHECK(t->offset >= clb_container_data_offset(c));
    CHECK(t->offset <= clb_container_expert_offset(c));
    CHECK(t->bytes <= clb_container_expert_offset(c) - t->offset);
    CHECK(t->n_dims >= 1 && t->n_dims <= 4 && t->offset % 64 == 0);
    CHECK(!t->alias || (t->alias_of < clb_container_n_tensors(c) && !clb_container_tensor(c, t->alias_of)->alias));
    touch(t->name, t->name_bytes);
    touch(t->sha256, 32);
    const clb_tensor *found = clb_container_find(c, t->role, t->layer);
    CHECK(found == t || t->role == CLB_ROLE_OTHER || t->group == CLB_GROUP_OPTIONAL);
  }
  CHECK(clb_container_tensor(c, clb_container_n_tensors(c)) == NULL);
}

static void check_layouts(const clb_container *c) {
  CHECK(clb_container_n_layouts(c) > 0);
  for (size_t l = 0; l < clb_container_n_layouts(c); l++) {
    const clb_layout *layout = clb_container_layout(c, (uint32_t)l);
    CHECK(layout->n_parts >= 3 && layout->n_parts <= CLB_MAX_PARTS);
    uint64_t end = 0;
    for (uint32_t i = 0; i < layout->n_parts; i++) {
      const clb_part *part = &layout->parts[i];
      CHECK(part->offset >= end && part->offset % 64 == 0 && part->bytes > 0);
      CHECK(part->offset <= layout->bytes && part->bytes <= layout->bytes - part->offset);
      end = part->offset + part->bytes;
    }
  }
  CHECK(clb_container_layout(c, (uint32_t)clb_container_n_layouts(c)) == NULL);
}

static void check_blocks(const clb_container *c) {
  uint64_t total = clb_container_expert_offset(c);
  for (size_t r = 0; r < clb_container_n_rows(c); r++) {
    const clb_row *row = clb_container_row(c, r);
    clb_block block;
    CHECK(row->n_experts >= 1 && row->n_experts <= clb_container_n_columns(c));
    CHECK(clb_container_row_of(c, row->stream, row->layer) == (ptrdiff_t)r);
    for (size_t e = 0; e < row->n_experts; e++) {
      CHECK(clb_container_block(c, r, e, &block));
      CHECK(block.offset % clb_container_alignment(c) == 0);
      CHECK(block.offset >= clb_container_expert_offset(c) && block.offset < clb_container_file_size(c));
      CHECK(clb_padded_bytes(c, block.bytes) <= clb_container_file_size(c) - block.offset);
      CHECK(clb_container_layout(c, block.layout)->bytes == block.bytes);
      touch(block.sha256, 32);
      total += clb_padded_bytes(c, block.bytes);
    }
    CHECK(!clb_container_block(c, r, row->n_experts, &block));
  }
  CHECK(total == clb_container_file_size(c));  // with rule 20: no overlap, no gap
  CHECK(clb_container_row(c, clb_container_n_rows(c)) == NULL);
  CHECK(clb_container_row_of(c, 2, 0) == -1);
}

// A key is found by its name, and by the getter of its type only.
static void check_key(const clb_container *c, const clb_kv *kv) {
  char key[129] = {0};
  const char *text = NULL;
  const uint64_t *integers = NULL;
  const double *numbers = NULL;
  size_t n = 0;
  CHECK(kv->key_bytes >= 1 && kv->key_bytes < sizeof key);
  memcpy(key, kv->key, kv->key_bytes);
  CHECK(clb_spec_find(c, key) == kv);
  CHECK(clb_spec_u64(c, key, &(uint64_t){0}) == (kv->type == CLB_KV_U64));
  CHECK(clb_spec_i64(c, key, &(int64_t){0}) == (kv->type == CLB_KV_I64));
  CHECK(clb_spec_f64(c, key, &(double){0}) == (kv->type == CLB_KV_F64));
  CHECK(clb_spec_bool(c, key, &(bool){0}) == (kv->type == CLB_KV_BOOL));
  CHECK(clb_spec_string(c, key, &text, &n) == (kv->type == CLB_KV_STRING));
  if (text != NULL) touch(text, n);
  CHECK(clb_spec_u64_array(c, key, &integers, &n) == (kv->type == CLB_KV_U64_ARRAY));
  for (size_t i = 0; integers != NULL && i < n; i++) sink += integers[i];
  CHECK(clb_spec_f64_array(c, key, &numbers, &n) == (kv->type == CLB_KV_F64_ARRAY));
  for (size_t i = 0; numbers != NULL && i < n; i++) sink += (uint64_t)(numbers[i] > 0);
}

static void check_spec(const clb_container *c) {
  uint64_t n_layers = 0, n_bytes = 0;
  const uint64_t *array = NULL;
  size_t n = 0;
  CHECK(clb_spec_u64(c, "n_layers", &n_layers) && !clb_spec_f64(c, "n_layers", &(double){0}));
  CHECK(clb_spec_u64_array(c, "moe_layers", &array, &n) && n == n_layers);
  for (size_t i = 0; i < n; i++) CHECK(array[i] <= 1);
  for (size_t i = 0; i < clb_spec_n_keys(c); i++) check_key(c, clb_spec_at(c, i));
  CHECK(clb_spec_at(c, clb_spec_n_keys(c)) == NULL && clb_spec_find(c, "") == NULL);
  const uint8_t *blob = clb_container_blob(c, "tokenizer.json", &n_bytes);
  if (blob != NULL) touch(blob, n_bytes);
  CHECK(clb_container_blob(c, "no such blob", &n_bytes) == NULL);
}

static void check_container(const clb_container *c) {
  check_tensors(c);
  check_layouts(c);
  check_blocks(c);
  check_spec(c);
}

#endif
