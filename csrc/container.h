/* The reader of the container format (docs/format.md), for C.
 *
 * The whole of page 0 and the metadata is read into memory once and validated there; after
 * clb_container_open succeeds every offset, size and count it hands out is in bounds, so callers
 * need no checks of their own. Payload bytes are not read here (the expert store does that).
 *
 * Everything here is single-threaded during open and immutable (hence thread-safe) afterwards.
 */
#ifndef COLIBRI_CONTAINER_H
#define COLIBRI_CONTAINER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#pragma GCC visibility push(default)  // part of the shared library
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { CLB_PAGE0_BYTES = 4096, CLB_MAX_ALIGNMENT = 2 << 20, CLB_MAX_PARTS = 8 };

enum clb_role {
  CLB_ROLE_OTHER = 0,
  CLB_ROLE_TOKEN_EMBD = 1,
  CLB_ROLE_OUTPUT = 2,
  CLB_ROLE_OUTPUT_NORM = 3,
  CLB_ROLE_ROPE_FACTORS = 4,
  CLB_ROLE_ROPE_FACTORS_SHORT = 5,
  CLB_ROLE_ROPE_FACTORS_LONG = 6,
  CLB_ROLE_OUTPUT_BIAS = 7,
  CLB_ROLE_OUTPUT_NORM_BIAS = 8,
  CLB_ROLE_ATTN_NORM = 16,
  CLB_ROLE_ATTN_Q = 17,
  CLB_ROLE_ATTN_K = 18,
  CLB_ROLE_ATTN_V = 19,
  CLB_ROLE_ATTN_O = 20,
  CLB_ROLE_ATTN_Q_BIAS = 21,
  CLB_ROLE_ATTN_K_BIAS = 22,
  CLB_ROLE_ATTN_V_BIAS = 23,
  CLB_ROLE_ATTN_O_BIAS = 24,
  CLB_ROLE_ATTN_Q_NORM = 25,
  CLB_ROLE_ATTN_K_NORM = 26,
  CLB_ROLE_ATTN_GATE = 27,
  CLB_ROLE_ATTN_POST_NORM = 28,
  CLB_ROLE_ATTN_NORM_BIAS = 30,
  CLB_ROLE_ATTN_SINKS = 31,
  CLB_ROLE_FFN_NORM = 32,
  CLB_ROLE_ROUTER = 33,
  CLB_ROLE_ROUTER_SELECT_BIAS = 34,
  CLB_ROLE_FFN_POST_NORM = 35,
  CLB_ROLE_FFN_NORM_BIAS = 38,
  CLB_ROLE_ROUTER_BIAS = 39,
  CLB_ROLE_DENSE_GATE = 40,
  CLB_ROLE_DENSE_UP = 41,
  CLB_ROLE_DENSE_DOWN = 42,
  CLB_ROLE_SHARED_GATE = 48,
  CLB_ROLE_SHARED_UP = 49,
  CLB_ROLE_SHARED_DOWN = 50,
  CLB_ROLE_SHARED_ROUTER = 51,
  CLB_ROLE_ATTN_Q_A = 64,
  CLB_ROLE_ATTN_Q_A_NORM = 65,
  CLB_ROLE_ATTN_Q_B = 66,
  CLB_ROLE_ATTN_KV_A = 67,
  CLB_ROLE_ATTN_KV_A_NORM = 68,
  CLB_ROLE_ATTN_KV_B = 69,
  CLB_ROLE_ATTN_K_B = 70,
  CLB_ROLE_ATTN_V_B = 71,
  CLB_ROLE_ATTN_Q_A_BIAS = 72,
  CLB_ROLE_ATTN_KV_A_BIAS = 73,
};

enum clb_group { CLB_GROUP_EVERY_TOKEN = 1, CLB_GROUP_PER_ROW = 2, CLB_GROUP_OPTIONAL = 3 };

enum clb_part_role {
  CLB_PART_GATE = 1,
  CLB_PART_UP = 2,
  CLB_PART_DOWN = 3,
  CLB_PART_GATE_BIAS = 4,
  CLB_PART_UP_BIAS = 5,
  CLB_PART_DOWN_BIAS = 6,
};

typedef struct {
  const char *name;  // UTF-8, not NUL-terminated
  uint32_t name_bytes;
  uint32_t type;  // GGML type number
  uint16_t role, group;
  int32_t layer;  // -1: none
  bool alias;
  uint32_t alias_of;
  uint32_t n_dims;
  uint64_t shape[4];  // row-major
  uint64_t offset, bytes;
  uint32_t crc32c;
  const uint8_t *sha256;
} clb_tensor;

typedef struct {
  uint16_t role, permutation;
  uint32_t type;
  uint64_t offset, bytes;  // offset within the payload
  uint64_t rows, cols;
} clb_part;

