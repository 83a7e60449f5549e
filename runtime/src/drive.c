// What the drive can give: random blocks of a container, past the page cache, as many at once as the store reads.
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "aligned_io.h"
#include "container.h"
#include "engine.h"

typedef struct {
  const clb_container *container;
  const clb_file *file;
  double until;
  size_t buffer_bytes;
} probe;

typedef struct {
  const probe *probe;
  uint64_t random;
  uint64_t bytes, reads, offset;
  size_t n_bytes;  // of the last read
  int failure;     // errno, or -1: no memory
  pthread_t thread;
} prober;

static uint64_t next_random(uint64_t *state) {  // xorshift64
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return *state;
}

// A block of the container, each row as likely as another.
static clb_block choose_block(prober *p) {
  const clb_container *c = p->probe->container;
  const size_t row = (size_t)(next_random(&p->random) % clb_container_n_rows(c));
  const uint32_t n = clb_container_row(c, row)->n_experts;
  clb_block block = {0};
  (void)clb_container_block(c, row, (size_t)(next_random(&p->random) % n), &block);
  return block;
}

static void *probe_thread(void *argument) {
  prober *p = argument;
  void *buffer = clb_pages_alloc(p->probe->buffer_bytes);
  p->failure = buffer ? 0 : -1;
  while (p->failure == 0 && clb_seconds() < p->probe->until) {
    const clb_block block = choose_block(p);
    p->offset = block.offset;
    p->n_bytes = (size_t)((block.bytes + CLB_IO_UNIT - 1) / CLB_IO_UNIT * CLB_IO_UNIT);
    p->failure = clb_file_read(p->probe->file, block.offset, buffer, p->n_bytes);
    if (p->failure) break;
    p->bytes += p->n_bytes;
    p->reads++;
  }
  clb_pages_free(buffer, p->probe->buffer_bytes);
  return NULL;
}

static size_t largest_block(const clb_container *c) {
  uint64_t largest = CLB_IO_UNIT;
  for (size_t row = 0; row < clb_container_n_rows(c); row++) {
    for (size_t e = 0; e < clb_container_row(c, row)->n_experts; e++) {
      clb_block block;
      if (clb_container_block(c, row, e, &block) && block.bytes > largest) largest = block.bytes;
    }
  }
  return (size_t)largest;
}

static colibri_status run_probe(probe *shared, size_t depth, double seconds, colibri_drive *out, clb_error error) {
  prober probers[CLB_STORE_MAX_IO_THREADS];
  size_t started = 0;
  sigset_t all, before;  // signals are the application's
  sigfillset(&all);
  const double start = clb_seconds();
  shared->until = start + seconds;
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (; started < depth; started++) {
    prober *p = &probers[started];
    *p = (prober){.probe = shared, .random = UINT64_C(0x9e3779b97f4a7c15) * (started + 1)};
    if (pthread_create(&p->thread, NULL, probe_thread, p) != 0) break;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  const prober *failed = NULL;
  for (size_t i = 0; i < started; i++) {
    pthread_join(probers[i].thread, NULL);
    out->bytes += probers[i].bytes;
    out->reads += probers[i].reads;
    if (probers[i].failure) failed = &probers[i];
  }
  if (started < depth || (failed && failed->failure < 0)) {
    return clb_fail(error, COLIBRI_ERROR_MEMORY, "no memory for %zu reads at once", depth);
  }
  if (failed) {
    char text[256];
    clb_file_describe(failed->failure, failed->offset, failed->n_bytes, text, sizeof text);
    return clb_fail(error, COLIBRI_ERROR_IO, "%s", text);
  }
  out->seconds = clb_seconds() - start;
  out->bytes_per_second = out->seconds > 0 ? (double)out->bytes / out->seconds : 0;
  return COLIBRI_OK;
}

colibri_status colibri_probe_drive(const char *path, uint32_t depth, double seconds, colibri_drive *out,
                                   char *error_text, size_t error_bytes) {
  const clb_error error = {error_text, error_bytes};
  *out = (colibri_drive){.depth = depth ? depth : CLB_STORE_DEFAULT_IO_THREADS};
  if (out->depth > CLB_STORE_MAX_IO_THREADS || !(seconds >= 0 && seconds <= 60)) {
    return clb_fail(error, COLIBRI_ERROR_ARGUMENT, "probe: expected up to %d reads at once and up to 60 seconds",
                    CLB_STORE_MAX_IO_THREADS);
  }
  char text[COLIBRI_ERROR_BYTES] = "";
  clb_container *container = clb_container_open(path, text, sizeof text);
  if (!container) return clb_fail(error, COLIBRI_ERROR_FORMAT, "%s", text);
  clb_file file;
  colibri_status status = COLIBRI_OK;
  if (!clb_file_open(&file, clb_container_fd(container), text, sizeof text)) {
    status = clb_fail(error, COLIBRI_ERROR_IO, "%s", text);
  } else if (clb_container_n_rows(container) > 0) {
    out->direct = file.direct;
    out->block_bytes = largest_block(container);
    probe shared = {.container = container, .file = &file, .buffer_bytes = out->block_bytes};
    status = run_probe(&shared, out->depth, seconds, out, error);
  }
  clb_file_close(&file);
  clb_container_close(container);
  return status;
}
