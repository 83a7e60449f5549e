// SHA-256 (FIPS 180-4), by the CPU's SHA instructions where it has them.
#ifndef CLB_SHA256_H
#define CLB_SHA256_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  uint32_t words[8];
  uint64_t n_bytes;    // hashed so far, including those waiting in buffer
  uint8_t buffer[64];  // the last, incomplete 64-byte chunk
  void (*compress)(uint32_t words[8], const uint8_t *chunks, size_t n_chunks);
} clb_sha256_state;

void clb_sha256_init(clb_sha256_state *s);
void clb_sha256_init_portable(clb_sha256_state *s);  // without SHA instructions: the reference
void clb_sha256_update(clb_sha256_state *s, const void *p, size_t n);
void clb_sha256_final(clb_sha256_state *s, uint8_t digest[32]);  // s must be initialised again before reuse

// All three at once.
void clb_sha256(const void *p, size_t n, uint8_t digest[32]);

#ifdef __cplusplus
}
#endif

#endif
