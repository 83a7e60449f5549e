// The kernels for x86-64 with AVX2, FMA and F16C: the same bits as the scalar reference in blocks.c, where the formats
// are described.
//
// A quant block is decoded 8 weights at a time, and each decoder exists once: what it emits is either stored (to
// decode) or multiplied with the activations (a dot product), which the compiler sees as a constant.
// Lanes: partial sum j of 32 is lane j % 8 of accumulator j / 8.
#include "blocks_internal.h"

#if defined(CLB_HAVE_AVX2)

#include <cpuid.h>
#include <immintrin.h>
#include <math.h>
#include <string.h>

#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define INLINE static inline __attribute__((always_inline, target("avx2,fma,f16c")))
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
  __m256 acc0, acc1, acc2, acc3;
} sink;

enum { DECODE, DOT };

// 32 weights.
INLINE void emit(sink *s, int mode, __m256 w0, __m256 w1, __m256 w2, __m256 w3) {
  if (mode == DECODE) {
    _mm256_storeu_ps(s->dst, w0);
    _mm256_storeu_ps(s->dst + 8, w1);
    _mm256_storeu_ps(s->dst + 16, w2);
    _mm256_storeu_ps(s->dst + 24, w3);
    s->dst += 32;
  } else {
    s->acc0 = _mm256_fmadd_ps(w0, _mm256_loadu_ps(s->x), s->acc0);
    s->acc1 = _mm256_fmadd_ps(w1, _mm256_loadu_ps(s->x + 8), s->acc1);
    s->acc2 = _mm256_fmadd_ps(w2, _mm256_loadu_ps(s->x + 16), s->acc2);
    s->acc3 = _mm256_fmadd_ps(w3, _mm256_loadu_ps(s->x + 24), s->acc3);
    s->x += 32;
  }
}

INLINE sink dot_sink(const float *x) {
  __m256 zero = _mm256_setzero_ps();
  return (sink){NULL, x, zero, zero, zero, zero};
}

// The canonical reduction from 32 partial sums on.
INLINE float reduce(__m256 acc0, __m256 acc1, __m256 acc2, __m256 acc3) {
  __m256 by8 = _mm256_add_ps(_mm256_add_ps(acc0, acc2), _mm256_add_ps(acc1, acc3));
  __m128 by4 = _mm_add_ps(_mm256_castps256_ps128(by8), _mm256_extractf128_ps(by8, 1));
  __m128 by2 = _mm_add_ps(by4, _mm_movehl_ps(by4, by4));
  return _mm_cvtss_f32(_mm_add_ss(by2, _mm_movehdup_ps(by2)));
}

INLINE float reduce_sink(const sink *s) {
  return reduce(s->acc0, s->acc1, s->acc2, s->acc3);
}

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

INLINE __m256 f16_splat(uint16_t h) {
  return _mm256_cvtph_ps(_mm_set1_epi16((short)h));
}
INLINE __m256 load_f16_splat(const uint8_t *p) {
  return f16_splat(load_u16(p));
}
INLINE __m256i load32(const uint8_t *p) {
  return _mm256_loadu_si256((const __m256i *)p);
}
INLINE __m128i load16(const uint8_t *p) {
  return _mm_loadu_si128((const __m128i *)p);
}
INLINE __m128i load8(const uint8_t *p) {
  return _mm_loadl_epi64((const __m128i *)p);
}
INLINE __m256 u8_to_f32(__m128i v) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v));
}
INLINE __m256 i8_to_f32(__m128i v) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v));
}

// scale * code for 32 signed codes, one scale per half.
INLINE void emit_i8(sink *s, int mode, __m256i codes, __m256 scale0, __m256 scale1) {
  __m128i low = _mm256_castsi256_si128(codes), high = _mm256_extracti128_si256(codes, 1);
  emit(s, mode, _mm256_mul_ps(scale0, i8_to_f32(low)), _mm256_mul_ps(scale0, i8_to_f32(_mm_srli_si128(low, 8))),
       _mm256_mul_ps(scale1, i8_to_f32(high)), _mm256_mul_ps(scale1, i8_to_f32(_mm_srli_si128(high, 8))));
}

