// The encoders, written once for every instruction set: included by quantize.c (portable) and quantize_avx2.c.
//
// Groups of weights that share a scale are encoded eight at a time: lane g of a vector belongs to group g, and element
// j of every group is handled at the same moment. So no sum runs across lanes, every lane sees its operations in one
// order, and any instruction set gives the same bits, as long as none fuses a multiplication with an addition.
//
// The including file defines INLINE (with its target), and may define the MIN, MAX and ROUND of vectors.
#include <math.h>
#include <string.h>

#include "quantize_internal.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only

enum { LANES = 8, MAX_GROUP = 32 };

typedef float v8 __attribute__((vector_size(4 * LANES)));
typedef int32_t m8 __attribute__((vector_size(4 * LANES)));

// ---------------------------------------------------------------------------------------------------------------------
// Vectors

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
// To the nearest integer, ties to even; |x| < 2^22.
INLINE v8 nearest(v8 x) {
#ifdef ROUND
  return ROUND(x);
#else
  return (x + 0x1.8p23f) - 0x1.8p23f;
#endif
}
INLINE v8 clamp(v8 x, float low, float high) {
  return vector_min(vector_max(x, splat(low)), splat(high));
}
INLINE v8 truncate(v8 x) {  // |x| < 2^31
  return __builtin_convertvector(__builtin_convertvector(x, m8), v8);
}
// 1 / x, and 0 where that is no use: x is zero, or so small that the quotient overflows.
INLINE v8 inverse(v8 x) {
  return pick(magnitude(x) > splat(0x1p-100f), splat(1) / x, splat(0));
}
INLINE float sum_lanes(v8 x) {
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}
INLINE float max_lanes(v8 x) {
  float max = x[0];
  for (int i = 1; i < LANES; i++) max = x[i] > max ? x[i] : max;
  return max;
}

// What the bits of a binary16 say, and back, rounded to the nearest; finite numbers that are too large become the
// largest there is.
INLINE float f16_decode(uint16_t h) {
  float f;
  (void)clb_dequantize(CLB_F16, &h, &f, 1);
  return f;
}
INLINE uint16_t f16_encode(float f) {
  uint16_t h;
  f = f > 65504.0f ? 65504.0f : f < -65504.0f ? -65504.0f : f;
  clb_scalar_to_f16(&h, &f, 1);
  return h;
}
INLINE float f16_round(float f) {
  return f16_decode(f16_encode(f));
}
INLINE v8 f16_round_lanes(v8 x) {
  v8 y = splat(0);
  for (int i = 0; i < LANES; i++) y[i] = f16_round(x[i]);
  return y;
}
INLINE void store_f16(uint8_t *dst, float f) {
  uint16_t h = f16_encode(f);
  memcpy(dst, &h, sizeof h);
}

// ---------------------------------------------------------------------------------------------------------------------
// Eight groups of n weights

typedef struct {
  int n;
  v8 x[MAX_GROUP], w[MAX_GROUP];  // weights, and how much their squared errors count
  v8 sum_w, sum_wx;
} groups;

// Groups lie one behind the other at x. Where importance is NULL or all zero in a group, all count 1.
INLINE void load_groups(groups *g, const float *x, const float *const importance[LANES], int n, int n_groups) {
  g->n = n;
  for (int j = 0; j < n; j++) {
    v8 column = splat(0), weight = splat(1);
    for (int i = 0; i < n_groups; i++) column[i] = x[i * n + j];
    for (int i = 0; i < n_groups; i++) {
      if (importance[i]) weight[i] = importance[i][j];
    }
    g->x[j] = column;
    g->w[j] = weight;
  }
  v8 sum = splat(0);
  for (int j = 0; j < n; j++) sum += g->w[j];
  const m8 none = ~(sum > splat(0));
  for (int j = 0; j < n; j++) g->w[j] = pick(none, splat(1), g->w[j]);
  g->sum_w = g->sum_wx = splat(0);
  for (int j = 0; j < n; j++) {
    g->sum_w += g->w[j];
    g->sum_wx += g->w[j] * g->x[j];
  }
}

INLINE void range_of(const groups *g, v8 *low, v8 *high) {
  *low = *high = g->x[0];
  for (int j = 1; j < g->n; j++) {
    *low = vector_min(*low, g->x[j]);
    *high = vector_max(*high, g->x[j]);
  }
}

// The weight of largest magnitude, with its sign; the first among equals.
INLINE v8 peak_of(const groups *g) {
  v8 peak = g->x[0];
  for (int j = 1; j < g->n; j++) peak = pick(magnitude(g->x[j]) > magnitude(peak), g->x[j], peak);
  return peak;
}

// ---------------------------------------------------------------------------------------------------------------------
// Codes with a scale and a minimum: x ~ scale * q + base, q in 0 .. q_max

INLINE v8 affine_code(v8 x, v8 inv, v8 base, float q_max) {
  return nearest(clamp((x - base) * inv, 0, q_max));
}

INLINE v8 affine_error(const groups *g, v8 scale, v8 base, float q_max) {
  const v8 inv = inverse(scale);
  v8 error = splat(0);
  for (int j = 0; j < g->n; j++) {
    const v8 e = g->x[j] - (scale * affine_code(g->x[j], inv, base, q_max) + base);
    error += g->w[j] * (e * e);
  }
  return error;
}

