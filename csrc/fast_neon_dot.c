// Fast kernels for AArch64 CPUs with the dot product instructions of ARMv8.2.
#include "blocks_internal.h"

#if defined(CLB_HAVE_NEON)

#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif

// Everything below may use the extension; nothing of it runs where it is missing.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

// Not an intrinsic: compilers differ in whether they offer it here.
static inline int32x4_t dot_16(int32x4_t acc, int8x16_t a, int8x16_t b) {
  __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(acc) : "w"(a), "w"(b));
  return acc;
}

#define DOT_16 dot_16
#define SET_NAME "neon_dot"
#include "fast_neon.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const clb_fast_kernels *clb_fast_neon_dot(void) {
#if defined(__linux__)
  enum { HAS_DOT = 1 << 20 };  // HWCAP_ASIMDDP
  return getauxval(AT_HWCAP) & HAS_DOT ? &kernels : NULL;
#elif defined(__ARM_FEATURE_DOTPROD)
  return &kernels;
#else
  return NULL;
#endif
}

#endif
