// Speed of the block kernels, one thread: weight bytes per second, and multiply-adds per second for a batch.
//
//   cc -O2 -ffp-contract=off -Icsrc tests/bench/bench_blocks.c csrc/blocks*.c csrc/crc32c.c csrc/sha256.c -lm -o bench
//   ./bench [MiB of weights, default 64] [columns, default 2048]
//
// scalar and best runs alternate; the best of several runs counts.
#define _POSIX_C_SOURCE 199309L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "blocks.h"
#include "crc32c.h"
#include "sha256.h"

enum { N_RUNS = 5, N_TOKENS = 24 };

// CPU time, not wall time: the machine may be shared.
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Random codes with every scale 1 (binary16), so that no kernel meets denormals or NaN.
static void fill(const clb_type *t, uint8_t *w, size_t n_bytes) {
  uint64_t s = 88172645463325252u;
  for (size_t i = 0; i < n_bytes; i++) {
    s ^= s << 13, s ^= s >> 7, s ^= s << 17;
    w[i] = (uint8_t)(s >> 32);
  }
  for (size_t b = 0; b + t->block_bytes <= n_bytes; b += t->block_bytes) {
    if (t->scale_kind == CLB_SCALE_E8M0) w[b] = 127;
    if (t->scale_kind == CLB_SCALE_IQ1_M) w[b + 49] = w[b + 51] = 0, w[b + 53] = 0xC0, w[b + 55] = 0x30;
    if (t->scale_kind == CLB_SCALE_SELF) w[b + t->block_bytes - 1] = 0x3C;
    for (uint32_t i = 0; i < t->n_scales; i++) memcpy(w + b + t->scale_offset[i], "\x00\x3C", 2);
  }
}

static double seconds_of_matmul(const clb_kernels *k, const clb_type *t, const uint8_t *w, size_t row_bytes,
                                size_t n_cols, size_t n_rows, const float *x, size_t n_tokens, float *y) {
  double start = now();
  clb_matmul_rows(k, t->id, w, row_bytes, n_cols, 0, n_rows, x, n_cols, n_tokens, y, n_rows);
  return now() - start;
}

static double seconds_of_decode(const clb_kernels *k, const clb_type *t, const uint8_t *w, size_t row_bytes,
                                size_t n_cols, size_t n_rows, float *row) {
  double start = now();
  for (size_t r = 0; r < n_rows; r++) clb_dequantize_with(k, t->id, w + r * row_bytes, row, n_cols);
  return now() - start;
}

static void keep_lower(double *best, double seconds) {
  if (*best == 0 || seconds < *best) *best = seconds;
}

static void bench_type(const clb_type *t, uint8_t *w, size_t n_bytes, size_t n_cols, const float *x, float *y) {
  uint64_t row_bytes;
  if (!clb_row_bytes(t, n_cols, &row_bytes)) return;
  size_t n_rows = n_bytes / row_bytes, few = n_rows / 16 + 1;  // the slow sides see a part only
  double gb = (double)(n_rows * row_bytes) * 1e-9, gb_few = (double)(few * row_bytes) * 1e-9;
  const clb_kernels *scalar = clb_kernels_scalar(), *best = clb_kernels_best();
  double s_scalar = 0, s_best = 0, s_decode = 0, s_batch = 0, s_scan = 0;
  fill(t, w, n_rows * row_bytes);
  for (int run = 0; run < N_RUNS; run++) {
    keep_lower(&s_scalar, seconds_of_matmul(scalar, t, w, row_bytes, n_cols, few, x, 1, y));
    keep_lower(&s_best, seconds_of_matmul(best, t, w, row_bytes, n_cols, n_rows, x, 1, y));
    keep_lower(&s_decode, seconds_of_decode(best, t, w, row_bytes, n_cols, n_rows, y));
    keep_lower(&s_batch, seconds_of_matmul(best, t, w, row_bytes, n_cols, few, x, N_TOKENS, y));
    double start = now();
    clb_find_nonfinite(t->id, w, n_rows * n_cols);
    keep_lower(&s_scan, now() - start);
  }
  double gmac = (double)(few * n_cols * N_TOKENS) * 1e-9;
  printf("%-8s %8.2f %8.2f %8.2f %8.2f %8.2f %8.1f\n", t->name, gb_few / s_scalar, gb / s_best,
         gb * (double)n_cols / (double)row_bytes / s_best, gb / s_decode, gb / s_scan, gmac / s_batch);
}

static void bench_sums(const uint8_t *p, size_t n) {
  double crc = 0, sha = 0;
  uint8_t digest[32];
  volatile uint32_t result;
  for (int run = 0; run < N_RUNS; run++) {
    double start = now();
    result = clb_crc32c(0, p, n);
    keep_lower(&crc, now() - start);
    start = now();
    clb_sha256(p, n, digest);
    keep_lower(&sha, now() - start);
  }
  (void)result;
  printf("crc32c %.2f GB/s, sha256 %.2f GB/s\n", (double)n * 1e-9 / crc, (double)n * 1e-9 / sha);
}

int main(int argc, char **argv) {
  size_t n_bytes = (argc > 1 ? strtoul(argv[1], NULL, 10) : 64) << 20;
  size_t n_cols = argc > 2 ? strtoul(argv[2], NULL, 10) : 2048;
  uint8_t *w = malloc(n_bytes);
  float *x = aligned_alloc(64, N_TOKENS * n_cols * sizeof *x);
  float *y = malloc((n_bytes + n_cols) * sizeof *y);
  if (!w || !x || !y) return 1;
  for (size_t i = 0; i < N_TOKENS * n_cols; i++) x[i] = (float)((i * 2654435761u >> 16) % 1000) * 0.001f - 0.5f;
  printf("%zu MiB of weights, %zu columns, 1 thread, kernels: %s\n", n_bytes >> 20, n_cols,
         clb_kernels_name(clb_kernels_best()));
  printf("%-8s %8s %8s %8s %8s %8s %8s\n", "", "scalar", "best", "best", "decode", "finite?", "24 tok.");
  printf("%-8s %8s %8s %8s %8s %8s %8s\n", "", "GB/s", "GB/s", "Gweight", "GB/s", "GB/s", "Gmac/s");
  for (size_t i = 0; i < clb_type_count(); i++) bench_type(clb_type_at(i), w, n_bytes, n_cols, x, y);
  bench_sums(w, n_bytes);
  free(w);
  free(x);
  free(y);
  return 0;
}