typedef struct {
  uint64_t bytes;
  uint32_t n_parts;
  clb_part parts[CLB_MAX_PARTS];
} clb_layout;

typedef struct {
  int32_t layer;
  uint32_t stream;  // 0 main, 1 MTP
  uint32_t n_experts;
} clb_row;

typedef struct {
  uint64_t offset, bytes;  // payload; the block on disk spans clb_padded_bytes
  uint32_t layout, rank;
  uint32_t crc32c;
  const uint8_t *sha256;
} clb_block;

enum clb_kv_type {
  CLB_KV_U64 = 1,
  CLB_KV_I64 = 2,
  CLB_KV_F64 = 3,
  CLB_KV_BOOL = 4,
  CLB_KV_STRING = 5,
  CLB_KV_U64_ARRAY = 6,
  CLB_KV_F64_ARRAY = 7,
  CLB_KV_STRING_ARRAY = 8,
};

typedef struct {
  const char *key;  // not NUL-terminated
  uint32_t key_bytes;
  uint32_t type;         // enum clb_kv_type
  uint32_t n;            // elements; strings: bytes
  const uint8_t *value;  // little-endian, 8-aligned
} clb_kv;

typedef struct clb_container clb_container;

/* Opens and validates everything of the file but payload bytes and block padding (rules 1-20, 23, 24).
 * Returns NULL and fills `error` (one line, always NUL-terminated) on failure. */
clb_container *clb_container_open(const char *path, char *error, size_t error_bytes);
/* The same over memory (for fuzzing): `metadata` holds the file's first bytes, up to data_offset at least. */
clb_container *clb_container_open_memory(const uint8_t *metadata, size_t n_bytes, uint64_t file_size, char *error,
                                         size_t error_bytes);
void clb_container_close(clb_container *c);

int clb_container_fd(const clb_container *c);            // buffered descriptor, -1 over memory
const char *clb_container_path(const clb_container *c);  // as it was opened, "" over memory
uint64_t clb_container_alignment(const clb_container *c);
uint64_t clb_container_file_size(const clb_container *c);
uint64_t clb_container_data_offset(const clb_container *c);
uint64_t clb_container_expert_offset(const clb_container *c);
const uint8_t *clb_container_id(const clb_container *c);  // 32 bytes

size_t clb_container_n_tensors(const clb_container *c);
const clb_tensor *clb_container_tensor(const clb_container *c, size_t i);
/* The tensor of a role in a layer (-1 for those outside layers), or NULL. */
const clb_tensor *clb_container_find(const clb_container *c, uint16_t role, int32_t layer);

size_t clb_container_n_rows(const clb_container *c);
const clb_row *clb_container_row(const clb_container *c, size_t row);
/* Row index of a layer in a stream, or -1 (a dense layer). */
ptrdiff_t clb_container_row_of(const clb_container *c, uint32_t stream, int32_t layer);
size_t clb_container_n_columns(const clb_container *c);
/* False when the row has no such expert: the lookup is refused. */
bool clb_container_block(const clb_container *c, size_t row, size_t expert, clb_block *out);
size_t clb_container_n_layouts(const clb_container *c);
const clb_layout *clb_container_layout(const clb_container *c, uint32_t layout);
uint64_t clb_padded_bytes(const clb_container *c, uint64_t bytes);  // align(bytes, alignment)

/* Spec. Getters return false when the key is missing or of another type. */
size_t clb_spec_n_keys(const clb_container *c);
const clb_kv *clb_spec_at(const clb_container *c, size_t i);
const clb_kv *clb_spec_find(const clb_container *c, const char *key);
bool clb_spec_u64(const clb_container *c, const char *key, uint64_t *out);
bool clb_spec_i64(const clb_container *c, const char *key, int64_t *out);
bool clb_spec_f64(const clb_container *c, const char *key, double *out);
bool clb_spec_bool(const clb_container *c, const char *key, bool *out);
bool clb_spec_string(const clb_container *c, const char *key, const char **out, size_t *n_bytes);
bool clb_spec_u64_array(const clb_container *c, const char *key, const uint64_t **out, size_t *n);
bool clb_spec_f64_array(const clb_container *c, const char *key, const double **out, size_t *n);

/* Verbatim source file carried in the container, or NULL. */
const uint8_t *clb_container_blob(const clb_container *c, const char *name, uint64_t *n_bytes);

/* The section of tokenizer tables, or NULL. Its checksums hold; its contents are for colibri_tokenizer.h. */
const uint8_t *clb_container_tokenizer(const clb_container *c, uint64_t *n_bytes);

#ifdef __cplusplus
}
#endif

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#endif
