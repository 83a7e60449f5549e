// Fast kernels for AVX-512 with VNNI, on vectors of 32 bytes. Not chosen automatically: see fast_internal.h.
#include "blocks_internal.h"

#if defined(CLB_HAVE_AVX2)

#define TARGET "avx2,fma,f16c,avx512f,avx512vl,avx512bw,avx512vnni"
#define DPBUSD _mm256_dpbusd_epi32
#define DPWSSD _mm256_dpwssd_epi32
#define SET_NAME "avx512"
#include <cpuid.h>

#include "fast_x86.h"

// The CPU has the extensions, and the system saves the registers (XCR0 bits 1, 2 and 5 to 7).
const clb_fast_kernels *clb_fast_avx512(void) {
  unsigned a, b, c, d, low, high, needed = bit_AVX512F | bit_AVX512VL | bit_AVX512BW;
  if (!clb_kernels_avx2()) return NULL;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & 0xE6) != 0xE6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return NULL;
  return (b & needed) == needed && (c & bit_AVX512VNNI) ? &kernels : NULL;
}

#endif