// scale * code - min. The product is exact (see blocks.c), so that fusing it with the subtraction changes nothing.
INLINE void emit_minus(sink *s, int mode, __m256i codes, __m256 scale0, __m256 min0, __m256 scale1, __m256 min1) {
  __m128i low = _mm256_castsi256_si128(codes), high = _mm256_extracti128_si256(codes, 1);
  emit(s, mode, _mm256_fmsub_ps(scale0, i8_to_f32(low), min0),
       _mm256_fmsub_ps(scale0, i8_to_f32(_mm_srli_si128(low, 8)), min0), _mm256_fmsub_ps(scale1, i8_to_f32(high), min1),
       _mm256_fmsub_ps(scale1, i8_to_f32(_mm_srli_si128(high, 8)), min1));
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

// ---------------------------------------------------------------------------------------------------------------------
// Decoders of one quant block

INLINE void q4_0_block(sink *s, int mode, const uint8_t *b) {
  __m256 d = load_f16_splat(b);
  emit_i8(s, mode, _mm256_sub_epi8(nibbles(b + 2), _mm256_set1_epi8(8)), d, d);
}

INLINE void q4_1_block(sink *s, int mode, const uint8_t *b) {
  __m256 d = load_f16_splat(b), m = _mm256_xor_ps(load_f16_splat(b + 2), _mm256_set1_ps(-0.0f));
  emit_minus(s, mode, nibbles(b + 4), d, m, d, m);
}

INLINE void q5_0_block(sink *s, int mode, const uint8_t *b) {
  __m256 d = load_f16_splat(b);
  __m256i codes = _mm256_or_si256(nibbles(b + 6), fifth_bits(load_u32(b + 2)));
  emit_i8(s, mode, _mm256_sub_epi8(codes, _mm256_set1_epi8(16)), d, d);
}

INLINE void q5_1_block(sink *s, int mode, const uint8_t *b) {
  __m256 d = load_f16_splat(b), m = _mm256_xor_ps(load_f16_splat(b + 2), _mm256_set1_ps(-0.0f));
  emit_minus(s, mode, _mm256_or_si256(nibbles(b + 8), fifth_bits(load_u32(b + 4))), d, m, d, m);
}

INLINE void q8_0_block(sink *s, int mode, const uint8_t *b) {
  __m256 d = load_f16_splat(b);
  emit(s, mode, _mm256_mul_ps(d, i8_to_f32(load8(b + 2))), _mm256_mul_ps(d, i8_to_f32(load8(b + 10))),
       _mm256_mul_ps(d, i8_to_f32(load8(b + 18))), _mm256_mul_ps(d, i8_to_f32(load8(b + 26))));
}

// 2-bit codes: shift is 0, 2, 4 or 6.
INLINE __m256i crumbs(const uint8_t *p, int shift) {
  return _mm256_and_si256(_mm256_srli_epi16(load32(p), shift), _mm256_set1_epi8(3));
}

INLINE void q2_k_block(sink *s, int mode, const uint8_t *b) {
  float scales[16], mins[16];
  __m256 d = load_f16_splat(b + 80), dmin = load_f16_splat(b + 82);
  __m128i packed = load16(b), low4 = _mm_set1_epi8(15);
  __m128i scale = _mm_and_si128(packed, low4), min = _mm_and_si128(_mm_srli_epi16(packed, 4), low4);
  _mm256_storeu_ps(scales, _mm256_mul_ps(d, u8_to_f32(scale)));
  _mm256_storeu_ps(scales + 8, _mm256_mul_ps(d, u8_to_f32(_mm_srli_si128(scale, 8))));
  _mm256_storeu_ps(mins, _mm256_mul_ps(dmin, u8_to_f32(min)));
  _mm256_storeu_ps(mins + 8, _mm256_mul_ps(dmin, u8_to_f32(_mm_srli_si128(min, 8))));
  for (int g = 0; g < 8; g++) {
    __m256i codes = crumbs(b + 16 + g / 4 * 32, g % 4 * 2);
    emit_minus(s, mode, codes, _mm256_set1_ps(scales[2 * g]), _mm256_set1_ps(mins[2 * g]),
               _mm256_set1_ps(scales[2 * g + 1]), _mm256_set1_ps(mins[2 * g + 1]));
  }
}

INLINE void q3_k_block(sink *s, int mode, const uint8_t *b) {
  float scales[16];
  const uint8_t *packed = b + 96;
  uint64_t low = load_u32(packed) | (uint64_t)load_u32(packed + 4) << 32;
  uint64_t high = load_u32(packed + 8), mask2 = 0x0303030303030303, mask4 = 0x0F0F0F0F0F0F0F0F;
  uint64_t high01 = (high | high << 30) & mask2, high23 = (high >> 4 | (high >> 6) << 32) & mask2;
  __m128i scale =
      _mm_set_epi64x((long long)((low >> 4 & mask4) | high23 << 4), (long long)((low & mask4) | high01 << 4));
  scale = _mm_sub_epi8(scale, _mm_set1_epi8(32));
  __m256 d = load_f16_splat(b + 108);
  _mm256_storeu_ps(scales, _mm256_mul_ps(d, i8_to_f32(scale)));
  _mm256_storeu_ps(scales + 8, _mm256_mul_ps(d, i8_to_f32(_mm_srli_si128(scale, 8))));
  __m256i mask = load32(b);
  for (int g = 0; g < 8; g++) {
    // The third bit, moved to bit 2: a code is its two low bits plus this, minus 4.
    __m256i third = _mm256_slli_epi16(_mm256_and_si256(_mm256_srli_epi16(mask, g), _mm256_set1_epi8(1)), 2);
    __m256i codes = _mm256_or_si256(crumbs(b + 32 + g / 4 * 32, g % 4 * 2), third);
    emit_i8(s, mode, _mm256_sub_epi8(codes, _mm256_set1_epi8(4)), _mm256_set1_ps(scales[2 * g]),
            _mm256_set1_ps(scales[2 * g + 1]));
  }
}

// The 8 scales and mins of q4_k and q5_k.
INLINE void k_scales(const uint8_t *b, float scales[8], float mins[8]) {
  uint32_t first = load_u32(b + 4), second = load_u32(b + 8), third = load_u32(b + 12);
  uint64_t scale = first & 0x3F3F3F3F, min = second & 0x3F3F3F3F;
  scale |= (uint64_t)((third & 0x0F0F0F0F) | (first >> 2 & 0x30303030)) << 32;
  min |= (uint64_t)((third >> 4 & 0x0F0F0F0F) | (second >> 2 & 0x30303030)) << 32;
  _mm256_storeu_ps(scales, _mm256_mul_ps(load_f16_splat(b), u8_to_f32(_mm_cvtsi64_si128((long long)scale))));
  _mm256_storeu_ps(mins, _mm256_mul_ps(load_f16_splat(b + 2), u8_to_f32(_mm_cvtsi64_si128((long long)min))));
}

INLINE __m256 nibble_minus(__m256i bytes, int high, __m256 scale, __m256 min) {
  __m256i code = high ? _mm256_srli_epi32(bytes, 4) : _mm256_and_si256(bytes, _mm256_set1_epi32(15));
  return _mm256_fmsub_ps(scale, _mm256_cvtepi32_ps(code), min);
}

INLINE void q4_k_block(sink *s, int mode, const uint8_t *b) {
  float scales[8], mins[8];
  k_scales(b, scales, mins);
  for (int g = 0; g < 8; g += 2) {
    const uint8_t *codes = b + 16 + g * 16;
    __m256i v0 = _mm256_cvtepu8_epi32(load8(codes)), v1 = _mm256_cvtepu8_epi32(load8(codes + 8));
    __m256i v2 = _mm256_cvtepu8_epi32(load8(codes + 16)), v3 = _mm256_cvtepu8_epi32(load8(codes + 24));
    __m256 d = _mm256_set1_ps(scales[g]), m = _mm256_set1_ps(mins[g]);
    emit(s, mode, nibble_minus(v0, 0, d, m), nibble_minus(v1, 0, d, m), nibble_minus(v2, 0, d, m),
         nibble_minus(v3, 0, d, m));
    d = _mm256_set1_ps(scales[g + 1]);
    m = _mm256_set1_ps(mins[g + 1]);
    emit(s, mode, nibble_minus(v0, 1, d, m), nibble_minus(v1, 1, d, m), nibble_minus(v2, 1, d, m),
         nibble_minus(v3, 1, d, m));
  }
}

INLINE void q5_k_block(sink *s, int mode, const uint8_t *b) {
  float scales[8], mins[8];
  k_scales(b, scales, mins);
  __m256i high = load32(b + 16);
  for (int g = 0; g < 8; g++) {
    __m256i codes = _mm256_and_si256(_mm256_srli_epi16(load32(b + 48 + g / 2 * 32), g % 2 * 4), _mm256_set1_epi8(15));
    __m256i fifth = _mm256_and_si256(_mm256_srli_epi16(high, g), _mm256_set1_epi8(1));
    __m256 d = _mm256_set1_ps(scales[g]), m = _mm256_set1_ps(mins[g]);
    emit_minus(s, mode, _mm256_or_si256(codes, _mm256_slli_epi16(fifth, 4)), d, m, d, m);
  }
}

INLINE void q6_k_block(sink *s, int mode, const uint8_t *b) {
  float scales[16];
  __m256 d = load_f16_splat(b + 208);
  __m128i packed = load16(b + 192);
  _mm256_storeu_ps(scales, _mm256_mul_ps(d, i8_to_f32(packed)));
  _mm256_storeu_ps(scales + 8, _mm256_mul_ps(d, i8_to_f32(_mm_srli_si128(packed, 8))));
  for (int g = 0; g < 8; g++) {
    __m256i low = load32(b + g / 4 * 64 + g % 2 * 32);
    low = _mm256_and_si256(_mm256_srli_epi16(low, g / 2 % 2 * 4), _mm256_set1_epi8(15));
    __m256i codes = _mm256_or_si256(low, _mm256_slli_epi16(crumbs(b + 128 + g / 4 * 32, g % 4 * 2), 4));
    emit_i8(s, mode, _mm256_sub_epi8(codes, _mm256_set1_epi8(32)), _mm256_set1_ps(scales[2 * g]),
            _mm256_set1_ps(scales[2 * g + 1]));
  }
}

// 32 codes of 4 bits, looked up in 16 values.
INLINE __m256i lookup(const int8_t values[16], __m256i codes) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load16((const uint8_t *)values)), codes);
}

