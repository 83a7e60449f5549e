// Text in and text out for colibri-run.
#ifndef COLIBRI_RUN_TEXT_H
#define COLIBRI_RUN_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "colibri_tokenizer.h"

typedef struct {
  colibri_tokenizer *tokenizer;  // NULL: ids in, ids out
  colibri_utf8 utf8;
  char *bytes;  // generated, [n_bytes]
  size_t n_bytes;
  bool odd_prompt;  // it is not UTF-8
} run_text;

// The ids of a prompt, with room for `more` behind them; free() frees them. Opens the model's tokenizer.
colibri_status text_encode(run_text *t, const char *model, const char *prompt, size_t more, uint32_t **ids,
                           size_t *n_ids, char *error, size_t error_bytes);

// Adds a token to the text; prints what is whole of it if it is to be shown. False without memory.
bool text_add(run_text *t, uint32_t id, bool shown);
bool text_finish(run_text *t, bool shown);

void text_close(run_text *t);

#endif
