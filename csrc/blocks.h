// The block formats of GGML tensors: one table of types, their exact decoding, and dot products over them.
//
// A tensor row is a sequence of quant blocks; a quant block holds `block_weights` weights in `block_bytes` bytes.
// Decoded values equal those of gguf-py bit for bit. Every function exists as portable C (the reference) and, where
// the CPU has it, as SIMD that returns the same bits.
//
// The canonical dot product. A dot product of n elements has 32 partial sums, all starting at +0. Element j is added to
// partial j % 32 by a fused multiply-add, j increasing. The partials are then reduced by halves: partial i += partial
// i + 16 for i < 16, then i + 8 for i < 8, and so on down to one. A result therefore depends on nothing but its inputs:
// not on the batch size, the number of threads or the instruction set.
// Exempt from "the same bits": which NaN comes out, when one does. Assumed: the default floating-point environment.
//
// Sources may start at any byte. No function reads past the last byte of a row. Nothing here allocates; the deepest
// function takes about 32 KiB of stack.
#ifndef CLB_BLOCKS_H
#define CLB_BLOCKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Types

enum {
  CLB_F32 = 0,
  CLB_F16 = 1,
  CLB_Q4_0 = 2,
  CLB_Q4_1 = 3,
  CLB_Q5_0 = 6,
  CLB_Q5_1 = 7,
  CLB_Q8_0 = 8,
  CLB_Q2_K = 10,
  CLB_Q3_K = 11,
  CLB_Q4_K = 12,
  CLB_Q5_K = 13,
  CLB_Q6_K = 14,
  CLB_IQ2_XXS = 16,
  CLB_IQ2_XS = 17,
  CLB_IQ3_XXS = 18,
  CLB_IQ1_S = 19,
  CLB_IQ4_NL = 20,
  CLB_IQ3_S = 21,
  CLB_IQ2_S = 22,
  CLB_IQ4_XS = 23,
  CLB_IQ1_M = 29,
  CLB_BF16 = 30,
  CLB_TQ1_0 = 34,
  CLB_TQ2_0 = 35,
  CLB_MXFP4 = 39,
  CLB_NVFP4 = 40,
};

// How a block can come to hold a NaN or an infinity.
typedef enum {
  CLB_SCALE_NONE,   // never: nvfp4, whose scales have no such code
  CLB_SCALE_SELF,   // the weights are floats themselves
  CLB_SCALE_F16,    // binary16 scales at scale_offset[0 .. n_scales): one bad scale spoils the whole block
  CLB_SCALE_IQ1_M,  // one binary16 scale, a nibble in each of four 16-bit words at scale_offset[0]
  CLB_SCALE_E8M0,   // a power of two at scale_offset[0], large enough to overflow with some codes
} clb_scale_kind;

typedef struct {
  uint32_t id;             // GGML type number
  const char *name;        // lower case: "f32", "q4_k", ...
  uint32_t block_weights;  // weights in a quant block: 1, 32, 64 or 256
  uint32_t block_bytes;
  clb_scale_kind scale_kind;
  uint32_t n_scales;         // binary16 scales in a block
  uint32_t scale_offset[2];  // their offsets in the block
} clb_type;

// The type with this GGML number, or NULL.
const clb_type *clb_type_by_id(uint32_t id);

// The type with this lower-case name, or NULL.
const clb_type *clb_type_by_name(const char *name);

// All types, in order of id. clb_type_at returns NULL beyond the last one.
size_t clb_type_count(void);
const clb_type *clb_type_at(size_t i);

// Bytes of a row of n_cols weights. False when n_cols is no multiple of block_weights, or on overflow.
bool clb_row_bytes(const clb_type *type, uint64_t n_cols, uint64_t *n_bytes);

// ---------------------------------------------------------------------------------------------------------------------
// Kernels: one set of functions per instruction set

typedef struct clb_kernels clb_kernels;

// The portable reference.
const clb_kernels *clb_kernels_scalar(void);

// The fastest set this CPU and operating system can run; detected at the first call, cheap afterwards.
const clb_kernels *clb_kernels_best(void);

