// Would rows interleaved by 4 or by 8 pay? One token times q8_0, q4_0 and q4_k, beside the kernels in use (AVX2).
//
//   cc -O3 -ffp-contract=off -Icsrc tests/bench/bench_interleave.c csrc/blocks*.c csrc/fast*.c -lm -lpthread -o bench
//   ./bench [MiB of weights from memory, default 1024] [pairs of runs, default 7]
//
// The layout is a permutation of the bytes of 4 or 8 rows, quant block by quant block: their scales side by side, then
// their codes by turns, 4 bytes (8 rows) or 8 bytes (4 rows) of each. A register then holds a column of rows, so sums
// need no reduction across lanes, and activations are broadcast. Products are the canonical ones of fast.h: every
// output is compared, bit for bit. Present and interleaved kernels run in turns, in one process, on the same numbers;
// medians of CPU time, and of the ratio of each pair. "prefill" is what a batch of 128 could gain at most: the share
// of its time in which rows are decoded into the same order for the tokens to share, by the times of 64 and of 128.
#define _GNU_SOURCE
#include <immintrin.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "fast_internal.h"

#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define INLINE static inline __attribute__((always_inline, target("avx2,fma,f16c")))
#define UNROLL _Pragma("GCC unroll 8")

enum { N_COLS = 2048, GROUPS = N_COLS / 256, MAX_RUNS = 31, PREFETCH_BYTES = 2048, MAX_TOKENS = 128 };

// CPU time of the thread, not wall time: the machine may be shared.
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// ---------------------------------------------------------------------------------------------------------------------
// The layout. A unit is 32 columns of q8_0 or q4_0, or 256 of q4_k, of R rows: first `head` bytes of each row, cut into
// `head_parts` parts that are each side by side, then the codes.

typedef struct {
  uint32_t id;
  const char *name;
  size_t columns, unit_bytes, head, head_part;  // head_part: bytes of a row that stay together
} kind;

static const kind kKinds[] = {
    {CLB_Q8_0, "q8_0", 32, 34, 2, 2}, {CLB_Q4_0, "q4_0", 32, 18, 2, 2}, {CLB_Q4_K, "q4_k", 256, 144, 16, 4}};

static void interleave_unit(const kind *k, size_t rows, uint8_t *dst, const uint8_t *src, size_t row_bytes) {
  const size_t step = 32 / rows;  // bytes of a row in a register
  for (size_t at = 0; at < k->head; at += k->head_part) {
    for (size_t r = 0; r < rows; r++, dst += k->head_part) memcpy(dst, src + r * row_bytes + at, k->head_part);
  }
  for (size_t at = k->head; at < k->unit_bytes; at += step) {
    for (size_t r = 0; r < rows; r++, dst += step) memcpy(dst, src + r * row_bytes + at, step);
  }
}

