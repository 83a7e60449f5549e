// Changes to a container that keep it worth reading: after each, sizes, offsets and checksums are mostly made to fit,
// so that the checks behind them are reached.
//
// An input is a container's first bytes: page 0 and the sections. What is missing up to data_offset is zero (the
// reserve), and file_size is what page 0 says.
#ifndef CLB_FUZZ_MUTATE_H
#define CLB_FUZZ_MUTATE_H

#include <stddef.h>
#include <stdint.h>

enum {
  FUZZ_MAX_BYTES = 16384,   // of an input
  FUZZ_MAX_MEMORY = 32768,  // of the memory that is opened
};

// Changes the n bytes at `data`, which has room for `max` (at most FUZZ_MAX_BYTES); returns the new size.
size_t fuzz_mutate(uint8_t *data, size_t n, size_t max, uint64_t seed);

// Puts `a` with some sections of `b` into `out`; returns the size, 0 if the two are no containers.
size_t fuzz_cross(const uint8_t *a, size_t a_bytes, const uint8_t *b, size_t b_bytes, uint8_t *out, size_t max,
                  uint64_t seed);

// Opens an input and checks what the reader hands out. Returns 1 if it was accepted; `error` gets the refusal.
int fuzz_open(const uint8_t *data, size_t n, char *error, size_t error_bytes);

// libFuzzer's, or a stand-in.
size_t LLVMFuzzerMutate(uint8_t *data, size_t n, size_t max);

#endif
