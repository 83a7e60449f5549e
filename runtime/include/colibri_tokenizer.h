/* Text to token ids and back, from the tokenizer tables of a container. Needs nothing else of the library.
 *
 * A tokenizer is immutable: any number of threads may use one. Text is UTF-8; a byte that is no part of it is taken as
 * U+FFFD. Not every container has tables: its tokenizer may be one that this code cannot do exactly.
 *
 *     colibri_tokenizer *tokenizer;
 *     char error[COLIBRI_ERROR_BYTES];
 *     if (colibri_tokenizer_open("model.colibri", &tokenizer, error, sizeof error) != COLIBRI_OK) ...
 *     uint32_t ids[64];
 *     size_t n_ids;
 *     colibri_tokenizer_encode(tokenizer, text, strlen(text), true, ids, 64, &n_ids);  // n_ids > 64: call again
 *     colibri_tokenizer_close(tokenizer);
 */
#ifndef COLIBRI_TOKENIZER_H
#define COLIBRI_TOKENIZER_H

#include "colibri.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct colibri_tokenizer colibri_tokenizer;

/* Reads the tables of a container. On failure *tokenizer is NULL and `error` tells why: COLIBRI_ERROR_UNSUPPORTED when
 * it has none, with what its tokenizer is. */
COLIBRI_API colibri_status colibri_tokenizer_open(const char *path, colibri_tokenizer **tokenizer, char *error,
                                                  size_t error_bytes);

/* The same from the bytes of the section (docs/format.md), which are copied. */
COLIBRI_API colibri_status colibri_tokenizer_parse(const void *tables, size_t n_bytes, colibri_tokenizer **tokenizer,
                                                   char *error, size_t error_bytes);

COLIBRI_API void colibri_tokenizer_close(colibri_tokenizer *tokenizer);

COLIBRI_API uint32_t colibri_tokenizer_n_tokens(const colibri_tokenizer *tokenizer);

/* The ids of a text. `add_special`: with what the tokenizer puts around one, as a beginning-of-text id. Special tokens
 * in the text itself are recognized. Writes at most `capacity` ids; *n_ids is how many there are.
 * COLIBRI_ERROR_MEMORY, or COLIBRI_ERROR_UNSUPPORTED for a text that takes unreasonably long. */
COLIBRI_API colibri_status colibri_tokenizer_encode(const colibri_tokenizer *tokenizer, const char *text,
                                                    size_t n_bytes, bool add_special, uint32_t *ids, size_t capacity,
                                                    size_t *n_ids);

/* The text of ids, without special tokens, always UTF-8. Writes at most `capacity` bytes and no NUL; *n_bytes is how
 * many there are. Ids that are no tokens have no text. */
COLIBRI_API colibri_status colibri_tokenizer_decode(const colibri_tokenizer *tokenizer, const uint32_t *ids,
                                                    size_t n_ids, char *text, size_t capacity, size_t *n_bytes);

/* The bytes of one token within a text, which need not be whole characters; none for a special token. Writes at most
 * `capacity` bytes; *n_bytes is how many there are. */
COLIBRI_API void colibri_tokenizer_piece(const colibri_tokenizer *tokenizer, uint32_t id, char *bytes, size_t capacity,
                                         size_t *n_bytes);

/* Makes UTF-8 of bytes that come in pieces: holds back the beginning of a character until it is whole. */
typedef struct {
  unsigned char held[4];
  size_t n_held;
} colibri_utf8;

/* Adds bytes; writes what can be shown, at most 3 * (n_bytes + 4) bytes. Returns how many. Begin with a zeroed state.
 */
COLIBRI_API size_t colibri_utf8_push(colibri_utf8 *state, const char *bytes, size_t n_bytes, char *out);

/* What is left at the end: U+FFFD for a character that never became whole. At most 12 bytes. */
COLIBRI_API size_t colibri_utf8_finish(colibri_utf8 *state, char *out);

#ifdef __cplusplus
}
#endif

#endif
