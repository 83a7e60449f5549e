// The type table, the scalar reference of every kernel, and the choice of kernels. See blocks.h.
//
// A decoder must round exactly where gguf-py rounds. In all formats the product scale * code fits a float exactly, so
// what rounds is only the subtraction of a minimum; compilers must not contract it (-ffp-contract=off).
#include "blocks.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "blocks_internal.h"

// ---------------------------------------------------------------------------------------------------------------------
// Types

static const clb_type types[CLB_N_TYPES] = {
    {CLB_F32, "f32", 1, 4, CLB_SCALE_SELF, 0, {0, 0}},
    {CLB_F16, "f16", 1, 2, CLB_SCALE_SELF, 0, {0, 0}},
    {CLB_Q4_0, "q4_0", 32, 18, CLB_SCALE_F16, 1, {0, 0}},
    {CLB_Q4_1, "q4_1", 32, 20, CLB_SCALE_F16, 2, {0, 2}},
    {CLB_Q5_0, "q5_0", 32, 22, CLB_SCALE_F16, 1, {0, 0}},
    {CLB_Q5_1, "q5_1", 32, 24, CLB_SCALE_F16, 2, {0, 2}},
    {CLB_Q8_0, "q8_0", 32, 34, CLB_SCALE_F16, 1, {0, 0}},
    {CLB_Q2_K, "q2_k", 256, 84, CLB_SCALE_F16, 2, {80, 82}},
    {CLB_Q3_K, "q3_k", 256, 110, CLB_SCALE_F16, 1, {108, 0}},
    {CLB_Q4_K, "q4_k", 256, 144, CLB_SCALE_F16, 2, {0, 2}},
    {CLB_Q5_K, "q5_k", 256, 176, CLB_SCALE_F16, 2, {0, 2}},
    {CLB_Q6_K, "q6_k", 256, 210, CLB_SCALE_F16, 1, {208, 0}},
    {CLB_IQ2_XXS, "iq2_xxs", 256, 66, CLB_SCALE_F16, 1, {0, 0}},
    {CLB_IQ2_XS, "iq2_xs", 256, 74, CLB_SCALE_F16, 1, {0, 0}},
    {CLB_IQ3_XXS, "iq3_xxs", 256, 98, CLB_SCALE_F16, 1, {0, 0}},
    {CLB_IQ1_S, "iq1_s", 256, 50, CLB_SCALE_F16, 1, {0, 0}},
    {CLB_IQ4_NL, "iq4_nl", 32, 18, CLB_SCALE_F16, 1, {0, 0}},
    {CLB_IQ3_S, "iq3_s", 256, 110, CLB_SCALE_F16, 1, {0, 0}},
    {CLB_IQ2_S, "iq2_s", 256, 82, CLB_SCALE_F16, 1, {0, 0}},
    {CLB_IQ4_XS, "iq4_xs", 256, 136, CLB_SCALE_F16, 1, {0, 0}},
    {CLB_IQ1_M, "iq1_m", 256, 56, CLB_SCALE_IQ1_M, 0, {48, 0}},
    {CLB_BF16, "bf16", 1, 2, CLB_SCALE_SELF, 0, {0, 0}},
    {CLB_TQ1_0, "tq1_0", 256, 54, CLB_SCALE_F16, 1, {52, 0}},
    {CLB_TQ2_0, "tq2_0", 256, 66, CLB_SCALE_F16, 1, {64, 0}},
    {CLB_MXFP4, "mxfp4", 32, 17, CLB_SCALE_E8M0, 0, {0, 0}},
    {CLB_NVFP4, "nvfp4", 64, 36, CLB_SCALE_NONE, 0, {0, 0}},
};

const clb_type *clb_type_by_id(uint32_t id) {
  for (size_t i = 0; i < CLB_N_TYPES; i++) {
    if (types[i].id == id) return &types[i];
  }
  return NULL;
}

const clb_type *clb_type_by_name(const char *name) {
  for (size_t i = 0; i < CLB_N_TYPES; i++) {
    if (strcmp(types[i].name, name) == 0) return &types[i];
  }
  return NULL;
}

size_t clb_type_count(void) {
  return CLB_N_TYPES;
}

const clb_type *clb_type_at(size_t i) {
  return i < CLB_N_TYPES ? &types[i] : NULL;
}

bool clb_row_bytes(const clb_type *type, uint64_t n_cols, uint64_t *n_bytes) {
  if (n_cols % type->block_weights != 0) return false;
  uint64_t n_blocks = n_cols / type->block_weights;
  if (n_blocks > UINT64_MAX / type->block_bytes) return false;
  *n_bytes = n_blocks * type->block_bytes;
  return true;
}

// The position in the table, which is also that of the type's kernels.
static size_t type_index(const clb_type *type) {
  return (size_t)(type - types);
}

// ---------------------------------------------------------------------------------------------------------------------
// Numbers in bytes. All formats are little-endian, and so is every CPU this builds for.

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "a little-endian CPU is required"
#endif

