// Every block type on buffers of exactly the right size, for tests/test_blocks.py: built with sanitizers it shows that
// no kernel reads past a row, and its last line, a CRC of all results, must be the same on every CPU.
//
// The best kernels are compared with the scalar ones bit for bit; results that are NaN only have to be NaN in both.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "blocks.h"
#include "crc32c.h"
#include "sha256.h"

#define CHECK(condition, what)                                                          \
  do {                                                                                  \
    if (!(condition)) {                                                                 \
      fprintf(stderr, "%s:%d: %s: not so: %s\n", __FILE__, __LINE__, what, #condition); \
      exit(1);                                                                          \
    }                                                                                   \
  } while (0)

static uint64_t seed = 88172645463325252u;
static uint32_t all_results;  // CRC

static uint32_t random_u32(void) {
  seed ^= seed << 13;
  seed ^= seed >> 7;
  seed ^= seed << 17;
  return (uint32_t)(seed >> 32);
}

static void *allocate(size_t n_bytes) {
  void *p = malloc(n_bytes);
  CHECK(p, "malloc");
  return p;
}

static float *random_floats(size_t n) {
  float *x = allocate(n * sizeof *x);
  for (size_t i = 0; i < n; i++) x[i] = (float)(int32_t)random_u32() * 0x1p-31f;
  return x;
}

// NaN as one value: which one comes out is not promised.
static void settle(float *x, size_t n) {
  for (size_t i = 0; i < n; i++) {
    if (isnan(x[i])) x[i] = NAN;
  }
}

static void expect_same(float *a, float *b, size_t n, const char *what) {
  settle(a, n);
  settle(b, n);
  CHECK(memcmp(a, b, n * sizeof *a) == 0, what);
  all_results = clb_crc32c(all_results, a, n * sizeof *a);
}

// n_bytes that end where the allocation ends, so that they start at an odd address as well as at an even one.
typedef struct {
  uint8_t *allocation, *bytes;
} source;

static source random_source(size_t n_bytes, size_t offset) {
  source s = {allocate(n_bytes + offset), NULL};
  s.bytes = s.allocation + offset;
  for (size_t i = 0; i < n_bytes; i++) s.bytes[i] = (uint8_t)random_u32();
  return s;
}

static void check_decode(const clb_type *t, size_t n, size_t offset) {
  uint64_t n_bytes;
  CHECK(clb_row_bytes(t, n, &n_bytes), t->name);
  source s = random_source(n_bytes, offset);
  float *a = allocate(n * sizeof *a), *b = allocate(n * sizeof *b);
  CHECK(clb_dequantize(t->id, s.bytes, a, n) == 0, t->name);
  CHECK(clb_dequantize_best(t->id, s.bytes, b, n) == 0, t->name);
  expect_same(a, b, n, t->name);
  uint64_t first = 0;
  while (first < n && isfinite(a[first])) first++;
  CHECK(clb_find_nonfinite(t->id, s.bytes, n) == (first < n ? first : UINT64_MAX), t->name);
  free(s.allocation);
  free(a);
  free(b);
}

static void check_matmul(const clb_type *t, size_t n_cols, size_t n_rows, size_t n_tokens, size_t offset) {
  uint64_t row_bytes;
  CHECK(clb_row_bytes(t, n_cols, &row_bytes), t->name);
  source w = random_source(row_bytes * n_rows, offset);
  float *x = random_floats(n_cols * n_tokens), *a = allocate(n_rows * n_tokens * sizeof *a);
  float *b = allocate(n_rows * n_tokens * sizeof *b), *row = allocate(n_cols * sizeof *row);
  clb_matmul_rows(clb_kernels_scalar(), t->id, w.bytes, row_bytes, n_cols, 0, n_rows, x, n_cols, n_tokens, a, n_rows);
  clb_matmul_rows(clb_kernels_best(), t->id, w.bytes, row_bytes, n_cols, 0, n_rows, x, n_cols, n_tokens, b, n_rows);
  expect_same(a, b, n_rows * n_tokens, t->name);
  for (size_t r = 0; r < n_rows; r++) {
    clb_dequantize(t->id, w.bytes + r * row_bytes, row, n_cols);
    for (size_t i = 0; i < n_tokens; i++)
      b[i * n_rows + r] = clb_dot_f32(clb_kernels_best(), row, x + i * n_cols, n_cols);
  }
  expect_same(a, b, n_rows * n_tokens, t->name);
  free(w.allocation);
  free(x);
  free(a);
  free(b);
  free(row);
}

static void check_type(const clb_type *t) {
  static const size_t tokens[] = {1, 2, 3, 4, 7, 25};
  size_t unit = t->block_weights > 1 ? t->block_weights : 1;
  for (size_t n = 0; n < 6; n++) check_decode(t, n * unit, n % 4);
  for (size_t offset = 0; offset < 4; offset++) check_decode(t, unit > 1 ? 9 * unit : 4096 + 41 + offset, offset);
  for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
    check_matmul(t, unit > 1 ? unit : 40, 1 + i, tokens[i], i % 4);
    check_matmul(t, unit > 1 ? 1024 + unit : 1024 + 45, 5, tokens[i], i % 3);
  }
  if (unit == 1) check_matmul(t, 7, 3, 5, 1);
}