static void interleave(const kind *k, size_t rows, uint8_t *dst, const uint8_t *src, size_t row_bytes, size_t n_rows) {
  for (size_t r = 0; r < n_rows; r += rows) {
    for (size_t at = 0; at < row_bytes; at += k->unit_bytes, dst += rows * k->unit_bytes) {
      interleave_unit(k, rows, dst, src + r * row_bytes + at, row_bytes);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels

INLINE __m256i load32(const void *p) {
  return _mm256_loadu_si256((const __m256i *)p);
}
INLINE __m256i splat4(const void *p) {
  int v;
  memcpy(&v, p, sizeof v);
  return _mm256_set1_epi32(v);
}
INLINE __m256i splat8(const void *p) {
  long long v;
  memcpy(&v, p, sizeof v);
  return _mm256_set1_epi64x(v);
}
INLINE __m256i dot(__m256i acc, __m256i codes, __m256i x) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
}
INLINE __m256i low4(__m256i v) {
  return _mm256_and_si256(v, _mm256_set1_epi8(15));
}
INLINE __m256i high4(__m256i v) {
  return low4(_mm256_srli_epi16(v, 4));
}
INLINE void prefetch(const uint8_t *w, size_t n) {
  for (size_t i = 0; i < n; i += 64) _mm_prefetch((const char *)((uintptr_t)w + PREFETCH_BYTES + i), _MM_HINT_T0);
}

// Activations of a group, of the kind that its type takes.
typedef struct {
  const int8_t *q8;
  const int16_t *q16;
  const float *d, *s;
  const int32_t *sum;
} group_x;

INLINE group_x x8_of(const void *x, size_t g) {
  const clb_fast_x8 *v = (const clb_fast_x8 *)x + g;
  return (group_x){v->q, NULL, v->d, v->s, v->sum};
}
INLINE group_x x16_of(const void *x, size_t g) {
  const clb_fast_x16 *v = (const clb_fast_x16 *)x + g;
  return (group_x){NULL, v->q, v->d, v->s, NULL};
}

// Integer products of the 32 columns of block b: of 8 rows; of 4 rows as 8 sums, two for each.
INLINE __m256i dot_wide(__m256i codes, __m256i even, __m256i odd) {
  __m256i low = _mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 8), high = _mm256_srai_epi16(codes, 8);
  return _mm256_add_epi32(_mm256_madd_epi16(low, even), _mm256_madd_epi16(high, odd));
}
INLINE __m256i q8_0_of_8(const uint8_t *codes, const group_x *x, int b) {
  __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  const int16_t *q = x->q16 + 32 * b;
  UNROLL for (int i = 0; i < 8; i++) {
    __m256i one = dot_wide(load32(codes + 32 * i), splat4(q + 2 * i), splat4(q + 16 + 2 * i));
    sums[i % 2] = _mm256_add_epi32(sums[i % 2], one);
  }
  return _mm256_add_epi32(sums[0], sums[1]);
}
INLINE __m256i q8_0_of_4(const uint8_t *codes, const group_x *x, int b) {
  __m256i sum = _mm256_setzero_si256();
  const int16_t *q = x->q16 + 32 * b;
  UNROLL for (int i = 0; i < 4; i++) {
    sum = _mm256_add_epi32(sum, dot_wide(load32(codes + 32 * i), splat8(q + 4 * i), splat8(q + 16 + 4 * i)));
  }
  return sum;
}
INLINE __m256i q4_0_of_8(const uint8_t *codes, const group_x *x, int block) {
  const int8_t *q = x->q8 + 32 * block;
  __m256i a = _mm256_setzero_si256(), b = a;
  UNROLL for (int i = 0; i < 4; i++) {
    a = dot(a, low4(load32(codes + 32 * i)), splat4(q + 4 * i));
    b = dot(b, high4(load32(codes + 32 * i)), splat4(q + 4 * i + 16));
  }
  return _mm256_add_epi32(a, b);
}
INLINE __m256i q4_0_of_4(const uint8_t *codes, const group_x *x, int block) {
  const int8_t *q = x->q8 + 32 * block;
  __m256i a = _mm256_setzero_si256(), b = a;
  UNROLL for (int i = 0; i < 2; i++) {
    a = dot(a, low4(load32(codes + 32 * i)), splat8(q + 8 * i));
    b = dot(b, high4(load32(codes + 32 * i)), splat8(q + 8 * i + 16));
  }
  return _mm256_add_epi32(a, b);
}

// The partial sums p[b] of 8 rows, reduced by halves.
INLINE __m256 reduce_8(const __m256 p[8]) {
  __m256 v[4];
  UNROLL for (int i = 0; i < 4; i++) v[i] = _mm256_add_ps(p[i], p[i + 4]);
  return _mm256_add_ps(_mm256_add_ps(v[0], v[2]), _mm256_add_ps(v[1], v[3]));
}
// Of 4 rows: p[i] has partial 2 i in its low half and 2 i + 1 in the other.
INLINE __m128 reduce_4(const __m256 p[4]) {
  __m256 by2 = _mm256_add_ps(_mm256_add_ps(p[0], p[2]), _mm256_add_ps(p[1], p[3]));
  return _mm_add_ps(_mm256_castps256_ps128(by2), _mm256_extractf128_ps(by2, 1));
}
// Sums of 4 rows, two for each, of blocks a and b: those of a in the low half.
INLINE __m256i pair_4(__m256i a, __m256i b) {
  return _mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), 0xD8);
}
INLINE __m256 in_halves(float a, float b) {
  return _mm256_set_m128(_mm_set1_ps(b), _mm_set1_ps(a));
}