INLINE void iq4_nl_block(sink *s, int mode, const uint8_t *b) {
  __m256 d = load_f16_splat(b);
  emit_i8(s, mode, lookup(clb_values_iq4, nibbles(b + 2)), d, d);
}

INLINE void iq4_xs_block(sink *s, int mode, const uint8_t *b) {
  __m256 d = load_f16_splat(b);
  uint32_t scales_high = load_u16(b + 2), scales_low = load_u32(b + 4);
  for (int g = 0; g < 8; g++) {
    int scale = (int)((scales_low >> (4 * g) & 15) | (scales_high >> (2 * g) & 3) << 4) - 32;
    __m256 dl = _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_set1_epi32(scale)));
    emit_i8(s, mode, lookup(clb_values_iq4, nibbles(b + 8 + g * 16)), dl, dl);
  }
}

INLINE __m128i ternary_digits(__m128i bytes, int power) {
  const __m128i byte_mask = _mm_set1_epi16(255);
  // (byte * power mod 256) * 3 / 256, in 16-bit lanes: even bytes, then odd ones.
  __m128i even = _mm_and_si128(_mm_mullo_epi16(bytes, _mm_set1_epi16((short)power)), byte_mask);
  __m128i odd = _mm_and_si128(_mm_mullo_epi16(_mm_srli_epi16(bytes, 8), _mm_set1_epi16((short)power)), byte_mask);
  even = _mm_srli_epi16(_mm_mullo_epi16(even, _mm_set1_epi16(3)), 8);
  odd = _mm_andnot_si128(byte_mask, _mm_mullo_epi16(odd, _mm_set1_epi16(3)));
  return _mm_sub_epi8(_mm_or_si128(even, odd), _mm_set1_epi8(1));
}

INLINE void tq1_0_block(sink *s, int mode, const uint8_t *b) {
  static const uint8_t power[5] = {1, 3, 9, 27, 81};
  __m256 d = load_f16_splat(b + 52);
  __m128i v0 = load16(b), v1 = load16(b + 16), v2 = load16(b + 32), last = _mm_cvtsi32_si128((int)load_u32(b + 48));
  for (int i = 0; i < 5; i++) {
    emit_i8(s, mode, _mm256_set_m128i(ternary_digits(v1, power[i]), ternary_digits(v0, power[i])), d, d);
  }
  for (int i = 0; i < 4; i += 2) {
    emit_i8(s, mode, _mm256_set_m128i(ternary_digits(v2, power[i + 1]), ternary_digits(v2, power[i])), d, d);
  }
  __m128i digits01 = _mm_unpacklo_epi32(ternary_digits(last, 1), ternary_digits(last, 3));
  __m128i digits23 = _mm_unpacklo_epi32(ternary_digits(last, 9), ternary_digits(last, 27));
  emit_i8(s, mode, _mm256_set_m128i(_mm_unpacklo_epi64(digits01, digits23), ternary_digits(v2, 81)), d, d);
}

INLINE void tq2_0_block(sink *s, int mode, const uint8_t *b) {
  __m256 d = load_f16_splat(b + 64);
  for (int g = 0; g < 8; g++) {
    emit_i8(s, mode, _mm256_sub_epi8(crumbs(b + g / 4 * 32, g % 4 * 2), _mm256_set1_epi8(1)), d, d);
  }
}

INLINE void mxfp4_block(sink *s, int mode, const uint8_t *b) {
  uint32_t e = b[0];
  __m256 d = _mm256_castsi256_ps(_mm256_set1_epi32((int)(e < 2 ? 0x00200000u << e : (e - 1) << 23)));
  emit_i8(s, mode, lookup(clb_values_e2m1, nibbles(b + 1)), d, d);
}

// Half of each of four unsigned e4m3 scales: 7 bits, placed as the top of a binary16 without its sign, whose exponent
// is larger by 8.
INLINE __m128 ue4m3_half(const uint8_t *p) {
  __m128i v = _mm_cvtepu8_epi16(_mm_cvtsi32_si128((int)load_u32(p)));
  __m128i magnitude = _mm_slli_epi16(_mm_and_si128(v, _mm_set1_epi16(127)), 7);
  magnitude = _mm_andnot_si128(_mm_cmpeq_epi16(v, _mm_set1_epi16(127)), magnitude);
  return _mm_mul_ps(_mm_cvtph_ps(magnitude), _mm_set1_ps(0x1p+7f));
}

