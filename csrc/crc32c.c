// See crc32c.h. The state is the CRC register: the reflected remainder, before the final inversion.
#include "crc32c.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "crc32c_table.h"

typedef uint32_t crc_fn(uint32_t state, const uint8_t *p, size_t n);

static inline uint64_t load_u64(const uint8_t *p) {
  uint64_t v;
  memcpy(&v, p, sizeof v);
  return v;
}

// ---------------------------------------------------------------------------------------------------------------------
// Portable: eight bytes a step ("slicing by 8", Kounavis and Berry 2005)

static uint32_t crc_tables(uint32_t state, const uint8_t *p, size_t n) {
  for (; n >= 8; n -= 8, p += 8) {
    uint64_t v = load_u64(p) ^ state;
    state = 0;
    for (int i = 0; i < 8; i++) state ^= crc32c_table[7 - i][v >> (8 * i) & 255];
  }
  for (; n > 0; n--) state = state >> 8 ^ crc32c_table[0][(state ^ *p++) & 255];
  return state;
}

// ---------------------------------------------------------------------------------------------------------------------
// x86-64: the crc32 instruction takes one input a cycle but answers after three, so three stretches run side by side

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#define SSE42 __attribute__((target("sse4.2,pclmul")))

// Advances a state over as many zero bits as the factor stands for: k = x^(bits - 33) mod P, reflected. The product of
// two reflected numbers comes out shifted by one bit, and the crc32 instruction multiplies by x^32: hence the 33.
SSE42 static uint32_t advance(uint32_t state, uint32_t k) {
  __m128i product = _mm_clmulepi64_si128(_mm_cvtsi32_si128((int)state), _mm_cvtsi32_si128((int)k), 0);
  return (uint32_t)_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product));
}

// Whole groups of three stretches of n_stretch bytes each; the factors advance by one and by two stretches.
SSE42 static uint32_t three_stretches(uint32_t state, const uint8_t *p, size_t n_groups, size_t n_stretch, uint32_t k1,
                                      uint32_t k2) {
  for (; n_groups > 0; n_groups--, p += 3 * n_stretch) {
    uint64_t a = state, b = 0, c = 0;
    for (size_t i = 0; i < n_stretch; i += 8) {
      a = _mm_crc32_u64(a, load_u64(p + i));
      b = _mm_crc32_u64(b, load_u64(p + n_stretch + i));
      c = _mm_crc32_u64(c, load_u64(p + 2 * n_stretch + i));
    }
    state = advance((uint32_t)a, k2) ^ advance((uint32_t)b, k1) ^ (uint32_t)c;
  }
  return state;
}

SSE42 static uint32_t crc_sse42(uint32_t state, const uint8_t *p, size_t n) {
  enum { LONG = 2048, SHORT = 256 };
  size_t n_groups = n / (3 * LONG);
  state = three_stretches(state, p, n_groups, LONG, 0xA51B6135, 0x82F89C77);
  p += n_groups * 3 * LONG;
  n -= n_groups * 3 * LONG;
  n_groups = n / (3 * SHORT);
  state = three_stretches(state, p, n_groups, SHORT, 0xB9E02B86, 0xDD7E3B0C);
  p += n_groups * 3 * SHORT;
  n -= n_groups * 3 * SHORT;
  for (; n >= 8; n -= 8, p += 8) state = (uint32_t)_mm_crc32_u64(state, load_u64(p));
  for (; n > 0; n--) state = _mm_crc32_u8(state, *p++);
  return state;
}

static crc_fn *best_crc(void) {
  unsigned a, b, c, d;
  bool usable = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSE4_2) && (c & bit_PCLMUL);
  return usable ? crc_sse42 : crc_tables;
}

// ---------------------------------------------------------------------------------------------------------------------
// AArch64 with the CRC extension: its answer comes fast enough for a single stretch

#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

static uint32_t crc_arm(uint32_t state, const uint8_t *p, size_t n) {
  for (; n >= 8; n -= 8, p += 8) {
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(state) : "r"(load_u64(p)));
  }
  for (; n > 0; n--) {
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(state) : "r"((uint32_t)*p++));
  }
  return state;
}

static crc_fn *best_crc(void) {
  enum { HAS_CRC32 = 1 << 7 };  // HWCAP_CRC32
  return getauxval(AT_HWCAP) & HAS_CRC32 ? crc_arm : crc_tables;
}

#else

static crc_fn *best_crc(void) {
  return crc_tables;
}

#endif

// ---------------------------------------------------------------------------------------------------------------------

uint32_t clb_crc32c_portable(uint32_t crc, const void *p, size_t n) {
  return ~crc_tables(~crc, p, n);
}

uint32_t clb_crc32c(uint32_t crc, const void *p, size_t n) {
  // A cache of a constant: threads that race here store the same pointer.
  static _Atomic(crc_fn *) cached;
  crc_fn *best = atomic_load_explicit(&cached, memory_order_relaxed);
  if (!best) {
    best = best_crc();
    atomic_store_explicit(&cached, best, memory_order_relaxed);
  }
  return ~best(~crc, p, n);
}
