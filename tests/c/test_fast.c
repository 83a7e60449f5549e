// Every fast kernel on buffers of exactly the right size, for tests/test_fast_kernels.py: built with sanitizers it
// shows that no kernel reads past a row, and its last line, a CRC of all results, must be the same on every CPU.
//
// Each set this CPU has is compared with the scalar one bit for bit, and products of a few rows and tokens with those
// of all at once; results that are NaN only have to be NaN in both.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "crc32c.h"
#include "fast_internal.h"

#define CHECK(condition, what)                                                          \
  do {                                                                                  \
    if (!(condition)) {                                                                 \
      fprintf(stderr, "%s:%d: %s: not so: %s\n", __FILE__, __LINE__, what, #condition); \
      exit(1);                                                                          \
    }                                                                                   \
  } while (0)

enum { MAX_TOKENS = 9 };

static const char *const set_names[] = {"avx2", "avx_vnni", "avx512", "neon", "neon_dot"};
static uint64_t seed = 88172645463325252u;
static uint32_t all_results;  // CRC

static uint32_t random_u32(void) {
  seed ^= seed << 13;
  seed ^= seed >> 7;
  seed ^= seed << 17;
  return (uint32_t)(seed >> 32);
}

static void *allocate(size_t n_bytes) {
  void *p = aligned_alloc(64, (n_bytes + 63) / 64 * 64);
  CHECK(p, "aligned_alloc");
  return p;
}

// Activations of many magnitudes, among them zeros, subnormals, and in one block of about 30 a NaN or an infinity.
static float *random_activations(size_t n) {
  static const float special[] = {NAN, INFINITY, -INFINITY};
  float *x = allocate(n * sizeof *x);
  for (size_t i = 0; i < n; i += 32) {
    uint32_t kind = random_u32() % 64;
    float scale = kind == 0 ? 0.0f : kind == 1 ? 0x1p-140f : kind == 2 ? 0x1p100f : 1.0f;
    for (size_t j = 0; j < 32; j++) x[i + j] = scale * ((float)(int32_t)random_u32() * 0x1p-31f);
    if (kind == 3 && random_u32() % 2 == 0) x[i + random_u32() % 32] = special[random_u32() % 3];
    if (kind == 4) x[i] = -2, x[i + 1] = 2;
  }
  return x;
}

// NaN as one value: which one comes out is not promised.
static void settle(float *y, size_t n) {
  for (size_t i = 0; i < n; i++) {
    if (isnan(y[i])) y[i] = NAN;
  }
}

// Random codes; scales are often extreme, NaN or infinite, since no scale is set to anything.
static void fill_row(const clb_type *t, uint8_t *w, size_t n_bytes) {
  for (size_t i = 0; i < n_bytes; i++) w[i] = (uint8_t)random_u32();
  bool ordinary = random_u32() % 4 != 0;
  for (size_t b = 0; ordinary && b < n_bytes; b += t->block_bytes) {
    if (t->scale_kind == CLB_SCALE_E8M0) w[b] = (uint8_t)(100 + random_u32() % 30);
    for (uint32_t i = 0; i < t->n_scales; i++) w[b + t->scale_offset[i] + 1] &= 0xBB;
  }
}

typedef struct {
  const clb_type *type;
  size_t n_cols, row_bytes, n_rows, n_tokens, stride;
  uint8_t *allocation, *w;
  float *x;
  uint8_t *qx;
} problem;

// Weights end where the allocation ends, so that a read past the last row is seen; they start at any address.
static problem random_problem(const clb_type *t, size_t n_cols, size_t n_rows, size_t n_tokens) {
  problem p = {.type = t, .n_cols = n_cols, .n_rows = n_rows, .n_tokens = n_tokens};
  p.row_bytes = n_cols / t->block_weights * t->block_bytes;
  size_t n_bytes = n_rows * p.row_bytes, shift = random_u32() % 8;
  p.allocation = malloc(n_bytes + shift);
  CHECK(p.allocation, "malloc");
  p.w = p.allocation + shift;
  for (size_t r = 0; r < n_rows; r++) fill_row(t, p.w + r * p.row_bytes, p.row_bytes);
  p.x = random_activations(n_tokens * n_cols);
  p.stride = clb_fast_x_bytes(clb_fast_kind(t->id), n_cols);
  p.qx = allocate(n_tokens * p.stride);
  memset(p.qx, 0xFF, n_tokens * p.stride);
  return p;
}

static void free_problem(problem *p) {
  free(p->allocation);
  free(p->x);
  free(p->qx);
}

// The scales of group g of a quantized row.
static float *scales_of(clb_fast_x_kind kind, void *row, size_t g, float **sums) {
  clb_fast_x8 *x8 = row;
  clb_fast_x16 *x16 = row;
  *sums = kind == CLB_FAST_X_Q16 ? x16[g].s : x8[g].s;
  return kind == CLB_FAST_X_Q16 ? x16[g].d : x8[g].d;
}

static void quantize(const clb_fast_kernels *f, const problem *p) {
  const clb_fast_x_kind kind = clb_fast_kind(p->type->id);
  for (size_t t = 0; t < p->n_tokens; t++) {
    uint8_t *row = p->qx + t * p->stride;
    clb_fast_quantize_with(f, kind, row, p->x + t * p->n_cols, p->n_cols);
    for (size_t g = 0; g * CLB_FAST_GROUP < p->n_cols; g++) {
      float *s, *d = scales_of(kind, row, g, &s);
      settle(d, 8);
      settle(s, 8);
    }
  }
}

static void multiply(const clb_fast_kernels *f, const problem *p, size_t row0, size_t row1, size_t token0,
                     size_t token1, float *y) {
  int done =
      clb_fast_product_with(f, p->type->id, p->w, p->row_bytes, p->n_cols, row0, row1, p->qx + token0 * p->stride,
                            p->stride, token1 - token0, y + token0 * p->n_rows, p->n_rows);
  CHECK(done == 0, p->type->name);
}

static void check_set(const clb_fast_kernels *f, const problem *p, const float *expected) {
  size_t n = p->n_rows * p->n_tokens;
  float *y = allocate(n * sizeof *y);
  for (size_t step = 1; step <= p->n_rows; step += 3) {
    for (size_t i = 0; i < n; i++) y[i] = -1;
    for (size_t r = 0; r < p->n_rows; r += step) {
      size_t row1 = r + step < p->n_rows ? r + step : p->n_rows;
      size_t split = (r + step) % (p->n_tokens + 1);
      multiply(f, p, r, row1, 0, split, y);
      multiply(f, p, r, row1, split, p->n_tokens, y);
    }
    settle(y, n);
    CHECK(memcmp(y, expected, n * sizeof *y) == 0, f->name);
  }
  free(y);
}

static void check_problem(const clb_type *t, size_t n_cols, size_t n_rows, size_t n_tokens) {
  const clb_fast_kernels *scalar = clb_fast_by_name("scalar");
  problem p = random_problem(t, n_cols, n_rows, n_tokens);
  size_t n = n_rows * n_tokens, n_bytes = n_tokens * p.stride;
  float *expected = allocate(n * sizeof *expected);
  uint8_t *qx = allocate(n_bytes);
  quantize(scalar, &p);
  memcpy(qx, p.qx, n_bytes);
  multiply(scalar, &p, 0, n_rows, 0, n_tokens, expected);
  settle(expected, n);
  check_set(scalar, &p, expected);
  for (size_t i = 0; i < sizeof set_names / sizeof *set_names; i++) {
    const clb_fast_kernels *f = clb_fast_by_name(set_names[i]);
    if (!f) continue;
    quantize(f, &p);
    CHECK(memcmp(qx, p.qx, n_bytes) == 0, f->name);
    check_set(f, &p, expected);
  }
  all_results = clb_crc32c(all_results, expected, n * sizeof *expected);
  all_results = clb_crc32c(all_results, qx, n_bytes);
  free(expected);
  free(qx);
  free_problem(&p);
}

static void check_type(const clb_type *t) {
  static const size_t n_cols[] = {32, 64, 96, 224, 256, 288, 768, 1056, 2048};
  static const size_t n_rows[] = {1, 2, 7, 8, 9, 15, 16, 17};
  for (size_t i = 0; i < sizeof n_cols / sizeof *n_cols; i++) {
    if (n_cols[i] % t->block_weights != 0) continue;
    for (size_t r = 0; r < sizeof n_rows / sizeof *n_rows; r++) {
      check_problem(t, n_cols[i], n_rows[r], 1 + random_u32() % MAX_TOKENS);
    }
  }
  check_problem(t, t->block_weights * 2, 2, 131);  // more tokens than a tile
}

static void check_rows_of_a_cache(uint32_t type, size_t block_bytes) {
  for (size_t n = 32; n <= 256; n += 32) {
    size_t n_bytes = n / 32 * block_bytes;
    float *x = random_activations(n);
    uint8_t *expected = malloc(n_bytes), *row = malloc(n_bytes);
    CHECK(expected && row, "malloc");
    CHECK(clb_quantize_row_with(clb_fast_by_name("scalar"), type, expected, x, n) == 0, "quantize");
    for (size_t i = 0; i < sizeof set_names / sizeof *set_names; i++) {
      const clb_fast_kernels *f = clb_fast_by_name(set_names[i]);
      if (!f) continue;
      CHECK(clb_quantize_row_with(f, type, row, x, n) == 0, "quantize");
      CHECK(memcmp(expected, row, n_bytes) == 0, f->name);
    }
    all_results = clb_crc32c(all_results, expected, n_bytes);
    free(x);
    free(expected);
    free(row);
  }
}

int main(void) {
  for (size_t i = 0; i < sizeof set_names / sizeof *set_names; i++) {
    if (clb_fast_by_name(set_names[i])) printf("%s ", set_names[i]);
  }
  for (size_t i = 0; i < CLB_N_FAST_TYPES; i++) check_type(clb_type_by_id(clb_fast_types[i].id));
  for (int i = 0; i < 50; i++) {
    check_rows_of_a_cache(CLB_Q8_0, 34);
    check_rows_of_a_cache(CLB_Q4_0, 18);
  }
  printf("\n%08x\n", all_results);
  return 0;
}