static inline uint16_t load_u16(const uint8_t *p) {
  uint16_t v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline uint32_t load_u32(const uint8_t *p) {
  uint32_t v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline float float_of(uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

static inline uint32_t bits_of(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return bits;
}

static inline float f16_to_f32(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7FFF;
  if (magnitude > 0x7C00) return float_of(sign | 0x7FC00000 | magnitude << 13);  // NaN, made quiet
  if (magnitude == 0x7C00) return float_of(sign | 0x7F800000);
  if (magnitude < 0x0400) return float_of(sign | bits_of((float)magnitude * 0x1p-24f));
  return float_of(sign | ((magnitude << 13) + ((127 - 15) << 23)));
}

static inline uint16_t f32_to_f16(float f) {
  uint32_t sign = bits_of(f) >> 16 & 0x8000, magnitude = bits_of(f) & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return (uint16_t)(sign | 0x7E00 | (magnitude >> 13 & 0x3FF));
  if (magnitude >= 0x477FF000) return (uint16_t)(sign | 0x7C00);  // from 65520 on: infinity
  if (magnitude < 0x38800000) {
    // Below 2^-14. The spacing of floats in [0.5, 1) is that of the subnormals: adding 0.5 rounds to it.
    return (uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
  }
  magnitude += 0xFFF + (magnitude >> 13 & 1);
  return (uint16_t)(sign | (magnitude - ((127 - 15) << 23)) >> 13);
}

static inline uint16_t f32_to_bf16(float f) {
  uint32_t bits = bits_of(f);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static inline float load_f16(const uint8_t *p) {
  return f16_to_f32(load_u16(p));
}

// ---------------------------------------------------------------------------------------------------------------------
// Decoders: one quant block at b into dst. Fields are listed in the order of their bytes.

const int8_t clb_values_iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
const int8_t clb_values_e2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static void f32_block(const uint8_t *b, float *dst) {
  memcpy(dst, b, sizeof *dst);
}

static void f16_block(const uint8_t *b, float *dst) {
  *dst = load_f16(b);
}

static void bf16_block(const uint8_t *b, float *dst) {
  *dst = float_of((uint32_t)load_u16(b) << 16);
}

// f16 d; u8 codes[16]: low nibbles are weights 0..15, high nibbles 16..31
static void q4_0_block(const uint8_t *b, float *dst) {
  float d = load_f16(b);
  for (int i = 0; i < 16; i++) {
    dst[i] = d * (float)((b[2 + i] & 15) - 8);
    dst[i + 16] = d * (float)((b[2 + i] >> 4) - 8);
  }
}

// f16 d, m; u8 codes[16] as in q4_0
static void q4_1_block(const uint8_t *b, float *dst) {
  float d = load_f16(b), m = load_f16(b + 2);
  for (int i = 0; i < 16; i++) {
    dst[i] = d * (float)(b[4 + i] & 15) + m;
    dst[i + 16] = d * (float)(b[4 + i] >> 4) + m;
  }
}

// f16 d; u32 high: the fifth bit of each code; u8 codes[16] as in q4_0
static void q5_0_block(const uint8_t *b, float *dst) {
  float d = load_f16(b);
  uint32_t high = load_u32(b + 2);
  for (int i = 0; i < 16; i++) {
    dst[i] = d * (float)((b[6 + i] & 15) + (int)(high >> i & 1) * 16 - 16);
    dst[i + 16] = d * (float)((b[6 + i] >> 4) + (int)(high >> (i + 16) & 1) * 16 - 16);
  }
}

// f16 d, m; u32 high; u8 codes[16] as in q5_0
static void q5_1_block(const uint8_t *b, float *dst) {
  float d = load_f16(b), m = load_f16(b + 2);
  uint32_t high = load_u32(b + 4);
  for (int i = 0; i < 16; i++) {
    dst[i] = d * (float)((b[8 + i] & 15) + (int)(high >> i & 1) * 16) + m;
    dst[i + 16] = d * (float)((b[8 + i] >> 4) + (int)(high >> (i + 16) & 1) * 16) + m;
  }
}

// f16 d; i8 codes[32]
static void q8_0_block(const uint8_t *b, float *dst) {
  float d = load_f16(b);
  for (int i = 0; i < 32; i++) dst[i] = d * (float)(int8_t)b[2 + i];
}

// u8 scales[16]: 4 bits scale, 4 bits min for 16 weights each; u8 codes[64]; f16 d, dmin
// Codes: byte k of half h has, from its lowest bits up, weights k, k + 32, k + 64, k + 96 of the half.
static void q2_k_block(const uint8_t *b, float *dst) {
  const uint8_t *scales = b, *codes = b + 16;
  float d = load_f16(b + 80), dmin = load_f16(b + 82);
  for (int i = 0; i < 256; i++) {
    int code = codes[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
    float scale = d * (float)(scales[i / 16] & 15), min = dmin * (float)(scales[i / 16] >> 4);
    dst[i] = scale * (float)code - min;
  }
}

// Scale i of 16: the low 4 bits are in nibbles of the first 8 bytes, the high 2 bits in the last 4.
static inline int q3_k_scale(const uint8_t *s, int i) {
  int low = s[i % 8] >> (i / 8 * 4) & 15, high = s[8 + i % 4] >> (i / 4 * 2) & 3;
  return (low | high << 4) - 32;
}

// u8 mask[32]: bit g of byte k is the third bit of weight k + 32 g, and 4 is subtracted where it is 0;
// u8 codes[64] as in q2_k; u8 scales[12]; f16 d
static void q3_k_block(const uint8_t *b, float *dst) {
  const uint8_t *mask = b, *codes = b + 32, *scales = b + 96;
  float d = load_f16(b + 108);
  for (int i = 0; i < 256; i++) {
    int code = codes[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
    int third = mask[i % 32] >> (i / 32) & 1;
    dst[i] = d * (float)q3_k_scale(scales, i / 16) * (float)(code - (third ? 0 : 4));
  }
}

// Scale and min i of 8, 6 bits each. The first four are plain; the others have 4 bits in the last 4 bytes and their
// high 2 bits above the first ones.
static inline void q4_k_scale(const uint8_t *s, int i, int *scale, int *min) {
  if (i < 4) {
    *scale = s[i] & 63;
    *min = s[i + 4] & 63;
  } else {
    *scale = (s[i + 4] & 15) | (s[i - 4] >> 6) << 4;
    *min = (s[i + 4] >> 4) | (s[i] >> 6) << 4;
  }
}

// f16 d, dmin; u8 scales[12]; u8 codes[128]: 32 bytes for 64 weights, low nibbles first
static void q4_k_block(const uint8_t *b, float *dst) {
  float d = load_f16(b), dmin = load_f16(b + 2);
  const uint8_t *codes = b + 16;
  for (int g = 0; g < 8; g++) {
    int scale, min;
    q4_k_scale(b + 4, g, &scale, &min);
    float dl = d * (float)scale, ml = dmin * (float)min;
    for (int k = 0; k < 32; k++) {
      dst[g * 32 + k] = dl * (float)(codes[g / 2 * 32 + k] >> (g % 2 * 4) & 15) - ml;
    }
  }
}

// f16 d, dmin; u8 scales[12]; u8 high[32]: bit g of byte k is the fifth bit of weight k + 32 g; u8 codes[128] as in
// q4_k
static void q5_k_block(const uint8_t *b, float *dst) {
  float d = load_f16(b), dmin = load_f16(b + 2);
  const uint8_t *high = b + 16, *codes = b + 48;
  for (int g = 0; g < 8; g++) {
    int scale, min;
    q4_k_scale(b + 4, g, &scale, &min);
    float dl = d * (float)scale, ml = dmin * (float)min;
    for (int k = 0; k < 32; k++) {
      int code = (codes[g / 2 * 32 + k] >> (g % 2 * 4) & 15) | (high[k] >> g & 1) << 4;
      dst[g * 32 + k] = dl * (float)code - ml;
    }
  }
}

// u8 codes[128]: per half of 128 weights, 64 bytes, low nibbles first; u8 high[64]: 2 bits, placed as in q2_k;
// i8 scales[16]; f16 d
static void q6_k_block(const uint8_t *b, float *dst) {
  const uint8_t *codes = b, *high = b + 128, *scales = b + 192;
  float d = load_f16(b + 208);
  for (int i = 0; i < 256; i++) {
    int low4 = codes[i / 128 * 64 + i % 64] >> (i / 64 % 2 * 4) & 15;
    int high2 = high[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
    dst[i] = d * (float)(int8_t)scales[i / 16] * (float)((low4 | high2 << 4) - 32);
  }
}

// f16 d; u8 codes[16] as in q4_0
static void iq4_nl_block(const uint8_t *b, float *dst) {
  float d = load_f16(b);
  for (int i = 0; i < 16; i++) {
    dst[i] = d * (float)clb_values_iq4[b[2 + i] & 15];
    dst[i + 16] = d * (float)clb_values_iq4[b[2 + i] >> 4];
  }
}

// f16 d; u16 scales_high: 2 bits for 32 weights each; u8 scales_low[4]: 4 bits each; u8 codes[8][16] as in q4_0
static void iq4_xs_block(const uint8_t *b, float *dst) {
  float d = load_f16(b);
  uint32_t scales_high = load_u16(b + 2);
  for (int g = 0; g < 8; g++) {
    const uint8_t *codes = b + 8 + g * 16;
    int scale = (b[4 + g / 2] >> (g % 2 * 4) & 15) | (int)(scales_high >> (2 * g) & 3) << 4;
    float dl = d * (float)(scale - 32);
    for (int i = 0; i < 16; i++) {
      dst[g * 32 + i] = dl * (float)clb_values_iq4[codes[i] & 15];
      dst[g * 32 + i + 16] = dl * (float)clb_values_iq4[codes[i] >> 4];
    }
  }
}

// u8 codes[52]: ternary digits, five to a byte (four in the last 4 bytes), as fractions: digit i of a byte is the
// integer part of 3 * (byte * 3^i mod 256) / 256; f16 d
static void tq1_0_block(const uint8_t *b, float *dst) {
  static const uint8_t power[5] = {1, 3, 9, 27, 81};
  static const struct {
    int first, n_bytes, n_digits;
  } parts[3] = {{0, 32, 5}, {32, 16, 5}, {48, 4, 4}};
  float d = load_f16(b + 52);
  for (int part = 0; part < 3; part++) {
    for (int digit = 0; digit < parts[part].n_digits; digit++) {
      for (int k = 0; k < parts[part].n_bytes; k++) {
        uint8_t fraction = (uint8_t)(b[parts[part].first + k] * power[digit]);
        *dst++ = d * (float)((fraction * 3 >> 8) - 1);
      }
    }
  }
}

// u8 codes[64] as in q2_k; f16 d
static void tq2_0_block(const uint8_t *b, float *dst) {
  float d = load_f16(b + 64);
  for (int i = 0; i < 256; i++) {
    dst[i] = d * (float)((b[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3) - 1);
  }
}

// 2^(e - 128): half of the scale, because the values are doubled. e = 255, NaN in the OCP format, is 2^127 here.
static inline float e8m0_half(uint8_t e) {
  return float_of(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23);
}

// u8 e; u8 codes[16] as in q4_0
static void mxfp4_block(const uint8_t *b, float *dst) {
  float d = e8m0_half(b[0]);
  for (int i = 0; i < 16; i++) {
    dst[i] = d * (float)clb_values_e2m1[b[1 + i] & 15];
    dst[i + 16] = d * (float)clb_values_e2m1[b[1 + i] >> 4];
  }
}

// Half of an e4m3 number without its sign; the codes 0x7F and 0x80 are 0.
static inline float ue4m3_half(uint8_t s) {
  int exponent = s >> 3 & 15, mantissa = s & 7;
  if (s == 0x7F) return 0;
  if (exponent == 0) return (float)mantissa * 0x1p-10f;
  return float_of((uint32_t)(exponent - 8 + 127) << 23 | (uint32_t)mantissa << 20);
}

// u8 scales[4]; u8 codes[4][8]: low nibbles are weights 0..7 of the 16, high nibbles 8..15
static void nvfp4_block(const uint8_t *b, float *dst) {
  for (int g = 0; g < 4; g++) {
    float d = ue4m3_half(b[g]);
    for (int i = 0; i < 8; i++) {
      uint8_t codes = b[4 + g * 8 + i];
      dst[g * 16 + i] = d * (float)clb_values_e2m1[codes & 15];
      dst[g * 16 + i + 8] = d * (float)clb_values_e2m1[codes >> 4];
    }
  }
}

// What the fields of a codebook entry stand for.
static const float iq1_values[4] = {-1, 0, 1, 0};
static const float iq2_values[4] = {8, 25, 43, 0};
static const float iq3_xxs_values[8] = {4, 12, 20, 28, 36, 44, 52, 62};
static const float iq3_s_values[8] = {1, 3, 5, 7, 9, 11, 13, 15};

// Seven stored signs; the eighth makes the number of minus signs even.
static inline uint32_t even_signs(uint32_t seven) {
  seven &= 127;
  return seven | (uint32_t)__builtin_parity(seven) << 7;
}

static inline float with_sign(float value, uint32_t signs, int i) {
  return signs >> i & 1 ? -value : value;
}

static inline void iq2_8_weights(float *dst, float scale, uint32_t entry, uint32_t signs) {
  for (int i = 0; i < 8; i++) dst[i] = with_sign(scale * iq2_values[entry >> (2 * i) & 3], signs, i);
}

static inline void iq3_8_weights(float *dst, float scale, uint32_t entries, uint32_t signs, const float values[8]) {
  for (int i = 0; i < 8; i++) dst[i] = with_sign(scale * values[entries >> (4 * i) & 7], signs, i);
}

static inline void iq1_8_weights(float *dst, float scale, uint32_t entry, float delta) {
  for (int i = 0; i < 8; i++) dst[i] = scale * (iq1_values[entry >> (2 * i) & 3] + delta);
}

// f16 d; {u8 entries[4]; u32 signs and scale}[8]: 7 bits of signs per entry, 4 bits of scale
static void iq2_xxs_block(const uint8_t *b, float *dst) {
  float d = load_f16(b);
  for (int g = 0; g < 8; g++) {
    const uint8_t *entries = b + 2 + g * 8;
    uint32_t rest = load_u32(entries + 4);
    float scale = d * (0.5f + (float)(rest >> 28)) * 0.25f;
    for (int i = 0; i < 4; i++, dst += 8) {
      iq2_8_weights(dst, scale, clb_grid_iq2_xxs[entries[i]], even_signs(rest >> (7 * i)));
    }
  }
}

// f16 d; u16 entries[32]: 9 bits of index, 7 of signs; u8 scales[8]: a nibble per 16 weights
static void iq2_xs_block(const uint8_t *b, float *dst) {
  float d = load_f16(b);
  for (int i = 0; i < 32; i++) {
    uint32_t entry = load_u16(b + 2 + i * 2);
    int nibble = b[66 + i / 4] >> (i / 2 % 2 * 4) & 15;
    float scale = d * (0.5f + (float)nibble) * 0.25f;
    iq2_8_weights(dst + i * 8, scale, clb_grid_iq2_xs[entry & 511], even_signs(entry >> 9));
  }
}

// f16 d; u8 entries[32]; u8 signs[32]; u8 high[8]: 2 more bits per entry; u8 scales[8]: a nibble per 16 weights
static void iq2_s_block(const uint8_t *b, float *dst) {
  float d = load_f16(b);
  for (int i = 0; i < 32; i++) {
    int index = b[2 + i] | (b[66 + i / 4] >> (i % 4 * 2) & 3) << 8;
    int nibble = b[74 + i / 4] >> (i / 2 % 2 * 4) & 15;
    float scale = d * (0.5f + (float)nibble) * 0.25f;
    iq2_8_weights(dst + i * 8, scale, clb_grid_iq2_s[index], b[34 + i]);
  }
}

// f16 d; u8 entries[64]; u32 signs and scale[8] as in iq2_xxs, 7 bits per two entries
static void iq3_xxs_block(const uint8_t *b, float *dst) {
  float d = load_f16(b);
  for (int g = 0; g < 8; g++) {
    const uint8_t *entries = b + 2 + g * 8;
    uint32_t rest = load_u32(b + 66 + g * 4);
    float scale = d * (0.5f + (float)(rest >> 28)) * 0.5f;
    for (int i = 0; i < 4; i++, dst += 8) {
      uint32_t pair = clb_grid_iq3_xxs[entries[2 * i]] | (uint32_t)clb_grid_iq3_xxs[entries[2 * i + 1]] << 16;
      iq3_8_weights(dst, scale, pair, even_signs(rest >> (7 * i)), iq3_xxs_values);
    }
  }
}

// f16 d; u8 entries[64]; u8 high[8]: a ninth bit per entry; u8 signs[32]; u8 scales[4]: a nibble per 32 weights
static void iq3_s_block(const uint8_t *b, float *dst) {
  float d = load_f16(b);
  for (int i = 0; i < 32; i++) {
    uint32_t high = (uint32_t)b[66 + i / 4] >> (i % 4 * 2);
    uint32_t first = b[2 + 2 * i] | (high & 1) << 8, second = b[3 + 2 * i] | (high & 2) << 7;
    uint32_t pair = clb_grid_iq3_s[first] | (uint32_t)clb_grid_iq3_s[second] << 16;
    int nibble = b[106 + i / 8] >> (i / 4 % 2 * 4) & 15;
    iq3_8_weights(dst + i * 8, d * (float)(1 + 2 * nibble), pair, b[74 + i], iq3_s_values);
  }
}

// f16 d; u8 entries[32]; u16 high[8]: 3 more bits for each of 4 entries, 3 bits of scale, the sign of the shift
static void iq1_s_block(const uint8_t *b, float *dst) {
  float d = load_f16(b);
  for (int i = 0; i < 32; i++) {
    uint32_t high = load_u16(b + 34 + i / 4 * 2);
    uint32_t index = b[2 + i] | (high >> (i % 4 * 3) & 7) << 8;
    float scale = d * (float)(2 * (high >> 12 & 7) + 1), delta = high & 0x8000 ? -0.125f : 0.125f;
    iq1_8_weights(dst + i * 8, scale, clb_grid_iq1[index], delta);
  }
}

static inline uint16_t iq1_m_f16(const uint8_t *scales) {
  return (uint16_t)(load_u16(scales) >> 12 | (load_u16(scales + 2) >> 12) << 4 | (load_u16(scales + 4) >> 12) << 8 |
                    (load_u16(scales + 6) >> 12) << 12);
}

// u8 entries[32]; u8 high[16]: a nibble per entry, 3 more bits and the sign of the shift;
// u16 scales[4]: 3 bits per 16 weights, and a nibble of the f16 d in the top of each
static void iq1_m_block(const uint8_t *b, float *dst) {
  float d = f16_to_f32(iq1_m_f16(b + 48));
  for (int i = 0; i < 32; i++) {
    uint32_t high = (uint32_t)b[32 + i / 2] >> (i % 2 * 4);
    uint32_t index = b[i] | (high & 7) << 8;
    int bits = load_u16(b + 48 + i / 8 * 2) >> (i / 2 % 4 * 3) & 7;
    iq1_8_weights(dst + i * 8, d * (float)(2 * bits + 1), clb_grid_iq1[index], high & 8 ? -0.125f : 0.125f);
  }
}

#define DECODER(name, weights, bytes)                                                           \
  static void decode_##name(const uint8_t *src, float *dst, size_t n_blocks) {                  \
    for (size_t i = 0; i < n_blocks; i++) name##_block(src + i * (bytes), dst + i * (weights)); \
  }

DECODER(f32, 1, 4)
DECODER(f16, 1, 2)
DECODER(q4_0, 32, 18)
DECODER(q4_1, 32, 20)
DECODER(q5_0, 32, 22)
DECODER(q5_1, 32, 24)
DECODER(q8_0, 32, 34)
DECODER(q2_k, 256, 84)
DECODER(q3_k, 256, 110)
DECODER(q4_k, 256, 144)
DECODER(q5_k, 256, 176)
DECODER(q6_k, 256, 210)
DECODER(iq2_xxs, 256, 66)
DECODER(iq2_xs, 256, 74)
DECODER(iq3_xxs, 256, 98)
DECODER(iq1_s, 256, 50)
DECODER(iq4_nl, 32, 18)
DECODER(iq3_s, 256, 110)
DECODER(iq2_s, 256, 82)
DECODER(iq4_xs, 256, 136)
DECODER(iq1_m, 256, 56)
DECODER(bf16, 1, 2)
DECODER(tq1_0, 256, 54)
DECODER(tq2_0, 256, 66)
DECODER(mxfp4, 32, 17)
DECODER(nvfp4, 64, 36)

// ---------------------------------------------------------------------------------------------------------------------
// The other scalar kernels

float clb_reduce_lanes(const float p[CLB_LANES]) {
  float sums[CLB_LANES];
  memcpy(sums, p, sizeof sums);
  for (int half = CLB_LANES / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) sums[i] += sums[i + half];
  }
  return sums[0];
}

static void accumulate(float p[CLB_LANES], const float *a, const float *b, size_t n) {
  for (size_t j = 0; j < n; j++) p[j % CLB_LANES] = fmaf(a[j], b[j], p[j % CLB_LANES]);
}

static float scalar_dot(const float *a, const float *b, size_t n) {
  float p[CLB_LANES] = {0};
  accumulate(p, a, b, n);
  return clb_reduce_lanes(p);
}

float clb_scalar_sum(const float *a, size_t n) {
  float p[CLB_LANES] = {0};
  for (size_t j = 0; j < n; j++) p[j % CLB_LANES] += a[j];
  return clb_reduce_lanes(p);
}

static void scalar_tile(float *acc, const float *w, size_t n_rows, const float *x, size_t ldx, size_t n_tokens,
                        size_t n) {
  for (size_t t = 0; t < n_tokens; t++) {
    for (size_t r = 0; r < n_rows; r++) {
      accumulate(acc + (t * CLB_TILE_ROWS + r) * CLB_LANES, w + r * CLB_TILE_COLUMNS, x + t * ldx, n);
    }
  }
}

void clb_scalar_axpy(float *dst, const float *src, float scale, size_t n) {
  for (size_t i = 0; i < n; i++) dst[i] = fmaf(scale, src[i], dst[i]);
}

void clb_scalar_mix(float *dst, size_t ld_dst, const float *scale, size_t ld_scale, const float *src, size_t n,
                    size_t n_dst, size_t d) {
  for (size_t m = 0; m < n_dst; m++) {
    for (size_t i = 0; i < n; i++) clb_scalar_axpy(dst + m * ld_dst, src + i * d, scale[m * ld_scale + i], d);
  }
}

// See CLB_EXP_LO in blocks_internal.h for the steps. The clamp lets NaN through.
static float exp_one(float x) {
  x = x < CLB_EXP_LO ? CLB_EXP_LO : x;
  x = x > CLB_EXP_HI ? CLB_EXP_HI : x;
  float t = fmaf(x, CLB_EXP_LOG2E, CLB_EXP_MAGIC);
  float n = t - CLB_EXP_MAGIC;
  float r = fmaf(-CLB_EXP_LN2_LO, n, fmaf(-CLB_EXP_LN2_HI, n, x));
  float q = CLB_EXP_C6;
  q = fmaf(q, r, CLB_EXP_C5);
  q = fmaf(q, r, CLB_EXP_C4);
  q = fmaf(q, r, CLB_EXP_C3);
  q = fmaf(q, r, CLB_EXP_C2);
  float p = fmaf(q * r, r, r) + 1.0f;
  int32_t i = (int32_t)(bits_of(t) - CLB_EXP_MAGIC_BITS);
  int32_t half = i >> 1;
  return p * float_of((uint32_t)(half + 127) << 23) * float_of((uint32_t)(i - half + 127) << 23);
}

void clb_scalar_exp(float *dst, const float *src, float shift, size_t n) {
  for (size_t i = 0; i < n; i++) dst[i] = exp_one(src[i] - shift);
}

void clb_scalar_silu_mul(float *dst, const float *gate, const float *up, size_t n) {
  for (size_t i = 0; i < n; i++) dst[i] = gate[i] / (1.0f + exp_one(-gate[i])) * up[i];
}

void clb_scalar_to_f16(uint16_t *dst, const float *src, size_t n) {
  for (size_t i = 0; i < n; i++) dst[i] = f32_to_f16(src[i]);
}

void clb_scalar_to_bf16(uint16_t *dst, const float *src, size_t n) {
  for (size_t i = 0; i < n; i++) dst[i] = f32_to_bf16(src[i]);
}

bool clb_scalar_any_masked_u32(const uint8_t *src, uint32_t mask, size_t n) {
  bool any = false;
  for (size_t i = 0; i < n; i++) any |= (load_u32(src + i * 4) & mask) == mask;
  return any;
}

bool clb_scalar_any_masked_u16(const uint8_t *src, uint16_t mask, size_t n) {
  bool any = false;
  for (size_t i = 0; i < n; i++) any |= (load_u16(src + i * 2) & mask) == mask;
  return any;
}

static const clb_kernels scalar_kernels = {
    .name = "scalar",
    .decode = {decode_f32,     decode_f16,   decode_q4_0,   decode_q4_1,  decode_q5_0,  decode_q5_1,    decode_q8_0,
               decode_q2_k,    decode_q3_k,  decode_q4_k,   decode_q5_k,  decode_q6_k,  decode_iq2_xxs, decode_iq2_xs,
               decode_iq3_xxs, decode_iq1_s, decode_iq4_nl, decode_iq3_s, decode_iq2_s, decode_iq4_xs,  decode_iq1_m,
               decode_bf16,    decode_tq1_0, decode_tq2_0,  decode_mxfp4, decode_nvfp4},
    .rows = {NULL},
    .tile = scalar_tile,
    .reduce = clb_reduce_lanes,
    .dot = scalar_dot,
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

// ---------------------------------------------------------------------------------------------------------------------
// The choice of kernels

const clb_kernels *clb_kernels_scalar(void) {
  return &scalar_kernels;
}

const clb_kernels *clb_kernels_best(void) {
  // A cache of a constant: threads that race here store the same pointer.
  static _Atomic(const clb_kernels *) cached;
  const clb_kernels *k = atomic_load_explicit(&cached, memory_order_relaxed);
  if (k) return k;
#if defined(CLB_HAVE_AVX2)
  k = clb_kernels_avx2();
#elif defined(CLB_HAVE_NEON)
  k = clb_kernels_neon();
#endif
  if (!k) k = &scalar_kernels;
  atomic_store_explicit(&cached, k, memory_order_relaxed);
  return k;
}

const char *clb_kernels_name(const clb_kernels *k) {
  return k->name;
}

// ---------------------------------------------------------------------------------------------------------------------
// Decoding

static clb_decode_fn *decoder(const clb_kernels *k, const clb_type *t) {
  clb_decode_fn *decode = k->decode[type_index(t)];
  return decode ? decode : scalar_kernels.decode[type_index(t)];
}

int clb_dequantize_with(const clb_kernels *k, uint32_t type, const void *src, float *dst, size_t n) {
  const clb_type *t = clb_type_by_id(type);
  if (!t || n % t->block_weights != 0) return -1;
  decoder(k, t)(src, dst, n / t->block_weights);
  return 0;
}

int clb_dequantize(uint32_t type, const void *src, float *dst, size_t n) {
  return clb_dequantize_with(&scalar_kernels, type, src, dst, n);
}

int clb_dequantize_best(uint32_t type, const void *src, float *dst, size_t n) {
  return clb_dequantize_with(clb_kernels_best(), type, src, dst, n);
}

// Whether any scale of the block is such that its weights need a look.
static bool block_is_suspect(const clb_type *t, const uint8_t *b) {
  switch (t->scale_kind) {
    case CLB_SCALE_F16:
      for (uint32_t i = 0; i < t->n_scales; i++) {
        if ((load_u16(b + t->scale_offset[i]) & 0x7C00) == 0x7C00) return true;
      }
      return false;
    case CLB_SCALE_IQ1_M:
      return (iq1_m_f16(b + t->scale_offset[0]) & 0x7C00) == 0x7C00;
    case CLB_SCALE_E8M0:
      return b[t->scale_offset[0]] >= 253;  // 12 * 2^(253 - 128) is the first product to overflow
    default:
      return false;
  }
}

static uint64_t find_in_blocks(const clb_type *t, const uint8_t *src, uint64_t n_blocks) {
  float weights[256];
  for (uint64_t i = 0; i < n_blocks; i++) {
    const uint8_t *b = src + i * t->block_bytes;
    __builtin_prefetch((const void *)((uintptr_t)b + 2048));  // few bytes are looked at, all lines are needed
    if (!block_is_suspect(t, b)) continue;
    scalar_kernels.decode[type_index(t)](b, weights, 1);
    for (uint32_t k = 0; k < t->block_weights; k++) {
      if (!isfinite(weights[k])) return i * t->block_weights + k;
    }
  }
  return UINT64_MAX;
}

static bool any_nonfinite(const clb_kernels *k, uint32_t type, const uint8_t *src, size_t n) {
  if (type == CLB_F32) return k->any_masked_u32(src, 0x7F800000, n);
  return k->any_masked_u16(src, type == CLB_F16 ? 0x7C00 : 0x7F80, n);
}

static uint64_t find_in_floats(const clb_type *t, const uint8_t *src, uint64_t n) {
  enum { STEP = 4096 };  // the search within a step is slow, so steps are short; and long enough for SIMD
  const clb_kernels *k = clb_kernels_best();
  for (uint64_t first = 0; first < n; first += STEP) {
    size_t n_step = n - first < STEP ? (size_t)(n - first) : STEP;
    const uint8_t *p = src + first * t->block_bytes;
    if (!any_nonfinite(k, t->id, p, n_step)) continue;
    for (size_t i = 0; i < n_step; i++) {
      if (any_nonfinite(&scalar_kernels, t->id, p + i * t->block_bytes, 1)) return first + i;
    }
  }
  return UINT64_MAX;
}

uint64_t clb_find_nonfinite(uint32_t type, const void *src, uint64_t n_weights) {
  const clb_type *t = clb_type_by_id(type);
  if (!t || t->scale_kind == CLB_SCALE_NONE) return UINT64_MAX;
  if (t->scale_kind == CLB_SCALE_SELF) return find_in_floats(t, src, n_weights);
  return find_in_blocks(t, src, n_weights / t->block_weights);
}

// ---------------------------------------------------------------------------------------------------------------------
// Matrix products

typedef struct {
  const clb_kernels *k;
  const clb_type *type;
  const uint8_t *w;  // row 0
  size_t row_bytes, n_cols;
  const float *x;  // token 0
  size_t ldx;
  float *y;
  size_t ldy;
} product;

// Decodes columns [first, first + n) of n_rows rows from `row` on into tile [CLB_TILE_ROWS, CLB_TILE_COLUMNS].
static void decode_tile(const product *p, size_t row, size_t n_rows, size_t first, size_t n, float *tile) {
  const clb_type *t = p->type;
  clb_decode_fn *decode = decoder(p->k, t);
  for (size_t r = 0; r < n_rows; r++) {
    const uint8_t *src = p->w + (row + r) * p->row_bytes + first / t->block_weights * t->block_bytes;
    decode(src, tile + r * CLB_TILE_COLUMNS, n / t->block_weights);
  }
}

// A few rows by a few tokens: each part of the rows is decoded once and used for all these tokens.
static void multiply_tile(const product *p, size_t row, size_t n_rows, size_t token, size_t n_tokens) {
  _Alignas(64) float w[CLB_TILE_ROWS * CLB_TILE_COLUMNS];
  _Alignas(64) float acc[CLB_TILE_TOKENS * CLB_TILE_ROWS * CLB_LANES];
  memset(acc, 0, n_tokens * CLB_TILE_ROWS * CLB_LANES * sizeof *acc);
  if (n_rows < CLB_TILE_ROWS) memset(w, 0, sizeof w);
  for (size_t first = 0; first < p->n_cols; first += CLB_TILE_COLUMNS) {
    size_t n = p->n_cols - first < CLB_TILE_COLUMNS ? p->n_cols - first : CLB_TILE_COLUMNS;
    decode_tile(p, row, n_rows, first, n, w);
    p->k->tile(acc, w, n_rows, p->x + token * p->ldx + first, p->ldx, n_tokens, n);
  }
  for (size_t t = 0; t < n_tokens; t++) {
    for (size_t r = 0; r < n_rows; r++) {
      p->y[(token + t) * p->ldy + row + r] = p->k->reduce(acc + (t * CLB_TILE_ROWS + r) * CLB_LANES);
    }
  }
}

int clb_matmul_rows(const clb_kernels *k, uint32_t type, const void *w, size_t row_bytes, size_t n_cols, size_t row0,
                    size_t row1, const float *x, size_t ldx, size_t n_tokens, float *y, size_t ldy) {
  const clb_type *t = clb_type_by_id(type);
  if (!t || n_cols % t->block_weights != 0) return -1;
  if (row0 >= row1) return 0;
  clb_rows_fn *rows = k->rows[type_index(t)];
  if (n_tokens == 1 && rows) {
    rows((const uint8_t *)w + row0 * row_bytes, row_bytes, n_cols / t->block_weights, x, y + row0, row1 - row0);
    return 0;
  }
  const product p = {k, t, w, row_bytes, n_cols, x, ldx, y, ldy};
  // Tokens outside: a tile of them stays in the second-level cache, while the weights pass once for each.
  for (size_t token = 0; token < n_tokens; token += CLB_TILE_TOKENS) {
    size_t n = n_tokens - token < CLB_TILE_TOKENS ? n_tokens - token : CLB_TILE_TOKENS;
    for (size_t row = row0; row < row1; row += CLB_TILE_ROWS) {
      multiply_tile(&p, row, row1 - row < CLB_TILE_ROWS ? row1 - row : CLB_TILE_ROWS, token, n);
    }
  }
  return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Vectors

float clb_dot_f32(const clb_kernels *k, const float *a, const float *b, size_t n) {
  return k->dot(a, b, n);
}

float clb_sum_f32(const clb_kernels *k, const float *a, size_t n) {
  return k->sum(a, n);
}

void clb_axpy_f32(const clb_kernels *k, float *dst, const float *src, float scale, size_t n) {
  k->axpy(dst, src, scale, n);
}

void clb_mix_f32(const clb_kernels *k, float *dst, size_t ld_dst, const float *scale, size_t ld_scale, const float *src,
                 size_t n, size_t n_dst, size_t d) {
  k->mix(dst, ld_dst, scale, ld_scale, src, n, n_dst, d);
}

void clb_exp_f32(const clb_kernels *k, float *dst, const float *src, float shift, size_t n) {
  k->exp(dst, src, shift, n);
}

void clb_silu_mul(const clb_kernels *k, float *dst, const float *gate, const float *up, size_t n) {
  k->silu_mul(dst, gate, up, n);
}

// tanh(x) from decay = exp(-2 |x|). Near 0, where 1 - decay has few digits left, by its series: the first term that is
// left out is below 3e-9 of the result.
static float tanh_of(float x, float decay) {
  const float s = x * x;
  const float series = 1 + s * (-1.0f / 3 + s * (2.0f / 15 + s * (-17.0f / 315 + s * (62.0f / 2835))));
  return s < 0.0625f ? x * series : copysignf((1 - decay) / (1 + decay), x);
}

void clb_softcap_f32(const clb_kernels *k, float *dst, const float *src, float cap, size_t n) {
  enum { CHUNK = 256 };
  float decay[CHUNK];
  for (size_t done = 0; done < n; done += CHUNK) {
    const size_t here = n - done < CHUNK ? n - done : CHUNK;
    for (size_t i = 0; i < here; i++) {
      dst[done + i] = src[done + i] / cap;
      decay[i] = -2 * fabsf(dst[done + i]);
    }
    k->exp(decay, decay, 0, here);
    for (size_t i = 0; i < here; i++) dst[done + i] = cap * tanh_of(dst[done + i], decay[i]);
  }
}

void clb_f32_to_f16(const clb_kernels *k, uint16_t *dst, const float *src, size_t n) {
  k->to_f16(dst, src, n);
}

void clb_f32_to_bf16(const clb_kernels *k, uint16_t *dst, const float *src, size_t n) {
  k->to_bf16(dst, src, n);
}
