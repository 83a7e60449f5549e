// What colibri-run prints about memory and time: for people on standard error, and as parts of its JSON document.
#ifndef COLIBRI_RUN_REPORT_H
#define COLIBRI_RUN_REPORT_H

#include <stdbool.h>
#include <stddef.h>

#include "colibri.h"

// Counters at the end of the prompt and at the end of the run; their difference is decoding.
typedef struct {
  colibri_metrics prefill, total;
  colibri_layer_metrics *prefill_layers, *layers;  // [n_layers]
  size_t n_layers;
  double *token_seconds;  // [n_token_seconds] of decoding, sorted by the report
  size_t n_token_seconds;
  colibri_drive drive;
  bool has_drive;
} run_profile;

void print_json_string(const char *text);
void print_json_text(const char *text, size_t n_bytes);

void print_memory(const colibri_memory *m);
void print_memory_json(const colibri_memory *m);

void print_profile(run_profile *p);
void print_profile_json(run_profile *p);

#endif
