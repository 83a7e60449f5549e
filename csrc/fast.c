// Fast precision: the table of types, the scalar reference of every kernel, and the choice of kernels. See fast.h.
#include "fast.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "fast_internal.h"

#define ROW(name, ...) {__VA_ARGS__},
const clb_fast_type clb_fast_types[CLB_N_FAST_TYPES] = {CLB_FAST_TYPES(ROW)};

#define CHECK(name, id, form, kind, group_bytes)                                                               \
  _Static_assert((kind) == CLB_FAST_X_Q8 || ((kind) == CLB_FAST_X_Q16 && (form) != CLB_FORM_SUB_MIN), "kind"); \
  _Static_assert((group_bytes) <= CLB_FAST_MAX_BYTES, "padded groups");
CLB_FAST_TYPES(CHECK)

static const clb_fast_type *fast_type(uint32_t id) {
  for (size_t i = 0; i < CLB_N_FAST_TYPES; i++) {
    if (clb_fast_types[i].id == id) return &clb_fast_types[i];
  }
  return NULL;
}

clb_fast_x_kind clb_fast_kind(uint32_t type) {
  const clb_fast_type *t = fast_type(type);
  return t ? t->kind : CLB_FAST_X_NONE;
}

static size_t group_count(size_t n_cols) {
  return n_cols / CLB_FAST_GROUP + (n_cols % CLB_FAST_GROUP != 0);
}

// Bytes of a group of activations.
static size_t x_group_bytes(clb_fast_x_kind kind) {
  static const size_t bytes[CLB_FAST_X_KINDS] = {0, sizeof(clb_fast_x8), sizeof(clb_fast_x16)};
  return bytes[kind];
}

size_t clb_fast_x_bytes(clb_fast_x_kind kind, size_t n_cols) {
  return group_count(n_cols) * x_group_bytes(kind);
}

const uint8_t *clb_fast_padded(const clb_fast_product *p, const clb_fast_type *t, size_t row, size_t g,
                               uint8_t *padded) {
  const uint8_t *src = p->w + row * p->row_bytes + g * t->group_bytes;
  size_t n_blocks = clb_fast_blocks_of(p->n_cols, g);
  if (n_blocks == CLB_FAST_BLOCKS) return src;
  size_t n_bytes = n_blocks * (t->group_bytes / CLB_FAST_BLOCKS);
  memcpy(padded, src, n_bytes);
  memset(padded + n_bytes, 0, t->group_bytes - n_bytes);
  return padded;
}

// ---------------------------------------------------------------------------------------------------------------------
// Numbers

static uint32_t bits_of(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return bits;
}

