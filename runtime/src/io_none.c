// A backend that brings nothing: every read is there at once. For simulation: what is in the cache is decided as
// always, and its memory is never touched.
#include <stdlib.h>

#include "io_backend.h"

typedef struct {
  clb_read_queue finished;
} no_reads;

static void *none_open(const clb_io_setup *setup, char *reason, size_t reason_bytes) {
  (void)setup, (void)reason, (void)reason_bytes;
  return calloc(1, sizeof(no_reads));
}

static void none_submit(void *io, clb_read *read) {
  no_reads *none = io;
  read->status = 0;
  read->arrived(read);
  clb_read_push(&none->finished, read);
}

static clb_read *none_poll(void *io) {
  no_reads *none = io;
  return clb_read_pop(&none->finished);
}

static bool none_withdraw(void *io, clb_read *read) {
  (void)io, (void)read;
  return false;
}

const clb_io_backend clb_io_none = {.name = "none",
                                    .open = none_open,
                                    .close = free,
                                    .submit = none_submit,
                                    .poll = none_poll,
                                    .wait = none_poll,
                                    .withdraw = none_withdraw};
