// A compute loop of somebody else over the expert store: for every row of MODEL the experts named on the command line,
// with the next row's read ahead meanwhile. What it computes with a block is the sum of its bytes.
//
//   cc foreign_loop.c -lcolibri -o foreign_loop && ./foreign_loop model.colibri 0 3 5
#include <colibri/container.h>
#include <colibri/store.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST_EXPERTS = 64 };

// Whatever the backend does with an expert: here on the CPU, elsewhere a copy to another device.
static uint64_t compute(const clb_expert *expert) {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < expert->layout->bytes; i++) sum += expert->data[i];
  return sum;
}

static clb_store_status run_row(clb_store *store, size_t row, const uint32_t *experts, size_t n) {
  if (!clb_store_begin(store, row, experts, n)) return CLB_STORE_FAILED;
  (void)clb_store_hint(store, row + 1, experts, n);  // a guess, read when nothing else is; refused after the last row
  clb_expert expert;
  clb_store_status status;
  while ((status = clb_store_next(store, &expert)) == CLB_STORE_READY) {  // those in memory first
    printf("%zu %" PRIu32 " %" PRIu64 "\n", row, expert.expert, compute(&expert));
    clb_store_release(store, expert.slot);
  }
  clb_store_end(store);
  return status;
}

int main(int argc, char **argv) {
  char error[512] = "usage: foreign_loop MODEL EXPERT...";
  uint32_t experts[MOST_EXPERTS];
  const size_t n = argc > 2 && argc - 2 <= MOST_EXPERTS ? (size_t)argc - 2 : 0;
  for (size_t i = 0; i < n; i++) experts[i] = (uint32_t)strtoul(argv[i + 2], NULL, 10);
  clb_container *container = n > 0 ? clb_container_open(argv[1], error, sizeof error) : NULL;
  clb_store *store = NULL;
  if (container != NULL) {
    clb_store_sizes sizes;
    clb_store_measure(container, &sizes);
    const clb_store_options options = {.cache_bytes = sizes.minimum_bytes * 4, .io = CLB_IO_AUTO};
    store = clb_store_open(container, &options, error, sizeof error);
  }
  clb_store_status status = store == NULL ? CLB_STORE_FAILED : CLB_STORE_DONE;
  for (size_t row = 0; status == CLB_STORE_DONE && row < clb_container_n_rows(container); row++) {
    status = run_row(store, row, experts, n);
  }
  if (status != CLB_STORE_DONE) fprintf(stderr, "%s\n", store == NULL ? error : clb_store_error(store));
  clb_store_close(store);
  clb_container_close(container);
  return status == CLB_STORE_DONE ? 0 : 1;
}