// The least-squares scale for the codes that `inv` and `base` give, and this base.
INLINE v8 affine_scale_fit(const groups *g, v8 inv, v8 base, float q_max) {
  v8 sqq = splat(0), sxq = splat(0);
  for (int j = 0; j < g->n; j++) {
    const v8 q = affine_code(g->x[j], inv, base, q_max), wq = g->w[j] * q;
    sqq += wq * q;
    sxq += wq * (g->x[j] - base);
  }
  return sxq * inverse(sqq);
}

typedef struct {
  v8 scale, base, error;
} affine;

// Sums over a group: of codes q, and of y, what the weights are above the lowest one.
typedef struct {
  v8 w, y, q, qq, yq;
} affine_sums;

INLINE affine_sums affine_add(const groups *g, const v8 *y, v8 inv, v8 base, float q_max) {
  affine_sums s = {.w = g->sum_w, .y = splat(0), .q = splat(0), .qq = splat(0), .yq = splat(0)};
  for (int j = 0; j < g->n; j++) {
    const v8 q = affine_code(y[j], inv, base, q_max), wq = g->w[j] * q;
    s.q += wq;
    s.qq += wq * q;
    s.yq += wq * y[j];
  }
  return s;
}

// The scale and base of least squared error for these codes, the base at most `top`; `error` is how far the error is
// below that of no scale at all, negated.
INLINE affine affine_fit(const affine_sums *s, v8 inv, v8 top) {
  const v8 det = s->w * s->qq - s->q * s->q, inv_det = inverse(det);
  v8 scale = (s->w * s->yq - s->y * s->q) * inv_det, base = (s->qq * s->y - s->q * s->yq) * inv_det;
  const m8 above = base > top;
  scale = pick(above, (s->yq - top * s->q) * inverse(s->qq), scale);
  base = pick(above, top, base);
  const m8 sound = (det > splat(0)) & (scale > splat(0));
  scale = pick(sound, scale, inverse(inv));
  base = pick(sound, base, splat(0));
  const v8 gain = splat(2) * (scale * s->yq + base * s->y) - scale * (scale * s->qq + splat(2) * (base * s->q)) -
                  base * base * s->w;
  return (affine){.scale = scale, .base = base, .error = -gain};
}

// The range is cut into q_max + t steps for several t: some weights at its ends are better clipped, or not reached.
// What is compared is the error with the codes as they were before the fit, which needs no second pass over the
// weights; then the best is fitted to its own codes a few times. With `below`, the base is at most 0.
enum { POLISH = 2 };

INLINE void keep_better(affine *best, const affine *found) {
  const m8 better = found->error < best->error;
  best->scale = pick(better, found->scale, best->scale);
  best->base = pick(better, found->base, best->base);
  best->error = pick(better, found->error, best->error);
}

INLINE affine affine_search(const groups *g, float q_max, bool below, int n_steps, float first, float step) {
  v8 low, high, y[MAX_GROUP], sum_y = splat(0);
  range_of(g, &low, &high);
  if (below) low = vector_min(low, splat(0));
  for (int j = 0; j < g->n; j++) {
    y[j] = g->x[j] - low;
    sum_y += g->w[j] * y[j];
  }
  const v8 inv_range = inverse(high - low), top = below ? -low : splat(0x1p100f);
  affine best = {.scale = splat(0), .base = splat(0), .error = splat(0)};
  for (int i = 0; i < n_steps + POLISH; i++) {
    const bool polish = i >= n_steps;
    const v8 inv = polish ? inverse(best.scale) : splat(q_max + first + step * (float)i) * inv_range;
    affine_sums sums = affine_add(g, y, inv, polish ? best.base : splat(0), q_max);
    sums.y = sum_y;
    const affine found = affine_fit(&sums, inv, top);
    keep_better(&best, &found);
  }
  best.base += low;
  return best;
}

// ---------------------------------------------------------------------------------------------------------------------
// Codes with a scale alone: x ~ scale * v, v an integer of a range or a value of a codebook

typedef struct {
  float low, high;
  const int8_t *values;  // 16 in ascending order, or NULL for the integers low .. high
} code_set;

INLINE v8 code_value(const code_set *c, v8 y) {
  if (!c->values) return nearest(clamp(y, c->low, c->high));
  v8 v = splat(c->values[0]);
  for (int i = 1; i < 16; i++) {
    const float middle = 0.5f * (float)(c->values[i - 1] + c->values[i]);
    v += (v8)((m8)splat((float)(c->values[i] - c->values[i - 1])) & (y > splat(middle)));
  }
  return v;
}

INLINE v8 scale_error(const groups *g, const code_set *c, v8 scale) {
  const v8 inv = inverse(scale);
  v8 error = splat(0);
  for (int j = 0; j < g->n; j++) {
    const v8 e = g->x[j] - scale * code_value(c, g->x[j] * inv);
    error += g->w[j] * (e * e);
  }
  return error;
}

typedef struct {
  v8 scale, gain;  // `gain` is how far the squared error is below that of scale 0
} scaled;

// The least-squares scale for the codes that `inv` gives.
INLINE scaled scale_fit(const groups *g, const code_set *c, v8 inv) {
  v8 svv = splat(0), sxv = splat(0);
  for (int j = 0; j < g->n; j++) {
    const v8 v = code_value(c, g->x[j] * inv), wv = g->w[j] * v;
    svv += wv * v;
    sxv += wv * g->x[j];
  }
  const v8 scale = sxv * inverse(svv);
  return (scaled){.scale = scale, .gain = scale * sxv};
}

