// The fast kernels for x86-64, once for every set: the same bits as the scalar reference in fast.c. The including file
// defines
//   TARGET     the instruction set, as the compiler names it
//   DPBUSD     where there is such an instruction: acc + sums of 4 products of unsigned a and signed b, as a function
//   DPWSSD     with it: acc + sums of 2 products of 16-bit integers
//   SET_NAME   the name of the set
//
// With activations of 8 bits, codes are multiplied as unsigned bytes above a bias, a power of two that the sum of the
// activations takes out again. Codes of 8 bits are too large for that without DPBUSD, since sums of two products must
// fit 16 bits: they stay signed, and the activations take over their signs. (128 * 127 * 2 does fit.) With activations
// of 16 bits, codes are widened to 16 bits, and multiplied by their sub-scales before anything else.
//
// One token: one or two registers hold a block of 32; the sums of 8 blocks are then transposed into one register, lane
// b being block b, like the partial sums of the canonical product. Many tokens: the codes of 8 rows are interleaved by
// 4 bytes, so that lanes are rows, and a broadcast of 4 or 2 activations meets as many columns of 8 rows.
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "fast_internal.h"

#define X86 __attribute__((target(TARGET)))
#define INLINE static inline __attribute__((always_inline, target(TARGET)))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

enum {
  TILE_ROWS = 8,
  MAX_TILES = 2,
  TILE_TOKENS = 128,  // tokens that share one decoding of the weights
  TOGETHER = 4,       // tokens multiplied at a time
  TILE_GROUPS = 4,    // groups decoded at a time, or half as many where codes are widened
  FEW_TOKENS = 3,     // up to here, decoding anew for every token is cheaper than a tile
  PREFETCH_BYTES = 2048,
#if defined(DPBUSD)
  FULL_BIAS = 7,  // codes of 8 bits: a bias of 2^7
#else
  FULL_BIAS = 0,  // signed
#endif
  NO_BIAS = 0,
};

// ---------------------------------------------------------------------------------------------------------------------
// Pieces

INLINE uint16_t load_u16(const uint8_t *p) {
  uint16_t v;
  memcpy(&v, p, sizeof v);
  return v;
}

INLINE uint32_t load_u32(const void *p) {
  uint32_t v;
  memcpy(&v, p, sizeof v);
  return v;
}

INLINE uint32_t bits_of(float f) {
  return load_u32(&f);
}

INLINE float float_of(uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

INLINE __m256i load32(const void *p) {
  return _mm256_loadu_si256((const __m256i *)p);
}
INLINE __m128i load16(const void *p) {
  return _mm_loadu_si128((const __m128i *)p);
}
INLINE __m256 load_f16_splat(const uint8_t *p) {
  return _mm256_cvtph_ps(_mm_set1_epi16((short)load_u16(p)));
}
INLINE __m256 u8_to_f32(__m128i v) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v));
}
INLINE __m256 negative(__m256 v) {
  return _mm256_xor_ps(v, _mm256_set1_ps(-0.0f));
}

// Sums of 4 products, unsigned by signed; codes below 128 only, unless there is DPBUSD.
INLINE __m256i dot_biased(__m256i acc, __m256i codes, __m256i x) {
#if defined(DPBUSD)
  return DPBUSD(acc, codes, x);
#else
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
#endif
}

// The same for codes of 8 bits, stored the way full_codes() leaves them.
INLINE __m256i dot_full(__m256i acc, __m256i codes, __m256i x) {
#if defined(DPBUSD)
  return DPBUSD(acc, codes, x);
#else
  return dot_biased(acc, _mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
#endif
}

INLINE __m256i dot_4(int full, __m256i acc, __m256i codes, __m256i x) {
  return full ? dot_full(acc, codes, x) : dot_biased(acc, codes, x);
}

// Sums of 2 products of 16-bit integers.
INLINE __m256i dot_2(__m256i acc, __m256i codes, __m256i x) {
#if defined(DPWSSD)
  return DPWSSD(acc, codes, x);
#else
  return _mm256_add_epi32(acc, _mm256_madd_epi16(codes, x));
#endif
}

// Its own inverse.
INLINE __m256i full_codes(__m256i codes) {
#if defined(DPBUSD)
  return _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
#else
  return codes;
#endif
}

// The sums of the lower lanes of 4 vectors, and of their upper ones.
INLINE __m256i lane_sums_of_4(const __m256i v[4]) {
  return _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
}

// Two of these to the sums of 8 vectors.
INLINE __m256i join_lane_sums(__m256i low, __m256i high) {
  return _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31));
}

// The sum of each of 8 vectors.
INLINE __m256i sums_of_8(const __m256i v[8]) {
  return join_lane_sums(lane_sums_of_4(v), lane_sums_of_4(v + 4));
}

INLINE float reduce(__m256 partial) {
  __m128 by4 = _mm_add_ps(_mm256_castps256_ps128(partial), _mm256_extractf128_ps(partial, 1));
  __m128 by2 = _mm_add_ps(by4, _mm_movehl_ps(by4, by4));
  return _mm_cvtss_f32(_mm_add_ss(by2, _mm_movehdup_ps(by2)));
}

INLINE void transpose_8(__m256 r[8]) {
  __m256 a[8], b[8];
  UNROLL for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  UNROLL for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xEE);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xEE);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    r[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// The types: scales of a group, and codes of its block b as unsigned bytes above the type's bias

typedef struct {
  __m256 d, add;     // of 8 blocks
  __m256i sub, min;  // of 16 halves, as 16-bit integers
} scales;

// Binary16 numbers at the start of 8 blocks.
INLINE __m256 f16_column(const uint8_t *w, int stride) {
  __m128i v = _mm_cvtsi32_si128(load_u16(w));
  v = _mm_insert_epi16(v, load_u16(w + stride), 1);
  v = _mm_insert_epi16(v, load_u16(w + 2 * stride), 2);
  v = _mm_insert_epi16(v, load_u16(w + 3 * stride), 3);
  v = _mm_insert_epi16(v, load_u16(w + 4 * stride), 4);
  v = _mm_insert_epi16(v, load_u16(w + 5 * stride), 5);
  v = _mm_insert_epi16(v, load_u16(w + 6 * stride), 6);
  v = _mm_insert_epi16(v, load_u16(w + 7 * stride), 7);
  return _mm256_cvtph_ps(v);
}

INLINE scales plain_scales(__m256 d) {
  return (scales){d, _mm256_setzero_ps(), _mm256_setzero_si256(), _mm256_setzero_si256()};
}

INLINE scales min_scales(__m256 d, __m256 add) {
  return (scales){d, add, _mm256_setzero_si256(), _mm256_setzero_si256()};
}

// The low nibbles of 16 bytes, then the high ones.
INLINE __m256i nibbles(const uint8_t *p) {
  __m128i v = load16(p);
  return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(v, 4), v), _mm256_set1_epi8(15));
}

