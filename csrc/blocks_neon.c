// The kernels for AArch64, whose CPUs all have NEON: the same bits as the scalar reference in blocks.c, where the
// formats are described. Types without a decoder here use the scalar one, and the tile.
//
// As in blocks_avx2.c, a decoder exists once, and emits either to memory or into a dot product.
// Lanes: partial sum j of 32 is lane j % 4 of accumulator j / 4.
#include "blocks_internal.h"

#if defined(CLB_HAVE_NEON)

#include <arm_neon.h>
#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Where decoded weights go

typedef struct {
  float *dst;      // decode
  const float *x;  // dot product
  float32x4_t acc[8];
} sink;

enum { DECODE, DOT };

// Weights 4 * i .. 4 * i + 3 of the current 32.
INLINE void emit_4(sink *s, int mode, int i, float32x4_t w) {
  if (mode == DECODE) {
    vst1q_f32(s->dst + 4 * i, w);
  } else {
    s->acc[i] = vfmaq_f32(s->acc[i], w, vld1q_f32(s->x + 4 * i));
  }
}

INLINE void next_32(sink *s, int mode) {
  if (mode == DECODE) {
    s->dst += 32;
  } else {
    s->x += 32;
  }
}

INLINE sink dot_sink(const float *x) {
  float32x4_t zero = vdupq_n_f32(0);
  return (sink){NULL, x, {zero, zero, zero, zero, zero, zero, zero, zero}};
}

INLINE float reduce(const float32x4_t a[8]) {
  float32x4_t by16_0 = vaddq_f32(a[0], a[4]), by16_1 = vaddq_f32(a[1], a[5]);
  float32x4_t by16_2 = vaddq_f32(a[2], a[6]), by16_3 = vaddq_f32(a[3], a[7]);
  float32x4_t by4 = vaddq_f32(vaddq_f32(by16_0, by16_2), vaddq_f32(by16_1, by16_3));
  float32x2_t by2 = vadd_f32(vget_low_f32(by4), vget_high_f32(by4));
  return vget_lane_f32(by2, 0) + vget_lane_f32(by2, 1);
}

// ---------------------------------------------------------------------------------------------------------------------
// Pieces of decoders

INLINE uint32_t load_u32(const uint8_t *p) {
  uint32_t v;
  memcpy(&v, p, sizeof v);
  return v;
}

INLINE uint16_t load_u16(const uint8_t *p) {
  uint16_t v;
  memcpy(&v, p, sizeof v);
  return v;
}

INLINE float load_f16(const uint8_t *p) {
  return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(load_u16(p)))), 0);
}

INLINE float32x4_t low_f32(int16x8_t v) {
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(v)));
}
INLINE float32x4_t high_f32(int16x8_t v) {
  return vcvtq_f32_s32(vmovl_high_s16(v));
}

// scale * code for 16 codes: half 0 or 1 of the current 32 weights.
INLINE void emit_i8(sink *s, int mode, int half, int8x16_t codes, float scale) {
  int16x8_t low = vmovl_s8(vget_low_s8(codes)), high = vmovl_high_s8(codes);
  emit_4(s, mode, 4 * half, vmulq_n_f32(low_f32(low), scale));
  emit_4(s, mode, 4 * half + 1, vmulq_n_f32(high_f32(low), scale));
  emit_4(s, mode, 4 * half + 2, vmulq_n_f32(low_f32(high), scale));
  emit_4(s, mode, 4 * half + 3, vmulq_n_f32(high_f32(high), scale));
}

// scale * code - min. The product is exact, so that the sign of min is all there is to a fused form of it.
INLINE void emit_minus(sink *s, int mode, int half, uint8x16_t codes, float scale, float min) {
  int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(codes)));
  int16x8_t high = vreinterpretq_s16_u16(vmovl_high_u8(codes));
  float32x4_t minus_min = vdupq_n_f32(-min);
  emit_4(s, mode, 4 * half, vfmaq_n_f32(minus_min, low_f32(low), scale));
  emit_4(s, mode, 4 * half + 1, vfmaq_n_f32(minus_min, high_f32(low), scale));
  emit_4(s, mode, 4 * half + 2, vfmaq_n_f32(minus_min, low_f32(high), scale));
  emit_4(s, mode, 4 * half + 3, vfmaq_n_f32(minus_min, high_f32(high), scale));
}

