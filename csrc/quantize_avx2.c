// The encoders for x86-64 with AVX2: the same source, and the same bytes, as the portable ones.
#include "quantize_internal.h"

#if defined(CLB_HAVE_AVX2)

#include <immintrin.h>

#define TARGET __attribute__((target("avx2")))
#define INLINE static inline __attribute__((always_inline, target("avx2")))
#define MIN(a, b) _mm256_min_ps(a, b)
#define MAX(a, b) _mm256_max_ps(a, b)
#define ROUND(x) _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define ENCODER clb_encoder_avx2

#include "quantize_body.h"

#else

clb_encode_fn *clb_encoder_avx2(uint32_t type) {
  (void)type;
  return NULL;
}

#endif