// Byte i of 32 is 0x10 where bit i is set.
INLINE __m256i fifth_bits(uint32_t bits) {
  const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit_of = _mm256_set1_epi64x((long long)0x8040201008040201);
  __m256i v = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), byte_of), bit_of);
  return _mm256_and_si256(_mm256_cmpeq_epi8(v, bit_of), _mm256_set1_epi8(16));
}

INLINE __m256i lookup(const int8_t values[16], __m256i codes) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load16(values)), codes);
}

INLINE scales q4_0_scales(const uint8_t *w) {
  return plain_scales(f16_column(w, 18));
}
INLINE __m256i q4_0_codes(const uint8_t *w, int b) {
  return nibbles(w + b * 18 + 2);
}

INLINE scales q4_1_scales(const uint8_t *w) {
  return min_scales(f16_column(w, 20), f16_column(w + 2, 20));
}
INLINE __m256i q4_1_codes(const uint8_t *w, int b) {
  return nibbles(w + b * 20 + 4);
}

INLINE scales q5_0_scales(const uint8_t *w) {
  return plain_scales(f16_column(w, 22));
}
INLINE __m256i q5_0_codes(const uint8_t *w, int b) {
  return _mm256_or_si256(nibbles(w + b * 22 + 6), fifth_bits(load_u32(w + b * 22 + 2)));
}

INLINE scales q5_1_scales(const uint8_t *w) {
  return min_scales(f16_column(w, 24), f16_column(w + 2, 24));
}
INLINE __m256i q5_1_codes(const uint8_t *w, int b) {
  return _mm256_or_si256(nibbles(w + b * 24 + 8), fifth_bits(load_u32(w + b * 24 + 4)));
}

INLINE scales q8_0_scales(const uint8_t *w) {
  return plain_scales(f16_column(w, 34));
}
INLINE __m256i q8_0_codes(const uint8_t *w, int b) {
  return full_codes(load32(w + b * 34 + 2));
}

INLINE scales iq4_nl_scales(const uint8_t *w) {
  return plain_scales(f16_column(w, 18));
}
INLINE __m256i iq4_codes(const uint8_t *p) {
  __m256i values = full_codes(_mm256_broadcastsi128_si256(load16(clb_values_iq4)));
  return _mm256_shuffle_epi8(values, nibbles(p));
}
INLINE __m256i iq4_nl_codes(const uint8_t *w, int b) {
  return iq4_codes(w + b * 18 + 2);
}

INLINE scales iq4_xs_scales(const uint8_t *w) {
  const __m256i low_shift = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
  const __m256i high_shift = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
  __m256i low = _mm256_srlv_epi32(_mm256_set1_epi32((int)load_u32(w + 4)), low_shift);
  __m256i high = _mm256_srlv_epi32(_mm256_set1_epi32(load_u16(w + 2)), high_shift);
  low = _mm256_and_si256(low, _mm256_set1_epi32(15));
  high = _mm256_slli_epi32(_mm256_and_si256(high, _mm256_set1_epi32(3)), 4);
  __m256i scale = _mm256_sub_epi32(_mm256_or_si256(low, high), _mm256_set1_epi32(32));
  return plain_scales(_mm256_mul_ps(load_f16_splat(w), _mm256_cvtepi32_ps(scale)));
}
INLINE __m256i iq4_xs_codes(const uint8_t *w, int b) {
  return iq4_codes(w + 8 + b * 16);
}

INLINE scales mxfp4_scales(const uint8_t *w) {
  __m256i e = _mm256_setr_epi32(w[0], w[17], w[34], w[51], w[68], w[85], w[102], w[119]);
  __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
  __m256i subnormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
  __m256i is_normal = _mm256_cmpgt_epi32(e, _mm256_set1_epi32(1));
  return plain_scales(_mm256_castsi256_ps(_mm256_blendv_epi8(subnormal, normal, is_normal)));
}
INLINE __m256i mxfp4_codes(const uint8_t *w, int b) {
  __m256i values = _mm256_add_epi8(_mm256_broadcastsi128_si256(load16(clb_values_e2m1)), _mm256_set1_epi8(16));
  return _mm256_shuffle_epi8(values, nibbles(w + b * 17 + 1));
}

// Bits moved up, or down by a negative number, within pairs of bytes: what comes over from another byte is to be
// masked.
INLINE __m256i shifted(__m256i v, int up) {
  return up > 0 ? _mm256_slli_epi16(v, up) : _mm256_srli_epi16(v, -up);
}

// Codes of 2 bits, as q2_k has them.
INLINE __m256i crumbs(const uint8_t *p, int b) {
  return _mm256_and_si256(_mm256_srli_epi16(load32(p + b / 4 * 32), b % 4 * 2), _mm256_set1_epi8(3));
}

INLINE scales q2_k_scales(const uint8_t *w) {
  __m128i packed = load16(w), low4 = _mm_set1_epi8(15);
  __m128i sub = _mm_and_si128(packed, low4), min = _mm_and_si128(_mm_srli_epi16(packed, 4), low4);
  return (scales){load_f16_splat(w + 80), negative(load_f16_splat(w + 82)), _mm256_cvtepi8_epi16(sub),
                  _mm256_cvtepi8_epi16(min)};
}
INLINE __m256i q2_k_codes(const uint8_t *w, int b) {
  return crumbs(w + 16, b);
}