INLINE void nvfp4_block(sink *s, int mode, const uint8_t *b) {
  float scales[4];
  _mm_storeu_ps(scales, ue4m3_half(b));
  for (int g = 0; g < 4; g += 2) {
    // Low nibbles of 8 bytes, then their high ones, twice.
    __m256i pairs = _mm256_permute4x64_epi64(nibbles(b + 4 + g * 8), 0xD8);
    emit_i8(s, mode, lookup(clb_values_e2m1, pairs), _mm256_set1_ps(scales[g]), _mm256_set1_ps(scales[g + 1]));
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Decoders of the codebook types

// Four times seven stored signs; the eighth of each makes the number of minus signs even.
INLINE uint32_t even_signs(uint32_t stored) {
  uint32_t s = (stored & 0x7F) | (stored << 1 & 0x7F00) | (stored << 2 & 0x7F0000) | (stored << 3 & 0x7F000000);
  uint32_t parity = s ^ s >> 4;
  parity ^= parity >> 2;
  parity ^= parity >> 1;
  return s | (parity & 0x01010101) << 7;
}

// Bit 8 * group + i of signs negates lane i.
INLINE __m256 with_signs(__m256 v, __m256i signs, int group) {
  const __m256i shift =
      _mm256_sub_epi32(_mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24), _mm256_set1_epi32(8 * group));
  __m256i sign = _mm256_and_si256(_mm256_sllv_epi32(signs, shift), _mm256_set1_epi32(INT32_MIN));
  return _mm256_xor_ps(v, _mm256_castsi256_ps(sign));
}

// An entry in the low half of every lane, its neighbour in the other: one load, where a 16-bit one would need a
// shuffle.
INLINE __m256i entry_splat(const uint16_t *entry) {
  return _mm256_set1_epi32((int)load_u32((const uint8_t *)entry));
}

// The 8 weights of an entry with 2-bit fields: the permutation looks at the lowest two bits of a lane only.
INLINE __m256 grid2(const uint16_t *entry, __m256 values) {
  const __m256i shift = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
  return _mm256_permutevar_ps(values, _mm256_srlv_epi32(entry_splat(entry), shift));
}

// The 8 weights of two entries with 4-bit fields, of which three count.
INLINE __m256 grid4(const uint16_t *first, const uint16_t *second, __m256 values) {
  const __m256i shift = _mm256_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12);
  __m256i entries = _mm256_blend_epi32(entry_splat(first), entry_splat(second), 0xF0);
  return _mm256_permutevar8x32_ps(values, _mm256_srlv_epi32(entries, shift));
}

INLINE __m256 iq1_values(void) {
  return _mm256_setr_ps(-1, 0, 1, 0, -1, 0, 1, 0);
}
INLINE __m256 iq2_values(void) {
  return _mm256_setr_ps(8, 25, 43, 0, 8, 25, 43, 0);
}
INLINE __m256 iq3_xxs_values(void) {
  return _mm256_setr_ps(4, 12, 20, 28, 36, 44, 52, 62);
}
INLINE __m256 iq3_s_values(void) {
  return _mm256_setr_ps(1, 3, 5, 7, 9, 11, 13, 15);
}

// Scale factors by code: (0.5 + code) / 4, 1 + 2 * code. Products with d are exact, in any order.
static const float quarter_steps[16] = {0.125f, 0.375f, 0.625f, 0.875f, 1.125f, 1.375f, 1.625f, 1.875f,
                                        2.125f, 2.375f, 2.625f, 2.875f, 3.125f, 3.375f, 3.625f, 3.875f};
static const float odd_numbers[16] = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};

INLINE __m256 coded_scale(__m256 d, const float factors[16], uint32_t code) {
  return _mm256_mul_ps(d, _mm256_set1_ps(factors[code & 15]));
}

INLINE __m256 iq2_8(__m256 scale, const uint16_t *entry, __m256i signs, int group) {
  return with_signs(_mm256_mul_ps(scale, grid2(entry, iq2_values())), signs, group);
}

INLINE void iq2_xxs_block(sink *s, int mode, const uint8_t *b) {
  __m256 d = load_f16_splat(b);
  for (int g = 0; g < 8; g++) {
    const uint8_t *e = b + 2 + g * 8;
    uint32_t rest = load_u32(e + 4);
    __m256i signs = _mm256_set1_epi32((int)even_signs(rest));
    __m256 scale = coded_scale(d, quarter_steps, rest >> 28);
    emit(s, mode, iq2_8(scale, clb_grid_iq2_xxs + e[0], signs, 0), iq2_8(scale, clb_grid_iq2_xxs + e[1], signs, 1),
         iq2_8(scale, clb_grid_iq2_xxs + e[2], signs, 2), iq2_8(scale, clb_grid_iq2_xxs + e[3], signs, 3));
  }
}

INLINE void iq2_xs_block(sink *s, int mode, const uint8_t *b) {
  __m256 d = load_f16_splat(b);
  for (int g = 0; g < 8; g++) {
    const uint8_t *p = b + 2 + g * 8;
    uint32_t e0 = load_u16(p), e1 = load_u16(p + 2), e2 = load_u16(p + 4), e3 = load_u16(p + 6), scales = b[66 + g];
    __m256i signs = _mm256_set1_epi32((int)even_signs(e0 >> 9 | e1 >> 9 << 7 | e2 >> 9 << 14 | e3 >> 9 << 21));
    __m256 scale0 = coded_scale(d, quarter_steps, scales), scale1 = coded_scale(d, quarter_steps, scales >> 4);
    emit(s, mode, iq2_8(scale0, clb_grid_iq2_xs + (e0 & 511), signs, 0),
         iq2_8(scale0, clb_grid_iq2_xs + (e1 & 511), signs, 1), iq2_8(scale1, clb_grid_iq2_xs + (e2 & 511), signs, 2),
         iq2_8(scale1, clb_grid_iq2_xs + (e3 & 511), signs, 3));
  }
}

