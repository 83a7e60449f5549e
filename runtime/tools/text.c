#include "text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Whether a text goes through as it is.
static bool is_utf8(const char *text, size_t n_bytes) {
  char *out = malloc(3 * (n_bytes + 8));
  if (!out) return true;  // what needs memory next will say so
  colibri_utf8 state = {0};
  size_t n = colibri_utf8_push(&state, text, n_bytes, out);
  n += colibri_utf8_finish(&state, out + n);
  const bool same = n == n_bytes && memcmp(out, text, n) == 0;
  free(out);
  return same;
}

static colibri_status encode(const run_text *t, const char *prompt, size_t more, uint32_t **ids, size_t *n_ids) {
  const size_t n_bytes = strlen(prompt);
  colibri_status status = colibri_tokenizer_encode(t->tokenizer, prompt, n_bytes, true, NULL, 0, n_ids);
  if (status != COLIBRI_OK) return status;
  *ids = calloc(*n_ids + more + 1, sizeof **ids);
  if (!*ids) return COLIBRI_ERROR_MEMORY;
  return colibri_tokenizer_encode(t->tokenizer, prompt, n_bytes, true, *ids, *n_ids, n_ids);
}

colibri_status text_encode(run_text *t, const char *model, const char *prompt, size_t more, uint32_t **ids,
                           size_t *n_ids, char *error, size_t error_bytes) {
  colibri_status status = colibri_tokenizer_open(model, &t->tokenizer, error, error_bytes);
  if (status == COLIBRI_ERROR_UNSUPPORTED) {
    const size_t used = strlen(error);
    snprintf(error + used, error_bytes - used, "; give ids with --tokens, or use 'colibri run'");
  }
  if (status != COLIBRI_OK) return status;
  t->odd_prompt = !is_utf8(prompt, strlen(prompt));
  status = encode(t, prompt, more, ids, n_ids);
  const bool memory = status == COLIBRI_ERROR_MEMORY;
  if (status != COLIBRI_OK) snprintf(error, error_bytes, "--prompt: %s", memory ? "no memory" : "it takes too long");
  return status;
}

// Appends what is whole of the bytes.
static bool append(run_text *t, const char *bytes, size_t n_bytes, bool last, bool shown) {
  char *text = realloc(t->bytes, t->n_bytes + 3 * (n_bytes + 8));
  if (!text) return false;
  t->bytes = text;
  size_t n = colibri_utf8_push(&t->utf8, bytes, n_bytes, text + t->n_bytes);
  if (last) n += colibri_utf8_finish(&t->utf8, text + t->n_bytes + n);
  if (shown) {
    fwrite(text + t->n_bytes, 1, n, stdout);
    fflush(stdout);
  }
  t->n_bytes += n;
  return true;
}

bool text_add(run_text *t, uint32_t id, bool shown) {
  size_t n_bytes;
  colibri_tokenizer_piece(t->tokenizer, id, NULL, 0, &n_bytes);
  if (n_bytes == 0) return true;
  char *bytes = malloc(n_bytes);
  if (!bytes) return false;
  colibri_tokenizer_piece(t->tokenizer, id, bytes, n_bytes, &n_bytes);
  const bool added = append(t, bytes, n_bytes, false, shown);
  free(bytes);
  return added;
}

bool text_finish(run_text *t, bool shown) {
  return append(t, "", 0, true, shown);
}

void text_close(run_text *t) {
  colibri_tokenizer_close(t->tokenizer);
  free(t->bytes);
}