typedef __m256i sums_fn(const uint8_t *codes, const group_x *x, int b);
typedef group_x x_fn(const void *x, size_t g);

INLINE void plain_8(size_t unit, int bias, sums_fn *sums, x_fn *x_of, const uint8_t *w, const void *xs, float *y) {
  __m256 p[8];
  UNROLL for (int b = 0; b < 8; b++) p[b] = _mm256_setzero_ps();
  for (size_t g = 0; g < GROUPS; g++) {
    const group_x x = x_of(xs, g);
    prefetch(w, 64 * unit);
    UNROLL for (int b = 0; b < 8; b++, w += 8 * unit) {
      __m256i total = sums(w + 16, &x, b);
      if (bias) total = _mm256_sub_epi32(total, _mm256_set1_epi32(x.sum[b] * bias));
      __m256 d =
          _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)w)), _mm256_set1_ps(x.d[b]));
      p[b] = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(total), p[b]);
    }
  }
  _mm256_storeu_ps(y, reduce_8(p));
}

INLINE void plain_4(size_t unit, int bias, sums_fn *sums, x_fn *x_of, const uint8_t *w, const void *xs, float *y) {
  __m256 p[4];
  UNROLL for (int i = 0; i < 4; i++) p[i] = _mm256_setzero_ps();
  for (size_t g = 0; g < GROUPS; g++) {
    const group_x x = x_of(xs, g);
    prefetch(w, 32 * unit);
    UNROLL for (int i = 0; i < 4; i++, w += 8 * unit) {
      const uint8_t *second = w + 4 * unit;
      __m256i total = pair_4(sums(w + 8, &x, 2 * i), sums(second + 8, &x, 2 * i + 1));
      if (bias) {
        __m128i a = _mm_set1_epi32(x.sum[2 * i] * bias), b = _mm_set1_epi32(x.sum[2 * i + 1] * bias);
        total = _mm256_sub_epi32(total, _mm256_set_m128i(b, a));
      }
      long long ha, hb;
      memcpy(&ha, w, 8);
      memcpy(&hb, second, 8);
      __m256 d = _mm256_cvtph_ps(_mm_set_epi64x(hb, ha));
      d = _mm256_mul_ps(d, in_halves(x.d[2 * i], x.d[2 * i + 1]));
      p[i] = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(total), p[i]);
    }
  }
  _mm_storeu_ps(y, reduce_4(p));
}

// Scales and minimums of q4_k of 8 rows (32-bit lanes), 4 blocks a register, of which block 0 is the lowest byte.
typedef struct {
  __m256i scale[2], min[2];
} k_scales;

