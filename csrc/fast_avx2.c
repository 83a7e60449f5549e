// Fast kernels for AVX2, FMA and F16C.
#include "blocks_internal.h"

#if defined(CLB_HAVE_AVX2)

#define TARGET "avx2,fma,f16c"
#define SET_NAME "avx2"
#include "fast_x86.h"

const clb_fast_kernels *clb_fast_avx2(void) {
  return clb_kernels_avx2() ? &kernels : NULL;
}

#endif
