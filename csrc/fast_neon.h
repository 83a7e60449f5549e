// The fast kernels for AArch64, once for every set: the same bits as the scalar reference in fast.c. The including file
// defines DOT_16(acc, a, b), which adds the products of 16 signed bytes to the four 32-bit sums of acc, in any order,
// and SET_NAME.
//
// A group of weights is decoded once for a tile of tokens, and for activations of 16 bits widened; lanes of the partial
// sums are blocks.
#include <arm_neon.h>
#include <math.h>
#include <string.h>

#include "fast_internal.h"

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

enum { TILE_TOKENS = 64 };

// ---------------------------------------------------------------------------------------------------------------------
// Pieces of decoders

INLINE uint16_t load_u16(const uint8_t *p) {
  uint16_t v;
  memcpy(&v, p, sizeof v);
  return v;
}

INLINE uint32_t load_u32(const uint8_t *p) {
  uint32_t v;
  memcpy(&v, p, sizeof v);
  return v;
}

INLINE float load_f16(const uint8_t *p) {
  return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(load_u16(p)))), 0);
}

INLINE float float_of(uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

INLINE uint8x16_t low_nibbles(uint8x16_t v) {
  return vandq_u8(v, vdupq_n_u8(15));
}
INLINE uint8x16_t high_nibbles(uint8x16_t v) {
  return vshrq_n_u8(v, 4);
}

// Both halves of a block, less an offset.
INLINE void store_codes(int8_t *dst, uint8x16_t low, uint8x16_t high, int8_t offset) {
  vst1q_s8(dst, vsubq_s8(vreinterpretq_s8_u8(low), vdupq_n_s8(offset)));
  vst1q_s8(dst + 16, vsubq_s8(vreinterpretq_s8_u8(high), vdupq_n_s8(offset)));
}

INLINE void store_nibbles(int8_t *dst, const uint8_t *src, int8_t offset) {
  uint8x16_t v = vld1q_u8(src);
  store_codes(dst, low_nibbles(v), high_nibbles(v), offset);
}

INLINE void store_values(int8_t *dst, const uint8_t *src, const int8_t values[16]) {
  uint8x16_t v = vld1q_u8(src);
  int8x16_t table = vld1q_s8(values);
  vst1q_s8(dst, vqtbl1q_s8(table, low_nibbles(v)));
  vst1q_s8(dst + 16, vqtbl1q_s8(table, high_nibbles(v)));
}

// 16 where a bit of the two bytes is set.
INLINE uint8x16_t fifth_bits(const uint8_t *p) {
  const uint8x8_t bit_of = vcreate_u8(0x8040201008040201);
  uint8x16_t v = vcombine_u8(vtst_u8(vdup_n_u8(p[0]), bit_of), vtst_u8(vdup_n_u8(p[1]), bit_of));
  return vandq_u8(v, vdupq_n_u8(16));
}

INLINE void store_fives(int8_t *dst, const uint8_t *nibbles, const uint8_t *high, int8_t offset) {
  uint8x16_t v = vld1q_u8(nibbles);
  store_codes(dst, vorrq_u8(low_nibbles(v), fifth_bits(high)), vorrq_u8(high_nibbles(v), fifth_bits(high + 2)), offset);
}

// The bits of every byte from `shift` on, below a mask.
INLINE uint8x16_t field(const uint8_t *p, int shift, uint8_t mask) {
  return vandq_u8(vshlq_u8(vld1q_u8(p), vdupq_n_s8((int8_t)-shift)), vdupq_n_u8(mask));
}

// ---------------------------------------------------------------------------------------------------------------------
// Decoders of a group: 8 blocks of 32, or a quant block of 256

INLINE void q4_0_group(const uint8_t *w, clb_fast_group *g) {
  for (int b = 0; b < 8; b++, w += 18) {
    g->d[b] = load_f16(w);
    store_nibbles(g->codes + 32 * b, w + 2, 8);
  }
}

INLINE void q4_1_group(const uint8_t *w, clb_fast_group *g) {
  for (int b = 0; b < 8; b++, w += 20) {
    g->d[b] = load_f16(w);
    g->add[b] = load_f16(w + 2);
    store_nibbles(g->codes + 32 * b, w + 4, 0);
  }
}

INLINE void q5_0_group(const uint8_t *w, clb_fast_group *g) {
  for (int b = 0; b < 8; b++, w += 22) {
    g->d[b] = load_f16(w);
    store_fives(g->codes + 32 * b, w + 6, w + 2, 16);
  }
}

INLINE void q5_1_group(const uint8_t *w, clb_fast_group *g) {
  for (int b = 0; b < 8; b++, w += 24) {
    g->d[b] = load_f16(w);
    g->add[b] = load_f16(w + 2);
    store_fives(g->codes + 32 * b, w + 8, w + 4, 0);
  }
}

INLINE void q8_0_group(const uint8_t *w, clb_fast_group *g) {
  for (int b = 0; b < 8; b++, w += 34) {
    g->d[b] = load_f16(w);
    memcpy(g->codes + 32 * b, w + 2, 32);
  }
}

INLINE void iq4_nl_group(const uint8_t *w, clb_fast_group *g) {
  for (int b = 0; b < 8; b++, w += 18) {
    g->d[b] = load_f16(w);
    store_values(g->codes + 32 * b, w + 2, clb_values_iq4);
  }
}

INLINE void mxfp4_group(const uint8_t *w, clb_fast_group *g) {
  for (int b = 0; b < 8; b++, w += 17) {
    g->d[b] = float_of(w[0] < 2 ? 0x00200000u << w[0] : (uint32_t)(w[0] - 1) << 23);
    store_values(g->codes + 32 * b, w + 1, clb_values_e2m1);
  }
}

INLINE void iq4_xs_group(const uint8_t *w, clb_fast_group *g) {
  float d = load_f16(w);
  for (int b = 0; b < 8; b++) {
    int low = w[4 + b / 2] >> (b % 2 * 4) & 15, high = w[2 + b / 4] >> (b % 4 * 2) & 3;
    g->d[b] = d * (float)((low | high << 4) - 32);
    store_values(g->codes + 32 * b, w + 8 + 16 * b, clb_values_iq4);
  }
}

INLINE void same_scales(float d, float add, clb_fast_group *g) {
  for (int b = 0; b < 8; b++) g->d[b] = d, g->add[b] = add;
}

INLINE void store_16_integers(int16_t *dst, int8x16_t v) {
  vst1q_s16(dst, vmovl_s8(vget_low_s8(v)));
  vst1q_s16(dst + 8, vmovl_high_s8(v));
}

INLINE void q2_k_group(const uint8_t *w, clb_fast_group *g) {
  uint8x16_t packed = vld1q_u8(w);
  same_scales(load_f16(w + 80), -load_f16(w + 82), g);
  store_16_integers(g->sub, vreinterpretq_s8_u8(low_nibbles(packed)));
  store_16_integers(g->min, vreinterpretq_s8_u8(high_nibbles(packed)));
  UNROLL for (int b = 0; b < 8; b++) {
    const uint8_t *p = w + 16 + b / 4 * 32;
    store_codes(g->codes + 32 * b, field(p, b % 4 * 2, 3), field(p + 16, b % 4 * 2, 3), 0);
  }
}

INLINE uint8x16_t q3_k_codes(const uint8_t *mask, const uint8_t *codes, int b) {
  return vorrq_u8(field(codes + b / 4 * 32, b % 4 * 2, 3), vshlq_n_u8(field(mask, b, 1), 2));
}

INLINE void q3_k_group(const uint8_t *w, clb_fast_group *g) {
  const uint8_t *s = w + 96;
  same_scales(load_f16(w + 108), 0, g);
  for (int i = 0; i < 16; i++) {
    int low = s[i % 8] >> (i / 8 * 4) & 15, high = s[8 + i % 4] >> (i / 4 * 2) & 3;
    g->sub[i] = (int16_t)((low | high << 4) - 32);
  }
  UNROLL for (int b = 0; b < 8; b++) {
    store_codes(g->codes + 32 * b, q3_k_codes(w, w + 32, b), q3_k_codes(w + 16, w + 48, b), 4);
  }
}

INLINE void k_scales(const uint8_t *w, clb_fast_group *g) {
  uint32_t first = load_u32(w + 4), second = load_u32(w + 8), third = load_u32(w + 12);
  uint64_t scale = first & 0x3F3F3F3F, min = second & 0x3F3F3F3F;
  scale |= (uint64_t)((third & 0x0F0F0F0F) | (first >> 2 & 0x30303030)) << 32;
  min |= (uint64_t)((third >> 4 & 0x0F0F0F0F) | (second >> 2 & 0x30303030)) << 32;
  float d = load_f16(w), dmin = load_f16(w + 2);
  for (int b = 0; b < 8; b++) {
    g->d[b] = d * (float)(int)(scale >> (8 * b) & 63);
    g->add[b] = -(dmin * (float)(int)(min >> (8 * b) & 63));
  }
}

INLINE void q4_k_group(const uint8_t *w, clb_fast_group *g) {
  k_scales(w, g);
  UNROLL for (int b = 0; b < 8; b++) {
    const uint8_t *p = w + 16 + b / 2 * 32;
    store_codes(g->codes + 32 * b, field(p, b % 2 * 4, 15), field(p + 16, b % 2 * 4, 15), 0);
  }
}

INLINE uint8x16_t q5_k_codes(const uint8_t *high, const uint8_t *codes, int b) {
  return vorrq_u8(field(codes + b / 2 * 32, b % 2 * 4, 15), vshlq_n_u8(field(high, b, 1), 4));
}

INLINE void q5_k_group(const uint8_t *w, clb_fast_group *g) {
  k_scales(w, g);
  UNROLL for (int b = 0; b < 8; b++) {
    store_codes(g->codes + 32 * b, q5_k_codes(w + 16, w + 48, b), q5_k_codes(w + 32, w + 64, b), 0);
  }
}

INLINE uint8x16_t q6_k_codes(const uint8_t *low, const uint8_t *high, int b) {
  uint8x16_t low4 = field(low + b / 4 * 64 + b % 2 * 32, b / 2 % 2 * 4, 15);
  return vorrq_u8(low4, vshlq_n_u8(field(high + b / 4 * 32, b % 4 * 2, 3), 4));
}

INLINE void q6_k_group(const uint8_t *w, clb_fast_group *g) {
  same_scales(load_f16(w + 208), 0, g);
  store_16_integers(g->sub, vreinterpretq_s8_u8(vld1q_u8(w + 192)));
  UNROLL for (int b = 0; b < 8; b++) {
    store_codes(g->codes + 32 * b, q6_k_codes(w, w + 128, b), q6_k_codes(w + 16, w + 144, b), 32);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Products

// The codes of a group as 16-bit integers, in the order of clb_fast_x16, times their sub-scales if they have any.
INLINE void widen(bool has_sub, const clb_fast_group *g, int16_t wide[CLB_FAST_GROUP]) {
  UNROLL for (int b = 0; b < 8; b++) {
    UNROLL for (int half = 0; half < 2; half++) {
      int16x8_t codes = vreinterpretq_s16_s8(vld1q_s8(g->codes + 32 * b + 16 * half));
      int16x8_t even = vshrq_n_s16(vshlq_n_s16(codes, 8), 8), odd = vshrq_n_s16(codes, 8);
      int16_t sub = has_sub ? g->sub[2 * b + half] : 1;
      vst1q_s16(wide + 32 * b + 8 * half, has_sub ? vmulq_n_s16(even, sub) : even);
      vst1q_s16(wide + 32 * b + 16 + 8 * half, has_sub ? vmulq_n_s16(odd, sub) : odd);
    }
  }
}

// The integer dot products of 4 blocks from block b on.
INLINE int32x4_t totals_of_4_16(const int16_t *wide, const clb_fast_x16 *x, int b) {
  int32x4_t v[4];
  UNROLL for (int i = 0; i < 4; i++) {
    v[i] = vdupq_n_s32(0);
    UNROLL for (int j = 32 * (b + i); j < 32 * (b + i + 1); j += 8) {
      int16x8_t codes = vld1q_s16(wide + j), q = vld1q_s16(x->q + j);
      v[i] = vmlal_s16(v[i], vget_low_s16(codes), vget_low_s16(q));
      v[i] = vmlal_high_s16(v[i], codes, q);
    }
  }
  return vpaddq_s32(vpaddq_s32(v[0], v[1]), vpaddq_s32(v[2], v[3]));
}

// The same of codes of 8 bits, sub-scales included.
INLINE int32x4_t totals_of_4_8(bool has_sub, const clb_fast_group *g, const clb_fast_x8 *x, int b) {
  int32x4_t v[4], zero = vdupq_n_s32(0);
  UNROLL for (int i = 0; i < 4; i++) {
    const int8_t *codes = g->codes + 32 * (b + i), *q = x->q + 32 * (b + i);
    if (has_sub) {
      v[i] = vmulq_n_s32(DOT_16(zero, vld1q_s8(codes), vld1q_s8(q)), g->sub[2 * (b + i)]);
      v[i] = vmlaq_n_s32(v[i], DOT_16(zero, vld1q_s8(codes + 16), vld1q_s8(q + 16)), g->sub[2 * (b + i) + 1]);
    } else {
      v[i] = DOT_16(DOT_16(zero, vld1q_s8(codes), vld1q_s8(q)), vld1q_s8(codes + 16), vld1q_s8(q + 16));
    }
  }
  return vpaddq_s32(vpaddq_s32(v[0], v[1]), vpaddq_s32(v[2], v[3]));
}

// Minimums times sums of activations, for 4 blocks from block b on.
INLINE int32x4_t mins_of_4(const clb_fast_group *g, const clb_fast_x8 *x, int b) {
  int16x8_t min = vld1q_s16(g->min + 2 * b), half = vld1q_s16(x->half + 2 * b);
  return vpaddq_s32(vmull_s16(vget_low_s16(min), vget_low_s16(half)), vmull_high_s16(min, half));
}

INLINE bool has_sub(clb_fast_form form) {
  return form == CLB_FORM_SUB || form == CLB_FORM_SUB_MIN;
}

INLINE void add_group_16(clb_fast_form form, float partial[8], const clb_fast_group *g, const int16_t *wide,
                         const clb_fast_x16 *x) {
  UNROLL for (int b = 0; b < 8; b += 4) {
    float32x4_t d = vmulq_f32(vld1q_f32(g->d + b), vld1q_f32(x->d + b));
    float32x4_t sum = vfmaq_f32(vld1q_f32(partial + b), d, vcvtq_f32_s32(totals_of_4_16(wide, x, b)));
    if (form == CLB_FORM_MIN) sum = vfmaq_f32(sum, vld1q_f32(g->add + b), vld1q_f32(x->s + b));
    vst1q_f32(partial + b, sum);
  }
}

INLINE void add_group_8(clb_fast_form form, float partial[8], const clb_fast_group *g, const clb_fast_x8 *x) {
  UNROLL for (int b = 0; b < 8; b += 4) {
    float32x4_t sum = vld1q_f32(partial + b), dx = vld1q_f32(x->d + b), add = vld1q_f32(g->add + b);
    float32x4_t total = vcvtq_f32_s32(totals_of_4_8(has_sub(form), g, x, b));
    sum = vfmaq_f32(sum, vmulq_f32(vld1q_f32(g->d + b), dx), total);
    if (form == CLB_FORM_MIN) sum = vfmaq_f32(sum, add, vld1q_f32(x->s + b));
    if (form == CLB_FORM_SUB_MIN) sum = vfmaq_f32(sum, vmulq_f32(add, dx), vcvtq_f32_s32(mins_of_4(g, x, b)));
    vst1q_f32(partial + b, sum);
  }
}

INLINE float reduce(const float p[8]) {
  float32x4_t by4 = vaddq_f32(vld1q_f32(p), vld1q_f32(p + 4));
  float32x2_t by2 = vadd_f32(vget_low_f32(by4), vget_high_f32(by4));
  return vget_lane_f32(by2, 0) + vget_lane_f32(by2, 1);
}

typedef void group_fn(const uint8_t *w, clb_fast_group *g);

INLINE void row_by_tokens(clb_fast_form form, clb_fast_x_kind kind, group_fn *decode, const clb_fast_product *p,
                          const clb_fast_type *t, size_t row, size_t token, size_t n_tokens) {
  float partial[TILE_TOKENS][8];
  uint8_t padded[CLB_FAST_MAX_BYTES];
  clb_fast_group decoded = {.add = {0}};
  int16_t wide[CLB_FAST_GROUP];
  memset(partial, 0, n_tokens * sizeof *partial);
  for (size_t g = 0; g * CLB_FAST_GROUP < p->n_cols; g++) {
    decode(clb_fast_padded(p, t, row, g, padded), &decoded);
    if (kind == CLB_FAST_X_Q16) widen(has_sub(form), &decoded, wide);
    for (size_t i = 0; i < n_tokens; i++) {
      const void *x = p->qx + (token + i) * p->qx_stride;
      if (kind == CLB_FAST_X_Q16) {
        add_group_16(form, partial[i], &decoded, wide, (const clb_fast_x16 *)x + g);
      } else {
        add_group_8(form, partial[i], &decoded, (const clb_fast_x8 *)x + g);
      }
    }
  }
  for (size_t i = 0; i < n_tokens; i++) p->y[(token + i) * p->ldy + row] = reduce(partial[i]);
}

INLINE void product(clb_fast_form form, clb_fast_x_kind kind, group_fn *decode, const clb_fast_product *p,
                    const clb_fast_type *t, size_t row0, size_t row1, size_t n_tokens) {
  for (size_t i = 0; i < n_tokens; i += TILE_TOKENS) {
    size_t n = n_tokens - i < TILE_TOKENS ? n_tokens - i : TILE_TOKENS;
    for (size_t row = row0; row < row1; row++) row_by_tokens(form, kind, decode, p, t, row, i, n);
  }
}

#define PRODUCT(name, id, form, kind, group_bytes)                                                        \
  static void product_##name(const clb_fast_product *p, const clb_fast_type *t, size_t row0, size_t row1, \
                             size_t n_tokens) {                                                           \
    product(form, kind, name##_group, p, t, row0, row1, n_tokens);                                        \
  }

CLB_FAST_TYPES(PRODUCT)

// ---------------------------------------------------------------------------------------------------------------------
// Quantizing activations

INLINE uint32_t largest_bits(const float *x) {
  uint32x4_t largest = vdupq_n_u32(0);
  UNROLL for (int i = 0; i < 8; i++) {
    uint32x4_t bits = vreinterpretq_u32_f32(vld1q_f32(x + 4 * i));
    largest = vmaxq_u32(largest, vandq_u32(bits, vdupq_n_u32(0x7FFFFFFF)));
  }
  return vmaxvq_u32(largest);
}

// The codes of a block in order; returns its scale.
INLINE float codes_of(int16x8_t q[4], const float *x, float largest_code) {
  uint32_t largest = largest_bits(x), keep = largest < CLB_INF_BITS ? ~0u : 0;
  clb_fast_step step = clb_fast_step_of(largest, largest_code);
  int16x4_t v[8];
  UNROLL for (int i = 0; i < 8; i++) {
    uint32x4_t bits = vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + 4 * i)), vdupq_n_u32(keep));
    v[i] = vmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vreinterpretq_f32_u32(bits), step.inverse)));
  }
  UNROLL for (int i = 0; i < 4; i++) q[i] = vcombine_s16(v[2 * i], v[2 * i + 1]);
  return step.d;
}