INLINE scales q3_k_scales(const uint8_t *w) {
  const uint8_t *packed = w + 96;
  uint64_t low = load_u32(packed) | (uint64_t)load_u32(packed + 4) << 32;
  uint64_t high = load_u32(packed + 8), mask2 = 0x0303030303030303, mask4 = 0x0F0F0F0F0F0F0F0F;
  uint64_t high01 = (high | high << 30) & mask2, high23 = (high >> 4 | (high >> 6) << 32) & mask2;
  __m128i sub = _mm_set_epi64x((long long)((low >> 4 & mask4) | high23 << 4), (long long)((low & mask4) | high01 << 4));
  sub = _mm_sub_epi8(sub, _mm_set1_epi8(32));
  return (scales){load_f16_splat(w + 108), _mm256_setzero_ps(), _mm256_cvtepi8_epi16(sub), _mm256_setzero_si256()};
}
INLINE __m256i q3_k_codes(const uint8_t *w, int b) {
  __m256i third = _mm256_and_si256(shifted(load32(w), 2 - b), _mm256_set1_epi8(4));
  return _mm256_or_si256(crumbs(w + 32, b), third);
}

INLINE scales q4_k_scales(const uint8_t *w) {
  uint32_t first = load_u32(w + 4), second = load_u32(w + 8), third = load_u32(w + 12);
  uint64_t scale = first & 0x3F3F3F3F, min = second & 0x3F3F3F3F;
  scale |= (uint64_t)((third & 0x0F0F0F0F) | (first >> 2 & 0x30303030)) << 32;
  min |= (uint64_t)((third >> 4 & 0x0F0F0F0F) | (second >> 2 & 0x30303030)) << 32;
  __m256 d = _mm256_mul_ps(load_f16_splat(w), u8_to_f32(_mm_cvtsi64_si128((long long)scale)));
  __m256 m = _mm256_mul_ps(load_f16_splat(w + 2), u8_to_f32(_mm_cvtsi64_si128((long long)min)));
  return min_scales(d, negative(m));
}
// Of 32 bytes, the low nibbles are one block, the high ones the next.
INLINE __m256i double_nibbles(const uint8_t *p, int b) {
  return _mm256_and_si256(_mm256_srli_epi16(load32(p + b / 2 * 32), b % 2 * 4), _mm256_set1_epi8(15));
}
INLINE __m256i q4_k_codes(const uint8_t *w, int b) {
  return double_nibbles(w + 16, b);
}

INLINE scales q5_k_scales(const uint8_t *w) {
  return q4_k_scales(w);
}
INLINE __m256i q5_k_codes(const uint8_t *w, int b) {
  __m256i fifth = _mm256_and_si256(shifted(load32(w + 16), 4 - b), _mm256_set1_epi8(16));
  return _mm256_or_si256(double_nibbles(w + 48, b), fifth);
}

INLINE scales q6_k_scales(const uint8_t *w) {
  return (scales){load_f16_splat(w + 208), _mm256_setzero_ps(), _mm256_cvtepi8_epi16(load16(w + 192)),
                  _mm256_setzero_si256()};
}
INLINE __m256i q6_k_codes(const uint8_t *w, int b) {
  __m256i low = _mm256_srli_epi16(load32(w + b / 4 * 64 + b % 2 * 32), b / 2 % 2 * 4);
  __m256i high = shifted(load32(w + 128 + b / 4 * 32), 4 - b % 4 * 2);
  return _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi8(15)), _mm256_and_si256(high, _mm256_set1_epi8(0x30)));
}

typedef scales scales_fn(const uint8_t *w);
typedef __m256i codes_fn(const uint8_t *w, int b);

// What the compiler sees as constants.
typedef struct {
  clb_fast_form form;
  clb_fast_x_kind kind;
  int bias;   // the exponent; NO_BIAS: none
  int full;   // codes of 8 bits
  int tiles;  // multiplied at a time
  scales_fn *scales;
  codes_fn *codes;
} type_traits;

INLINE bool has_sub(type_traits t) {
  return t.form == CLB_FORM_SUB || t.form == CLB_FORM_SUB_MIN;
}

// ---------------------------------------------------------------------------------------------------------------------
// One token: lanes are blocks

// The scales of block b: that of its first half in the low lane, that of the other in the high one.
INLINE __m256i sub_splat(__m256i by_parity, int b) {
  const __m256i pair = _mm256_set1_epi16((short)(2 * b | (2 * b + 1) << 8));
  return _mm256_shuffle_epi8(by_parity, pair);
}

// Even elements of 16 into the low lane, odd ones into the high lane.
INLINE __m256i by_parity(__m256i v) {
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5, 8, 9, 12, 13,
                                         2, 3, 6, 7, 10, 11, 14, 15);
  return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(v, order), 0xD8);
}

INLINE __m256 sub_totals_8(type_traits t, const scales *s, const uint8_t *w, const clb_fast_x8 *x) {
  __m256i v[8], sub = by_parity(s->sub);
  UNROLL for (int b = 0; b < 8; b++) {
    v[b] = _mm256_madd_epi16(_mm256_maddubs_epi16(t.codes(w, b), load32(x->q + 32 * b)), sub_splat(sub, b));
  }
  __m256i total = sums_of_8(v);
  if (t.bias != NO_BIAS) {
    __m256i biases = _mm256_madd_epi16(s->sub, load32(x->half));
    total = _mm256_sub_epi32(total, _mm256_slli_epi32(biases, t.bias));
  }
  return _mm256_cvtepi32_ps(total);
}

INLINE __m256 totals_8(type_traits t, const uint8_t *w, const clb_fast_x8 *x) {
  __m256i v[8];
  UNROLL for (int b = 0; b < 8; b++) {
    v[b] = dot_4(t.full, _mm256_setzero_si256(), t.codes(w, b), load32(x->q + 32 * b));
  }
  __m256i total = sums_of_8(v);
  if (t.bias != NO_BIAS) total = _mm256_sub_epi32(total, _mm256_slli_epi32(load32(x->sum), t.bias));
  return _mm256_cvtepi32_ps(total);
}

// Codes as they are stored, as unsigned 16-bit integers in the order of clb_fast_x16; or signed, without a bias.
INLINE void widen_unsigned(__m256i codes, __m256i wide[2]) {
  wide[0] = _mm256_and_si256(codes, _mm256_set1_epi16(0xFF));
  wide[1] = _mm256_srli_epi16(codes, 8);
}

INLINE void widen_signed(type_traits t, __m256i codes, __m256i wide[2]) {
  codes = t.full ? full_codes(codes) : _mm256_sub_epi8(codes, _mm256_set1_epi8((char)(1 << t.bias)));
  wide[0] = _mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 8);
  wide[1] = _mm256_srai_epi16(codes, 8);
}

