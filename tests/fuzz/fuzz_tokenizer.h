#ifndef FUZZ_TOKENIZER_H
#define FUZZ_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Parses and uses one input; whether its tables were accepted.
bool fuzz_tokenizer(const uint8_t *data, size_t n, char *error, size_t error_bytes);

#endif