INLINE uint8x16_t low_nibbles(uint8x16_t v) {
  return vandq_u8(v, vdupq_n_u8(15));
}
INLINE uint8x16_t high_nibbles(uint8x16_t v) {
  return vshrq_n_u8(v, 4);
}
INLINE int8x16_t minus(uint8x16_t codes, int8_t offset) {
  return vsubq_s8(vreinterpretq_s8_u8(codes), vdupq_n_s8(offset));
}

// ---------------------------------------------------------------------------------------------------------------------
// Decoders of one quant block

INLINE void q8_0_block(sink *s, int mode, const uint8_t *b) {
  float d = load_f16(b);
  emit_i8(s, mode, 0, vreinterpretq_s8_u8(vld1q_u8(b + 2)), d);
  emit_i8(s, mode, 1, vreinterpretq_s8_u8(vld1q_u8(b + 18)), d);
  next_32(s, mode);
}

INLINE void q4_0_block(sink *s, int mode, const uint8_t *b) {
  float d = load_f16(b);
  uint8x16_t codes = vld1q_u8(b + 2);
  emit_i8(s, mode, 0, minus(low_nibbles(codes), 8), d);
  emit_i8(s, mode, 1, minus(high_nibbles(codes), 8), d);
  next_32(s, mode);
}

INLINE void looked_up(sink *s, int mode, const uint8_t *nibbles, const int8_t values[16], float d) {
  uint8x16_t codes = vld1q_u8(nibbles);
  int8x16_t table = vld1q_s8(values);
  emit_i8(s, mode, 0, vqtbl1q_s8(table, low_nibbles(codes)), d);
  emit_i8(s, mode, 1, vqtbl1q_s8(table, high_nibbles(codes)), d);
  next_32(s, mode);
}

INLINE void iq4_nl_block(sink *s, int mode, const uint8_t *b) {
  looked_up(s, mode, b + 2, clb_values_iq4, load_f16(b));
}

INLINE void iq4_xs_block(sink *s, int mode, const uint8_t *b) {
  float d = load_f16(b);
  uint32_t scales_high = load_u16(b + 2), scales_low = load_u32(b + 4);
  for (int g = 0; g < 8; g++) {
    int scale = (int)((scales_low >> (4 * g) & 15) | (scales_high >> (2 * g) & 3) << 4) - 32;
    looked_up(s, mode, b + 8 + g * 16, clb_values_iq4, d * (float)scale);
  }
}

INLINE void mxfp4_block(sink *s, int mode, const uint8_t *b) {
  uint32_t e = b[0], bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
  float d;
  memcpy(&d, &bits, sizeof d);
  looked_up(s, mode, b + 1, clb_values_e2m1, d);
}

// The 8 scales and mins of q4_k and q5_k.
INLINE void k_scales(const uint8_t *b, float scales[8], float mins[8]) {
  uint32_t first = load_u32(b + 4), second = load_u32(b + 8), third = load_u32(b + 12);
  uint64_t scale = first & 0x3F3F3F3F, min = second & 0x3F3F3F3F;
  scale |= (uint64_t)((third & 0x0F0F0F0F) | (first >> 2 & 0x30303030)) << 32;
  min |= (uint64_t)((third >> 4 & 0x0F0F0F0F) | (second >> 2 & 0x30303030)) << 32;
  float d = load_f16(b), dmin = load_f16(b + 2);
  for (int i = 0; i < 8; i++) {
    scales[i] = d * (float)(int)(scale >> (8 * i) & 63);
    mins[i] = dmin * (float)(int)(min >> (8 * i) & 63);
  }
}