// The weight of largest magnitude goes to the end of the range, or somewhat within or beyond it, on either side.
INLINE scaled scale_search(const groups *g, const code_set *c, int n_steps, float first, float step) {
  const v8 inv_peak = inverse(peak_of(g));
  scaled best = {.scale = splat(0), .gain = splat(0)};
  for (int i = 0; i < 2 * n_steps + 1; i++) {
    const float t = first + step * (float)(i / 2);
    v8 inv = splat(i % 2 == 0 ? c->low - t : c->high + t) * inv_peak;
    if (i == 2 * n_steps) inv = inverse(best.scale);  // once more, with the codes of the best
    const scaled found = scale_fit(g, c, inv);
    const m8 better = found.gain > best.gain;
    best.scale = pick(better, found.scale, best.scale);
    best.gain = pick(better, found.gain, best.gain);
  }
  return best;
}

// ---------------------------------------------------------------------------------------------------------------------
// Simple types: eight quant blocks of 32 at a time, each with scales of its own

INLINE void load_blocks(groups *g, const clb_encode_context *c, const float *x, size_t block, size_t n_blocks) {
  const float *importance[LANES] = {NULL};
  for (size_t i = 0; i < n_blocks && c->importance; i++) {
    importance[i] = c->importance + (block + i) % c->row_blocks * 32;
  }
  load_groups(g, x + block * 32, importance, 32, (int)n_blocks);
}

INLINE bool is_searched(const clb_encode_context *c) {
  return c->importance || c->effort == CLB_EFFORT_BEST;
}

// Codes of 32 weights in a lane, as integers.
typedef struct {
  m8 q[MAX_GROUP];
} codes32;

INLINE void put_nibbles(uint8_t *dst, const codes32 *c, int lane) {
  for (int j = 0; j < 16; j++) dst[j] = (uint8_t)((c->q[j][lane] & 15) | (c->q[j + 16][lane] & 15) << 4);
}
INLINE void put_fifth_bits(uint8_t *dst, const codes32 *c, int lane) {
  uint32_t bits = 0;
  for (int j = 0; j < 32; j++) bits |= (uint32_t)(c->q[j][lane] >> 4 & 1) << j;
  memcpy(dst, &bits, sizeof bits);
}

// gguf's encoder of q4_0 and q5_0: the peak is the lowest code, `half` from the middle.
INLINE v8 symmetric_reference(const groups *g, codes32 *c, float half) {
  const v8 scale = peak_of(g) / splat(-half), inv = inverse(scale);
  for (int j = 0; j < 32; j++) {
    const v8 q = vector_min(truncate(g->x[j] * inv + splat(half + 0.5f)), splat(2 * half - 1));
    c->q[j] = __builtin_convertvector(q, m8);
  }
  return scale;
}

INLINE v8 symmetric_best(const clb_encode_context *x, const groups *g, codes32 *c, float low, float high, float zero) {
  const code_set set = {low, high, NULL};
  const bool best = x->effort == CLB_EFFORT_BEST;
  const scaled found = scale_search(g, &set, best ? 32 : 20, -1.6f, best ? 0.1f : 0.15f);
  const v8 scale = f16_round_lanes(found.scale), inv = inverse(scale);
  for (int j = 0; j < 32; j++) {
    c->q[j] = __builtin_convertvector(code_value(&set, g->x[j] * inv) + splat(zero), m8);
  }
  return scale;
}

INLINE void encode_symmetric(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst, bool five) {
  const float half = five ? 16 : 8;
  const size_t block_bytes = five ? 22 : 18;
  for (size_t b = 0; b < n; b += LANES) {
    groups g;
    codes32 codes;
    const size_t n_now = n - b < LANES ? n - b : LANES;
    load_blocks(&g, c, x, b, n_now);
    const v8 scale =
        is_searched(c) ? symmetric_best(c, &g, &codes, -half, half - 1, half) : symmetric_reference(&g, &codes, half);
    for (size_t i = 0; i < n_now; i++) {
      uint8_t *to = dst + (b + i) * block_bytes;
      store_f16(to, scale[i]);
      if (five) put_fifth_bits(to + 2, &codes, (int)i);
      put_nibbles(to + (five ? 6 : 2), &codes, (int)i);
    }
  }
}

// Scales and bases are stored as binary16, which can undo what the search found where the base is far from zero: so the
// rounded ones are compared, those of the plain range among them.
INLINE affine affine_best(const clb_encode_context *c, const groups *g, float q_max) {
  const bool thorough = c->effort == CLB_EFFORT_BEST;
  const affine found = affine_search(g, q_max, false, thorough ? 28 : 14, -1.8f, thorough ? 0.1f : 0.2f);
  v8 low, high;
  range_of(g, &low, &high);
  affine best = {.scale = f16_round_lanes((high - low) / splat(q_max)), .base = f16_round_lanes(low)};
  best.error = affine_error(g, best.scale, best.base, q_max);
  affine other = {.scale = f16_round_lanes(found.scale), .base = f16_round_lanes(found.base)};
  for (int round = 0; round < 3; round++) {
    other.error = affine_error(g, other.scale, other.base, q_max);
    const m8 better = other.error < best.error;
    best.scale = pick(better, other.scale, best.scale);
    best.base = pick(better, other.base, best.base);
    best.error = pick(better, other.error, best.error);
    other.base = best.base;  // next: the scale that fits this base
    other.scale = f16_round_lanes(affine_scale_fit(g, inverse(best.scale), best.base, q_max));
  }
  return best;
}