// Block b with its activations: 8 sums, the lower 4 of the first half.
INLINE __m256i dot_16(type_traits t, const uint8_t *w, const clb_fast_x16 *x, int b) {
  __m256i wide[2], codes = t.codes(w, b);
  if (t.full) {
    widen_signed(t, codes, wide);
  } else {
    widen_unsigned(codes, wide);
  }
  return dot_2(_mm256_madd_epi16(wide[0], load32(x->q + 32 * b)), wide[1], load32(x->q + 32 * b + 16));
}

// Halves of 4 blocks from block b on, in the order of clb_fast_x16.half.
INLINE __m256i halves_of_4(type_traits t, const uint8_t *w, const clb_fast_x16 *x, int b) {
  __m256i v[4];
  UNROLL for (int i = 0; i < 4; i++) v[i] = dot_16(t, w, x, b + i);
  __m256i sums = lane_sums_of_4(v);
  if (t.full || t.bias == NO_BIAS) return sums;
  return _mm256_sub_epi32(sums, _mm256_slli_epi32(load32(x->half + 2 * b), t.bias));
}

INLINE __m256 totals_16(type_traits t, const scales *s, const uint8_t *w, const clb_fast_x16 *x) {
  __m256i low = halves_of_4(t, w, x, 0), high = halves_of_4(t, w, x, 4);
  if (has_sub(t)) {
    __m256i sub = by_parity(s->sub);
    low = _mm256_mullo_epi32(low, _mm256_srai_epi32(_mm256_unpacklo_epi16(sub, sub), 16));
    high = _mm256_mullo_epi32(high, _mm256_srai_epi32(_mm256_unpackhi_epi16(sub, sub), 16));
  }
  return _mm256_cvtepi32_ps(join_lane_sums(low, high));
}

INLINE __m256 add_group_16(type_traits t, __m256 partial, const uint8_t *w, const clb_fast_x16 *x) {
  scales s = t.scales(w);
  partial = _mm256_fmadd_ps(_mm256_mul_ps(s.d, _mm256_load_ps(x->d)), totals_16(t, &s, w, x), partial);
  return t.form == CLB_FORM_MIN ? _mm256_fmadd_ps(s.add, _mm256_load_ps(x->s), partial) : partial;
}

INLINE __m256 add_group_8(type_traits t, __m256 partial, const uint8_t *w, const clb_fast_x8 *x) {
  scales s = t.scales(w);
  __m256 dx = _mm256_load_ps(x->d);
  __m256 total = has_sub(t) ? sub_totals_8(t, &s, w, x) : totals_8(t, w, x);
  partial = _mm256_fmadd_ps(_mm256_mul_ps(s.d, dx), total, partial);
  if (t.form == CLB_FORM_MIN) partial = _mm256_fmadd_ps(s.add, _mm256_load_ps(x->s), partial);
  if (t.form == CLB_FORM_SUB_MIN) {
    __m256 mins = _mm256_cvtepi32_ps(_mm256_madd_epi16(s.min, load32(x->half)));
    partial = _mm256_fmadd_ps(_mm256_mul_ps(s.add, dx), mins, partial);
  }
  return partial;
}

// The activations of a token from group `group` on, of the type's kind.
INLINE const void *x_at(type_traits t, const clb_fast_product *p, size_t token, size_t group) {
  const size_t group_bytes = t.kind == CLB_FAST_X_Q16 ? sizeof(clb_fast_x16) : sizeof(clb_fast_x8);
  return p->qx + token * p->qx_stride + group * group_bytes;
}

INLINE float row_by_token(type_traits t, const clb_fast_product *p, const clb_fast_type *type, size_t row,
                          size_t token) {
  uint8_t padded[CLB_FAST_MAX_BYTES];
  __m256 partial = _mm256_setzero_ps();
  for (size_t g = 0; g * CLB_FAST_GROUP < p->n_cols; g++) {
    const uint8_t *w = clb_fast_padded(p, type, row, g, padded);
    // Beyond the row comes the next one; beyond the last row nothing is touched, but the address may be formed.
    for (size_t i = 0; i < type->group_bytes; i += 64) {
      _mm_prefetch((const char *)((uintptr_t)w + PREFETCH_BYTES + i), _MM_HINT_T0);
    }
    const void *x = x_at(t, p, token, g);
    partial = t.kind == CLB_FAST_X_Q16 ? add_group_16(t, partial, w, x) : add_group_8(t, partial, w, x);
  }
  return reduce(partial);
}

// ---------------------------------------------------------------------------------------------------------------------
// Many tokens: lanes are rows

typedef struct {
  _Alignas(64) union {
    uint8_t codes[TILE_GROUPS * 8][8][TILE_ROWS][4];      // [block][column / 4][row][column % 4]
    int16_t wide[TILE_GROUPS / 2 * 8][16][TILE_ROWS][2];  // the same of pairs of columns, in the order of clb_fast_x16
  };
  float d[TILE_GROUPS * 8][TILE_ROWS], add[TILE_GROUPS * 8][TILE_ROWS];
  float sub[TILE_GROUPS * 16][TILE_ROWS], min[TILE_GROUPS * 16][TILE_ROWS];  // [half]
} tile;

// rows [8 rows][8] transposed into dst [8][8 rows]
INLINE void store_transposed(float (*dst)[TILE_ROWS], const void *rows, size_t stride) {
  __m256 v[8];
  UNROLL for (int r = 0; r < 8; r++) v[r] =
      _mm256_loadu_ps((const float *)(const void *)((const char *)rows + (size_t)r * stride));
  transpose_8(v);
  UNROLL for (int i = 0; i < 8; i++) _mm256_store_ps(dst[i], v[i]);
}

INLINE void store_integers(float *dst, __m256i v) {
  __m256i low = _mm256_cvtepi16_epi32(_mm256_castsi256_si128(v));
  __m256i high = _mm256_cvtepi16_epi32(_mm256_extracti128_si256(v, 1));
  _mm256_store_ps(dst, _mm256_cvtepi32_ps(low));
  _mm256_store_ps(dst + 8, _mm256_cvtepi32_ps(high));
}