INLINE void q4_k_block(sink *s, int mode, const uint8_t *b) {
  float scales[8], mins[8];
  k_scales(b, scales, mins);
  for (int g = 0; g < 8; g += 2) {
    uint8x16_t v0 = vld1q_u8(b + 16 + g * 16), v1 = vld1q_u8(b + 32 + g * 16);
    emit_minus(s, mode, 0, low_nibbles(v0), scales[g], mins[g]);
    emit_minus(s, mode, 1, low_nibbles(v1), scales[g], mins[g]);
    next_32(s, mode);
    emit_minus(s, mode, 0, high_nibbles(v0), scales[g + 1], mins[g + 1]);
    emit_minus(s, mode, 1, high_nibbles(v1), scales[g + 1], mins[g + 1]);
    next_32(s, mode);
  }
}

// The low nibble or the high one, under a bit of the fifth.
INLINE uint8x16_t q5_codes(const uint8_t *codes, const uint8_t *high, int g) {
  uint8x16_t low4 = g % 2 ? high_nibbles(vld1q_u8(codes)) : low_nibbles(vld1q_u8(codes));
  uint8x16_t fifth = vandq_u8(vshlq_u8(vld1q_u8(high), vdupq_n_s8((int8_t)-g)), vdupq_n_u8(1));
  return vorrq_u8(low4, vshlq_n_u8(fifth, 4));
}

INLINE void q5_k_block(sink *s, int mode, const uint8_t *b) {
  float scales[8], mins[8];
  k_scales(b, scales, mins);
  for (int g = 0; g < 8; g++) {
    const uint8_t *codes = b + 48 + g / 2 * 32;
    emit_minus(s, mode, 0, q5_codes(codes, b + 16, g), scales[g], mins[g]);
    emit_minus(s, mode, 1, q5_codes(codes + 16, b + 32, g), scales[g], mins[g]);
    next_32(s, mode);
  }
}

// 16 codes of group g: low nibbles for even g / 2, and two bits at 2 * (g % 4).
INLINE int8x16_t q6_codes(const uint8_t *low, const uint8_t *high, int g) {
  uint8x16_t low4 = g / 2 % 2 ? high_nibbles(vld1q_u8(low)) : low_nibbles(vld1q_u8(low));
  uint8x16_t high2 = vandq_u8(vshlq_u8(vld1q_u8(high), vdupq_n_s8((int8_t)(-2 * (g % 4)))), vdupq_n_u8(3));
  return minus(vorrq_u8(low4, vshlq_n_u8(high2, 4)), 32);
}

INLINE void q6_k_block(sink *s, int mode, const uint8_t *b) {
  float d = load_f16(b + 208);
  for (int g = 0; g < 8; g++) {
    const uint8_t *low = b + g / 4 * 64 + g % 2 * 32, *high = b + 128 + g / 4 * 32, *scales = b + 192 + 2 * g;
    emit_i8(s, mode, 0, q6_codes(low, high, g), d * (float)(int8_t)scales[0]);
    emit_i8(s, mode, 1, q6_codes(low + 16, high + 16, g), d * (float)(int8_t)scales[1]);
    next_32(s, mode);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels of the block types

#define BLOCK_KERNELS(name, bytes)                                                                       \
  static void decode_##name(const uint8_t *src, float *dst, size_t n_blocks) {                           \
    sink s = {.dst = dst};                                                                               \
    for (size_t i = 0; i < n_blocks; i++) name##_block(&s, DECODE, src + i * (bytes));                   \
  }                                                                                                      \
  static void rows_##name(const uint8_t *w, size_t row_bytes, size_t n_blocks, const float *x, float *y, \
                          size_t n_rows) {                                                               \
    for (size_t r = 0; r < n_rows; r++, w += row_bytes) {                                                \
      sink s = dot_sink(x);                                                                              \
      for (size_t i = 0; i < n_blocks; i++) name##_block(&s, DOT, w + i * (bytes));                      \
      y[r] = reduce(s.acc);                                                                              \
    }                                                                                                    \
  }

BLOCK_KERNELS(q4_0, 18)
BLOCK_KERNELS(q8_0, 34)
BLOCK_KERNELS(q4_k, 144)
BLOCK_KERNELS(q5_k, 176)
BLOCK_KERNELS(q6_k, 210)
BLOCK_KERNELS(iq4_nl, 18)
BLOCK_KERNELS(iq4_xs, 136)
BLOCK_KERNELS(mxfp4, 17)