INLINE void iq2_s_block(sink *s, int mode, const uint8_t *b) {
  __m256 d = load_f16_splat(b);
  for (int g = 0; g < 8; g++) {
    const uint8_t *e = b + 2 + g * 4;
    uint32_t high = b[66 + g], scales = b[74 + g];
    __m256i signs = _mm256_set1_epi32((int)load_u32(b + 34 + g * 4));
    __m256 scale0 = coded_scale(d, quarter_steps, scales), scale1 = coded_scale(d, quarter_steps, scales >> 4);
    emit(s, mode, iq2_8(scale0, clb_grid_iq2_s + (e[0] | (high & 3) << 8), signs, 0),
         iq2_8(scale0, clb_grid_iq2_s + (e[1] | (high >> 2 & 3) << 8), signs, 1),
         iq2_8(scale1, clb_grid_iq2_s + (e[2] | (high >> 4 & 3) << 8), signs, 2),
         iq2_8(scale1, clb_grid_iq2_s + (e[3] | (high >> 6 & 3) << 8), signs, 3));
  }
}

INLINE __m256 iq3_xxs_8(__m256 scale, const uint8_t *e, __m256i signs, int group) {
  __m256 grid = grid4(clb_grid_iq3_xxs + e[2 * group], clb_grid_iq3_xxs + e[2 * group + 1], iq3_xxs_values());
  return with_signs(_mm256_mul_ps(scale, grid), signs, group);
}

INLINE void iq3_xxs_block(sink *s, int mode, const uint8_t *b) {
  __m256 twice_d = _mm256_mul_ps(load_f16_splat(b), _mm256_set1_ps(2));
  for (int g = 0; g < 8; g++) {
    const uint8_t *e = b + 2 + g * 8;
    uint32_t rest = load_u32(b + 66 + g * 4);
    __m256i signs = _mm256_set1_epi32((int)even_signs(rest));
    __m256 scale = coded_scale(twice_d, quarter_steps, rest >> 28);
    emit(s, mode, iq3_xxs_8(scale, e, signs, 0), iq3_xxs_8(scale, e, signs, 1), iq3_xxs_8(scale, e, signs, 2),
         iq3_xxs_8(scale, e, signs, 3));
  }
}

INLINE __m256 iq3_s_8(__m256 scale, const uint8_t *e, uint32_t high, __m256i signs, int group) {
  uint32_t first = e[2 * group] | (high << (8 - 2 * group) & 256);
  uint32_t second = e[2 * group + 1] | (high << (7 - 2 * group) & 256);
  __m256 grid = grid4(clb_grid_iq3_s + first, clb_grid_iq3_s + second, iq3_s_values());
  return with_signs(_mm256_mul_ps(scale, grid), signs, group);
}

INLINE void iq3_s_block(sink *s, int mode, const uint8_t *b) {
  __m256 d = load_f16_splat(b);
  for (int g = 0; g < 8; g++) {
    const uint8_t *e = b + 2 + g * 8;
    uint32_t high = b[66 + g];
    __m256i signs = _mm256_set1_epi32((int)load_u32(b + 74 + g * 4));
    __m256 scale = coded_scale(d, odd_numbers, (uint32_t)b[106 + g / 2] >> (g % 2 * 4));
    emit(s, mode, iq3_s_8(scale, e, high, signs, 0), iq3_s_8(scale, e, high, signs, 1),
         iq3_s_8(scale, e, high, signs, 2), iq3_s_8(scale, e, high, signs, 3));
  }
}

// Bit 31 of sign decides: an eighth down or up.
INLINE __m256 iq1_8(__m256 scale, uint32_t index, uint32_t sign) {
  __m256i delta = _mm256_set1_epi32((int)(0x3E000000u | (sign & 0x80000000u)));
  return _mm256_mul_ps(scale, _mm256_add_ps(grid2(clb_grid_iq1 + index, iq1_values()), _mm256_castsi256_ps(delta)));
}

INLINE void iq1_s_block(sink *s, int mode, const uint8_t *b) {
  __m256 d = load_f16_splat(b);
  for (int g = 0; g < 8; g++) {
    const uint8_t *e = b + 2 + g * 4;
    uint32_t high = load_u16(b + 34 + g * 2), sign = high << 16;
    __m256 scale = coded_scale(d, odd_numbers, high >> 12 & 7);
    emit(s, mode, iq1_8(scale, e[0] | (high << 8 & 0x700), sign), iq1_8(scale, e[1] | (high << 5 & 0x700), sign),
         iq1_8(scale, e[2] | (high << 2 & 0x700), sign), iq1_8(scale, e[3] | (high >> 1 & 0x700), sign));
  }
}

INLINE void iq1_m_block(sink *s, int mode, const uint8_t *b) {
  const uint8_t *scales = b + 48;
  uint32_t first = load_u32(scales), second = load_u32(scales + 4);
  uint32_t d_bits = (first >> 12 & 0x000F) | (first >> 24 & 0x00F0) | (second >> 4 & 0x0F00) | (second >> 16 & 0xF000);
  __m256 d = f16_splat((uint16_t)d_bits);
  for (int g = 0; g < 8; g++) {
    const uint8_t *e = b + g * 4;
    uint32_t high = load_u16(b + 32 + g * 2), codes = (uint32_t)load_u16(scales + g / 2 * 2) >> (g % 2 * 6);
    __m256 scale0 = coded_scale(d, odd_numbers, codes & 7), scale1 = coded_scale(d, odd_numbers, codes >> 3 & 7);
    emit(s, mode, iq1_8(scale0, e[0] | (high << 8 & 0x700), high << 28),
         iq1_8(scale0, e[1] | (high << 4 & 0x700), high << 24), iq1_8(scale1, e[2] | (high & 0x700), high << 20),
         iq1_8(scale1, e[3] | (high >> 4 & 0x700), high << 16));
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels of the block types

// Decoding is long enough that out-of-order execution sees only a few cache lines ahead: without this, weights that
// come from memory arrive at a third of the speed. Addresses beyond the end do no harm, a prefetch never faults.
INLINE void prefetch(const uint8_t *p, size_t n_bytes) {
  enum { AHEAD = 2048, LINE = 64 };
  for (size_t i = 0; i < n_bytes; i += LINE) _mm_prefetch((const char *)((uintptr_t)p + AHEAD + i), _MM_HINT_T0);
}

#define BLOCK_KERNELS(name, bytes)                                                                            \
  AVX2 static void decode_##name(const uint8_t *src, float *dst, size_t n_blocks) {                           \
    sink s = {.dst = dst};                                                                                    \
    for (size_t i = 0; i < n_blocks; i++) {                                                                   \
      prefetch(src + i * (bytes), bytes);                                                                     \
      name##_block(&s, DECODE, src + i * (bytes));                                                            \
    }                                                                                                         \
  }                                                                                                           \
  AVX2 static void rows_##name(const uint8_t *w, size_t row_bytes, size_t n_blocks, const float *x, float *y, \
                               size_t n_rows) {                                                               \
    for (size_t r = 0; r < n_rows; r++, w += row_bytes) {                                                     \
      sink s = dot_sink(x);                                                                                   \
      for (size_t i = 0; i < n_blocks; i++) {                                                                 \
        prefetch(w + i * (bytes), bytes);                                                                     \
        name##_block(&s, DOT, w + i * (bytes));                                                               \
      }                                                                                                       \
      y[r] = reduce_sink(&s);                                                                                 \
    }                                                                                                         \
  }