// Codes across 8 rows as 16-bit integers, signed, and multiplied by their sub-scales if they have any. Bytes 0 and 2 of
// each 4, and 1 and 3, are the pairs of clb_fast_x16.
INLINE void widen_block(type_traits t, tile *dst, int block, const uint8_t (*codes)[TILE_ROWS][4]) {
  __m256i wide[2], sub[2];
  for (int half = 0; has_sub(t) && half < 2; half++) {
    __m256i v = _mm256_cvtps_epi32(_mm256_load_ps(dst->sub[2 * block + half]));
    sub[half] = _mm256_blend_epi16(v, _mm256_slli_epi32(v, 16), 0xAA);
  }
  UNROLL for (int c = 0; c < 8; c++) {
    if (t.bias == NO_BIAS && !t.full) {
      widen_unsigned(load32(codes[c]), wide);
    } else {
      widen_signed(t, load32(codes[c]), wide);
    }
    UNROLL for (int i = 0; i < 2; i++) {
      __m256i v = has_sub(t) ? _mm256_mullo_epi16(wide[i], sub[c / 4]) : wide[i];
      _mm256_store_si256((__m256i *)(void *)dst->wide[block][8 * i + c], v);
    }
  }
}

// Group number g of the tile from 8 groups of weights, one a row: scales, then codes.
INLINE void decode_codes(type_traits t, tile *dst, int g, const uint8_t *const w[TILE_ROWS]) {
  _Alignas(32) uint8_t codes[8][TILE_ROWS][32], across[8][TILE_ROWS][4];
  for (int r = 0; r < TILE_ROWS; r++) {
    UNROLL for (int b = 0; b < 8; b++) _mm256_store_si256((__m256i *)(void *)codes[b][r], t.codes(w[r], b));
  }
  for (int b = 0; b < 8; b++) {
    void *to = t.kind == CLB_FAST_X_Q16 ? across : dst->codes[8 * g + b];
    store_transposed((float (*)[TILE_ROWS])to, codes[b], sizeof codes[b][0]);
    if (t.kind == CLB_FAST_X_Q16) widen_block(t, dst, 8 * g + b, (const uint8_t (*)[TILE_ROWS][4])across);
  }
}

INLINE void decode_scales(type_traits t, tile *dst, int g, const uint8_t *const w[TILE_ROWS]) {
  _Alignas(32) float d[TILE_ROWS][8], add[TILE_ROWS][8], sub[TILE_ROWS][16], min[TILE_ROWS][16];
  for (int r = 0; r < TILE_ROWS; r++) {
    scales s = t.scales(w[r]);
    _mm256_store_ps(d[r], s.d);
    if (t.form == CLB_FORM_MIN || t.form == CLB_FORM_SUB_MIN) _mm256_store_ps(add[r], s.add);
    if (has_sub(t)) store_integers(sub[r], s.sub);
    if (t.form == CLB_FORM_SUB_MIN) store_integers(min[r], s.min);
  }
  store_transposed(dst->d + 8 * g, d, sizeof d[0]);
  if (t.form == CLB_FORM_MIN || t.form == CLB_FORM_SUB_MIN) store_transposed(dst->add + 8 * g, add, sizeof add[0]);
  for (int half = 0; half < 2; half++) {
    if (has_sub(t)) store_transposed(dst->sub + 16 * g + 8 * half, sub[0] + 8 * half, sizeof sub[0]);
    if (t.form == CLB_FORM_SUB_MIN) store_transposed(dst->min + 16 * g + 8 * half, min[0] + 8 * half, sizeof min[0]);
  }
}

// Sums of 16 or 32 products, from column group `first` to `last`, of a block of the rows of all tiles with TOGETHER
// tokens.
INLINE void multiply_columns(type_traits t, const tile *w, int block, int first, int last,
                             const int8_t *const q[TOGETHER], __m256i sums[MAX_TILES][TOGETHER]) {
  UNROLL for (int r = 0; r < t.tiles; r++) {
    UNROLL for (int i = 0; i < TOGETHER; i++) sums[r][i] = _mm256_setzero_si256();
  }
  UNROLL for (int c = first; c < last; c++) {
    UNROLL for (int i = 0; i < TOGETHER; i++) {
      __m256i x = _mm256_set1_epi32((int)load_u32(q[i] + 4 * c));
      UNROLL for (int r = 0; r < t.tiles; r++) sums[r][i] = dot_4(t.full, sums[r][i], load32(w[r].codes[block][c]), x);
    }
  }
}

INLINE __m256 unbiased(type_traits t, __m256i sums, int sum_of_x) {
  if (t.bias != NO_BIAS) sums = _mm256_sub_epi32(sums, _mm256_slli_epi32(_mm256_set1_epi32(sum_of_x), t.bias));
  return _mm256_cvtepi32_ps(sums);
}

INLINE __m256 load_splat(const float *p) {
  return _mm256_broadcast_ss(p);
}

// The integer dot products of block b of a group, number `block` of the tiles. Products of sub-scales and sums are
// integers below 2^24: exact as floats.
INLINE void block_totals_8(type_traits t, const tile *w, int block, int b, const clb_fast_x8 *const x[TOGETHER],
                           __m256 total[MAX_TILES][TOGETHER]) {
  const int8_t *q[TOGETHER];
  __m256i sums[MAX_TILES][TOGETHER];
  UNROLL for (int i = 0; i < TOGETHER; i++) q[i] = x[i]->q + 32 * b;
  if (!has_sub(t)) {
    multiply_columns(t, w, block, 0, 8, q, sums);
    UNROLL for (int r = 0; r < t.tiles; r++) {
      UNROLL for (int i = 0; i < TOGETHER; i++) total[r][i] = unbiased(t, sums[r][i], x[i]->sum[b]);
    }
    return;
  }
  UNROLL for (int half = 0; half < 2; half++) {
    multiply_columns(t, w, block, 4 * half, 4 * half + 4, q, sums);
    UNROLL for (int r = 0; r < t.tiles; r++) {
      __m256 sub = _mm256_load_ps(w[r].sub[2 * block + half]);
      UNROLL for (int i = 0; i < TOGETHER; i++) {
        __m256 v = unbiased(t, sums[r][i], x[i]->half[2 * b + half]);
        total[r][i] = half == 0 ? _mm256_mul_ps(sub, v) : _mm256_fmadd_ps(sub, v, total[r][i]);
      }
    }
  }
}

