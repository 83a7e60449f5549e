/* The declarations of runtime/include/colibri_tokenizer.h, for cffi; a test compares the two. */
typedef struct colibri_tokenizer colibri_tokenizer;

colibri_status colibri_tokenizer_open(const char *path, colibri_tokenizer **tokenizer, char *error,
                                      size_t error_bytes);
colibri_status colibri_tokenizer_parse(const void *tables, size_t n_bytes, colibri_tokenizer **tokenizer,
                                       char *error, size_t error_bytes);
void colibri_tokenizer_close(colibri_tokenizer *tokenizer);
uint32_t colibri_tokenizer_n_tokens(const colibri_tokenizer *tokenizer);
colibri_status colibri_tokenizer_encode(const colibri_tokenizer *tokenizer, const char *text,
                                        size_t n_bytes, bool add_special, uint32_t *ids, size_t capacity,
                                        size_t *n_ids);
colibri_status colibri_tokenizer_decode(const colibri_tokenizer *tokenizer, const uint32_t *ids,
                                        size_t n_ids, char *text, size_t capacity, size_t *n_bytes);
void colibri_tokenizer_piece(const colibri_tokenizer *tokenizer, uint32_t id, char *bytes, size_t capacity,
                             size_t *n_bytes);

typedef struct {
  unsigned char held[4];
  size_t n_held;
} colibri_utf8;

size_t colibri_utf8_push(colibri_utf8 *state, const char *bytes, size_t n_bytes, char *out);
size_t colibri_utf8_finish(colibri_utf8 *state, char *out);
