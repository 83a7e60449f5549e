// What the fast kernels share among themselves; besides them, tests include this. See fast.h.
#ifndef CLB_FAST_INTERNAL_H
#define CLB_FAST_INTERNAL_H

#include "blocks_internal.h"
#include "fast.h"

enum {
  CLB_FAST_GROUP = 256,     // columns handled at a time: 8 blocks of 32
  CLB_FAST_BLOCKS = 8,      // blocks of a group, partial sums of a product
  CLB_N_FAST_TYPES = 13,    // types with fast kernels
  CLB_FAST_MAX_BYTES = 272  // bytes of a group of any such type: 8 blocks of q8_0
};

// 256 activations. What is beyond the row is zero.
typedef struct {
  int8_t q[CLB_FAST_GROUP];
  float d[CLB_FAST_BLOCKS];           // NaN for a block that holds a NaN or an infinity
  float s[CLB_FAST_BLOCKS];           // d * sum
  int32_t sum[CLB_FAST_BLOCKS];       // sums of q
  int16_t half[2 * CLB_FAST_BLOCKS];  // sums of 16
} clb_fast_x;

_Static_assert(sizeof(clb_fast_x) == 384, "whole cache lines");

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
  uint32_t group_bytes;  // of 256 weights
} clb_fast_type;

// In the order of every table of kernels. The block size follows: group_bytes / 8 for types with blocks of 32.
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
  void (*quantize)(clb_fast_x *dst, const float *x, size_t n);
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
void clb_fast_quantize_with(const clb_fast_kernels *f, void *dst, const float *x, size_t n);
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

#endif
