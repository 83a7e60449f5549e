// libFuzzer's target for the container reader; see mutate.h for what an input is.
#include "mutate.h"

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t n, size_t max, unsigned seed);
size_t LLVMFuzzerCustomCrossOver(const uint8_t *a, size_t a_bytes, const uint8_t *b, size_t b_bytes, uint8_t *out,
                                 size_t max, unsigned seed);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t n, size_t max, unsigned seed) {
  return fuzz_mutate(data, n, max, seed);
}

size_t LLVMFuzzerCustomCrossOver(const uint8_t *a, size_t a_bytes, const uint8_t *b, size_t b_bytes, uint8_t *out,
                                 size_t max, unsigned seed) {
  return fuzz_cross(a, a_bytes, b, b_bytes, out, max, seed);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  char error[512];
  (void)fuzz_open(data, n, error, sizeof error);
  return 0;
}