INLINE void block_totals_16(type_traits t, const tile *w, int block, int b, const clb_fast_x16 *const x[TOGETHER],
                            __m256 total[MAX_TILES][TOGETHER]) {
  __m256i sums[MAX_TILES][TOGETHER];
  UNROLL for (int r = 0; r < t.tiles; r++) {
    UNROLL for (int i = 0; i < TOGETHER; i++) sums[r][i] = _mm256_setzero_si256();
  }
  UNROLL for (int c = 0; c < 16; c++) {
    UNROLL for (int i = 0; i < TOGETHER; i++) {
      __m256i q = _mm256_set1_epi32((int)load_u32(x[i]->q + 32 * b + 2 * c));
      UNROLL for (int r = 0; r < t.tiles; r++) sums[r][i] = dot_2(sums[r][i], load32(w[r].wide[block][c]), q);
    }
  }
  UNROLL for (int r = 0; r < t.tiles; r++) {
    UNROLL for (int i = 0; i < TOGETHER; i++) total[r][i] = _mm256_cvtepi32_ps(sums[r][i]);
  }
}

// Sums of 16 codes times minimums.
INLINE __m256 block_mins(const tile *w, int block, int b, const clb_fast_x8 *x) {
  __m256 mins = _mm256_mul_ps(_mm256_load_ps(w->min[2 * block]), _mm256_set1_ps(x->half[2 * b]));
  return _mm256_fmadd_ps(_mm256_load_ps(w->min[2 * block + 1]), _mm256_set1_ps(x->half[2 * b + 1]), mins);
}

// Partial sums of one token and tile: [block of a group][row]. Those of a token follow one another.
typedef float partials[8][TILE_ROWS];

INLINE void multiply_block_8(type_traits t, const tile *w, int block, int b, const clb_fast_x8 *const x[TOGETHER],
                             partials *partial) {
  __m256 total[MAX_TILES][TOGETHER];
  block_totals_8(t, w, block, b, x, total);
  UNROLL for (int i = 0; i < TOGETHER; i++) {
    __m256 dx = load_splat(x[i]->d + b);
    UNROLL for (int r = 0; r < t.tiles; r++) {
      __m256 sum = _mm256_load_ps(partial[i * t.tiles + r][b]), add = _mm256_load_ps(w[r].add[block]);
      sum = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_load_ps(w[r].d[block]), dx), total[r][i], sum);
      if (t.form == CLB_FORM_MIN) sum = _mm256_fmadd_ps(add, load_splat(x[i]->s + b), sum);
      if (t.form == CLB_FORM_SUB_MIN) {
        sum = _mm256_fmadd_ps(_mm256_mul_ps(add, dx), block_mins(w + r, block, b, x[i]), sum);
      }
      _mm256_store_ps(partial[i * t.tiles + r][b], sum);
    }
  }
}

INLINE void multiply_block_16(type_traits t, const tile *w, int block, int b, const clb_fast_x16 *const x[TOGETHER],
                              partials *partial) {
  __m256 total[MAX_TILES][TOGETHER];
  block_totals_16(t, w, block, b, x, total);
  UNROLL for (int i = 0; i < TOGETHER; i++) {
    __m256 dx = load_splat(x[i]->d + b);
    UNROLL for (int r = 0; r < t.tiles; r++) {
      __m256 d = _mm256_mul_ps(_mm256_load_ps(w[r].d[block]), dx), add = _mm256_load_ps(w[r].add[block]);
      __m256 sum = _mm256_fmadd_ps(d, total[r][i], _mm256_load_ps(partial[i * t.tiles + r][b]));
      if (t.form == CLB_FORM_MIN) sum = _mm256_fmadd_ps(add, load_splat(x[i]->s + b), sum);
      _mm256_store_ps(partial[i * t.tiles + r][b], sum);
    }
  }
}

// One group of TOGETHER tokens.
INLINE void multiply_group(type_traits t, const tile *w, int g, const void *const x[TOGETHER], partials *partial) {
  if (t.kind == CLB_FAST_X_Q16) {
    const clb_fast_x16 *x16[TOGETHER];
    UNROLL for (int i = 0; i < TOGETHER; i++) x16[i] = x[i];
    for (int b = 0; b < 8; b++) multiply_block_16(t, w, 8 * g + b, b, x16, partial);
  } else {
    const clb_fast_x8 *x8[TOGETHER];
    UNROLL for (int i = 0; i < TOGETHER; i++) x8[i] = x[i];
    for (int b = 0; b < 8; b++) multiply_block_8(t, w, 8 * g + b, b, x8, partial);
  }
}

// TOGETHER tokens from `token` on, n of which exist: the last one stands for the others.
INLINE void multiply_tokens(type_traits t, const tile *w, const clb_fast_product *p, size_t token, size_t n,
                            size_t group, int n_groups, partials *partial) {
  const void *x[TOGETHER];
  for (int g = 0; g < n_groups; g++) {
    UNROLL for (size_t i = 0; i < TOGETHER; i++) x[i] = x_at(t, p, token + (i < n ? i : n - 1), group + (size_t)g);
    multiply_group(t, w, g, x, partial);
  }
}

// Rows from `row` on; the last one stands for those that do not exist.
INLINE void decode_tile(type_traits t, tile *dst, const clb_fast_product *p, const clb_fast_type *type, size_t row,
                        size_t last, size_t group, int n_groups) {
  uint8_t padded[TILE_ROWS][CLB_FAST_MAX_BYTES];
  const uint8_t *w[TILE_ROWS];
  for (int g = 0; g < n_groups; g++) {
    for (size_t r = 0; r < TILE_ROWS; r++) {
      w[r] = clb_fast_padded(p, type, row + r < last ? row + r : last, group + (size_t)g, padded[r]);
    }
    decode_scales(t, dst, g, w);
    decode_codes(t, dst, g, w);
  }
}

INLINE void store_results(type_traits t, const clb_fast_product *p, size_t row, size_t n_rows, size_t token,
                          size_t n_tokens, const partials *partial) {
  for (size_t i = 0; i < n_tokens; i++) {
    _Alignas(32) float y[MAX_TILES][TILE_ROWS];
    UNROLL for (int r = 0; r < t.tiles; r++) {
      __m256 v[4];
      const partials *sums = partial++;
      UNROLL for (int b = 0; b < 4; b++) v[b] =
          _mm256_add_ps(_mm256_load_ps((*sums)[b]), _mm256_load_ps((*sums)[b + 4]));
      _mm256_store_ps(y[r], _mm256_add_ps(_mm256_add_ps(v[0], v[2]), _mm256_add_ps(v[1], v[3])));
    }
    memcpy(p->y + (token + i) * p->ldy + row, y, n_rows * sizeof(float));
  }
}

