// Speed of the fast kernels: weight bytes per second from memory for one token, multiply-adds per second for many.
//
//   cc -O3 -ffp-contract=off -Icsrc tests/bench/bench_fast.c csrc/blocks*.c csrc/fast*.c -lm -lpthread -o bench
//   ./bench [set, default best] [type, default all] [MiB of weights, default 512] [columns, default 2048]
//
// Set: "best", "exact" (the exact kernels, to compare with), or a name of fast_internal.h. Beside each type stands what
// a loop of reads with prefetches reaches in the same run, taken in turns with it; the best of several runs counts.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fast_internal.h"

enum { N_RUNS = 5, MAX_THREADS = 2, MAX_TOKENS = 512, BATCH_ROWS = 384 };

// CPU time of the thread, not wall time: the machine may be shared.
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef struct {
  const clb_fast_kernels *fast;  // NULL: exact
  const clb_kernels *exact;
  const clb_type *type;
  const uint8_t *w;
  size_t n_cols, row_bytes, n_rows, n_tokens, stride;
  const float *x;
  const uint8_t *qx;
  float *y;
} problem;

typedef struct {
  const problem *p;  // NULL: read w
  const uint8_t *w;
  size_t first, last;  // rows, or bytes
  pthread_barrier_t *start;
  uint64_t sum;
  double seconds;
} job;

static uint64_t read_all(const uint8_t *w, size_t first, size_t last) {
  typedef uint64_t vector __attribute__((vector_size(32), aligned(1)));
  vector sums[4] = {{0}};
  for (size_t i = first; i + 128 <= last; i += 128) {
    __builtin_prefetch((const void *)((uintptr_t)w + i + 2048));
    __builtin_prefetch((const void *)((uintptr_t)w + i + 2112));
    for (size_t k = 0; k < 4; k++) sums[k] ^= *(const vector *)(const void *)(w + i + 32 * k);
  }
  return sums[0][0] ^ sums[1][1] ^ sums[2][2] ^ sums[3][3];
}

static void run_rows(const problem *p, size_t first, size_t last) {
  bool quantized = clb_fast_kind(p->type->id) != CLB_FAST_X_NONE;
  if (p->fast && quantized) {
    clb_fast_product_with(p->fast, p->type->id, p->w, p->row_bytes, p->n_cols, first, last, p->qx, p->stride,
                          p->n_tokens, p->y, p->n_rows);
  } else {
    clb_matmul_rows(p->exact, p->type->id, p->w, p->row_bytes, p->n_cols, first, last, p->x, p->n_cols, p->n_tokens,
                    p->y, p->n_rows);
  }
}

static void *work(void *argument) {
  job *j = argument;
  pthread_barrier_wait(j->start);
  double start = now();
  if (j->p) {
    run_rows(j->p, j->first, j->last);
  } else {
    j->sum = read_all(j->w, j->first, j->last);
  }
  j->seconds = now() - start;
  return NULL;
}

// n rows or bytes on n_threads threads: the time of the slowest.
static double seconds_of(const problem *p, const uint8_t *w, size_t n, size_t n_threads) {
  static volatile uint64_t result;
  pthread_t threads[MAX_THREADS];
  job jobs[MAX_THREADS];
  pthread_barrier_t start;
  double slowest = 0;
  pthread_barrier_init(&start, NULL, (unsigned)n_threads);
  for (size_t i = 0; i < n_threads; i++) {
    jobs[i] = (job){p, w, n * i / n_threads, n * (i + 1) / n_threads, &start, 0, 0};
    if (pthread_create(&threads[i], NULL, work, &jobs[i]) != 0) exit(1);
  }
  for (size_t i = 0; i < n_threads; i++) {
    pthread_join(threads[i], NULL);
    if (jobs[i].seconds > slowest) slowest = jobs[i].seconds;
    result ^= jobs[i].sum;
  }
  pthread_barrier_destroy(&start);
  return slowest;
}

static void keep_lower(double *best, double seconds) {
  if (*best == 0 || seconds < *best) *best = seconds;
}

// Random codes with scales of 1, so that no kernel meets denormals or NaN.
static void fill(const clb_type *t, uint8_t *w, size_t n_bytes) {
  uint64_t s = 88172645463325252u;
  for (size_t i = 0; i + 8 <= n_bytes; i += 8) {
    s ^= s << 13, s ^= s >> 7, s ^= s << 17;
    memcpy(w + i, &s, 8);
  }
  for (size_t b = 0; b + t->block_bytes <= n_bytes; b += t->block_bytes) {
    if (t->scale_kind == CLB_SCALE_E8M0) w[b] = 127;
    if (t->scale_kind == CLB_SCALE_SELF) w[b + t->block_bytes - 1] = 0x3C;
    for (uint32_t i = 0; i < t->n_scales; i++) memcpy(w + b + t->scale_offset[i], "\x00\x3C", 2);
  }
}