INLINE k_scales unpack(__m256i first, __m256i second, __m256i third) {
  const __m256i m6 = _mm256_set1_epi8(0x3F), m4 = _mm256_set1_epi8(0x0F), top = _mm256_set1_epi8(0x30);
  __m256i high_s = _mm256_and_si256(_mm256_srli_epi32(first, 2), top);
  __m256i high_m = _mm256_and_si256(_mm256_srli_epi32(second, 2), top);
  __m256i third_m = _mm256_and_si256(_mm256_srli_epi32(third, 4), m4);
  return (k_scales){{_mm256_and_si256(first, m6), _mm256_or_si256(_mm256_and_si256(third, m4), high_s)},
                    {_mm256_and_si256(second, m6), _mm256_or_si256(third_m, high_m)}};
}
INLINE __m256 byte_of(__m256i v, int i) {
  return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(v, 8 * i), _mm256_set1_epi32(255)));
}
// Of 8 rows: d and dmin, a pair of binary16 numbers in each lane.
INLINE void load_d(__m256i pairs, __m256 *d, __m256 *m) {
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5, 8, 9, 12, 13,
                                         2, 3, 6, 7, 10, 11, 14, 15);
  __m256i v = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(pairs, order), 0xD8);
  *d = _mm256_cvtph_ps(_mm256_castsi256_si128(v));
  *m = _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1));
}

INLINE void q4_k_8(const uint8_t *w, const void *xs, float *y) {
  __m256 p[8];
  UNROLL for (int b = 0; b < 8; b++) p[b] = _mm256_setzero_ps();
  for (size_t g = 0; g < GROUPS; g++, w += 8 * 144) {
    const group_x x = x8_of(xs, g);
    prefetch(w, 8 * 144);
    __m256 d8, m8;
    load_d(load32(w), &d8, &m8);
    const k_scales s = unpack(load32(w + 32), load32(w + 64), load32(w + 96));
    UNROLL for (int b = 0; b < 8; b++) {
      const uint8_t *codes = w + 128 + b / 2 * 256;
      __m256i t0 = _mm256_setzero_si256(), t1 = t0;
      UNROLL for (int i = 0; i < 8; i += 2) {
        __m256i v0 = load32(codes + 32 * i), v1 = load32(codes + 32 * i + 32);
        t0 = dot(t0, b % 2 ? high4(v0) : low4(v0), splat4(x.q8 + 32 * b + 4 * i));
        t1 = dot(t1, b % 2 ? high4(v1) : low4(v1), splat4(x.q8 + 32 * b + 4 * i + 4));
      }
      __m256 d = _mm256_mul_ps(d8, byte_of(s.scale[b / 4], b % 4)), m = _mm256_mul_ps(m8, byte_of(s.min[b / 4], b % 4));
      p[b] =
          _mm256_fmadd_ps(_mm256_mul_ps(d, _mm256_set1_ps(x.d[b])), _mm256_cvtepi32_ps(_mm256_add_epi32(t0, t1)), p[b]);
      p[b] = _mm256_fnmadd_ps(m, _mm256_set1_ps(x.s[b]), p[b]);
    }
  }
  _mm256_storeu_ps(y, reduce_8(p));
}

// Lanes are 4 rows of an even block, then of the next one.
INLINE __m256 pair_of(__m128i v, int i) {
  const __m256i shifts = _mm256_setr_epi32(8 * i, 8 * i, 8 * i, 8 * i, 8 * i + 8, 8 * i + 8, 8 * i + 8, 8 * i + 8);
  __m256i both = _mm256_srlv_epi32(_mm256_broadcastsi128_si256(v), shifts);
  return _mm256_cvtepi32_ps(_mm256_and_si256(both, _mm256_set1_epi32(255)));
}

