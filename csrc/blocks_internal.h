// What the block kernels share among themselves; nothing else includes this.
#ifndef CLB_BLOCKS_INTERNAL_H
#define CLB_BLOCKS_INTERNAL_H

#include "blocks.h"

#if defined(__x86_64__)
#define CLB_HAVE_AVX2 1
#elif defined(__aarch64__)
#define CLB_HAVE_NEON 1
#endif

enum {
  CLB_N_TYPES = 26,
  CLB_LANES = 32,           // partial sums of a dot product
  CLB_TILE_ROWS = 4,        // rows of W decoded together
  CLB_TILE_TOKENS = 24,     // tokens that share one decoding
  CLB_TILE_COLUMNS = 1024,  // columns decoded at a time: all of a tile's operands then fit into L1
};

// Decodes n_blocks consecutive quant blocks.
typedef void clb_decode_fn(const uint8_t *src, float *dst, size_t n_blocks);

// y[r] = dot(row r, x) for n_rows rows of n_blocks quant blocks.
typedef void clb_rows_fn(const uint8_t *w, size_t row_bytes, size_t n_blocks, const float *x, float *y, size_t n_rows);

// Adds the products of n columns to the partial sums of rows x tokens.
//   acc [n_tokens, CLB_TILE_ROWS, CLB_LANES], 64-byte aligned
//   w   [CLB_TILE_ROWS, CLB_TILE_COLUMNS], 64-byte aligned; rows from n_rows on may be computed, and are ignored
//   x   [n_tokens, n], ldx floats apart
typedef void clb_tile_fn(float *acc, const float *w, size_t n_rows, const float *x, size_t ldx, size_t n_tokens,
                         size_t n);

struct clb_kernels {
  const char *name;
  // In the order of the type table; NULL: decode by the scalar one, and multiply by way of the tile.
  clb_decode_fn *decode[CLB_N_TYPES];
  clb_rows_fn *rows[CLB_N_TYPES];
  clb_tile_fn *tile;
  float (*reduce)(const float p[CLB_LANES]);  // the partial sums of a tile, 64-byte aligned, in canonical order
  float (*dot)(const float *a, const float *b, size_t n);
  float (*sum)(const float *a, size_t n);
  void (*axpy)(float *dst, const float *src, float scale, size_t n);
  void (*mix)(float *dst, size_t ld_dst, const float *scale, size_t ld_scale, const float *src, size_t n, size_t n_dst,
              size_t d);
  void (*exp)(float *dst, const float *src, float shift, size_t n);
  void (*silu_mul)(float *dst, const float *gate, const float *up, size_t n);
  void (*to_f16)(uint16_t *dst, const float *src, size_t n);
  void (*to_bf16)(uint16_t *dst, const float *src, size_t n);
  // Whether any of n words, masked, equals the mask: for exponent masks, whether any float is not finite.
  bool (*any_masked_u32)(const uint8_t *src, uint32_t mask, size_t n);
  bool (*any_masked_u16)(const uint8_t *src, uint16_t mask, size_t n);
};

// The sets beyond the scalar one, NULL where the CPU cannot run them.
const clb_kernels *clb_kernels_avx2(void);
const clb_kernels *clb_kernels_neon(void);

// The partial sums, reduced in canonical order: the reference.
float clb_reduce_lanes(const float p[CLB_LANES]);

// Scalar kernels that compile into good code for every CPU.
float clb_scalar_sum(const float *a, size_t n);
void clb_scalar_axpy(float *dst, const float *src, float scale, size_t n);
void clb_scalar_mix(float *dst, size_t ld_dst, const float *scale, size_t ld_scale, const float *src, size_t n,
                    size_t n_dst, size_t d);
void clb_scalar_exp(float *dst, const float *src, float shift, size_t n);
void clb_scalar_silu_mul(float *dst, const float *gate, const float *up, size_t n);
void clb_scalar_to_f16(uint16_t *dst, const float *src, size_t n);
void clb_scalar_to_bf16(uint16_t *dst, const float *src, size_t n);
bool clb_scalar_any_masked_u32(const uint8_t *src, uint32_t mask, size_t n);
bool clb_scalar_any_masked_u16(const uint8_t *src, uint16_t mask, size_t n);

// Codebooks; see blocks_grids.c. One entry more than there are codes: an entry may be loaded as 32 bits.
extern const uint16_t clb_grid_iq2_xxs[256 + 1], clb_grid_iq2_xs[512 + 1], clb_grid_iq2_s[1024 + 1];
extern const uint16_t clb_grid_iq3_xxs[256 + 1], clb_grid_iq3_s[512 + 1];
extern const uint16_t clb_grid_iq1[2048 + 1];
extern const int8_t clb_values_iq4[16];   // iq4_nl, iq4_xs
extern const int8_t clb_values_e2m1[16];  // mxfp4, nvfp4: e2m1, doubled

// exp(x) = 2^n * exp(r), n = round(x / ln 2). Every implementation runs these steps in this order:
//   x clamped to [LO, HI]; t = fma(x, LOG2E, MAGIC); n = t - MAGIC; r = fma(-LN2_LO, n, fma(-LN2_HI, n, x))
//   q = C6; q = fma(q, r, C5) .. fma(q, r, C2); p = fma(q * r, r, r) + 1
//   i = bits(t) - bits(MAGIC); result p * 2^(i >> 1) * 2^(i - (i >> 1)), halved so that subnormals come out
#define CLB_EXP_LO (-104.0f)
#define CLB_EXP_HI 89.0f
#define CLB_EXP_LOG2E 0x1.715476p+0f
#define CLB_EXP_MAGIC 0x1.8p+23f
#define CLB_EXP_MAGIC_BITS 0x4B400000
#define CLB_EXP_LN2_HI 0x1.62e4p-1f
#define CLB_EXP_LN2_LO 0x1.7f7d1cp-20f
#define CLB_EXP_C2 0x1.fffffcp-2f
#define CLB_EXP_C3 0x1.555492p-3f
#define CLB_EXP_C4 0x1.5558f2p-5f
#define CLB_EXP_C5 0x1.123a2p-7f
#define CLB_EXP_C6 0x1.6a23cep-10f

#endif