BLOCK_KERNELS(q4_0, 18)
BLOCK_KERNELS(q4_1, 20)
BLOCK_KERNELS(q5_0, 22)
BLOCK_KERNELS(q5_1, 24)
BLOCK_KERNELS(q8_0, 34)
BLOCK_KERNELS(q2_k, 84)
BLOCK_KERNELS(q3_k, 110)
BLOCK_KERNELS(q4_k, 144)
BLOCK_KERNELS(q5_k, 176)
BLOCK_KERNELS(q6_k, 210)
BLOCK_KERNELS(iq2_xxs, 66)
BLOCK_KERNELS(iq2_xs, 74)
BLOCK_KERNELS(iq3_xxs, 98)
BLOCK_KERNELS(iq1_s, 50)
BLOCK_KERNELS(iq4_nl, 18)
BLOCK_KERNELS(iq3_s, 110)
BLOCK_KERNELS(iq2_s, 82)
BLOCK_KERNELS(iq4_xs, 136)
BLOCK_KERNELS(iq1_m, 56)
BLOCK_KERNELS(tq1_0, 54)
BLOCK_KERNELS(tq2_0, 66)
BLOCK_KERNELS(mxfp4, 17)
BLOCK_KERNELS(nvfp4, 36)

// ---------------------------------------------------------------------------------------------------------------------
// Kernels of the float types: 8 weights at a time, then one by one

INLINE __m256 f32_8(const uint8_t *p) {
  return _mm256_castsi256_ps(load32(p));
}
INLINE __m256 f16_8(const uint8_t *p) {
  return _mm256_cvtph_ps(load16(p));
}
INLINE __m256 bf16_8(const uint8_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(p)), 16));
}

INLINE float f32_1(const uint8_t *p) {
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128((int)load_u32(p))));
}
INLINE float f16_1(const uint8_t *p) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(load_u16(p))));
}
INLINE float bf16_1(const uint8_t *p) {
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128((int)((uint32_t)load_u16(p) << 16))));
}

INLINE void store_sink(const sink *s, float p[CLB_LANES]) {
  _mm256_storeu_ps(p, s->acc0);
  _mm256_storeu_ps(p + 8, s->acc1);
  _mm256_storeu_ps(p + 16, s->acc2);
  _mm256_storeu_ps(p + 24, s->acc3);
}