INLINE void q4_k_4(const uint8_t *w, const void *xs, float *y) {
  __m256 p[4];
  UNROLL for (int i = 0; i < 4; i++) p[i] = _mm256_setzero_ps();
  for (size_t g = 0; g < GROUPS; g++, w += 4 * 144) {
    const group_x x = x8_of(xs, g);
    prefetch(w, 4 * 144);
    __m256 d8, m8;
    load_d(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)w)), &d8, &m8);
    const __m256i words = load32(w + 16);
    const k_scales s = unpack(words, _mm256_permute2x128_si256(words, words, 1),
                              _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)(w + 48))));
    UNROLL for (int i = 0; i < 4; i++) {
      __m256i a = _mm256_setzero_si256(), b = a;
      UNROLL for (int j = 0; j < 4; j++) {
        __m256i v = load32(w + 64 + 128 * i + 32 * j);
        a = dot(a, low4(v), splat8(x.q8 + 64 * i + 8 * j));
        b = dot(b, high4(v), splat8(x.q8 + 64 * i + 32 + 8 * j));
      }
      __m256 total = _mm256_cvtepi32_ps(pair_4(a, b));
      __m256 d = _mm256_mul_ps(d8, pair_of(_mm256_castsi256_si128(s.scale[i / 2]), i % 2 * 2));
      __m256 m = _mm256_mul_ps(m8, pair_of(_mm256_castsi256_si128(s.min[i / 2]), i % 2 * 2));
      p[i] = _mm256_fmadd_ps(_mm256_mul_ps(d, in_halves(x.d[2 * i], x.d[2 * i + 1])), total, p[i]);
      p[i] = _mm256_fnmadd_ps(m, in_halves(x.s[2 * i], x.s[2 * i + 1]), p[i]);
    }
  }
  _mm_storeu_ps(y, reduce_4(p));
}

