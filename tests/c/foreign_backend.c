// An engine of somebody else, for tests/test_install.py: sees the installed headers and the shared library only.
//
//   foreign_backend FILE TOKEN   the sum of each expert's numbers (F32), read through the expert store in a cache of
//   two
//                                blocks; then the most likely token after TOKEN, by the engine
#include <colibri.h>
#include <colibri/container.h>
#include <colibri/store.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_EXPERTS = 64 };

static int fail(const char *text) {
  fprintf(stderr, "%s\n", text);
  return 1;
}

static double sum_of(const clb_expert *e) {
  double sum = 0;
  for (uint32_t p = 0; p < e->layout->n_parts; p++) {
    const clb_part *part = &e->layout->parts[p];
    const float *values = (const float *)(const void *)(e->data + part->offset);
    for (uint64_t i = 0; i < part->rows * part->cols; i++) sum += (double)values[i];
  }
  return sum;
}

static int print_row(clb_store *store, const clb_container *container, size_t row) {
  uint32_t experts[MAX_EXPERTS];
  const uint32_t n = clb_container_row(container, row)->n_experts;
  if (n > MAX_EXPERTS) return fail("too many experts");
  for (uint32_t i = 0; i < n; i++) experts[i] = n - 1 - i;
  if (!clb_store_begin(store, row, experts, n)) return fail(clb_store_error(store));
  clb_expert e;
  clb_store_status status;
  while ((status = clb_store_next(store, &e)) == CLB_STORE_READY) {
    printf("%zu %" PRIu32 " %.17g\n", row, e.expert, sum_of(&e));
    clb_store_release(store, e.slot);
  }
  clb_store_end(store);
  return status == CLB_STORE_DONE ? 0 : fail(clb_store_error(store));
}

static int print_blocks(const char *path) {
  char error[COLIBRI_ERROR_BYTES];
  clb_container *container = clb_container_open(path, error, sizeof error);
  if (container == NULL) return fail(error);
  clb_store_sizes sizes;
  clb_store_measure(container, &sizes);
  const clb_store_options options = {.cache_bytes = sizes.minimum_bytes, .check = CLB_CHECK_ALWAYS};
  clb_store *store = clb_store_open(container, &options, error, sizeof error);
  int failure = store == NULL ? fail(error) : 0;
  for (size_t row = 0; failure == 0 && row < clb_container_n_rows(container); row++) {
    failure = print_row(store, container, row);
  }
  clb_store_close(store);
  clb_container_close(container);
  return failure;
}

static int print_next_token(const char *path, uint32_t token) {
  char error[COLIBRI_ERROR_BYTES];
  colibri_options options;
  colibri_options_init(&options);
  options.check = COLIBRI_CHECK_ALWAYS;
  colibri_model *model;
  if (colibri_open(path, &options, &model, error, sizeof error) != COLIBRI_OK) return fail(error);
  colibri_info info;
  colibri_get_info(model, &info);
  float *logits = malloc(info.vocab_size * sizeof *logits);
  int failure = logits == NULL ? fail("no memory") : 0;
  if (failure == 0 && colibri_eval(model, &token, 1, logits, 1) != COLIBRI_OK) failure = fail(colibri_error(model));
  uint64_t best = 0;
  for (uint64_t i = 1; failure == 0 && i < info.vocab_size; i++) best = logits[i] > logits[best] ? i : best;
  if (failure == 0) printf("next %" PRIu64 "\n", best);
  free(logits);
  colibri_close(model);
  return failure;
}

int main(int argc, char **argv) {
  if (argc != 3) return fail("usage: foreign_backend FILE TOKEN");
  const int failure = print_blocks(argv[1]);
  return failure != 0 ? failure : print_next_token(argv[1], (uint32_t)strtoul(argv[2], NULL, 0));
}
