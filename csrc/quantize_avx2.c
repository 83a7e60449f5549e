// The encoders for x86-64 with AVX2: the same source, and the same bytes, as the portable ones.
#include "quantize_internal.h"

#if defined(CLB_HAVE_AVX2)

#include <immintrin.h>

#define TARGET __attribute__((target("avx2,f16c")))
#define INLINE static inline __attribute__((always_inline, target("avx2,f16c")))
#define OUTLINE INLINE
#define MIN(a, b) _mm256_min_ps(a, b)
#define MAX(a, b) _mm256_max_ps(a, b)
#define ANY(mask) (_mm256_movemask_ps((__m256)(mask)) != 0)
#define MIN_16(a, b) ((h16)_mm256_min_epi16((__m256i)(a), (__m256i)(b)))
#define MAX_16(a, b) ((h16)_mm256_max_epi16((__m256i)(a), (__m256i)(b)))
#define SCALE_16(a, b) ((h16)_mm256_mulhrs_epi16((__m256i)(a), (__m256i)(b)))
#define DOT_16(a, b) ((m8)_mm256_madd_epi16((__m256i)(a), (__m256i)(b)))
#define TO_F16(f) ((uint16_t)_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT))
#define FROM_F16(h) _cvtsh_ss(h)
#define ENCODER clb_encoder_avx2

#include "quantize_body.h"

#else

clb_encode_fn *clb_encoder_avx2(uint32_t type) {
  (void)type;
  return NULL;
}

#endif