#define FLOAT_32(name, s, mode, p, bytes)                                                 \
  do {                                                                                    \
    prefetch(p, 32 * (bytes));                                                            \
    emit(s, mode, name##_8(p), name##_8((p) + 8 * (bytes)), name##_8((p) + 16 * (bytes)), \
         name##_8((p) + 24 * (bytes)));                                                   \
  } while (0)

#define FLOAT_KERNELS(name, bytes)                                                                     \
  AVX2 static void decode_##name(const uint8_t *src, float *dst, size_t n) {                           \
    sink s = {.dst = dst};                                                                             \
    size_t j = 0;                                                                                      \
    for (; j + 32 <= n; j += 32) FLOAT_32(name, &s, DECODE, src + j * (bytes), bytes);                 \
    for (; j < n; j++) dst[j] = name##_1(src + j * (bytes));                                           \
  }                                                                                                    \
  AVX2 static void rows_##name(const uint8_t *w, size_t row_bytes, size_t n, const float *x, float *y, \
                               size_t n_rows) {                                                        \
    for (size_t r = 0; r < n_rows; r++, w += row_bytes) {                                              \
      sink s = dot_sink(x);                                                                            \
      size_t j = 0;                                                                                    \
      for (; j + 32 <= n; j += 32) FLOAT_32(name, &s, DOT, w + j * (bytes), bytes);                    \
      if (j == n) {                                                                                    \
        y[r] = reduce_sink(&s);                                                                        \
        continue;                                                                                      \
      }                                                                                                \
      float p[CLB_LANES];                                                                              \
      store_sink(&s, p);                                                                               \
      for (; j < n; j++) p[j % CLB_LANES] = fmaf(name##_1(w + j * (bytes)), x[j], p[j % CLB_LANES]);   \
      y[r] = clb_reduce_lanes(p);                                                                      \
    }                                                                                                  \
  }

FLOAT_KERNELS(f32, 4)
FLOAT_KERNELS(f16, 2)
FLOAT_KERNELS(bf16, 2)

AVX2 static float dot(const float *a, const float *b, size_t n) {
  float y;
  rows_f32((const uint8_t *)a, 0, n, b, &y, 1);
  return y;
}

AVX2 static float sum(const float *a, size_t n) {
  sink s = dot_sink(NULL);
  size_t j = 0;
  for (; j + 32 <= n; j += 32) {
    s.acc0 = _mm256_add_ps(s.acc0, _mm256_loadu_ps(a + j));
    s.acc1 = _mm256_add_ps(s.acc1, _mm256_loadu_ps(a + j + 8));
    s.acc2 = _mm256_add_ps(s.acc2, _mm256_loadu_ps(a + j + 16));
    s.acc3 = _mm256_add_ps(s.acc3, _mm256_loadu_ps(a + j + 24));
  }
  float p[CLB_LANES];
  store_sink(&s, p);
  for (; j < n; j++) p[j % CLB_LANES] += a[j];
  return clb_reduce_lanes(p);
}

// ---------------------------------------------------------------------------------------------------------------------
// Several tokens: a tile of 4 rows x up to 3 tokens keeps 12 accumulators in registers and needs 7 loads for 12
// multiply-adds. It walks the columns once per accumulator of 8 lanes, which is why the tile has to fit into L1.

INLINE void tile_lanes(int n_tokens, float *acc, const float *w, const float *x, size_t ldx, size_t n) {
  __m256 a[CLB_TILE_ROWS][3];
  UNROLL for (int r = 0; r < CLB_TILE_ROWS; r++) {
    UNROLL for (int t = 0; t < n_tokens; t++) a[r][t] = _mm256_load_ps(acc + (t * CLB_TILE_ROWS + r) * CLB_LANES);
  }
  for (size_t j = 0; j < n; j += CLB_LANES) {
    __m256 v[3];
    UNROLL for (int t = 0; t < n_tokens; t++) v[t] = _mm256_loadu_ps(x + (size_t)t * ldx + j);
    UNROLL for (int r = 0; r < CLB_TILE_ROWS; r++) {
      __m256 weights = _mm256_load_ps(w + r * CLB_TILE_COLUMNS + j);
      UNROLL for (int t = 0; t < n_tokens; t++) a[r][t] = _mm256_fmadd_ps(weights, v[t], a[r][t]);
    }
  }
  UNROLL for (int r = 0; r < CLB_TILE_ROWS; r++) {
    UNROLL for (int t = 0; t < n_tokens; t++) _mm256_store_ps(acc + (t * CLB_TILE_ROWS + r) * CLB_LANES, a[r][t]);
  }
}

INLINE void tile_tokens(int n_tokens, float *acc, const float *w, const float *x, size_t ldx, size_t n) {
  size_t n_whole = n / CLB_LANES * CLB_LANES;
  for (int lane = 0; lane < CLB_LANES; lane += 8) {
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

AVX2 static void tile(float *acc, const float *w, size_t n_rows, const float *x, size_t ldx, size_t n_tokens,
                      size_t n) {
  (void)n_rows;
  size_t t = 0;
  for (; t + 3 <= n_tokens; t += 3) tile_tokens(3, acc + t * CLB_TILE_ROWS * CLB_LANES, w, x + t * ldx, ldx, n);
  acc += t * CLB_TILE_ROWS * CLB_LANES;
  x += t * ldx;
  if (n_tokens - t == 2) tile_tokens(2, acc, w, x, ldx, n);
  if (n_tokens - t == 1) tile_tokens(1, acc, w, x, ldx, n);
}

AVX2 static float reduce_tile(const float p[CLB_LANES]) {
  return reduce(_mm256_load_ps(p), _mm256_load_ps(p + 8), _mm256_load_ps(p + 16), _mm256_load_ps(p + 24));
}

// ---------------------------------------------------------------------------------------------------------------------
// Elementwise. The last few elements go through a padded copy, so that they meet the same instructions.

AVX2 static void axpy(float *dst, const float *src, float scale, size_t n) {
  __m256 v = _mm256_set1_ps(scale);
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(dst + i, _mm256_fmadd_ps(v, _mm256_loadu_ps(src + i), _mm256_loadu_ps(dst + i)));
  }
  for (; i < n; i++) dst[i] = fmaf(scale, src[i], dst[i]);
}

// 16 columns of n_dst rows stay in registers while the rows of src go by.
INLINE void mix_tile(int n_dst, float *dst, size_t ld_dst, const float *scale, size_t ld_scale, const float *src,
                     size_t n, size_t d) {
  __m256 a[4][2];
  UNROLL for (int m = 0; m < n_dst; m++) {
    a[m][0] = _mm256_loadu_ps(dst + (size_t)m * ld_dst);
    a[m][1] = _mm256_loadu_ps(dst + (size_t)m * ld_dst + 8);
  }
  for (size_t i = 0; i < n; i++) {
    const __m256 v0 = _mm256_loadu_ps(src + i * d), v1 = _mm256_loadu_ps(src + i * d + 8);
    UNROLL for (int m = 0; m < n_dst; m++) {
      const __m256 factor = _mm256_broadcast_ss(scale + (size_t)m * ld_scale + i);
      a[m][0] = _mm256_fmadd_ps(factor, v0, a[m][0]);
      a[m][1] = _mm256_fmadd_ps(factor, v1, a[m][1]);
    }
  }
  UNROLL for (int m = 0; m < n_dst; m++) {
    _mm256_storeu_ps(dst + (size_t)m * ld_dst, a[m][0]);
    _mm256_storeu_ps(dst + (size_t)m * ld_dst + 8, a[m][1]);
  }
}

AVX2 static void mix(float *dst, size_t ld_dst, const float *scale, size_t ld_scale, const float *src, size_t n,
                     size_t n_dst, size_t d) {
  const size_t whole = d / 16 * 16;
  for (size_t j = 0; j < whole; j += 16) {
    size_t m = 0;
    for (; m + 4 <= n_dst; m += 4) {
      mix_tile(4, dst + m * ld_dst + j, ld_dst, scale + m * ld_scale, ld_scale, src + j, n, d);
    }
    for (; m < n_dst; m++) mix_tile(1, dst + m * ld_dst + j, ld_dst, scale + m * ld_scale, ld_scale, src + j, n, d);
  }
  if (whole == d) return;
  for (size_t m = 0; m < n_dst; m++) {
    for (size_t i = 0; i < n; i++) {
      axpy(dst + m * ld_dst + whole, src + i * d + whole, scale[m * ld_scale + i], d - whole);
    }
  }
}

// See CLB_EXP_LO in blocks_internal.h. min and max return their second operand when one is NaN.
INLINE __m256 exp_8(__m256 x) {
  x = _mm256_max_ps(_mm256_set1_ps(CLB_EXP_LO), x);
  x = _mm256_min_ps(_mm256_set1_ps(CLB_EXP_HI), x);
  __m256 t = _mm256_fmadd_ps(x, _mm256_set1_ps(CLB_EXP_LOG2E), _mm256_set1_ps(CLB_EXP_MAGIC));
  __m256 n = _mm256_sub_ps(t, _mm256_set1_ps(CLB_EXP_MAGIC));
  __m256 r = _mm256_fmadd_ps(_mm256_set1_ps(-CLB_EXP_LN2_HI), n, x);
  r = _mm256_fmadd_ps(_mm256_set1_ps(-CLB_EXP_LN2_LO), n, r);
  __m256 q = _mm256_fmadd_ps(_mm256_set1_ps(CLB_EXP_C6), r, _mm256_set1_ps(CLB_EXP_C5));
  q = _mm256_fmadd_ps(q, r, _mm256_set1_ps(CLB_EXP_C4));
  q = _mm256_fmadd_ps(q, r, _mm256_set1_ps(CLB_EXP_C3));
  q = _mm256_fmadd_ps(q, r, _mm256_set1_ps(CLB_EXP_C2));
  __m256 p = _mm256_add_ps(_mm256_fmadd_ps(_mm256_mul_ps(q, r), r, r), _mm256_set1_ps(1.0f));
  __m256i i = _mm256_sub_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(CLB_EXP_MAGIC_BITS));
  __m256i half = _mm256_srai_epi32(i, 1), bias = _mm256_set1_epi32(127);
  __m256i scale0 = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  __m256i scale1 = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(i, half), bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(scale0)), _mm256_castsi256_ps(scale1));
}