static float float_of(uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

static uint32_t load_u32(const uint8_t *p) {
  uint32_t v;
  memcpy(&v, p, sizeof v);
  return v;
}

static float load_f16(const uint8_t *p) {
  float f;
  clb_dequantize(CLB_F16, p, &f, 1);
  return f;
}

// The largest magnitude of 32 floats, as bits, which order like the numbers: NaN above infinity above the rest.
static uint32_t largest_bits(const float *x) {
  uint32_t largest = 0;
  for (int i = 0; i < 32; i++) {
    uint32_t magnitude = bits_of(x[i]) & 0x7FFFFFFF;
    if (magnitude > largest) largest = magnitude;
  }
  return largest;
}

// ---------------------------------------------------------------------------------------------------------------------
// Quantizing activations

static int code_of(clb_fast_step step, float x) {
  return step.inverse > 0 ? (int)lrintf(x * step.inverse) : 0;
}

static void quantize_block_8(clb_fast_x8 *dst, int b, const float *x) {
  clb_fast_step step = clb_fast_step_of(largest_bits(x), CLB_FAST_MAX_8);
  int sums[2] = {0, 0};
  for (int i = 0; i < 32; i++) {
    int code = code_of(step, x[i]);
    dst->q[32 * b + i] = (int8_t)code;
    sums[i / 16] += code;
  }
  dst->half[2 * b] = (int16_t)sums[0];
  dst->half[2 * b + 1] = (int16_t)sums[1];
  dst->sum[b] = sums[0] + sums[1];
  dst->d[b] = step.d;
  dst->s[b] = step.d * (float)dst->sum[b];
}

// Where the code of column i of a block of CLB_FAST_X_Q16 is.
static int place_16(int i) {
  return i % 2 * 16 + i / 2;
}

static void quantize_block_16(clb_fast_x16 *dst, int b, const float *x) {
  clb_fast_step step = clb_fast_step_of(largest_bits(x), CLB_FAST_MAX_16);
  int sums[2] = {0, 0};
  for (int i = 0; i < 32; i++) {
    int code = code_of(step, x[i]);
    dst->q[32 * b + place_16(i)] = (int16_t)code;
    sums[i / 16] += code;
  }
  for (size_t half = 0; half < 2; half++) dst->half[clb_fast_half_at((size_t)b, half)] = sums[half];
  dst->d[b] = step.d;
  dst->s[b] = step.d * (float)(sums[0] + sums[1]);
}

static void scalar_quantize_8(clb_fast_x8 *dst, const float *x, size_t n) {
  for (size_t i = 0; i < n; i += 32) quantize_block_8(dst + i / CLB_FAST_GROUP, (int)(i / 32 % CLB_FAST_BLOCKS), x + i);
}

static void scalar_quantize_16(clb_fast_x16 *dst, const float *x, size_t n) {
  for (size_t i = 0; i < n; i += 32) {
    quantize_block_16(dst + i / CLB_FAST_GROUP, (int)(i / 32 % CLB_FAST_BLOCKS), x + i);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Decoding a group of 8 blocks of 32, or a quant block of 256: blocks.c describes the formats

static void nibbles(const uint8_t *src, int8_t *codes) {
  for (int i = 0; i < 16; i++) {
    codes[i] = (int8_t)(src[i] & 15);
    codes[i + 16] = (int8_t)(src[i] >> 4);
  }
}

static void add_fifth_bits(uint32_t bits, int8_t *codes) {
  for (int i = 0; i < 32; i++) codes[i] = (int8_t)(codes[i] + (int)(bits >> i & 1) * 16);
}

static void subtract(int offset, int8_t *codes, int n) {
  for (int i = 0; i < n; i++) codes[i] = (int8_t)(codes[i] - offset);
}

static void look_up(const int8_t values[16], int8_t *codes) {
  for (int i = 0; i < 32; i++) codes[i] = values[codes[i]];
}

static void q4_0_group(const uint8_t *w, clb_fast_group *g) {
  for (int b = 0; b < 8; b++, w += 18) {
    g->d[b] = load_f16(w);
    nibbles(w + 2, g->codes + 32 * b);
  }
  subtract(8, g->codes, 256);
}

static void q4_1_group(const uint8_t *w, clb_fast_group *g) {
  for (int b = 0; b < 8; b++, w += 20) {
    g->d[b] = load_f16(w);
    g->add[b] = load_f16(w + 2);
    nibbles(w + 4, g->codes + 32 * b);
  }
}

static void q5_0_group(const uint8_t *w, clb_fast_group *g) {
  for (int b = 0; b < 8; b++, w += 22) {
    g->d[b] = load_f16(w);
    nibbles(w + 6, g->codes + 32 * b);
    add_fifth_bits(load_u32(w + 2), g->codes + 32 * b);
  }
  subtract(16, g->codes, 256);
}

static void q5_1_group(const uint8_t *w, clb_fast_group *g) {
  for (int b = 0; b < 8; b++, w += 24) {
    g->d[b] = load_f16(w);
    g->add[b] = load_f16(w + 2);
    nibbles(w + 8, g->codes + 32 * b);
    add_fifth_bits(load_u32(w + 4), g->codes + 32 * b);
  }
}

static void q8_0_group(const uint8_t *w, clb_fast_group *g) {
  for (int b = 0; b < 8; b++, w += 34) {
    g->d[b] = load_f16(w);
    memcpy(g->codes + 32 * b, w + 2, 32);
  }
}

static void iq4_nl_group(const uint8_t *w, clb_fast_group *g) {
  for (int b = 0; b < 8; b++, w += 18) {
    g->d[b] = load_f16(w);
    nibbles(w + 2, g->codes + 32 * b);
    look_up(clb_values_iq4, g->codes + 32 * b);
  }
}

static void mxfp4_group(const uint8_t *w, clb_fast_group *g) {
  for (int b = 0; b < 8; b++, w += 17) {
    g->d[b] = float_of(w[0] < 2 ? 0x00200000u << w[0] : (uint32_t)(w[0] - 1) << 23);
    nibbles(w + 1, g->codes + 32 * b);
    look_up(clb_values_e2m1, g->codes + 32 * b);
  }
}

static void iq4_xs_group(const uint8_t *w, clb_fast_group *g) {
  float d = load_f16(w);
  for (int b = 0; b < 8; b++) {
    int low = w[4 + b / 2] >> (b % 2 * 4) & 15, high = w[2 + b / 4] >> (b % 4 * 2) & 3;
    g->d[b] = d * (float)((low | high << 4) - 32);
    nibbles(w + 8 + 16 * b, g->codes + 32 * b);
    look_up(clb_values_iq4, g->codes + 32 * b);
  }
}

static void same_scales(float d, float add, clb_fast_group *g) {
  for (int b = 0; b < 8; b++) g->d[b] = d, g->add[b] = add;
}

// 2-bit codes, placed as in q2_k, times a factor, are added.
static void add_crumbs(const uint8_t *src, int factor, int8_t *codes) {
  for (int i = 0; i < 256; i++) {
    int code = src[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
    codes[i] = (int8_t)(codes[i] + code * factor);
  }
}

static void q2_k_group(const uint8_t *w, clb_fast_group *g) {
  same_scales(load_f16(w + 80), -load_f16(w + 82), g);
  for (int i = 0; i < 16; i++) {
    g->sub[i] = w[i] & 15;
    g->min[i] = w[i] >> 4;
  }
  memset(g->codes, 0, sizeof g->codes);
  add_crumbs(w + 16, 1, g->codes);
}

static void q3_k_group(const uint8_t *w, clb_fast_group *g) {
  const uint8_t *s = w + 96;
  same_scales(load_f16(w + 108), 0, g);
  for (int i = 0; i < 16; i++) {
    int low = s[i % 8] >> (i / 8 * 4) & 15, high = s[8 + i % 4] >> (i / 4 * 2) & 3;
    g->sub[i] = (int16_t)((low | high << 4) - 32);
  }
  for (int i = 0; i < 256; i++) g->codes[i] = (int8_t)((w[i % 32] >> (i / 32) & 1) * 4 - 4);
  add_crumbs(w + 32, 1, g->codes);
}

// The scales of q4_k and q5_k.
static void k_scales(const uint8_t *w, clb_fast_group *g) {
  float d = load_f16(w), dmin = load_f16(w + 2);
  const uint8_t *s = w + 4;
  for (int b = 0; b < 8; b++) {
    int scale = b < 4 ? s[b] & 63 : (s[b + 4] & 15) | (s[b - 4] >> 6) << 4;
    int min = b < 4 ? s[b + 4] & 63 : (s[b + 4] >> 4) | (s[b] >> 6) << 4;
    g->d[b] = d * (float)scale;
    g->add[b] = -(dmin * (float)min);
  }
}

// 32 bytes hold two blocks: low nibbles, then high ones.
static void double_nibbles(const uint8_t *src, int8_t *codes) {
  for (int i = 0; i < 256; i++) codes[i] = (int8_t)(src[i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15);
}

static void q4_k_group(const uint8_t *w, clb_fast_group *g) {
  k_scales(w, g);
  double_nibbles(w + 16, g->codes);
}

static void q5_k_group(const uint8_t *w, clb_fast_group *g) {
  k_scales(w, g);
  double_nibbles(w + 48, g->codes);
  for (int i = 0; i < 256; i++) g->codes[i] = (int8_t)(g->codes[i] + (w[16 + i % 32] >> (i / 32) & 1) * 16);
}

static void q6_k_group(const uint8_t *w, clb_fast_group *g) {
  same_scales(load_f16(w + 208), 0, g);
  for (int i = 0; i < 16; i++) g->sub[i] = (int8_t)w[192 + i];
  for (int i = 0; i < 256; i++) {
    g->codes[i] = (int8_t)((w[i / 128 * 64 + i % 64] >> (i / 64 % 2 * 4) & 15) - 32);
  }
  add_crumbs(w + 128, 16, g->codes);
}

// ---------------------------------------------------------------------------------------------------------------------
// Products

static int32_t dot16(const int8_t *a, const int8_t *b) {
  int32_t sum = 0;
  for (int i = 0; i < 16; i++) sum += a[i] * b[i];
  return sum;
}

static bool has_sub(clb_fast_form form) {
  return form == CLB_FORM_SUB || form == CLB_FORM_SUB_MIN;
}

static void add_group_8(float partial[8], clb_fast_form form, const clb_fast_group *g, const clb_fast_x8 *x) {
  for (int b = 0; b < 8; b++) {
    const int8_t *codes = g->codes + 32 * b, *q = x->q + 32 * b;
    int32_t low = dot16(codes, q), high = dot16(codes + 16, q + 16);
    int32_t total = has_sub(form) ? g->sub[2 * b] * low + g->sub[2 * b + 1] * high : low + high;
    partial[b] = fmaf(g->d[b] * x->d[b], (float)total, partial[b]);
    if (form == CLB_FORM_MIN) partial[b] = fmaf(g->add[b], x->s[b], partial[b]);
    if (form == CLB_FORM_SUB_MIN) {
      int32_t mins = g->min[2 * b] * x->half[2 * b] + g->min[2 * b + 1] * x->half[2 * b + 1];
      partial[b] = fmaf(g->add[b] * x->d[b], (float)mins, partial[b]);
    }
  }
}

static void add_group_16(float partial[8], clb_fast_form form, const clb_fast_group *g, const clb_fast_x16 *x) {
  for (int b = 0; b < 8; b++) {
    int32_t total = 0;
    for (int i = 0; i < 32; i++) {
      int32_t code = g->codes[32 * b + i] * (has_sub(form) ? g->sub[2 * b + i / 16] : 1);
      total += code * x->q[32 * b + place_16(i)];
    }
    partial[b] = fmaf(g->d[b] * x->d[b], (float)total, partial[b]);
    if (form == CLB_FORM_MIN) partial[b] = fmaf(g->add[b], x->s[b], partial[b]);
  }
}

static float reduce(const float p[8]) {
  float by4[4], by2[2];
  for (int i = 0; i < 4; i++) by4[i] = p[i] + p[i + 4];
  for (int i = 0; i < 2; i++) by2[i] = by4[i] + by4[i + 2];
  return by2[0] + by2[1];
}

typedef void group_fn(const uint8_t *w, clb_fast_group *g);

static void multiply(const clb_fast_product *p, const clb_fast_type *t, group_fn *decode, size_t row0, size_t row1,
                     size_t n_tokens) {
  uint8_t padded[CLB_FAST_MAX_BYTES];
  clb_fast_group decoded;
  for (size_t row = row0; row < row1; row++) {
    for (size_t token = 0; token < n_tokens; token++) {
      const void *x = p->qx + token * p->qx_stride;
      float partial[8] = {0};
      for (size_t g = 0; g < group_count(p->n_cols); g++) {
        decode(clb_fast_padded(p, t, row, g, padded), &decoded);
        if (t->kind == CLB_FAST_X_Q16) {
          add_group_16(partial, t->form, &decoded, (const clb_fast_x16 *)x + g);
        } else {
          add_group_8(partial, t->form, &decoded, (const clb_fast_x8 *)x + g);
        }
      }
      p->y[token * p->ldy + row] = reduce(partial);
    }
  }
}

#define PRODUCT(name, ...)                                                                                \
  static void product_##name(const clb_fast_product *p, const clb_fast_type *t, size_t row0, size_t row1, \
                             size_t n_tokens) {                                                           \
    multiply(p, t, name##_group, row0, row1, n_tokens);                                                   \
  }

CLB_FAST_TYPES(PRODUCT)

// ---------------------------------------------------------------------------------------------------------------------
// Rows of a quantized KV cache

// As gguf-py rounds: half away from zero.
static float round_half_away(float v) {
  float magnitude = fabsf(v), whole = floorf(magnitude);
  whole += floorf(2 * (magnitude - whole));
  return copysignf(whole, v);
}

static void store_f16(uint8_t *dst, float v) {
  uint16_t h;
  clb_scalar_to_f16(&h, &v, 1);
  memcpy(dst, &h, sizeof h);
}

void clb_scalar_to_q8_0(uint8_t *dst, const float *x, size_t n_blocks) {
  for (size_t b = 0; b < n_blocks; b++, dst += 34, x += 32) {
    uint32_t largest = largest_bits(x);
    float d = largest < CLB_INF_BITS ? float_of(largest) / 127 : NAN, inverse = clb_fast_inverse(d);
    store_f16(dst, d);
    for (int i = 0; i < 32; i++) dst[2 + i] = (uint8_t)(inverse != 0 ? (int)round_half_away(x[i] * inverse) : 0);
  }
}

// The first element of the largest magnitude.
static float extreme_of(const float *x, uint32_t largest) {
  int i = 0;
  while ((bits_of(x[i]) & 0x7FFFFFFF) != largest) i++;
  return x[i];
}

static int q4_0_code(float v, float inverse) {
  int code = inverse != 0 ? (int)(v * inverse + 8.5f) : 8;
  return code < 15 ? code : 15;
}

void clb_scalar_to_q4_0(uint8_t *dst, const float *x, size_t n_blocks) {
  for (size_t b = 0; b < n_blocks; b++, dst += 18, x += 32) {
    uint32_t largest = largest_bits(x);
    float d = largest < CLB_INF_BITS ? extreme_of(x, largest) / -8 : NAN, inverse = clb_fast_inverse(d);
    store_f16(dst, d);
    for (int i = 0; i < 16; i++) {
      dst[2 + i] = (uint8_t)(q4_0_code(x[i], inverse) | q4_0_code(x[i + 16], inverse) << 4);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// The choice of kernels

#define ENTRY(name, ...) product_##name,

static const clb_fast_kernels scalar_kernels = {
    .name = "scalar",
    .quantize_8 = scalar_quantize_8,
    .quantize_16 = scalar_quantize_16,
    .to_q8_0 = clb_scalar_to_q8_0,
    .to_q4_0 = clb_scalar_to_q4_0,
    .product = {CLB_FAST_TYPES(ENTRY)},
};

static const clb_fast_kernels *scalar(void) {
  return &scalar_kernels;
}

static const clb_fast_kernels *none(void) {
  return NULL;
}

#if !defined(CLB_HAVE_AVX2)
#define clb_fast_avx2 none
#define clb_fast_avx_vnni none
#define clb_fast_avx512 none
#endif
#if !defined(CLB_HAVE_NEON)
#define clb_fast_neon none
#define clb_fast_neon_dot none
#endif

// In order of preference; those that are not automatic need to be named.
static const struct {
  const char *name;
  const clb_fast_kernels *(*get)(void);
  bool automatic;
} sets[] = {
    {"neon_dot", clb_fast_neon_dot, true}, {"neon", clb_fast_neon, true}, {"avx512", clb_fast_avx512, false},
    {"avx_vnni", clb_fast_avx_vnni, true}, {"avx2", clb_fast_avx2, true}, {"scalar", scalar, true},
};

const clb_fast_kernels *clb_fast_by_name(const char *name) {
  (void)none;
  for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
    if (strcmp(sets[i].name, name) == 0) return sets[i].get();
  }
  return NULL;
}

const clb_fast_kernels *clb_fast_best(void) {
  // A cache of a constant: threads that race here store the same pointer.
  static _Atomic(const clb_fast_kernels *) cached;
  const clb_fast_kernels *f = atomic_load_explicit(&cached, memory_order_relaxed);
  if (f) return f;
  for (size_t i = 0; !f; i++) f = sets[i].automatic ? sets[i].get() : NULL;
  atomic_store_explicit(&cached, f, memory_order_relaxed);
  return f;
}

static const clb_fast_kernels *fast_of(const clb_kernels *k) {
  return k == clb_kernels_scalar() ? &scalar_kernels : clb_fast_best();
}

// ---------------------------------------------------------------------------------------------------------------------
// The interface

void clb_fast_quantize_with(const clb_fast_kernels *f, clb_fast_x_kind kind, void *dst, const float *x, size_t n) {
  const size_t group_bytes = x_group_bytes(kind);
  if (kind == CLB_FAST_X_NONE) return;
  if (n % CLB_FAST_GROUP != 0) memset((uint8_t *)dst + n / CLB_FAST_GROUP * group_bytes, 0, group_bytes);
  if (kind == CLB_FAST_X_Q8) f->quantize_8(dst, x, n);
  if (kind == CLB_FAST_X_Q16) f->quantize_16(dst, x, n);
}

void clb_fast_quantize_x(const clb_kernels *k, clb_fast_x_kind kind, void *dst, const float *x, size_t n) {
  clb_fast_quantize_with(fast_of(k), kind, dst, x, n);
}

int clb_fast_product_with(const clb_fast_kernels *f, uint32_t type, const void *w, size_t row_bytes, size_t n_cols,
                          size_t row0, size_t row1, const void *qx, size_t qx_stride, size_t n_tokens, float *y,
                          size_t ldy) {
  const clb_fast_type *t = fast_type(type);
  if (!t || n_cols % clb_type_by_id(type)->block_weights != 0) return -1;
  const clb_fast_product p = {w, row_bytes, n_cols, qx, qx_stride, y, ldy};
  f->product[t - clb_fast_types](&p, t, row0, row1, n_tokens);
  return 0;
}

int clb_fast_matmul_rows(const clb_kernels *k, uint32_t type, const void *w, size_t row_bytes, size_t n_cols,
                         size_t row0, size_t row1, const void *qx, size_t qx_stride, const float *x, size_t ldx,
                         size_t n_tokens, float *y, size_t ldy) {
  if (clb_fast_kind(type) == CLB_FAST_X_NONE) {
    return clb_matmul_rows(k, type, w, row_bytes, n_cols, row0, row1, x, ldx, n_tokens, y, ldy);
  }
  return clb_fast_product_with(fast_of(k), type, w, row_bytes, n_cols, row0, row1, qx, qx_stride, n_tokens, y, ldy);
}

int clb_quantize_row_with(const clb_fast_kernels *f, uint32_t type, void *dst, const float *x, size_t n) {
  if (n % 32 != 0) return -1;
  if (type == CLB_Q8_0) {
    f->to_q8_0(dst, x, n / 32);
  } else if (type == CLB_Q4_0) {
    f->to_q4_0(dst, x, n / 32);
  } else {
    return -1;
  }
  return 0;
}

int clb_quantize_row(const clb_kernels *k, uint32_t type, void *dst, const float *x, size_t n) {
  if (type != CLB_F16) return clb_quantize_row_with(fast_of(k), type, dst, x, n);
  clb_f32_to_f16(k, dst, x, n);
  return 0;
}
