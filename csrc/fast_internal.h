// What the fast kernels share among themselves; besides them, tests include this. See fast.h.
#ifndef CLB_FAST_INTERNAL_H
#define CLB_FAST_INTERNAL_H

#include <math.h>
#include <string.h>

#include "blocks_internal.h"
#include "fast.h"

enum {
  CLB_FAST_GROUP = 256,     // columns handled at a time: 8 blocks of 32
  CLB_FAST_BLOCKS = 8,      // blocks of a group, partial sums of a product
  CLB_FAST_MAX_BYTES = 272  // bytes of a group of any type with fast kernels: 8 blocks of q8_0
};

// 256 activations of CLB_FAST_X_Q8. What is beyond the row is zero.
typedef struct {
  int8_t q[CLB_FAST_GROUP];
  float d[CLB_FAST_BLOCKS];           // NaN for a block that holds a NaN or an infinity
  float s[CLB_FAST_BLOCKS];           // d * sum
  int32_t sum[CLB_FAST_BLOCKS];       // sums of q
  int16_t half[2 * CLB_FAST_BLOCKS];  // sums of 16
} clb_fast_x8;

// The same of CLB_FAST_X_Q16. In each block the codes of even columns come first, then those of odd ones: a vector of
// weights as bytes becomes two of 16-bit integers in that order by shifts alone.
typedef struct {
  int16_t q[CLB_FAST_GROUP];
  float d[CLB_FAST_BLOCKS];
  float s[CLB_FAST_BLOCKS];           // d * the sum of q
  int32_t half[2 * CLB_FAST_BLOCKS];  // sums of 16: of the first halves of 4 blocks, of their second ones; of 4 more
} clb_fast_x16;

_Static_assert(sizeof(clb_fast_x8) == 384 && sizeof(clb_fast_x16) == 640, "whole cache lines");

// How the weights of a group are made up of codes c, block by block; see the canonical product in fast.h.
typedef enum {
  CLB_FORM_PLAIN,    // d * c
  CLB_FORM_MIN,      // d * c + add
  CLB_FORM_SUB,      // d * sub * c, sub an integer for 16 weights
  CLB_FORM_SUB_MIN,  // d * sub * c + add * min, both integers for 16 weights
} clb_fast_form;

typedef struct {
  uint32_t id;
  clb_fast_form form;
  clb_fast_x_kind kind;  // of the activations
  uint32_t group_bytes;  // of 256 weights
} clb_fast_type;

// The types with fast kernels, of which every set makes its table: X(name, the fields of clb_fast_type in order).
// Blocks of 32 take group_bytes / 8. There are no products of CLB_FORM_SUB_MIN with CLB_FAST_X_Q16.
#define CLB_FAST_TYPES(X)                                      \
  X(q4_0, CLB_Q4_0, CLB_FORM_PLAIN, CLB_FAST_X_Q8, 8 * 18)     \
  X(q4_1, CLB_Q4_1, CLB_FORM_MIN, CLB_FAST_X_Q8, 8 * 20)       \
  X(q5_0, CLB_Q5_0, CLB_FORM_PLAIN, CLB_FAST_X_Q8, 8 * 22)     \
  X(q5_1, CLB_Q5_1, CLB_FORM_MIN, CLB_FAST_X_Q8, 8 * 24)       \
  X(q8_0, CLB_Q8_0, CLB_FORM_PLAIN, CLB_FAST_X_Q16, 8 * 34)    \
  X(q2_k, CLB_Q2_K, CLB_FORM_SUB_MIN, CLB_FAST_X_Q8, 84)       \
  X(q3_k, CLB_Q3_K, CLB_FORM_SUB, CLB_FAST_X_Q8, 110)          \
  X(q4_k, CLB_Q4_K, CLB_FORM_MIN, CLB_FAST_X_Q8, 144)          \
  X(q5_k, CLB_Q5_K, CLB_FORM_MIN, CLB_FAST_X_Q8, 176)          \
  X(q6_k, CLB_Q6_K, CLB_FORM_SUB, CLB_FAST_X_Q16, 210)         \
  X(iq4_nl, CLB_IQ4_NL, CLB_FORM_PLAIN, CLB_FAST_X_Q8, 8 * 18) \
  X(iq4_xs, CLB_IQ4_XS, CLB_FORM_PLAIN, CLB_FAST_X_Q8, 136)    \
  X(mxfp4, CLB_MXFP4, CLB_FORM_PLAIN, CLB_FAST_X_Q8, 8 * 17)

#define CLB_FAST_ONE(name, ...) +1
enum { CLB_N_FAST_TYPES = 0 CLB_FAST_TYPES(CLB_FAST_ONE) };

extern const clb_fast_type clb_fast_types[CLB_N_FAST_TYPES];

typedef struct {
  const uint8_t *w;  // row 0
  size_t row_bytes, n_cols;
  const uint8_t *qx;  // token 0
  size_t qx_stride;
  float *y;
  size_t ldy;
} clb_fast_product;

