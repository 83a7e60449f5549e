// Vectors for the encoders: eight floats or integers, sixteen 16-bit integers, and how they come from and go to memory.
// Included by quantize_body.h, once for each instruction set; the including file defines INLINE (with its target) and
// OUTLINE, which is INLINE or makes a function of its own, and may define the instructions that C cannot say: MIN, MAX,
// ANY, MIN_16, MAX_16, SCALE_16, DOT_16, TO_F16, FROM_F16.
#include <math.h>
#include <string.h>

#include "quantize_internal.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only

enum { LANES = 8, MAX_GROUP = 32 };

typedef float v8 __attribute__((vector_size(4 * LANES)));
typedef int32_t m8 __attribute__((vector_size(4 * LANES)));
typedef uint32_t u8 __attribute__((vector_size(4 * LANES)));
typedef int16_t h16 __attribute__((vector_size(4 * LANES)));  // a pair of 16-bit integers in each lane

INLINE v8 splat(float f) {
  return (v8){f, f, f, f, f, f, f, f};
}
INLINE v8 pick(m8 mask, v8 yes, v8 no) {
  return (v8)((mask & (m8)yes) | (~mask & (m8)no));
}
INLINE v8 magnitude(v8 x) {
  return (v8)((m8)x & 0x7FFFFFFF);
}
INLINE v8 vector_min(v8 a, v8 b) {
#ifdef MIN
  return MIN(a, b);
#else
  return pick(a < b, a, b);
#endif
}
INLINE v8 vector_max(v8 a, v8 b) {
#ifdef MAX
  return MAX(a, b);
#else
  return pick(a > b, a, b);
#endif
}
INLINE v8 clamp(v8 x, float low, float high) {
  return vector_min(vector_max(x, splat(low)), splat(high));
}

// Added to a float of magnitude below 2^22, this leaves the nearest integer, ties to even, in the low bits of the sum.
#define ROUNDING 0x1.8p23f

INLINE v8 nearest(v8 x) {
  return (x + splat(ROUNDING)) - splat(ROUNDING);
}
// nearest(x) + more in the low 16 bits; above them is nothing of use. `more` is even.
INLINE m8 low_bits(v8 x, float more) {
  return (m8)(x + splat(ROUNDING + more));
}
// 1 / x, and 0 where that is no use: x is zero, or so small that the quotient overflows.
INLINE v8 inverse(v8 x) {
  return pick(magnitude(x) > splat(0x1p-100f), splat(1) / x, splat(0));
}
INLINE float sum_lanes(v8 x) {
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}
INLINE bool any_lane(m8 mask) {
#ifdef ANY
  return ANY(mask);
#else
  int32_t any = 0;
  for (int i = 0; i < LANES; i++) any |= mask[i];
  return any != 0;
#endif
}
INLINE float max_lanes(v8 x) {
  float max = x[0];
  for (int i = 1; i < LANES; i++) max = x[i] > max ? x[i] : max;
  return max;
}

// ---------------------------------------------------------------------------------------------------------------------
// binary16: what its bits say, and back, rounded to the nearest; what is too large becomes the largest there is

INLINE float f16_decode(uint16_t h) {
  float f;
  (void)clb_dequantize(CLB_F16, &h, &f, 1);
  return f;
}
INLINE uint16_t f16_encode(float f) {
  f = f > 65504.0f ? 65504.0f : f < -65504.0f ? -65504.0f : f;
#ifdef TO_F16
  return TO_F16(f);
#else
  uint16_t h;
  clb_scalar_to_f16(&h, &f, 1);
  return h;
#endif
}
INLINE float f16_round(float f) {
#ifdef FROM_F16
  return FROM_F16(f16_encode(f));
#else
  return f16_decode(f16_encode(f));
#endif
}
INLINE void store_f16(uint8_t *dst, float f) {
  const uint16_t h = f16_encode(f);
  memcpy(dst, &h, sizeof h);
}
INLINE v8 f16_round_lanes(v8 x) {
  v8 y = splat(0);
  for (int i = 0; i < LANES; i++) y[i] = f16_round(x[i]);
  return y;
}

