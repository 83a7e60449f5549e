// Fast kernels for every AArch64 CPU.
#include "blocks_internal.h"

#if defined(CLB_HAVE_NEON)

#include <arm_neon.h>

// A sum of two products of int8 fits 16 bits while one factor is not -128, and activations never are.
static inline int32x4_t dot_16(int32x4_t acc, int8x16_t a, int8x16_t b) {
  int16x8_t products = vmull_s8(vget_low_s8(a), vget_low_s8(b));
  return vpadalq_s16(acc, vmlal_s8(products, vget_high_s8(a), vget_high_s8(b)));
}

#define DOT_16 dot_16
#define SET_NAME "neon"
#include "fast_neon.h"

const clb_fast_kernels *clb_fast_neon(void) {
  return &kernels;
}

#endif