// 7 rows of n sums over 5 rows of n; the scalar kernel is calls of axpy.
static void check_mix(const clb_kernels *scalar, const clb_kernels *best, const float *x, size_t n) {
  enum { ROWS = 7, TERMS = 5 };
  float *src = random_floats(TERMS * n), *a = allocate(ROWS * n * sizeof *a), *b = allocate(ROWS * n * sizeof *b);
  float scale[ROWS * TERMS];
  for (size_t i = 0; i < ROWS * TERMS; i++) scale[i] = src[i % (TERMS * n)] * 0.7f;
  for (size_t i = 0; i < ROWS * n; i++) a[i] = b[i] = x[i % n];
  clb_mix_f32(scalar, a, n, scale, TERMS, src, TERMS, ROWS, n);
  clb_mix_f32(best, b, n, scale, TERMS, src, TERMS, ROWS, n);
  expect_same(a, b, ROWS * n, "mix");
  memcpy(b, x, n * sizeof *b);
  for (size_t i = 0; i < TERMS; i++) clb_axpy_f32(best, b, src + i * n, scale[TERMS + i], n);
  expect_same(a + n, b, n, "mix and axpy");
  free(src);
  free(a);
  free(b);
}

static void check_vectors(size_t n) {
  const clb_kernels *scalar = clb_kernels_scalar(), *best = clb_kernels_best();
  float *x = random_floats(n), *y = random_floats(n), *a = allocate(n * sizeof *a), *b = allocate(n * sizeof *b);
  for (size_t i = 0; i < n; i++) x[i] *= 100;
  a[0] = clb_dot_f32(scalar, x, y, n), b[0] = clb_dot_f32(best, x, y, n);
  expect_same(a, b, 1, "dot");
  a[0] = clb_sum_f32(scalar, x, n), b[0] = clb_sum_f32(best, x, n);
  expect_same(a, b, 1, "sum");
  clb_exp_f32(scalar, a, x, 1.5f, n), clb_exp_f32(best, b, x, 1.5f, n);
  expect_same(a, b, n, "exp");
  clb_axpy_f32(scalar, a, y, 0.3f, n), clb_axpy_f32(best, b, y, 0.3f, n);
  expect_same(a, b, n, "axpy");
  check_mix(scalar, best, x, n);
  clb_silu_mul(scalar, a, x, y, n), clb_silu_mul(best, b, x, y, n);
  expect_same(a, b, n, "silu_mul");
  uint16_t *c = allocate(n * sizeof *c), *d = allocate(n * sizeof *d);
  clb_f32_to_f16(scalar, c, x, n), clb_f32_to_f16(best, d, x, n);
  CHECK(memcmp(c, d, n * sizeof *c) == 0, "to f16");
  all_results = clb_crc32c(all_results, c, n * sizeof *c);
  clb_f32_to_bf16(scalar, c, x, n), clb_f32_to_bf16(best, d, x, n);
  CHECK(memcmp(c, d, n * sizeof *c) == 0, "to bf16");
  all_results = clb_crc32c(all_results, c, n * sizeof *c);
  free(x);
  free(y);
  free(a);
  free(b);
  free(c);
  free(d);
}

static void check_sums(size_t n_bytes) {
  source s = random_source(n_bytes, n_bytes % 8);
  CHECK(clb_crc32c(7, s.bytes, n_bytes) == clb_crc32c_portable(7, s.bytes, n_bytes), "crc32c");
  uint8_t a[32], b[32];
  clb_sha256_state state;
  clb_sha256_init_portable(&state);
  clb_sha256_update(&state, s.bytes, n_bytes);
  clb_sha256_final(&state, a);
  clb_sha256(s.bytes, n_bytes, b);
  CHECK(memcmp(a, b, sizeof a) == 0, "sha256");
  all_results = clb_crc32c(all_results, a, sizeof a);
  free(s.allocation);
}

int main(void) {
  for (size_t i = 0; i < clb_type_count(); i++) check_type(clb_type_at(i));
  for (size_t n = 1; n < 80; n++) check_vectors(n);
  for (size_t n = 0; n < 200; n++) check_sums(n);
  check_sums(20011);
  CHECK(clb_crc32c(0, "123456789", 9) == 0xE3069283, "crc32c");
  printf("%s %08x\n", clb_kernels_name(clb_kernels_best()), all_results);
  return 0;
}