INLINE void encode_affine(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst, bool five) {
  const float q_max = five ? 31 : 15;
  const size_t block_bytes = five ? 24 : 20;
  for (size_t b = 0; b < n; b += LANES) {
    groups g;
    codes32 codes;
    v8 scale, base, high;
    const size_t n_now = n - b < LANES ? n - b : LANES;
    load_blocks(&g, c, x, b, n_now);
    if (is_searched(c)) {
      const affine best = affine_best(c, &g, q_max);
      scale = best.scale;
      base = best.base;
      const v8 inv = inverse(scale);
      for (int j = 0; j < 32; j++) {
        codes.q[j] = __builtin_convertvector(affine_code(g.x[j], inv, base, q_max), m8);
      }
    } else {
      range_of(&g, &base, &high);
      scale = (high - base) / splat(q_max);
      const v8 inv = inverse(scale);
      for (int j = 0; j < 32; j++) {
        const v8 q = vector_min(truncate((g.x[j] - base) * inv + splat(0.5f)), splat(q_max));
        codes.q[j] = __builtin_convertvector(q, m8);
      }
    }
    for (size_t i = 0; i < n_now; i++) {
      uint8_t *to = dst + (b + i) * block_bytes;
      store_f16(to, scale[i]);
      store_f16(to + 2, base[i]);
      if (five) put_fifth_bits(to + 4, &codes, (int)i);
      put_nibbles(to + (five ? 8 : 4), &codes, (int)i);
    }
  }
}

TARGET static void encode_q4_0(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  encode_symmetric(c, x, n, dst, false);
}
TARGET static void encode_q5_0(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  encode_symmetric(c, x, n, dst, true);
}
TARGET static void encode_q4_1(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  encode_affine(c, x, n, dst, false);
}
TARGET static void encode_q5_1(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  encode_affine(c, x, n, dst, true);
}

// Halves away from zero, as gguf rounds here.
INLINE v8 round_half_away(v8 x) {
  const v8 a = magnitude(x), whole = truncate(a), rounded = whole + truncate(splat(2) * (a - whole));
  return (v8)((m8)rounded | ((m8)x & INT32_MIN));
}

TARGET static void encode_q8_0(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  for (size_t b = 0; b < n; b += LANES) {
    groups g;
    codes32 codes;
    v8 scale;
    const size_t n_now = n - b < LANES ? n - b : LANES;
    load_blocks(&g, c, x, b, n_now);
    if (is_searched(c)) {
      scale = symmetric_best(c, &g, &codes, -127, 127, 0);
    } else {
      scale = magnitude(peak_of(&g)) / splat(127);
      const v8 inv = inverse(scale);
      for (int j = 0; j < 32; j++) codes.q[j] = __builtin_convertvector(round_half_away(g.x[j] * inv), m8);
    }
    for (size_t i = 0; i < n_now; i++) {
      uint8_t *to = dst + (b + i) * 34;
      store_f16(to, scale[i]);
      for (int j = 0; j < 32; j++) to[2 + j] = (uint8_t)codes.q[j][i];
    }
  }
}

// The index into clb_values_e2m1 nearest to y; halfway, the smaller magnitude.
INLINE m8 e2m1_code(v8 y) {
  static const float middles[7] = {0.5f, 1.5f, 2.5f, 3.5f, 5, 7, 10};
  const v8 a = magnitude(y);
  m8 code = {0};
  for (int i = 0; i < 7; i++) code -= a > splat(middles[i]);
  const m8 sign = (m8)y < 0;
  return code + ((sign & (code > 0)) & 8);
}

INLINE v8 e8m0_half_lanes(m8 e) {  // of e >= 2 as a float's exponent, of 0 and 1 as subnormals
  return (v8)((((e - 1) << 23) & (e > 1)) | (0x00200000 & (e == 0)) | (0x00400000 & (e == 1)));
}

// Codes for the scale of e. Small scales have no finite inverse, so weights are enlarged first.
INLINE void e2m1_codes(const groups *g, m8 e, m8 codes[32]) {
  const v8 enlarge = pick(e < 64, splat(0x1p64f), splat(1)), inv = splat(1) / (e8m0_half_lanes(e) * enlarge);
  for (int j = 0; j < 32; j++) codes[j] = e2m1_code(g->x[j] * enlarge * inv);
}

INLINE v8 mxfp4_error(const groups *g, m8 e) {
  static const float values[8] = {0, 1, 2, 3, 4, 6, 8, 12};
  const v8 d = e8m0_half_lanes(e);
  m8 codes[32];
  v8 error = splat(0);
  e2m1_codes(g, e, codes);
  for (int j = 0; j < 32; j++) {
    const m8 code = codes[j];
    v8 value = splat(0);
    for (int i = 1; i < 8; i++) value = pick((code & 7) == i, splat(values[i]), value);
    const v8 difference = magnitude(g->x[j]) - value * d;
    error += g->w[j] * (difference * difference);
  }
  return error;
}

// The exponent of the largest magnitude, less that of the largest code. gguf takes the logarithm in f32, which rounds
// up to the next power of two from just below it.
INLINE m8 mxfp4_exponent(v8 peak) {
  m8 e = {0};
  for (int i = 0; i < LANES; i++) {
    const float a = fabsf(peak[i]);
    const float exponent = a > 0 ? floorf((float)log2((double)a)) + 125 : 0;
    e[i] = (int32_t)(exponent < 0 ? 0 : exponent);
  }
  return e;
}

