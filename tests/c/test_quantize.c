// The encoders of quantize.c, in buffers of exactly the right size: the best kernels of this CPU against the portable
// ones, and conversion against encoding in one piece. Prints the number of checks and a hash of all that was encoded,
// which is the same on every CPU.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "quantize.h"

enum { ROWS = 2, COLS = 9 * 256, N = ROWS * COLS, SKIP = 256 };

static const uint32_t types[] = {CLB_Q4_0, CLB_Q4_1, CLB_Q5_0,   CLB_Q5_1,   CLB_Q8_0,  CLB_Q2_K, CLB_Q3_K, CLB_Q4_K,
                                 CLB_Q5_K, CLB_Q6_K, CLB_IQ4_NL, CLB_IQ4_XS, CLB_MXFP4, CLB_F16,  CLB_BF16, CLB_F32};
static unsigned n_checks;
static uint64_t hash = 14695981039346656037u;

static void check(bool holds, const char *what, uint32_t type) {
  n_checks++;
  if (holds) return;
  fprintf(stderr, "%s: %s\n", clb_type_by_id(type)->name, what);
  exit(1);
}

static uint32_t random_bits(void) {
  static uint32_t state = 1;
  state = state * 1664525u + 1013904223u;
  return state >> 8;
}

// Integers in a bell shape, times powers of two; no function of the C library, which could differ in the last bit.
static float random_weight(float scale) {
  int32_t sum = -4 * 512;
  for (int i = 0; i < 4; i++) sum += (int32_t)(random_bits() % 1024);
  return (float)sum * 0x1p-16f * scale;
}

// Rows of kinds: ordinary; far apart in size, with zeros and constants; subnormal, huge and one-signed.
static void fill(float *x, int kind) {
  static const float sizes[] = {1, 0x1p-8f, 0x1p-30f, 0, 0x1p-126f, 256, 0x1p-80f};
  for (int i = 0; i < N; i++) {
    const float size = kind == 0 ? 1 : sizes[i / 24 * 5 % 7];
    x[i] = kind == 2 && i / COLS == 1 ? 1 + random_weight(0.125f) : random_weight(size);
    if (kind > 0 && i / 96 % 5 == 0) x[i] = -0.75f;
  }
}

static uint8_t *encode(const clb_kernels *k, uint32_t type, clb_effort effort, const float *x, const float *importance,
                       size_t *n_bytes) {
  const clb_type *t = clb_type_by_id(type);
  *n_bytes = (size_t)N / t->block_weights * t->block_bytes;
  uint8_t *dst = malloc(*n_bytes);
  uint64_t bad;
  check(dst && clb_quantize_rows(k, type, effort, x, ROWS, COLS, importance, dst, &bad) == 0, "encodes", type);
  return dst;
}

// All but the first weights of `from`, as rows of n_cols, encoded by pieces and at once.
static void check_conversion(uint32_t from, uint32_t type, size_t n_cols, const float *x, const float *importance) {
  size_t n_source;
  uint8_t *source = encode(clb_kernels_best(), from, CLB_EFFORT_FAST, x, NULL, &n_source);
  const clb_type *t = clb_type_by_id(type);
  const size_t n_rows = (N - SKIP) / n_cols, n_bytes = (N - SKIP) / t->block_weights * t->block_bytes;
  float *decoded = malloc(N * sizeof *decoded);
  uint8_t *expected = malloc(n_bytes), *found = malloc(n_bytes);
  const float *y = decoded + SKIP;
  uint64_t bad;
  clb_loss loss = {0}, other = {0};
  const clb_conversion job = {from, type, CLB_EFFORT_FAST, source, SKIP, n_rows, n_cols, importance, found};
  check(clb_dequantize_best(from, source, decoded, N) == 0, "decodes", from);
  check(clb_quantize_rows_best(type, CLB_EFFORT_FAST, y, n_rows, n_cols, importance, expected, &bad) == 0, "encodes",
        type);
  check(clb_convert_rows(&job, &bad, NULL) == 0, "converts", type);
  check(memcmp(expected, found, n_bytes) == 0, "the same by pieces", type);
  check(clb_convert_rows(&job, &bad, &loss) == 0, "converts and measures", type);
  check(clb_add_loss(type, expected, y, n_rows, n_cols, importance, &other) == 0, "measures", type);
  check(loss.error <= other.error * 1.000001 && loss.error >= other.error * 0.999999, "the same loss", type);
  free(source);
  free(decoded);
  free(expected);
  free(found);
}

static void check_type(uint32_t type, const float *x, const float *importance) {
  for (int effort = CLB_EFFORT_FAST; effort <= CLB_EFFORT_BEST; effort++) {
    size_t n_bytes;
    uint8_t *best = encode(clb_kernels_best(), type, (clb_effort)effort, x, importance, &n_bytes);
    uint8_t *portable = encode(clb_kernels_scalar(), type, (clb_effort)effort, x, importance, &n_bytes);
    check(memcmp(best, portable, n_bytes) == 0, "one result for every instruction set", type);
    for (size_t i = 0; i < n_bytes; i++) hash = (hash ^ best[i]) * 1099511628211u;
    free(best);
    free(portable);
  }
  check_conversion(CLB_BF16, type, N - SKIP, x, importance);
  check_conversion(CLB_Q5_K, type, 256, x, importance);
}

int main(void) {
  float *x = malloc(N * sizeof *x), *importance = malloc((N - SKIP) * sizeof *importance);
  if (!x || !importance) return 1;
  for (int i = 0; i < N - SKIP; i++) importance[i] = i / 64 % 7 == 3 ? 0 : (float)(1 + random_bits() % 4096) * 0x1p-11f;
  for (int kind = 0; kind < 3; kind++) {
    fill(x, kind);
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
      check_type(types[i], x, NULL);
      check_type(types[i], x, importance);
    }
  }
  printf("%u %016llx\n", n_checks, (unsigned long long)hash);
  free(x);
  free(importance);
  return 0;
}
