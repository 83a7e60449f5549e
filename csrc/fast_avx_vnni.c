// Fast kernels for AVX2 with AVX-VNNI, which multiplies and adds up in one instruction.
#include "blocks_internal.h"

#if defined(CLB_HAVE_AVX2)

#include <cpuid.h>
#include <stddef.h>

#include "fast_internal.h"

#if (defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11)

#define TARGET "avx2,fma,f16c,avxvnni"
#define DPBUSD _mm256_dpbusd_avx_epi32
#define DPWSSD _mm256_dpwssd_avx_epi32
#define SET_NAME "avx_vnni"
#include "fast_x86.h"

const clb_fast_kernels *clb_fast_avx_vnni(void) {
  enum { AVX_VNNI = 1 << 4 };  // leaf 7, subleaf 1, EAX
  unsigned a, b, c, d;
  if (!clb_kernels_avx2() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || a < 1) return NULL;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & AVX_VNNI) ? &kernels : NULL;
}

#else  // a compiler from before the extension

const clb_fast_kernels *clb_fast_avx_vnni(void) {
  return NULL;
}

#endif
#endif