AVX2 static void interleaved_rows(const kind *k, size_t rows, const uint8_t *w, const void *x, size_t first,
                                  size_t last, float *y) {
  const size_t row_bytes = N_COLS / k->columns * k->unit_bytes;
  for (size_t r = first; r < last; r += rows) {
    const uint8_t *at = w + r * row_bytes;
    if (rows == 8 && k->id == CLB_Q8_0) plain_8(34, 0, q8_0_of_8, x16_of, at, x, y + r);
    if (rows == 8 && k->id == CLB_Q4_0) plain_8(18, 8, q4_0_of_8, x8_of, at, x, y + r);
    if (rows == 8 && k->id == CLB_Q4_K) q4_k_8(at, x, y + r);
    if (rows == 4 && k->id == CLB_Q8_0) plain_4(34, 0, q8_0_of_4, x16_of, at, x, y + r);
    if (rows == 4 && k->id == CLB_Q4_0) plain_4(18, 8, q4_0_of_4, x8_of, at, x, y + r);
    if (rows == 4 && k->id == CLB_Q4_K) q4_k_4(at, x, y + r);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Measuring

typedef struct {
  const clb_fast_kernels *present;
  const kind *kind;
  size_t rows;  // interleaved; 1: the present kernels; 0: the weights are only read
  const uint8_t *w;
  size_t row_bytes, n_rows, n_tokens, n_passes;
  const uint8_t *x;  // [n_tokens] quantized rows, stride bytes apart
  size_t stride;
  float *y;
} product;

typedef struct {
  const product *p;
  size_t first, last;
  pthread_barrier_t *start;
  double seconds;
  uint64_t sum;
} share;

static uint64_t read_all(const uint8_t *w, size_t n) {
  typedef uint64_t vector __attribute__((vector_size(32), aligned(1)));
  vector sums[4] = {{0}};
  for (size_t i = 0; i + 128 <= n; i += 128) {
    __builtin_prefetch((const void *)((uintptr_t)w + i + PREFETCH_BYTES));
    __builtin_prefetch((const void *)((uintptr_t)w + i + PREFETCH_BYTES + 64));
    for (size_t k = 0; k < 4; k++) sums[k] ^= *(const vector *)(const void *)(w + i + 32 * k);
  }
  return sums[0][0] ^ sums[1][1] ^ sums[2][2] ^ sums[3][3];
}

static void *work(void *argument) {
  share *s = argument;
  const product *p = s->p;
  pthread_barrier_wait(s->start);
  const double begun = now();
  for (size_t pass = 0; pass < p->n_passes; pass++) {
    if (p->rows == 0) {
      s->sum ^= read_all(p->w + s->first * p->row_bytes, (s->last - s->first) * p->row_bytes);
    } else if (p->rows == 1) {
      clb_fast_product_with(p->present, p->kind->id, p->w, p->row_bytes, N_COLS, s->first, s->last, p->x, p->stride,
                            p->n_tokens, p->y, p->n_rows);
    } else {
      interleaved_rows(p->kind, p->rows, p->w, p->x, s->first, s->last, p->y);
    }
  }
  s->seconds = now() - begun;
  return NULL;
}

// The time of the slowest thread.
static double seconds_of(const product *p, size_t n_threads) {
  static volatile uint64_t sum;
  pthread_t threads[2];
  share shares[2];
  pthread_barrier_t start;
  pthread_barrier_init(&start, NULL, (unsigned)n_threads);
  for (size_t i = 0; i < n_threads; i++) {
    shares[i] = (share){p, p->n_rows / 8 * i / n_threads * 8, p->n_rows / 8 * (i + 1) / n_threads * 8, &start, 0, 0};
    if (pthread_create(&threads[i], NULL, work, &shares[i]) != 0) exit(1);
  }
  double slowest = 0;
  for (size_t i = 0; i < n_threads; i++) {
    pthread_join(threads[i], NULL);
    if (shares[i].seconds > slowest) slowest = shares[i].seconds;
    sum ^= shares[i].sum;
  }
  pthread_barrier_destroy(&start);
  return slowest;
}

static int by_size(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *v, size_t n) {
  qsort(v, n, sizeof *v, by_size);
  return v[n / 2];
}

// Present and interleaved kernels and reads by turns.
static void compare(product p, const uint8_t *const w[3], size_t n_threads, size_t n_runs, const char *where) {
  static const size_t rows[] = {1, 4, 8, 0};
  double seconds[4][MAX_RUNS], ratio[4][MAX_RUNS], gb = (double)(p.n_rows * p.row_bytes * p.n_passes) * 1e-9;
  for (size_t run = 0; run < n_runs; run++) {
    for (size_t i = 0; i < 4; i++) {
      p.rows = rows[i];
      p.w = w[i % 3];
      seconds[i][run] = seconds_of(&p, n_threads);
      ratio[i][run] = seconds[0][run] / seconds[i][run];
    }
  }
  printf("%-5s %-12s %7zu %9.1f", p.kind->name, where, n_threads, gb / median(seconds[0], n_runs));
  for (size_t i = 1; i < 4; i++) printf(" %7.1f (%.2fx)", gb / median(seconds[i], n_runs), median(ratio[i], n_runs));
  printf("\n");
  fflush(stdout);
}

static void check(product p, const uint8_t *const w[3], float *expected, float *found) {
  static const size_t rows[] = {1, 4, 8};
  for (size_t i = 0; i < 3; i++) {
    p.rows = rows[i];
    p.w = w[i];
    p.y = i ? found : expected;
    (void)seconds_of(&p, 1);
    if (i && memcmp(expected, found, p.n_rows * sizeof *found) != 0) {
      fprintf(stderr, "%s by %zu: other bits than the present kernel\n", p.kind->name, rows[i]);
      exit(1);
    }
  }
}

// One thread: a batch takes n * product + decoding, the latter once for up to 128 tokens.
static double decoding_share(product p, size_t n_runs) {
  double shares[MAX_RUNS];
  for (size_t run = 0; run < n_runs; run++) {
    p.n_tokens = 64;
    const double half = seconds_of(&p, 1);
    p.n_tokens = 128;
    const double whole = seconds_of(&p, 1);
    shares[run] = (2 * half - whole) / whole;
  }
  return median(shares, n_runs);
}

static void *map(size_t n) {
  void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) exit(1);
  (void)madvise(p, n, MADV_HUGEPAGE);
  return p;
}

// Random codes; scales of about 1.
static void fill(const kind *k, uint8_t *w, size_t n) {
  uint64_t s = 88172645463325252u;
  for (size_t i = 0; i + 8 <= n; i += 8) {
    s ^= s << 13, s ^= s >> 7, s ^= s << 17;
    memcpy(w + i, &s, 8);
  }
  for (size_t i = 0; i + k->unit_bytes <= n; i += k->unit_bytes) {
    w[i + 1] = 0x3C;
    if (k->id == CLB_Q4_K) w[i + 3] = 0x38;
  }
}

// [MAX_TOKENS] rows as the type takes them, stride bytes apart.
static uint8_t *quantized_rows(const kind *k, const clb_fast_kernels *present, size_t *stride) {
  const clb_fast_x_kind kind_of_x = clb_fast_kind(k->id);
  *stride = clb_fast_x_bytes(kind_of_x, N_COLS);
  uint8_t *x = aligned_alloc(64, MAX_TOKENS * *stride);
  float row[N_COLS];
  if (!x) exit(1);
  for (size_t t = 0; t < MAX_TOKENS; t++) {
    for (size_t i = 0; i < N_COLS; i++) row[i] = sinf((float)(t * N_COLS + i) * 0.37f);
    clb_fast_quantize_with(present, kind_of_x, x + t * *stride, row, N_COLS);
  }
  return x;
}

static void bench(const kind *k, const clb_fast_kernels *present, size_t n_bytes, size_t n_runs) {
  product p = {.present = present, .kind = k, .n_tokens = 1, .n_passes = 1};
  uint8_t *x = quantized_rows(k, present, &p.stride);
  p.x = x;
  p.row_bytes = N_COLS / k->columns * k->unit_bytes;
  p.n_rows = n_bytes / p.row_bytes / 16 * 16;
  const size_t room = p.n_rows * p.row_bytes + PREFETCH_BYTES;
  uint8_t *w[3] = {map(room), map(room), map(room)};
  fill(k, w[0], p.n_rows * p.row_bytes);
  for (size_t i = 1; i < 3; i++) interleave(k, 4 * i, w[i], w[0], p.row_bytes, p.n_rows);
  float *y[2] = {calloc(p.n_rows * MAX_TOKENS, sizeof(float)), calloc(p.n_rows, sizeof(float))};
  if (!y[0] || !y[1]) exit(1);
  const uint8_t *const weights[3] = {w[0], w[1], w[2]};
  check(p, weights, y[0], y[1]);
  p.y = y[0];
  for (size_t n = 1; n <= 2; n++) compare(p, weights, n, n_runs, "memory");
  p.n_rows = ((size_t)1 << 20) / p.row_bytes / 16 * 16;
  p.n_passes = 256;
  for (size_t n = 1; n <= 2; n++) compare(p, weights, n, n_runs, "L2, 1 MiB");
  p.rows = 1;
  p.w = w[0];
  p.n_passes = 4;
  printf("%-5s prefill of 128: %.1f %% of the time is decoding\n", k->name, 100 * decoding_share(p, n_runs));
  for (size_t i = 0; i < 3; i++) munmap(w[i], room);
  free(y[0]);
  free(y[1]);
  free(x);
}

int main(int argc, char **argv) {
  const size_t n_bytes = (argc > 1 ? strtoul(argv[1], NULL, 10) : 1024) << 20;
  size_t n_runs = argc > 2 ? strtoul(argv[2], NULL, 10) : 7;
  if (n_runs < 1 || n_runs > MAX_RUNS) n_runs = MAX_RUNS;
  const clb_fast_kernels *present = clb_fast_by_name("avx2");
  if (!present) return 1;
  printf("GB/s of weights, one token, %d columns, %zu pairs; ratios to the present kernel\n", N_COLS, n_runs);
  printf("%-5s %-12s %7s %9s %15s %15s %15s\n", "type", "from", "threads", "present", "by 4", "by 8", "plain reads");
  for (size_t i = 0; i < sizeof kKinds / sizeof *kKinds; i++) bench(&kKinds[i], present, n_bytes, n_runs);
  return 0;
}