INLINE void quantize_block_8(clb_fast_x8 *dst, size_t b, const float *x) {
  int16x8_t q[4];
  float d = codes_of(q, x, CLB_FAST_MAX_8);
  int8x16_t first = vcombine_s8(vmovn_s16(q[0]), vmovn_s16(q[1]));
  int8x16_t second = vcombine_s8(vmovn_s16(q[2]), vmovn_s16(q[3]));
  int low = vaddlvq_s8(first), high = vaddlvq_s8(second);
  vst1q_s8(dst->q + 32 * b, first);
  vst1q_s8(dst->q + 32 * b + 16, second);
  dst->half[2 * b] = (int16_t)low;
  dst->half[2 * b + 1] = (int16_t)high;
  dst->sum[b] = low + high;
  dst->d[b] = d;
  dst->s[b] = d * (float)(low + high);
}

INLINE void quantize_block_16(clb_fast_x16 *dst, size_t b, const float *x) {
  int16x8_t q[4];
  float d = codes_of(q, x, CLB_FAST_MAX_16);
  int sum = 0;
  UNROLL for (size_t half = 0; half < 2; half++) {
    int16x8_t low = q[2 * half], high = q[2 * half + 1];
    vst1q_s16(dst->q + 32 * b + 8 * half, vuzp1q_s16(low, high));
    vst1q_s16(dst->q + 32 * b + 16 + 8 * half, vuzp2q_s16(low, high));
    dst->half[clb_fast_half_at(b, half)] = vaddlvq_s16(low) + vaddlvq_s16(high);
    sum += dst->half[clb_fast_half_at(b, half)];
  }
  dst->d[b] = d;
  dst->s[b] = d * (float)sum;
}

static void quantize_8(clb_fast_x8 *dst, const float *x, size_t n) {
  for (size_t i = 0; i < n; i += 32) quantize_block_8(dst + i / CLB_FAST_GROUP, i / 32 % CLB_FAST_BLOCKS, x + i);
}

static void quantize_16(clb_fast_x16 *dst, const float *x, size_t n) {
  for (size_t i = 0; i < n; i += 32) quantize_block_16(dst + i / CLB_FAST_GROUP, i / 32 % CLB_FAST_BLOCKS, x + i);
}

// ---------------------------------------------------------------------------------------------------------------------
// The set

#define ENTRY(name, ...) product_##name,

static const clb_fast_kernels kernels = {
    .name = SET_NAME,
    .quantize_8 = quantize_8,
    .quantize_16 = quantize_16,
    .to_q8_0 = clb_scalar_to_q8_0,
    .to_q4_0 = clb_scalar_to_q4_0,
    .product = {CLB_FAST_TYPES(ENTRY)},
};