// ---------------------------------------------------------------------------------------------------------------------
// Between rows in memory and vectors that hold one element of eight rows

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (m8){__VA_ARGS__})
#endif

// Lane i of vector j becomes lane j of vector i.
INLINE void transpose(v8 r[LANES]) {
  v8 a[LANES], b[LANES];
  for (int i = 0; i < LANES; i += 2) {
    a[i] = SHUFFLE(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    a[i + 1] = SHUFFLE(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < LANES; i += 4) {
    for (int k = 0; k < 2; k++) {
      b[i + 2 * k] = SHUFFLE(a[i + k], a[i + 2 + k], 0, 1, 8, 9, 4, 5, 12, 13);
      b[i + 2 * k + 1] = SHUFFLE(a[i + k], a[i + 2 + k], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int i = 0; i < 4; i++) {
    r[i] = SHUFFLE(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    r[i + 4] = SHUFFLE(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// Lane i of to[j] is element j of row i; n is a multiple of eight.
INLINE void load_columns(v8 *to, const float *const rows[LANES], int n) {
  for (int j = 0; j < n; j += LANES) {
    for (int i = 0; i < LANES; i++) memcpy(&to[j + i], rows[i] + j, sizeof *to);
    transpose(to + j);
  }
}

INLINE v8 four_bytes(const m8 *q) {
  return (v8)((q[0] & 255) | (q[1] & 255) << 8 | (q[2] & 255) << 16 | (m8)((u8)q[3] << 24));
}

// Rows of 32 bytes: byte j of row i is the low byte of lane i of q[j].
INLINE void store_rows(uint8_t rows[LANES][32], const m8 q[32]) {
  v8 words[LANES];
  for (int k = 0; k < LANES; k++) words[k] = four_bytes(q + 4 * k);
  transpose(words);
  memcpy(rows, words, sizeof words);
}

// ---------------------------------------------------------------------------------------------------------------------
// 16-bit integers

INLINE h16 min_16(h16 a, h16 b) {
#ifdef MIN_16
  return MIN_16(a, b);
#else
  const h16 less = a < b;
  return (a & less) | (b & ~less);
#endif
}
INLINE h16 max_16(h16 a, h16 b) {
#ifdef MAX_16
  return MAX_16(a, b);
#else
  const h16 more = a > b;
  return (a & more) | (b & ~more);
#endif
}
INLINE m8 low_half(h16 x) {
  return (m8)((u8)x << 16) >> 16;
}
INLINE m8 high_half(h16 x) {
  return (m8)x >> 16;
}
// a * b / 2^15, to the nearest, halves up; magnitudes below 2^15.
INLINE h16 scale_16(h16 a, h16 b) {
#ifdef SCALE_16
  return SCALE_16(a, b);
#else
  const m8 low = (low_half(a) * low_half(b) + 0x4000) >> 15, high = (high_half(a) * high_half(b) + 0x4000) >> 15;
  return (h16)((low & 0xFFFF) | (m8)((u8)high << 16));
#endif
}
// The sum of the two products of a pair, in its lane.
INLINE m8 dot_16(h16 a, h16 b) {
#ifdef DOT_16
  return DOT_16(a, b);
#else
  return low_half(a) * low_half(b) + high_half(a) * high_half(b);
#endif
}
// The nearest integers as a pair; magnitudes below 2^15.
INLINE h16 pair(v8 a, v8 b) {
  return (h16)((low_bits(a, 0) & 0xFFFF) | (m8)((u8)low_bits(b, 0) << 16));
}
INLINE h16 pair_of_same(v8 a) {
  const m8 low = low_bits(a, 0) & 0xFFFF;
  return (h16)(low | (m8)((u8)low << 16));
}
INLINE h16 splat_16(int i) {
  const int16_t s = (int16_t)i;
  return (h16){s, s, s, s, s, s, s, s, s, s, s, s, s, s, s, s};
}
INLINE v8 to_float(m8 x) {
  return __builtin_convertvector(x, v8);
}