AVX2 static void vector_exp(float *dst, const float *src, float shift, size_t n) {
  __m256 v = _mm256_set1_ps(shift);
  size_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, exp_8(_mm256_sub_ps(_mm256_loadu_ps(src + i), v)));
  if (i == n) return;
  float last[8] = {0};
  memcpy(last, src + i, (n - i) * sizeof *src);
  _mm256_storeu_ps(last, exp_8(_mm256_sub_ps(_mm256_loadu_ps(last), v)));
  memcpy(dst + i, last, (n - i) * sizeof *dst);
}

INLINE __m256 silu_mul_8(__m256 gate, __m256 up) {
  __m256 e = exp_8(_mm256_xor_ps(gate, _mm256_set1_ps(-0.0f)));
  return _mm256_mul_ps(_mm256_div_ps(gate, _mm256_add_ps(_mm256_set1_ps(1.0f), e)), up);
}

AVX2 static void silu_mul(float *dst, const float *gate, const float *up, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, silu_mul_8(_mm256_loadu_ps(gate + i), _mm256_loadu_ps(up + i)));
  if (i == n) return;
  float last_gate[8] = {0}, last_up[8] = {0};
  memcpy(last_gate, gate + i, (n - i) * sizeof *gate);
  memcpy(last_up, up + i, (n - i) * sizeof *up);
  _mm256_storeu_ps(last_gate, silu_mul_8(_mm256_loadu_ps(last_gate), _mm256_loadu_ps(last_up)));
  memcpy(dst + i, last_gate, (n - i) * sizeof *dst);
}

INLINE __m128i to_f16_8(__m256 v) {
  return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
}

INLINE __m128i to_bf16_8(__m256 v) {
  __m256i bits = _mm256_castps_si256(v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

#define NARROW_KERNEL(name)                                                                                        \
  AVX2 static void name(uint16_t *dst, const float *src, size_t n) {                                               \
    size_t i = 0;                                                                                                  \
    for (; i + 8 <= n; i += 8) _mm_storeu_si128((__m128i *)(void *)(dst + i), name##_8(_mm256_loadu_ps(src + i))); \
    if (i == n) return;                                                                                            \
    float last[8] = {0};                                                                                           \
    uint16_t result[8];                                                                                            \
    memcpy(last, src + i, (n - i) * sizeof *src);                                                                  \
    _mm_storeu_si128((__m128i *)(void *)result, name##_8(_mm256_loadu_ps(last)));                                  \
    memcpy(dst + i, result, (n - i) * sizeof *dst);                                                                \
  }

NARROW_KERNEL(to_f16)
NARROW_KERNEL(to_bf16)

AVX2 static bool any_masked_u32(const uint8_t *src, uint32_t mask, size_t n) {
  __m256i m = _mm256_set1_epi32((int)mask), any = _mm256_setzero_si256();
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    any = _mm256_or_si256(any, _mm256_cmpeq_epi32(_mm256_and_si256(load32(src + i * 4), m), m));
  }
  bool found = !_mm256_testz_si256(any, any);
  for (; i < n; i++) found |= (load_u32(src + i * 4) & mask) == mask;
  return found;
}

AVX2 static bool any_masked_u16(const uint8_t *src, uint16_t mask, size_t n) {
  __m256i m = _mm256_set1_epi16((short)mask), any = _mm256_setzero_si256();
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    any = _mm256_or_si256(any, _mm256_cmpeq_epi16(_mm256_and_si256(load32(src + i * 2), m), m));
  }
  bool found = !_mm256_testz_si256(any, any);
  for (; i < n; i++) found |= (load_u16(src + i * 2) & mask) == mask;
  return found;
}

// ---------------------------------------------------------------------------------------------------------------------
// The set, and whether it can run

#define ALL_TYPES(kernel)                                                                                   \
  {                                                                                                         \
      kernel##_f32,     kernel##_f16,    kernel##_q4_0,    kernel##_q4_1,  kernel##_q5_0,   kernel##_q5_1,  \
      kernel##_q8_0,    kernel##_q2_k,   kernel##_q3_k,    kernel##_q4_k,  kernel##_q5_k,   kernel##_q6_k,  \
      kernel##_iq2_xxs, kernel##_iq2_xs, kernel##_iq3_xxs, kernel##_iq1_s, kernel##_iq4_nl, kernel##_iq3_s, \
      kernel##_iq2_s,   kernel##_iq4_xs, kernel##_iq1_m,   kernel##_bf16,  kernel##_tq1_0,  kernel##_tq2_0, \
      kernel##_mxfp4,   kernel##_nvfp4}

static const clb_kernels avx2_kernels = {
    .name = "avx2",
    .decode = ALL_TYPES(decode),
    .rows = ALL_TYPES(rows),
    .tile = tile,
    .reduce = reduce_tile,
    .dot = dot,
    .sum = sum,
    .axpy = axpy,
    .mix = mix,
    .exp = vector_exp,
    .silu_mul = silu_mul,
    .to_f16 = to_f16,
    .to_bf16 = to_bf16,
    .any_masked_u32 = any_masked_u32,
    .any_masked_u16 = any_masked_u16,
};

// The CPU has AVX2, FMA and F16C, and the system saves the wide registers (XCR0 bits 1 and 2).
static bool cpu_can_run(void) {
  enum { NEEDED_1_ECX = bit_FMA | bit_F16C | bit_OSXSAVE | bit_AVX };
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & NEEDED_1_ECX) != NEEDED_1_ECX) return false;
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & 6) != 6) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

const clb_kernels *clb_kernels_avx2(void) {
  return cpu_can_run() ? &avx2_kernels : NULL;
}

#endif