TARGET static void encode_mxfp4(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  for (size_t b = 0; b < n; b += LANES) {
    groups g;
    codes32 codes;
    const size_t n_now = n - b < LANES ? n - b : LANES;
    load_blocks(&g, c, x, b, n_now);
    m8 e = mxfp4_exponent(peak_of(&g));
    if (is_searched(c)) {
      v8 least = mxfp4_error(&g, e);
      for (int step = -1; step < 2; step += 2) {
        const m8 other = e + step, possible = (other >= 2) & (other < 253) & (e > 2);
        const v8 error = mxfp4_error(&g, (other & possible) | (e & ~possible));
        const m8 better = (error < least) & possible;
        least = pick(better, error, least);
        e += (step & better);
      }
    }
    e2m1_codes(&g, e, codes.q);
    for (size_t i = 0; i < n_now; i++) {
      uint8_t *to = dst + (b + i) * 17;
      to[0] = (uint8_t)e[i];
      put_nibbles(to + 1, &codes, (int)i);
    }
  }
}

TARGET static void encode_iq4_nl(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  const code_set set = {-127, 113, clb_values_iq4};
  const int n_steps = c->effort == CLB_EFFORT_FAST ? 4 : c->effort == CLB_EFFORT_NORMAL ? 8 : 16;
  for (size_t b = 0; b < n; b += LANES) {
    groups g;
    codes32 codes;
    const size_t n_now = n - b < LANES ? n - b : LANES;
    load_blocks(&g, c, x, b, n_now);
    const v8 scale = f16_round_lanes(scale_search(&g, &set, n_steps, -14, 28.0f / (float)n_steps).scale);
    const v8 inv = inverse(scale);
    for (int j = 0; j < 32; j++) {
      m8 code = {0};
      for (int i = 1; i < 16; i++) {
        code -= g.x[j] * inv > splat(0.5f * (float)(clb_values_iq4[i - 1] + clb_values_iq4[i]));
      }
      codes.q[j] = code;
    }
    for (size_t i = 0; i < n_now; i++) {
      uint8_t *to = dst + (b + i) * 18;
      store_f16(to, scale[i]);
      put_nibbles(to + 2, &codes, (int)i);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Super-blocks of 256: groups whose scales are integers times a common factor

typedef struct {
  int n_vectors;  // 1: eight groups of 32; 2: sixteen of 16
  groups g[2];
  v8 scale[2], low[2];  // integers of the groups: scale, and minimum where there is one
  float d, d_min;       // as stored
} super_block;

INLINE void load_super(super_block *s, const clb_encode_context *c, const float *x, size_t block, int group) {
  const float *importance[2][LANES] = {{NULL}};
  const float *row = c->importance ? c->importance + block % c->row_blocks * 256 : NULL;
  s->n_vectors = group == 32 ? 1 : 2;
  for (int v = 0; v < s->n_vectors; v++) {
    for (int i = 0; i < LANES && row; i++) importance[v][i] = row + (v * LANES + i) * group;
    load_groups(&s->g[v], x + block * 256 + v * LANES * group, importance[v], group, LANES);
  }
}

typedef struct {
  float q_max, scale_max;
  int n_steps;
  float first, step;
  int radius, n_rounds;  // how far integer scales are tried around the rounded ones, how often d is fitted anew
} affine_plan;

// The best integers around the present ones, for the present d and d_min. Returns the error.
INLINE float tune_affine(super_block *s, const affine_plan *p, int radius) {
  float total = 0;
  for (int v = 0; v < s->n_vectors; v++) {
    const groups *g = &s->g[v];
    v8 scale = s->scale[v], low = s->low[v];
    v8 least = affine_error(g, splat(s->d) * scale, splat(-s->d_min) * low, p->q_max);
    for (int i = -radius; i <= radius; i++) {
      for (int k = -radius; k <= radius; k++) {
        // A scale that grows while the minimum shrinks, or the reverse, moves all weights one way: it never pays.
        if ((i == 0 && k == 0) || i * k < 0) continue;
        const v8 other = clamp(s->scale[v] + splat((float)i), 0, p->scale_max);
        const v8 other_low = clamp(s->low[v] + splat((float)k), 0, p->scale_max);
        const v8 error = affine_error(g, splat(s->d) * other, splat(-s->d_min) * other_low, p->q_max);
        const m8 better = error < least;
        least = pick(better, error, least);
        scale = pick(better, other, scale);
        low = pick(better, other_low, low);
      }
    }
    s->scale[v] = scale;
    s->low[v] = low;
    total += sum_lanes(least);
  }
  return total;
}

// The least-squares d and d_min for the present codes: x ~ d u - d_min v, u = scale * q, v = low.
INLINE void fit_affine_factors(super_block *s, const affine_plan *p) {
  v8 uu = splat(0), uv = splat(0), vv = splat(0), xu = splat(0), xv = splat(0);
  for (int v = 0; v < s->n_vectors; v++) {
    const groups *g = &s->g[v];
    const v8 base = splat(-s->d_min) * s->low[v], inv = inverse(splat(s->d) * s->scale[v]), low = s->low[v];
    for (int j = 0; j < g->n; j++) {
      const v8 u = s->scale[v] * affine_code(g->x[j], inv, base, p->q_max), wu = g->w[j] * u;
      uu += wu * u;
      uv += wu * low;
      xu += wu * g->x[j];
    }
    vv += g->sum_w * (low * low);
    xv += g->sum_wx * low;
  }
  const double a = (double)sum_lanes(uu), b = (double)sum_lanes(uv), c = (double)sum_lanes(vv);
  const double r = (double)sum_lanes(xu), t = (double)sum_lanes(xv), det = a * c - b * b;
  if (det > 1e-9 * a * c && det > 0) {
    const double d = (r * c - b * t) / det, d_min = (r * b - a * t) / det;
    if (d > 0 && d_min >= 0) {
      s->d = f16_round((float)d);
      s->d_min = f16_round((float)d_min);
    }
  } else if (a > 0 && c <= 0) {
    s->d = f16_round((float)(r / a));
  }
}

INLINE void round_affine(super_block *s, const affine_plan *p, const affine *found) {
  float scale = 0, low = 0;
  for (int v = 0; v < s->n_vectors; v++) {
    scale = fmaxf(scale, max_lanes(found[v].scale));
    low = fmaxf(low, max_lanes(-found[v].base));
  }
  s->d = f16_round(scale / p->scale_max);
  s->d_min = f16_round(low / p->scale_max);
  for (int v = 0; v < s->n_vectors; v++) {
    s->scale[v] = nearest(clamp(found[v].scale * inverse(splat(s->d)), 0, p->scale_max));
    s->low[v] = nearest(clamp(-found[v].base * inverse(splat(s->d_min)), 0, p->scale_max));
  }
}

INLINE void encode_affine_super(super_block *s, const affine_plan *p, uint8_t *codes) {
  affine found[2];
  for (int v = 0; v < s->n_vectors; v++) {
    found[v] = affine_search(&s->g[v], p->q_max, true, p->n_steps, p->first, p->step);
  }
  round_affine(s, p, found);
  float least = tune_affine(s, p, p->radius);
  for (int round = 0; round < p->n_rounds; round++) {
    super_block other;
    other.n_vectors = s->n_vectors;
    memcpy(other.g, s->g, sizeof other.g);
    memcpy(other.scale, s->scale, sizeof other.scale);
    memcpy(other.low, s->low, sizeof other.low);
    other.d = s->d;
    other.d_min = s->d_min;
    fit_affine_factors(&other, p);
    const float error = tune_affine(&other, p, 1);
    if (!(error < least)) break;
    least = error;
    memcpy(s->scale, other.scale, sizeof s->scale);
    memcpy(s->low, other.low, sizeof s->low);
    s->d = other.d;
    s->d_min = other.d_min;
  }
  for (int v = 0; v < s->n_vectors; v++) {
    const groups *g = &s->g[v];
    const v8 base = splat(-s->d_min) * s->low[v], inv = inverse(splat(s->d) * s->scale[v]);
    for (int j = 0; j < g->n; j++) {
      const v8 q = affine_code(g->x[j], inv, base, p->q_max);
      for (int i = 0; i < LANES; i++) codes[(v * LANES + i) * g->n + j] = (uint8_t)q[i];
    }
  }
}

// Bytes of 6-bit scales and minimums as q4_k and q5_k keep them; see blocks.c.
INLINE void put_scales_6(uint8_t *dst, const super_block *s) {
  for (int i = 0; i < 4; i++) {
    const uint32_t scale = (uint32_t)s->scale[0][i], low = (uint32_t)s->low[0][i];
    const uint32_t scale4 = (uint32_t)s->scale[0][i + 4], low4 = (uint32_t)s->low[0][i + 4];
    dst[i] = (uint8_t)(scale | (scale4 >> 4) << 6);
    dst[i + 4] = (uint8_t)(low | (low4 >> 4) << 6);
    dst[i + 8] = (uint8_t)((scale4 & 15) | (low4 & 15) << 4);
  }
}

// The steps tried, the radius and the rounds were chosen on normal, heavy-tailed, one-sided and outlier-ridden
// matrices: with fewer, one of these comes out worse than it needs to.
INLINE affine_plan plan_affine(const clb_encode_context *c, float q_max, float scale_max) {
  affine_plan p = {.q_max = q_max, .scale_max = scale_max, .first = q_max > 3 ? -1.8f : -1.2f};
  p.n_steps = c->effort == CLB_EFFORT_FAST ? 6 : c->effort == CLB_EFFORT_NORMAL ? 14 : 28;
  p.step = (q_max > 3 ? 3.0f : 2.0f) / (float)p.n_steps;
  if (c->effort == CLB_EFFORT_FAST) p.first = -0.7f, p.step = 0.2f;
  p.radius = c->effort == CLB_EFFORT_FAST ? 0 : c->effort == CLB_EFFORT_NORMAL ? 1 : 2;
  p.n_rounds = c->effort == CLB_EFFORT_FAST ? 0 : c->effort == CLB_EFFORT_NORMAL ? 1 : 4;
  return p;
}

// What q4_k and q5_k have in common: block `b` encoded, its first 16 bytes written, its codes in `codes`.
INLINE void encode_min_block(const clb_encode_context *c, const affine_plan *plan, const float *x, size_t b,
                             uint8_t *dst, uint8_t codes[256]) {
  super_block s;
  load_super(&s, c, x, b, 32);
  encode_affine_super(&s, plan, codes);
  store_f16(dst, s.d);
  store_f16(dst + 2, s.d_min);
  put_scales_6(dst + 4, &s);
}

TARGET static void encode_q4_k(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  const affine_plan plan = plan_affine(c, 15, 63);
  for (size_t b = 0; b < n; b++, dst += 144) {
    uint8_t codes[256];
    encode_min_block(c, &plan, x, b, dst, codes);
    for (int i = 0; i < 128; i++) {
      const uint8_t *pair = codes + i / 32 * 64 + i % 32;
      dst[16 + i] = (uint8_t)(pair[0] | pair[32] << 4);
    }
  }
}

TARGET static void encode_q5_k(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  const affine_plan plan = plan_affine(c, 31, 63);
  for (size_t b = 0; b < n; b++, dst += 176) {
    uint8_t codes[256];
    encode_min_block(c, &plan, x, b, dst, codes);
    for (int k = 0; k < 32; k++) {
      uint32_t high = 0;
      for (int g = 0; g < 8; g++) high |= (uint32_t)(codes[g * 32 + k] >> 4) << g;
      dst[16 + k] = (uint8_t)high;
    }
    for (int i = 0; i < 128; i++) {
      const uint8_t *pair = codes + i / 32 * 64 + i % 32;
      dst[48 + i] = (uint8_t)((pair[0] & 15) | (pair[32] & 15) << 4);
    }
  }
}

// 2-bit parts of 256 codes, as q2_k places them.
INLINE void put_crumbs(uint8_t *dst, const uint8_t *codes, int shift) {
  for (int i = 0; i < 64; i++) {
    const uint8_t *quad = codes + i / 32 * 128 + i % 32;
    uint32_t byte = 0;
    for (int k = 0; k < 4; k++) byte |= (uint32_t)(quad[k * 32] >> shift & 3) << (2 * k);
    dst[i] = (uint8_t)byte;
  }
}

TARGET static void encode_q2_k(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  const affine_plan plan = plan_affine(c, 3, 15);
  for (size_t b = 0; b < n; b++, dst += 84) {
    super_block s;
    uint8_t codes[256];
    load_super(&s, c, x, b, 16);
    encode_affine_super(&s, &plan, codes);
    for (int i = 0; i < 16; i++) {
      dst[i] = (uint8_t)((int)s.scale[i / LANES][i % LANES] | (int)s.low[i / LANES][i % LANES] << 4);
    }
    put_crumbs(dst + 16, codes, 0);
    store_f16(dst + 80, s.d);
    store_f16(dst + 82, s.d_min);
  }
}

typedef struct {
  code_set set;
  float scale_low, scale_high;
  int n_steps;
  float first, step;
  int radius, n_rounds;
} scale_plan;

INLINE float tune_scales(super_block *s, const scale_plan *p, int radius) {
  float total = 0;
  for (int v = 0; v < s->n_vectors; v++) {
    v8 scale = s->scale[v], least = scale_error(&s->g[v], &p->set, splat(s->d) * scale);
    for (int i = -radius; i <= radius; i++) {
      if (i == 0) continue;
      const v8 other = clamp(s->scale[v] + splat((float)i), p->scale_low, p->scale_high);
      const v8 error = scale_error(&s->g[v], &p->set, splat(s->d) * other);
      const m8 better = error < least;
      least = pick(better, error, least);
      scale = pick(better, other, scale);
    }
    s->scale[v] = scale;
    total += sum_lanes(least);
  }
  return total;
}

INLINE void fit_factor(super_block *s, const scale_plan *p) {
  v8 uu = splat(0), xu = splat(0);
  for (int v = 0; v < s->n_vectors; v++) {
    const groups *g = &s->g[v];
    const v8 inv = inverse(splat(s->d) * s->scale[v]);
    for (int j = 0; j < g->n; j++) {
      const v8 u = s->scale[v] * code_value(&p->set, g->x[j] * inv), wu = g->w[j] * u;
      uu += wu * u;
      xu += wu * g->x[j];
    }
  }
  const float below = sum_lanes(uu);
  if (below > 0) s->d = f16_round(sum_lanes(xu) / below);
}

// The scale of largest magnitude becomes the lowest integer, which reaches further than the highest one.
INLINE void round_scales(super_block *s, const scale_plan *p, const scaled *found, float furthest) {
  float peak = 0;
  for (int v = 0; v < s->n_vectors; v++) {
    for (int i = 0; i < LANES; i++) peak = fabsf(found[v].scale[i]) > fabsf(peak) ? found[v].scale[i] : peak;
  }
  s->d = f16_round(peak / furthest);
  for (int v = 0; v < s->n_vectors; v++) {
    s->scale[v] = nearest(clamp(found[v].scale * inverse(splat(s->d)), p->scale_low, p->scale_high));
  }
}

INLINE void copy_scales(super_block *to, const super_block *from) {
  memcpy(to->scale, from->scale, sizeof to->scale);
  to->d = from->d;
}

// Leaves the values (not yet codes) of all weights in `values`.
INLINE void encode_scaled_super(super_block *s, const scale_plan *p, int8_t *values) {
  scaled found[2];
  for (int v = 0; v < s->n_vectors; v++) found[v] = scale_search(&s->g[v], &p->set, p->n_steps, p->first, p->step);
  round_scales(s, p, found, p->scale_low);
  float least = tune_scales(s, p, p->radius);
  for (int round = 0; round < p->n_rounds; round++) {
    super_block before;
    copy_scales(&before, s);
    fit_factor(s, p);
    const float error = tune_scales(s, p, 1);
    if (error < least) {
      least = error;
    } else {
      copy_scales(s, &before);
      break;
    }
  }
  for (int v = 0; v < s->n_vectors; v++) {
    const groups *g = &s->g[v];
    const v8 inv = inverse(splat(s->d) * s->scale[v]);
    for (int j = 0; j < g->n; j++) {
      const v8 value = code_value(&p->set, g->x[j] * inv);
      for (int i = 0; i < LANES; i++) values[(v * LANES + i) * g->n + j] = (int8_t)value[i];
    }
  }
}

INLINE scale_plan plan_scales(const clb_encode_context *c, code_set set, float scale_low, float width) {
  scale_plan p = {.set = set, .scale_low = scale_low, .scale_high = -scale_low - 1};
  p.n_steps = c->effort == CLB_EFFORT_FAST ? 3 : c->effort == CLB_EFFORT_NORMAL ? 6 : 14;
  p.first = -width;
  p.step = 2 * width / (float)(p.n_steps - 1);
  p.radius = c->effort == CLB_EFFORT_FAST ? 0 : c->effort == CLB_EFFORT_NORMAL ? 1 : 3;
  p.n_rounds = c->effort == CLB_EFFORT_FAST ? 0 : c->effort == CLB_EFFORT_NORMAL ? 2 : 4;
  return p;
}

TARGET static void encode_q3_k(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  const scale_plan plan = plan_scales(c, (code_set){-4, 3, NULL}, -32, 1.0f);
  for (size_t b = 0; b < n; b++, dst += 110) {
    super_block s;
    int8_t values[256];
    uint8_t codes[256];
    load_super(&s, c, x, b, 16);
    encode_scaled_super(&s, &plan, values);
    for (int i = 0; i < 256; i++) codes[i] = (uint8_t)(values[i] + 4);
    for (int k = 0; k < 32; k++) {
      uint32_t third = 0;
      for (int g = 0; g < 8; g++) third |= (uint32_t)(codes[g * 32 + k] >> 2) << g;
      dst[k] = (uint8_t)third;
    }
    put_crumbs(dst + 32, codes, 0);
    memset(dst + 96, 0, 12);
    for (int i = 0; i < 16; i++) {
      const uint32_t scale = (uint32_t)((int)s.scale[i / LANES][i % LANES] + 32);
      dst[96 + i % 8] = (uint8_t)(dst[96 + i % 8] | (scale & 15) << (i / 8 * 4));
      dst[104 + i % 4] = (uint8_t)(dst[104 + i % 4] | (scale >> 4) << (i / 4 * 2));
    }
    store_f16(dst + 108, s.d);
  }
}

TARGET static void encode_q6_k(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  const scale_plan plan = plan_scales(c, (code_set){-32, 31, NULL}, -128, 0.9f);
  for (size_t b = 0; b < n; b++, dst += 210) {
    super_block s;
    int8_t values[256];
    uint8_t codes[256];
    load_super(&s, c, x, b, 16);
    encode_scaled_super(&s, &plan, values);
    for (int i = 0; i < 256; i++) codes[i] = (uint8_t)(values[i] + 32);
    for (int i = 0; i < 128; i++) {
      const uint8_t *pair = codes + i / 64 * 128 + i % 64;
      dst[i] = (uint8_t)((pair[0] & 15) | (pair[64] & 15) << 4);
    }
    put_crumbs(dst + 128, codes, 4);
    for (int i = 0; i < 16; i++) dst[192 + i] = (uint8_t)(int8_t)s.scale[i / LANES][i % LANES];
    store_f16(dst + 208, s.d);
  }
}

// The index of a value of the iq4 codebook.
INLINE uint32_t iq4_index(int8_t value) {
  uint32_t index = 0;
  for (int i = 1; i < 16; i++) index += value >= clb_values_iq4[i];
  return index;
}

TARGET static void encode_iq4_xs(const clb_encode_context *c, const float *x, size_t n, uint8_t *dst) {
  const scale_plan plan = plan_scales(c, (code_set){-127, 113, clb_values_iq4}, -32, 12);
  for (size_t b = 0; b < n; b++, dst += 136) {
    super_block s;
    int8_t values[256];
    uint32_t scales_high = 0;
    load_super(&s, c, x, b, 32);
    encode_scaled_super(&s, &plan, values);
    store_f16(dst, s.d);
    memset(dst + 4, 0, 4);
    for (int g = 0; g < 8; g++) {
      const uint32_t scale = (uint32_t)((int)s.scale[0][g] + 32);
      scales_high |= (scale >> 4) << (2 * g);
      dst[4 + g / 2] = (uint8_t)(dst[4 + g / 2] | (scale & 15) << (g % 2 * 4));
      for (int i = 0; i < 16; i++) {
        dst[8 + g * 16 + i] = (uint8_t)(iq4_index(values[g * 32 + i]) | iq4_index(values[g * 32 + 16 + i]) << 4);
      }
    }
    dst[2] = (uint8_t)scales_high;
    dst[3] = (uint8_t)(scales_high >> 8);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// The table

static const struct {
  uint32_t type;
  clb_encode_fn *encode;
} encoders[] = {
    {CLB_Q4_0, encode_q4_0},   {CLB_Q4_1, encode_q4_1}, {CLB_Q5_0, encode_q5_0},     {CLB_Q5_1, encode_q5_1},
    {CLB_Q8_0, encode_q8_0},   {CLB_Q2_K, encode_q2_k}, {CLB_Q3_K, encode_q3_k},     {CLB_Q4_K, encode_q4_k},
    {CLB_Q5_K, encode_q5_k},   {CLB_Q6_K, encode_q6_k}, {CLB_IQ4_NL, encode_iq4_nl}, {CLB_IQ4_XS, encode_iq4_xs},
    {CLB_MXFP4, encode_mxfp4},
};

clb_encode_fn *ENCODER(uint32_t type) {
  for (size_t i = 0; i < sizeof encoders / sizeof *encoders; i++) {
    if (encoders[i].type == type) return encoders[i].encode;
  }
  return NULL;
}