// ---------------------------------------------------------------------------------------------------------------------
// Kernels of the float types: 32 weights at a time, then one by one

INLINE float32x4_t f32_4(const uint8_t *p) {
  return vreinterpretq_f32_u8(vld1q_u8(p));
}
INLINE float32x4_t f16_4(const uint8_t *p) {
  return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
}
INLINE float32x4_t bf16_4(const uint8_t *p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
}

INLINE float f32_1(const uint8_t *p) {
  return vgetq_lane_f32(vreinterpretq_f32_u32(vdupq_n_u32(load_u32(p))), 0);
}
INLINE float f16_1(const uint8_t *p) {
  return load_f16(p);
}
INLINE float bf16_1(const uint8_t *p) {
  return vgetq_lane_f32(vreinterpretq_f32_u32(vdupq_n_u32((uint32_t)load_u16(p) << 16)), 0);
}

INLINE void store_sums(const float32x4_t a[8], float p[CLB_LANES]) {
  UNROLL for (int i = 0; i < 8; i++) vst1q_f32(p + 4 * i, a[i]);
}

#define FLOAT_KERNELS(name, bytes)                                                                                 \
  INLINE void name##_32(sink *s, int mode, const uint8_t *p) {                                                     \
    UNROLL for (int i = 0; i < 8; i++) emit_4(s, mode, i, name##_4(p + 4 * (bytes) * i));                          \
    next_32(s, mode);                                                                                              \
  }                                                                                                                \
  static void decode_##name(const uint8_t *src, float *dst, size_t n) {                                            \
    sink s = {.dst = dst};                                                                                         \
    size_t j = 0;                                                                                                  \
    for (; j + 32 <= n; j += 32) name##_32(&s, DECODE, src + j * (bytes));                                         \
    for (; j < n; j++) dst[j] = name##_1(src + j * (bytes));                                                       \
  }                                                                                                                \
  static void rows_##name(const uint8_t *w, size_t row_bytes, size_t n, const float *x, float *y, size_t n_rows) { \
    for (size_t r = 0; r < n_rows; r++, w += row_bytes) {                                                          \
      sink s = dot_sink(x);                                                                                        \
      float p[CLB_LANES];                                                                                          \
      size_t j = 0;                                                                                                \
      for (; j + 32 <= n; j += 32) name##_32(&s, DOT, w + j * (bytes));                                            \
      store_sums(s.acc, p);                                                                                        \
      for (; j < n; j++) p[j % CLB_LANES] = fmaf(name##_1(w + j * (bytes)), x[j], p[j % CLB_LANES]);               \
      y[r] = reduce_tile(p);                                                                                       \
    }                                                                                                              \
  }

static float reduce_tile(const float p[CLB_LANES]) {
  float32x4_t a[8];
  UNROLL for (int i = 0; i < 8; i++) a[i] = vld1q_f32(p + 4 * i);
  return reduce(a);
}

FLOAT_KERNELS(f32, 4)
FLOAT_KERNELS(f16, 2)
FLOAT_KERNELS(bf16, 2)

static float dot(const float *a, const float *b, size_t n) {
  float y;
  rows_f32((const uint8_t *)a, 0, n, b, &y, 1);
  return y;
}

// ---------------------------------------------------------------------------------------------------------------------
// Several tokens: a tile of 4 rows x up to 4 tokens keeps 16 accumulators in registers and needs 8 loads for 16
// multiply-adds. It walks the columns once per accumulator of 4 lanes, which is why the tile has to fit into L1.