INLINE void rows_by_tokens(type_traits t, const clb_fast_product *p, const clb_fast_type *type, size_t row,
                           size_t n_rows, size_t token, size_t n_tokens) {
  tile w[MAX_TILES];
  _Alignas(64) partials partial[TILE_TOKENS * MAX_TILES];
  memset(partial, 0, (n_tokens + TOGETHER - 1) / TOGETHER * TOGETHER * (size_t)t.tiles * sizeof *partial);
  size_t n_groups = (p->n_cols + CLB_FAST_GROUP - 1) / CLB_FAST_GROUP;
  const size_t step = t.kind == CLB_FAST_X_Q16 ? TILE_GROUPS / 2 : TILE_GROUPS;
  for (size_t group = 0; group < n_groups; group += step) {
    int n = (int)(n_groups - group < step ? n_groups - group : step);
    for (int r = 0; r < t.tiles; r++) {
      decode_tile(t, &w[r], p, type, row + (size_t)r * TILE_ROWS, row + n_rows - 1, group, n);
    }
    for (size_t i = 0; i < n_tokens; i += TOGETHER) {
      multiply_tokens(t, w, p, token + i, n_tokens - i, group, n, partial + i * (size_t)t.tiles);
    }
  }
  store_results(t, p, row, n_rows, token, n_tokens, (const partials *)partial);
}

INLINE void product(type_traits t, const clb_fast_product *p, const clb_fast_type *type, size_t row0, size_t row1,
                    size_t n_tokens) {
  if (n_tokens <= FEW_TOKENS) {
    for (size_t row = row0; row < row1; row++) {
      for (size_t i = 0; i < n_tokens; i++) p->y[i * p->ldy + row] = row_by_token(t, p, type, row, i);
    }
    return;
  }
  // Tokens outside: a tile of them stays in the second-level cache, while the weights pass once for each.
  const size_t step = (size_t)t.tiles * TILE_ROWS;
  for (size_t i = 0; i < n_tokens; i += TILE_TOKENS) {
    size_t n = n_tokens - i < TILE_TOKENS ? n_tokens - i : TILE_TOKENS;
    for (size_t row = row0; row < row1; row += step) {
      rows_by_tokens(t, p, type, row, row1 - row < step ? row1 - row : step, i, n);
    }
  }
}

// How codes are stored: the exponent of the bias; for codes of 8 bits FULL_BIAS, 1.
#define q4_0_STORED 3, 0
#define q4_1_STORED NO_BIAS, 0
#define q5_0_STORED 4, 0
#define q5_1_STORED NO_BIAS, 0
#define q8_0_STORED FULL_BIAS, 1
#define q2_k_STORED NO_BIAS, 0
#define q3_k_STORED 2, 0
#define q4_k_STORED NO_BIAS, 0
#define q5_k_STORED NO_BIAS, 0
#define q6_k_STORED 5, 0
#define iq4_nl_STORED FULL_BIAS, 1
#define iq4_xs_STORED FULL_BIAS, 1
#define mxfp4_STORED 4, 0

// Two tiles share reading the activations, which is what limits products of few instructions.
#if defined(DPBUSD)
#define TILES(kind) 2
#else
#define TILES(kind) ((kind) == CLB_FAST_X_Q16 ? 2 : 1)
#endif

#define PRODUCT(name, id, form, kind, group_bytes)                                                               \
  X86 static void product_##name(const clb_fast_product *p, const clb_fast_type *type, size_t row0, size_t row1, \
                                 size_t n_tokens) {                                                              \
    const type_traits t = {form, kind, name##_STORED, TILES(kind), name##_scales, name##_codes};                 \
    product(t, p, type, row0, row1, n_tokens);                                                                   \
  }

CLB_FAST_TYPES(PRODUCT)

// ---------------------------------------------------------------------------------------------------------------------
// Quantizing

// The largest magnitude of 32 floats, as bits.
INLINE uint32_t largest_bits(const __m256 v[4]) {
  __m256i m[4];
  UNROLL for (int i = 0; i < 4; i++) m[i] = _mm256_and_si256(_mm256_castps_si256(v[i]), _mm256_set1_epi32(0x7FFFFFFF));
  __m256i by8 = _mm256_max_epi32(_mm256_max_epi32(m[0], m[1]), _mm256_max_epi32(m[2], m[3]));
  __m128i by4 = _mm_max_epi32(_mm256_castsi256_si128(by8), _mm256_extracti128_si256(by8, 1));
  by4 = _mm_max_epi32(by4, _mm_shuffle_epi32(by4, 0x4E));
  by4 = _mm_max_epi32(by4, _mm_shuffle_epi32(by4, 0xB1));
  return (uint32_t)_mm_cvtsi128_si32(by4);
}

// 32 integers of 8 bits, in order.
INLINE __m256i pack_32(__m256i a, __m256i b, __m256i c, __m256i d) {
  __m256i v = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
  return _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

INLINE void load_32(__m256 v[4], const float *x) {
  UNROLL for (int i = 0; i < 4; i++) v[i] = _mm256_loadu_ps(x + 8 * i);
}

INLINE int sum_of_4(__m128i v) {
  v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4E));
  v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0xB1));
  return _mm_cvtsi128_si32(v);
}

INLINE int sum_of_16(__m128i v) {
  __m128i pairs = _mm_maddubs_epi16(_mm_set1_epi8(1), v);
  return sum_of_4(_mm_madd_epi16(pairs, _mm_set1_epi16(1)));
}

// The codes of a block in order, as 32-bit integers; returns its scale.
INLINE float codes_of(__m256i q[4], const float *x, float largest_code) {
  __m256 v[4];
  load_32(v, x);
  uint32_t largest = largest_bits(v);
  clb_fast_step step = clb_fast_step_of(largest, largest_code);
  __m256 keep = _mm256_castsi256_ps(_mm256_set1_epi32(largest < CLB_INF_BITS ? -1 : 0));
  UNROLL for (int i = 0; i < 4; i++) {
    q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_and_ps(v[i], keep), _mm256_set1_ps(step.inverse)));
  }
  return step.d;
}

