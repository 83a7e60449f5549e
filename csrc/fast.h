// Matrix products in fast precision: activations are quantized where the weights are, and multiplied as integers.
//
// Activations are cut into blocks of 32, each with integer codes q and one float d = max|x| / m: x is about d * q, q =
// rint(x * (m / max|x|)), ties to even. A block whose largest magnitude is below 2^-100 becomes zeros. A NaN or an
// infinity in a block makes its d NaN, and with it every product that the block enters. There are two kinds:
//   CLB_FAST_X_Q8   m = 127, in 8 bits: for weights of about 5 bits and less, whose own rounding is coarser
//   CLB_FAST_X_Q16  m = 16383, in 16 bits: for q8_0 and q6_k. More would not fit: T below is an int32, and with q6_k it
//                   can be 32 codes of -32, times 16383, times sub-scales of -128: 2^31 - 2^17
//
// The canonical product. A row is padded with zero blocks to a multiple of 256 columns. Block b adds to partial b % 8
// of 8, all starting at +0, b increasing:
//   partial = fma(dw * dx, (float)T, partial)             T: the integer dot product of the codes, sub-scales included
//   partial = fma(-mw, dx * (float)sum(q), partial)       types with a minimum per 32: q4_1, q5_1, q4_k, q5_k
//   partial = fma(-mw * dx, (float)M, partial)            q2_k, M: sums of 16 codes times their integer minimums
// The integers are exact, and their conversion to float rounds to nearest, ties to even.
// The partials are then reduced by halves: i += i + 4, i + 2, i + 1. A result depends on nothing but its inputs: not on
// the batch size, the range of rows, the number of threads or the instruction set. (Which NaN comes out is exempt.)
//
// f32, f16 and bf16 weights, and the types that no fast kernel exists for (iq1, iq2, iq3, tq, nvfp4), are multiplied by
// the exact kernels of blocks.h with f32 activations: kind CLB_FAST_X_NONE.
//
// Sources may start at any byte, quantized activations at multiples of 64. No function reads past the last byte of a
// row. Nothing here allocates; the deepest function takes about 100 KiB of stack.
#ifndef CLB_FAST_H
#define CLB_FAST_H

#include "blocks.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  CLB_FAST_X_NONE = 0,  // f32 activations as they are
  CLB_FAST_X_Q8 = 1,    // int8 codes with a scale for 32
  CLB_FAST_X_Q16 = 2,   // int16 codes with a scale for 32
  CLB_FAST_X_KINDS = 3,
} clb_fast_x_kind;

// The activations that products with `type` take; CLB_FAST_X_NONE for an unknown type as well.
clb_fast_x_kind clb_fast_kind(uint32_t type);

// Bytes of one quantized row of n_cols activations: a multiple of 64, 0 for CLB_FAST_X_NONE.
size_t clb_fast_x_bytes(clb_fast_x_kind kind, size_t n_cols);

// Quantizes x[n], n a multiple of 32, into dst: clb_fast_x_bytes(kind, n) bytes, 64-byte aligned. Nothing to do for
// CLB_FAST_X_NONE.
void clb_fast_quantize_x(const clb_kernels *k, clb_fast_x_kind kind, void *dst, const float *x, size_t n);

// y[t * ldy + r] = row r of W times token t, for rows r in [row0, row1) and tokens t in [0, n_tokens).
//   w   [.., n_cols] of `type`, row r at w + r * row_bytes
//   qx  [n_tokens] rows of the kind clb_fast_kind(type), qx_stride bytes apart (a multiple of 64); unused, may be NULL,
//       for CLB_FAST_X_NONE
//   x   [n_tokens, n_cols], ldx floats apart; unused, may be NULL, for the other kinds
//   y   [n_tokens, ..], ldy floats apart
// Returns 0, or -1 (and leaves y alone) for an unknown type or an n_cols that is no multiple of its block_weights.
int clb_fast_matmul_rows(const clb_kernels *k, uint32_t type, const void *w, size_t row_bytes, size_t n_cols,
                         size_t row0, size_t row1, const void *qx, size_t qx_stride, const float *x, size_t ldx,
                         size_t n_tokens, float *y, size_t ldy);

// Encodes x[n] as a row of f16, q8_0 or q4_0 (n a multiple of 32 for the latter two), equal to gguf-py bit for bit for
// finite x. A q8_0 or q4_0 block that holds a NaN or an infinity gets a scale of NaN. Returns 0, or -1 for another type
// or n.
int clb_quantize_row(const clb_kernels *k, uint32_t type, void *dst, const float *x, size_t n);

#ifdef __cplusplus
}
#endif

#endif
