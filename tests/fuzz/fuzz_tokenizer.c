// Tokenizer tables as untrusted input: u16 length of a text, the text, the section. Whatever the tables are, parsing
// ends with a tokenizer or a refusal, and with a tokenizer encoding, decoding and streaming end in bounds.
#include "fuzz_tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "colibri_tokenizer.h"

enum { MAX_IDS = 512, MAX_TEXT = 1024 };

static void use(const colibri_tokenizer *tokenizer, const uint8_t *text, size_t n_text) {
  static uint32_t ids[MAX_IDS];
  static char out[MAX_TEXT], shown[3 * (MAX_TEXT + 4)];
  size_t n_ids, n_bytes;
  if (colibri_tokenizer_encode(tokenizer, (const char *)text, n_text, true, ids, MAX_IDS, &n_ids) != COLIBRI_OK) return;
  const size_t n = n_ids < MAX_IDS ? n_ids : MAX_IDS;
  for (size_t i = 0; i < n; i++) {
    if (ids[i] >= colibri_tokenizer_n_tokens(tokenizer)) abort();
  }
  if (colibri_tokenizer_decode(tokenizer, ids, n, out, sizeof out, &n_bytes) != COLIBRI_OK) return;
  colibri_utf8 state = {0};
  for (size_t i = 0; i < n; i++) {
    colibri_tokenizer_piece(tokenizer, ids[i], out, sizeof out, &n_bytes);
    if (colibri_utf8_push(&state, out, n_bytes < sizeof out ? n_bytes : sizeof out, shown) > sizeof shown) abort();
  }
  colibri_utf8_finish(&state, shown);
}

bool fuzz_tokenizer(const uint8_t *data, size_t n, char *error, size_t error_bytes) {
  if (n < 2) return false;
  const size_t wanted = (size_t)(data[0] | data[1] << 8) % 256, left = n - 2;
  const size_t n_text = wanted < left ? wanted : left;
  colibri_tokenizer *tokenizer;
  const uint8_t *tables = data + 2 + n_text;
  if (colibri_tokenizer_parse(tables, left - n_text, &tokenizer, error, error_bytes) != COLIBRI_OK) return false;
  use(tokenizer, data + 2, n_text);
  colibri_tokenizer_close(tokenizer);
  return true;
}

#ifdef FUZZ_TARGET
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  char error[COLIBRI_ERROR_BYTES];
  (void)fuzz_tokenizer(data, n, error, sizeof error);
  return 0;
}
#endif