// y for rows [row0, row1) and all tokens. t: the type's row of the table.
typedef void clb_fast_fn(const clb_fast_product *p, const clb_fast_type *t, size_t row0, size_t row1, size_t n_tokens);

typedef struct {
  const char *name;
  void (*quantize_8)(clb_fast_x8 *dst, const float *x, size_t n);
  void (*quantize_16)(clb_fast_x16 *dst, const float *x, size_t n);
  void (*to_q8_0)(uint8_t *dst, const float *x, size_t n_blocks);
  void (*to_q4_0)(uint8_t *dst, const float *x, size_t n_blocks);
  clb_fast_fn *product[CLB_N_FAST_TYPES];
} clb_fast_kernels;

// One group of weights, decoded: what the portable and the NEON products work with.
typedef struct {
  int8_t codes[CLB_FAST_GROUP];
  float d[CLB_FAST_BLOCKS], add[CLB_FAST_BLOCKS];
  int16_t sub[2 * CLB_FAST_BLOCKS], min[2 * CLB_FAST_BLOCKS];
} clb_fast_group;

// The sets beyond the scalar one, NULL where this build or CPU has none.
const clb_fast_kernels *clb_fast_avx2(void);
const clb_fast_kernels *clb_fast_avx_vnni(void);
const clb_fast_kernels *clb_fast_avx512(void);  // by name only: off until measured on such hardware
const clb_fast_kernels *clb_fast_neon(void);
const clb_fast_kernels *clb_fast_neon_dot(void);

// Scalar kernels for sets without their own.
void clb_scalar_to_q8_0(uint8_t *dst, const float *x, size_t n_blocks);
void clb_scalar_to_q4_0(uint8_t *dst, const float *x, size_t n_blocks);

// A set by name: "scalar", "avx2", "avx_vnni", "avx512", "neon", "neon_dot". NULL as above.
const clb_fast_kernels *clb_fast_by_name(const char *name);

// The set that goes with clb_kernels_best(): the first automatic one.
const clb_fast_kernels *clb_fast_best(void);

// clb_fast_quantize_x, clb_fast_matmul_rows and clb_quantize_row with a set of one's choice, for quantized types.
void clb_fast_quantize_with(const clb_fast_kernels *f, clb_fast_x_kind kind, void *dst, const float *x, size_t n);
int clb_fast_product_with(const clb_fast_kernels *f, uint32_t type, const void *w, size_t row_bytes, size_t n_cols,
                          size_t row0, size_t row1, const void *qx, size_t qx_stride, size_t n_tokens, float *y,
                          size_t ldy);
int clb_quantize_row_with(const clb_fast_kernels *f, uint32_t type, void *dst, const float *x, size_t n);

// Blocks of group g in a row, 1 to 8; and the group itself, copied into `padded` and followed by zero blocks if there
// are fewer than 8. padded: CLB_FAST_MAX_BYTES bytes.
static inline size_t clb_fast_blocks_of(size_t n_cols, size_t g) {
  size_t n = n_cols / 32 - g * CLB_FAST_BLOCKS;
  return n < CLB_FAST_BLOCKS ? n : CLB_FAST_BLOCKS;
}

const uint8_t *clb_fast_padded(const clb_fast_product *p, const clb_fast_type *t, size_t row, size_t g,
                               uint8_t *padded);

// 1 / d to quantize with; 0, which makes all codes those of zero, when that is no finite number.
static inline float clb_fast_inverse(float d) {
  float inverse = 1 / d;
  return inverse - inverse == 0 ? inverse : 0;
}

// A block whose largest magnitude has fewer bits than this is quantized to zeros: 2^-100.
#define CLB_FAST_TINY_BITS 0x0D800000
#define CLB_INF_BITS 0x7F800000

// The largest codes. That of 16 bits is what 32 products with q6_k leave room for in an int32: 32 * 128 * 32 * 16383.
#define CLB_FAST_MAX_8 127
#define CLB_FAST_MAX_16 16383

// The scale of a block of activations whose largest magnitude has these bits, and what codes are made with: 0 when all
// of them are zero.
typedef struct {
  float d, inverse;
} clb_fast_step;

// Where clb_fast_x16.half holds the sum of the first or second half of block b.
static inline size_t clb_fast_half_at(size_t b, size_t half) {
  return b / 4 * 8 + half * 4 + b % 4;
}

static inline clb_fast_step clb_fast_step_of(uint32_t largest_bits, float largest_code) {
  float largest;
  memcpy(&largest, &largest_bits, sizeof largest);
  if (largest_bits >= CLB_INF_BITS) return (clb_fast_step){NAN, 0};
  if (largest_bits < CLB_FAST_TINY_BITS) return (clb_fast_step){0, 0};
  return (clb_fast_step){largest / largest_code, largest_code / largest};
}

#endif