static void bench_type(problem p, const clb_type *t, uint8_t *w, size_t n_bytes) {
  static const size_t tokens[] = {4, 16, 128, 512};
  double read[MAX_THREADS] = {0}, one[MAX_THREADS] = {0}, many[4] = {0};
  p.type = t;
  p.row_bytes = p.n_cols / t->block_weights * t->block_bytes;
  p.n_rows = n_bytes / p.row_bytes;
  fill(t, w, n_bytes);
  problem batch = p;
  batch.n_rows = p.n_rows < BATCH_ROWS ? p.n_rows : BATCH_ROWS;
  p.n_tokens = 1;
  for (int run = 0; run < N_RUNS; run++) {
    for (size_t i = 0; i < MAX_THREADS; i++) {
      keep_lower(&read[i], seconds_of(NULL, w, n_bytes, i + 1));
      keep_lower(&one[i], seconds_of(&p, w, p.n_rows, i + 1));
    }
    for (size_t i = 0; i < 4; i++) {
      batch.n_tokens = tokens[i];
      keep_lower(&many[i], seconds_of(&batch, w, batch.n_rows, MAX_THREADS));
    }
  }
  double gb = (double)n_bytes * 1e-9, gmac = (double)(batch.n_rows * p.n_cols) * 1e-9;
  printf("%-8s %7.2f %7.2f %6.0f%% %7.2f %7.2f %6.0f%%", t->name, gb / one[0], gb / read[0], 100 * read[0] / one[0],
         gb / one[1], gb / read[1], 100 * read[1] / one[1]);
  for (size_t i = 0; i < 4; i++) printf(" %7.1f", gmac * (double)tokens[i] / many[i]);
  printf("\n");
  fflush(stdout);
}

int main(int argc, char **argv) {
  const char *set = argc > 1 ? argv[1] : "best", *only = argc > 2 ? argv[2] : "all";
  size_t n_bytes = (argc > 3 ? strtoul(argv[3], NULL, 10) : 512) << 20;
  problem p = {.exact = clb_kernels_best(), .n_cols = argc > 4 ? strtoul(argv[4], NULL, 10) : 2048};
  if (strcmp(set, "exact") != 0) p.fast = strcmp(set, "best") == 0 ? clb_fast_best() : clb_fast_by_name(set);
  if (!p.fast && strcmp(set, "exact") != 0) {
    fprintf(stderr, "bench_fast: no set \"%s\" on this CPU\n", set);
    return 2;
  }
  uint8_t *w = aligned_alloc(64, n_bytes), *qx[CLB_FAST_X_KINDS] = {NULL};
  float *x = aligned_alloc(64, MAX_TOKENS * p.n_cols * sizeof *x);
  float *y = malloc((n_bytes + MAX_TOKENS * BATCH_ROWS) * sizeof *y);
  if (!w || !x || !y) return 1;
  for (size_t i = 0; i < MAX_TOKENS * p.n_cols; i++) x[i] = (float)((i * 2654435761u >> 16) % 1000) * 0.001f - 0.5f;
  for (clb_fast_x_kind kind = CLB_FAST_X_Q8; kind < CLB_FAST_X_KINDS; kind++) {
    const size_t stride = clb_fast_x_bytes(kind, p.n_cols);
    if (!(qx[kind] = aligned_alloc(64, MAX_TOKENS * stride))) return 1;
    for (size_t i = 0; i < MAX_TOKENS; i++) {
      clb_fast_quantize_x(p.exact, kind, qx[kind] + i * stride, x + i * p.n_cols, p.n_cols);
    }
  }
  p.w = w, p.x = x, p.y = y;
  printf("%zu MiB of weights, %zu columns, kernels: %s\n", n_bytes >> 20, p.n_cols, p.fast ? p.fast->name : "exact");
  printf("%-8s %24s %24s %31s\n", "", "1 token, 1 thread", "1 token, 2 threads", "Gmac/s, 2 threads");
  printf("%-8s", "");
  for (int i = 0; i < 2; i++) printf(" %7s %7s %7s", "GB/s", "read", "");
  printf(" %7s %7s %7s %7s\n", "4 tok.", "16", "128", "512");
  for (size_t i = 0; i < clb_type_count(); i++) {
    const clb_type *t = clb_type_at(i);
    bool wanted = strcmp(only, "all") == 0 ? t->block_weights == 1 || clb_fast_kind(t->id) != CLB_FAST_X_NONE
                                           : strcmp(only, t->name) == 0;
    p.qx = qx[clb_fast_kind(t->id)];
    p.stride = clb_fast_x_bytes(clb_fast_kind(t->id), p.n_cols);
    if (wanted && p.n_cols % t->block_weights == 0) bench_type(p, t, w, n_bytes);
  }
  free(w);
  free(x);
  for (size_t i = 0; i < CLB_FAST_X_KINDS; i++) free(qx[i]);
  free(y);
  return 0;
}