INLINE void quantize_block_8(clb_fast_x8 *dst, size_t b, const float *x) {
  __m256i q[4];
  float d = codes_of(q, x, CLB_FAST_MAX_8);
  __m256i codes = pack_32(q[0], q[1], q[2], q[3]);
  _mm256_storeu_si256((__m256i *)(void *)(dst->q + 32 * b), codes);
  int low = sum_of_16(_mm256_castsi256_si128(codes)), high = sum_of_16(_mm256_extracti128_si256(codes, 1));
  dst->half[2 * b] = (int16_t)low;
  dst->half[2 * b + 1] = (int16_t)high;
  dst->sum[b] = low + high;
  dst->d[b] = d;
  dst->s[b] = d * (float)(low + high);
}

// Of 16 integers of 32 bits each, in order: as they are, their upper halves, their lower halves.
INLINE __m256i pack_16(__m256i a, __m256i b) {
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
}
INLINE __m256i pack_high_16(__m256i a, __m256i b) {
  return pack_16(_mm256_srai_epi32(a, 16), _mm256_srai_epi32(b, 16));
}
INLINE __m256i pack_low_16(__m256i a, __m256i b) {
  return pack_high_16(_mm256_slli_epi32(a, 16), _mm256_slli_epi32(b, 16));
}

INLINE void quantize_block_16(clb_fast_x16 *dst, size_t b, const float *x) {
  __m256i q[4];
  float d = codes_of(q, x, CLB_FAST_MAX_16);
  __m256i low = pack_16(q[0], q[1]), high = pack_16(q[2], q[3]), ones = _mm256_set1_epi16(1);
  __m256i even = pack_low_16(low, high), odd = pack_high_16(low, high);
  _mm256_storeu_si256((__m256i *)(void *)(dst->q + 32 * b), even);
  _mm256_storeu_si256((__m256i *)(void *)(dst->q + 32 * b + 16), odd);
  __m256i sums = _mm256_madd_epi16(_mm256_add_epi16(even, odd), ones);
  int first = sum_of_4(_mm256_castsi256_si128(sums)), second = sum_of_4(_mm256_extracti128_si256(sums, 1));
  dst->half[clb_fast_half_at(b, 0)] = first;
  dst->half[clb_fast_half_at(b, 1)] = second;
  dst->d[b] = d;
  dst->s[b] = d * (float)(first + second);
}

X86 static void quantize_8(clb_fast_x8 *dst, const float *x, size_t n) {
  for (size_t i = 0; i < n; i += 32) quantize_block_8(dst + i / CLB_FAST_GROUP, i / 32 % CLB_FAST_BLOCKS, x + i);
}

X86 static void quantize_16(clb_fast_x16 *dst, const float *x, size_t n) {
  for (size_t i = 0; i < n; i += 32) quantize_block_16(dst + i / CLB_FAST_GROUP, i / 32 % CLB_FAST_BLOCKS, x + i);
}

// Half away from zero, as gguf-py rounds.
INLINE __m256i round_half_away(__m256 v) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 magnitude = _mm256_andnot_ps(sign, v), whole = _mm256_floor_ps(magnitude);
  __m256 twice = _mm256_mul_ps(_mm256_set1_ps(2), _mm256_sub_ps(magnitude, whole));
  whole = _mm256_add_ps(whole, _mm256_floor_ps(twice));
  return _mm256_cvttps_epi32(_mm256_or_ps(whole, _mm256_and_ps(sign, v)));
}

INLINE void store_f16(uint8_t *dst, float v) {
  uint16_t h = (uint16_t)_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(v), _MM_FROUND_TO_NEAREST_INT));
  memcpy(dst, &h, sizeof h);
}

X86 static void to_q8_0(uint8_t *dst, const float *x, size_t n_blocks) {
  for (size_t b = 0; b < n_blocks; b++, dst += 34, x += 32) {
    __m256 v[4];
    __m256i q[4];
    load_32(v, x);
    uint32_t largest = largest_bits(v);
    float d = largest < CLB_INF_BITS ? float_of(largest) / 127 : NAN, inverse = clb_fast_inverse(d);
    UNROLL for (int i = 0; i < 4; i++) q[i] = round_half_away(_mm256_mul_ps(v[i], _mm256_set1_ps(inverse)));
    __m256i codes = inverse != 0 ? pack_32(q[0], q[1], q[2], q[3]) : _mm256_setzero_si256();
    store_f16(dst, d);
    _mm256_storeu_si256((__m256i *)(void *)(dst + 2), codes);
  }
}

// The first of 32 floats with the largest magnitude.
INLINE float extreme_of(const float *x, const __m256 v[4], uint32_t largest) {
  uint32_t found = 0;
  UNROLL for (int i = 0; i < 4; i++) {
    __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(v[i]), _mm256_set1_epi32(0x7FFFFFFF));
    __m256i same = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32((int)largest));
    found |= (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(same)) << (8 * i);
  }
  return x[__builtin_ctz(found)];
}

X86 static void to_q4_0(uint8_t *dst, const float *x, size_t n_blocks) {
  for (size_t b = 0; b < n_blocks; b++, dst += 18, x += 32) {
    __m256 v[4];
    __m256i q[4];
    load_32(v, x);
    uint32_t largest = largest_bits(v);
    float d = largest < CLB_INF_BITS ? extreme_of(x, v, largest) / -8 : NAN, inverse = clb_fast_inverse(d);
    __m256 keep = _mm256_castsi256_ps(_mm256_set1_epi32(inverse != 0 ? -1 : 0));
    UNROLL for (int i = 0; i < 4; i++) {
      __m256 code = _mm256_mul_ps(_mm256_and_ps(v[i], keep), _mm256_set1_ps(inverse));
      q[i] = _mm256_cvttps_epi32(_mm256_add_ps(code, _mm256_set1_ps(8.5f)));
    }
    __m256i codes = _mm256_min_epu8(pack_32(q[0], q[1], q[2], q[3]), _mm256_set1_epi8(15));
    __m128i high = _mm_slli_epi16(_mm256_extracti128_si256(codes, 1), 4);
    store_f16(dst, d);
    _mm_storeu_si128((__m128i *)(void *)(dst + 2), _mm_or_si128(_mm256_castsi256_si128(codes), high));
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// The set

#define ENTRY(name, ...) product_##name,

static const clb_fast_kernels kernels = {
    .name = SET_NAME,
    .quantize_8 = quantize_8,
    .quantize_16 = quantize_16,
    .to_q8_0 = to_q8_0,
    .to_q4_0 = to_q4_0,
    .product = {CLB_FAST_TYPES(ENTRY)},
};
