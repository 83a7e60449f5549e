// See sha256.h. Constants and functions are those of FIPS 180-4.
#include "sha256.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

typedef void compress_fn(uint32_t words[8], const uint8_t *chunks, size_t n_chunks);

static const uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static inline uint32_t load_be(const uint8_t *p) {
  return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static inline void store_be(uint8_t *p, uint32_t v) {
  for (int i = 0; i < 4; i++) p[i] = (uint8_t)(v >> (24 - 8 * i));
}

// ---------------------------------------------------------------------------------------------------------------------
// Portable

static inline uint32_t rotate(uint32_t v, int n) {
  return v >> n | v << (32 - n);
}

static void message_schedule(uint32_t w[64], const uint8_t *chunk) {
  for (int i = 0; i < 16; i++) w[i] = load_be(chunk + 4 * i);
  for (int i = 16; i < 64; i++) {
    uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
    uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
}

static void compress_portable(uint32_t words[8], const uint8_t *chunks, size_t n_chunks) {
  for (; n_chunks > 0; n_chunks--, chunks += 64) {
    uint32_t w[64];
    message_schedule(w, chunks);
    uint32_t a = words[0], b = words[1], c = words[2], d = words[3];
    uint32_t e = words[4], f = words[5], g = words[6], h = words[7];
    for (int i = 0; i < 64; i++) {
      uint32_t s1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25), choose = (e & f) ^ (~e & g);
      uint32_t s0 = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22), majority = (a & b) ^ (a & c) ^ (b & c);
      uint32_t t = h + s1 + choose + round_constants[i] + w[i];
      h = g, g = f, f = e, e = d + t, d = c, c = b, b = a, a = t + s0 + majority;
    }
    words[0] += a, words[1] += b, words[2] += c, words[3] += d;
    words[4] += e, words[5] += f, words[6] += g, words[7] += h;
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// x86-64 with the SHA extension

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#define SHA_NI __attribute__((target("sha,sse4.1")))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

// Four message words from the sixteen before them, oldest first.
SHA_NI static inline __m128i next_words(__m128i w0, __m128i w1, __m128i w2, __m128i w3) {
  __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(w0, w1), _mm_alignr_epi8(w3, w2, 4));
  return _mm_sha256msg2_epu32(sum, w3);
}

// The instructions hold the state as (a, b, e, f) and (c, d, g, h), highest lane first.
SHA_NI static void compress_sha_ni(uint32_t words[8], const uint8_t *chunks, size_t n_chunks) {
  const __m128i big_endian = _mm_setr_epi8(3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 15, 14, 13, 12);
  __m128i *memory = (__m128i *)(void *)words;
  __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128(memory), 0xB1);
  __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128(memory + 1), 0x1B);
  __m128i abef = _mm_alignr_epi8(badc, hgfe, 8), cdgh = _mm_blend_epi16(hgfe, badc, 0xF0);
  for (; n_chunks > 0; n_chunks--, chunks += 64) {
    const __m128i *p = (const __m128i *)(const void *)chunks;
    __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w0 = _mm_shuffle_epi8(_mm_loadu_si128(p), big_endian);
    __m128i w1 = _mm_shuffle_epi8(_mm_loadu_si128(p + 1), big_endian);
    __m128i w2 = _mm_shuffle_epi8(_mm_loadu_si128(p + 2), big_endian);
    __m128i w3 = _mm_shuffle_epi8(_mm_loadu_si128(p + 3), big_endian);
    UNROLL for (int i = 0; i < 16; i++) {
      const __m128i *k = (const __m128i *)(const void *)(round_constants + 4 * i);
      __m128i input = _mm_add_epi32(w0, _mm_loadu_si128(k));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, input);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(input, 0x0E));
      __m128i next = i < 12 ? next_words(w0, w1, w2, w3) : w0;
      w0 = w1, w1 = w2, w2 = w3, w3 = next;
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  __m128i feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(memory, _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(memory + 1, _mm_alignr_epi8(dchg, feba, 8));
}

static compress_fn *best_compress(void) {
  enum { HAS_SHA = 1 << 29 };  // leaf 7, ebx
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSE4_1)) return compress_portable;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & HAS_SHA) ? compress_sha_ni : compress_portable;
}

#else

static compress_fn *best_compress(void) {
  return compress_portable;
}

#endif

// ---------------------------------------------------------------------------------------------------------------------

void clb_sha256_init_portable(clb_sha256_state *s) {
  static const uint32_t first[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  memcpy(s->words, first, sizeof first);
  s->n_bytes = 0;
  s->compress = compress_portable;
}

void clb_sha256_init(clb_sha256_state *s) {
  // A cache of a constant: threads that race here store the same pointer.
  static _Atomic(compress_fn *) cached;
  compress_fn *best = atomic_load_explicit(&cached, memory_order_relaxed);
  if (!best) {
    best = best_compress();
    atomic_store_explicit(&cached, best, memory_order_relaxed);
  }
  clb_sha256_init_portable(s);
  s->compress = best;
}

void clb_sha256_update(clb_sha256_state *s, const void *data, size_t n) {
  const uint8_t *p = data;
  if (n == 0) return;  // p may be NULL then
  size_t n_waiting = s->n_bytes % 64;
  s->n_bytes += n;
  if (n_waiting > 0) {
    size_t n_taken = n < 64 - n_waiting ? n : 64 - n_waiting;
    memcpy(s->buffer + n_waiting, p, n_taken);
    p += n_taken;
    n -= n_taken;
    if (n_waiting + n_taken < 64) return;
    s->compress(s->words, s->buffer, 1);
  }
  s->compress(s->words, p, n / 64);
  if (n % 64 > 0) memcpy(s->buffer, p + n / 64 * 64, n % 64);
}

void clb_sha256_final(clb_sha256_state *s, uint8_t digest[32]) {
  uint8_t padding[72] = {0x80};
  uint64_t n_bits = s->n_bytes * 8;
  size_t n_padding = 64 - (s->n_bytes + 8) % 64;  // 1 to 64 bytes, then the length
  store_be(padding + n_padding, (uint32_t)(n_bits >> 32));
  store_be(padding + n_padding + 4, (uint32_t)n_bits);
  clb_sha256_update(s, padding, n_padding + 8);
  for (int i = 0; i < 8; i++) store_be(digest + 4 * i, s->words[i]);
}

void clb_sha256(const void *p, size_t n, uint8_t digest[32]) {
  clb_sha256_state s;
  clb_sha256_init(&s);
  clb_sha256_update(&s, p, n);
  clb_sha256_final(&s, digest);
}