// "scalar", "avx2" or "neon".
const char *clb_kernels_name(const clb_kernels *k);

// ---------------------------------------------------------------------------------------------------------------------
// Decoding

// Decodes n weights at src into dst[n], by the portable reference. Returns 0, or -1 for an unknown type or an n that is
// no multiple of its block_weights. A signalling NaN of f16 becomes quiet; floats are otherwise kept as they are.
int clb_dequantize(uint32_t type, const void *src, float *dst, size_t n);

// The same with the kernels k, and with the best ones.
int clb_dequantize_with(const clb_kernels *k, uint32_t type, const void *src, float *dst, size_t n);
int clb_dequantize_best(uint32_t type, const void *src, float *dst, size_t n);

// Index of the first of n_weights weights that decodes to NaN or infinity; UINT64_MAX when there is none or the type is
// unknown. Weights after the last whole block are not looked at. Reads the scales only, where a type has scales.
uint64_t clb_find_nonfinite(uint32_t type, const void *src, uint64_t n_weights);

// ---------------------------------------------------------------------------------------------------------------------
// Dot products in exact precision, in the canonical order

// y[t * ldy + r] = dot(row r of W, x + t * ldx) for rows r in [row0, row1) and tokens t in [0, n_tokens).
//   w  [.., n_cols] of `type`, row r at w + r * row_bytes
//   x  [n_tokens, n_cols], ldx floats apart
//   y  [n_tokens, ..], ldy floats apart
// Returns 0, or -1 (and leaves y alone) for an unknown type or an n_cols that is no multiple of its block_weights.
int clb_matmul_rows(const clb_kernels *k, uint32_t type, const void *w, size_t row_bytes, size_t n_cols, size_t row0,
                    size_t row1, const float *x, size_t ldx, size_t n_tokens, float *y, size_t ldy);

// dot(a[n], b[n])
float clb_dot_f32(const clb_kernels *k, const float *a, const float *b, size_t n);

// The sum of a[n]: the dot product with ones.
float clb_sum_f32(const clb_kernels *k, const float *a, size_t n);

// ---------------------------------------------------------------------------------------------------------------------
// Elementwise. dst may be a source, but must not overlap one partly.

// dst[i] = fma(scale, src[i], dst[i])
void clb_axpy_f32(const clb_kernels *k, float *dst, const float *src, float scale, size_t n);

// dst[m, :] += scale[m, i] * src[i, :] for i = 0, 1, .. n - 1: what n calls of axpy for each of n_dst rows would do.
//   dst [n_dst, d], ld_dst floats apart; scale [n_dst, n], ld_scale floats apart; src [n, d]
void clb_mix_f32(const clb_kernels *k, float *dst, size_t ld_dst, const float *scale, size_t ld_scale, const float *src,
                 size_t n, size_t n_dst, size_t d);

// dst[i] = exp(src[i] - shift), less than 1.1 ulp from the exponential of the rounded difference; subnormal results are
// kept, overflow is +inf, NaN stays NaN. With shift = the maximum, this is the numerator of softmax.
void clb_exp_f32(const clb_kernels *k, float *dst, const float *src, float shift, size_t n);

// dst[i] = gate[i] / (1 + exp(-gate[i])) * up[i], within 4 ulp; for a gate below -88.7 the first factor is -0.
void clb_silu_mul(const clb_kernels *k, float *dst, const float *gate, const float *up, size_t n);

// dst[i] = cap * tanh(src[i] / cap), within 4 ulp of the tanh of the rounded quotient; infinity becomes cap.
void clb_softcap_f32(const clb_kernels *k, float *dst, const float *src, float cap, size_t n);

// Round to nearest, ties to even; a NaN becomes quiet and keeps its sign and its upper payload bits.
void clb_f32_to_f16(const clb_kernels *k, uint16_t *dst, const float *src, size_t n);
void clb_f32_to_bf16(const clb_kernels *k, uint16_t *dst, const float *src, size_t n);

#ifdef __cplusplus
}
#endif

#endif