INLINE void tile_lanes(int n_tokens, float *acc, const float *w, const float *x, size_t ldx, size_t n) {
  float32x4_t a[CLB_TILE_ROWS][4];
  UNROLL for (int r = 0; r < CLB_TILE_ROWS; r++) {
    UNROLL for (int t = 0; t < n_tokens; t++) a[r][t] = vld1q_f32(acc + (t * CLB_TILE_ROWS + r) * CLB_LANES);
  }
  for (size_t j = 0; j < n; j += CLB_LANES) {
    float32x4_t v[4];
    UNROLL for (int t = 0; t < n_tokens; t++) v[t] = vld1q_f32(x + (size_t)t * ldx + j);
    UNROLL for (int r = 0; r < CLB_TILE_ROWS; r++) {
      float32x4_t weights = vld1q_f32(w + r * CLB_TILE_COLUMNS + j);
      UNROLL for (int t = 0; t < n_tokens; t++) a[r][t] = vfmaq_f32(a[r][t], weights, v[t]);
    }
  }
  UNROLL for (int r = 0; r < CLB_TILE_ROWS; r++) {
    UNROLL for (int t = 0; t < n_tokens; t++) vst1q_f32(acc + (t * CLB_TILE_ROWS + r) * CLB_LANES, a[r][t]);
  }
}

INLINE void tile_tokens(int n_tokens, float *acc, const float *w, const float *x, size_t ldx, size_t n) {
  size_t n_whole = n / CLB_LANES * CLB_LANES;
  for (int lane = 0; lane < CLB_LANES; lane += 4) {
    tile_lanes(n_tokens, acc + lane, w + lane, x + lane, ldx, n_whole);
  }
  for (int t = 0; t < n_tokens; t++) {
    for (int r = 0; r < CLB_TILE_ROWS; r++) {
      float *p = acc + (t * CLB_TILE_ROWS + r) * CLB_LANES;
      for (size_t j = n_whole; j < n; j++) {
        p[j - n_whole] = fmaf(w[(size_t)r * CLB_TILE_COLUMNS + j], x[(size_t)t * ldx + j], p[j - n_whole]);
      }
    }
  }
}

static void tile(float *acc, const float *w, size_t n_rows, const float *x, size_t ldx, size_t n_tokens, size_t n) {
  (void)n_rows;
  size_t t = 0;
  for (; t + 4 <= n_tokens; t += 4) tile_tokens(4, acc + t * CLB_TILE_ROWS * CLB_LANES, w, x + t * ldx, ldx, n);
  acc += t * CLB_TILE_ROWS * CLB_LANES;
  x += t * ldx;
  if (n_tokens - t == 3) tile_tokens(3, acc, w, x, ldx, n);
  if (n_tokens - t == 2) tile_tokens(2, acc, w, x, ldx, n);
  if (n_tokens - t == 1) tile_tokens(1, acc, w, x, ldx, n);
}

// ---------------------------------------------------------------------------------------------------------------------
// The set, in the order of the type table

#define KERNELS(kernel)                                                  \
  {kernel##_f32,  kernel##_f16,    kernel##_q4_0, NULL, NULL,            \
   NULL,          kernel##_q8_0,   NULL,          NULL, kernel##_q4_k,   \
   kernel##_q5_k, kernel##_q6_k,   NULL,          NULL, NULL,            \
   NULL,          kernel##_iq4_nl, NULL,          NULL, kernel##_iq4_xs, \
   NULL,          kernel##_bf16,   NULL,          NULL, kernel##_mxfp4,  \
   NULL}

// What the compiler makes of the scalar loops over independent elements is NEON already.
static const clb_kernels neon_kernels = {
    .name = "neon",
    .decode = KERNELS(decode),
    .rows = KERNELS(rows),
    .tile = tile,
    .reduce = reduce_tile,
    .dot = dot,
    .sum = clb_scalar_sum,
    .axpy = clb_scalar_axpy,
    .mix = clb_scalar_mix,
    .exp = clb_scalar_exp,
    .silu_mul = clb_scalar_silu_mul,
    .to_f16 = clb_scalar_to_f16,
    .to_bf16 = clb_scalar_to_bf16,
    .any_masked_u32 = clb_scalar_any_masked_u32,
    .any_masked_u16 = clb_scalar_any_masked_u16,
};

const clb_kernels *clb_kernels_neon(void) {
  return &neon_kernels;
}

#endif
