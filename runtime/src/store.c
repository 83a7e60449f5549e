// The expert store: opening, requests for blocks, and the reads they need. What stays in memory: store_cache.c.
//
// Reads. A block is read in pieces of about piece_bytes, so that the first block of a request is complete while the
// others are still under way, and several reads are in flight even for a single miss. Blocks smaller than that which
// follow one another in the file are read at once. A request's misses are read in the order of the file.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "store.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "crc32c.h"
#include "store_internal.h"

// Measured with O_DIRECT on a virtual disk of 1.0-1.3 GB/s, blocks of 2.5 and 9 MiB, 1-8 threads: pieces from 512 KiB
// up to whole blocks are within the noise of one another, 256 KiB lose up to 25 % with one thread. 1 MiB is also where
// NVMe drives reach their bandwidth with a few reads in flight.
enum { PIECE_BYTES = 1 << 20, MAX_PIECES = 64 };

// ---------------------------------------------------------------------------------------------------------------------
// Sizes

static uint64_t memory_page(void) {
  long page = sysconf(_SC_PAGESIZE);
  return page > CLB_IO_UNIT ? (uint64_t)page : CLB_IO_UNIT;
}

static uint64_t block_memory(const clb_container *c, size_t row, size_t expert, uint64_t page) {
  clb_block block;
  return clb_container_block(c, row, expert, &block) ? align_up(block.bytes, page) : 0;
}

void clb_store_measure(const clb_container *container, clb_store_sizes *out) {
  uint64_t page = memory_page(), largest = 0, second = 0, top_k = 0;
  *out = (clb_store_sizes){0};
  (void)clb_spec_u64(container, "top_k", &top_k);
  for (size_t r = 0; r < clb_container_n_rows(container); r++) {
    const clb_row *row = clb_container_row(container, r);
    uint64_t largest_of_row = 0;
    for (size_t e = 0; e < row->n_experts; e++) {
      uint64_t n = block_memory(container, r, e, page);
      out->n_blocks++;
      out->all_bytes += n;
      if (n > largest_of_row) largest_of_row = n;
      if (n >= largest) {
        second = largest;
        largest = n;
      } else if (n > second) {
        second = n;
      }
    }
    if (row->stream == 0) out->token_bytes += top_k * largest_of_row;
  }
  out->minimum_bytes = largest + second;
}

// ---------------------------------------------------------------------------------------------------------------------
// Open and close

bool clb_fail_store(clb_store *s, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(s->error, sizeof s->error, format, args);
  va_end(args);
  return false;
}

static bool allocate_request(clb_store *s) {
  const size_t n = clb_container_n_columns(s->container);
  s->request.items = calloc(n, sizeof *s->request.items);
  s->request.missing = calloc(n, sizeof *s->request.missing);
  s->request.ready = calloc(n, sizeof *s->request.ready);
  return s->request.items != NULL && s->request.missing != NULL && s->request.ready != NULL;
}

// Maps the file. False, and why in s->reason, when blocks cannot be handed out that way.
static bool map_file(clb_store *s) {
  const int fd = clb_container_fd(s->container);
  const uint64_t size = clb_container_file_size(s->container);
  void *map = size > SIZE_MAX ? MAP_FAILED : mmap(NULL, (size_t)size, PROT_READ, MAP_SHARED, fd, 0);
  if (map == MAP_FAILED) {
    snprintf(s->reason, sizeof s->reason, "the file cannot be mapped, so pread is used; ");
    return false;
  }
  s->map = map;
  s->map_bytes = (size_t)size;
  return true;
}

static void unmap_file(clb_store *s) {
  if (s->map != NULL) munmap((void *)(uintptr_t)s->map, s->map_bytes);
  s->map = NULL;
}

static void *open_backend(clb_store *s, const clb_io_backend *backend, uint32_t n_threads, char *reason,
                          size_t reason_bytes) {
  const clb_io_setup setup = {.file = &s->file,
                              .n_threads = n_threads,
                              .memory = s->arena,
                              .unit_bytes = s->one_size ? (size_t)s->slot_bytes : 0,
                              .n_units = s->n_slots};
  s->backend = backend;
  return backend->open(&setup, reason, reason_bytes);
}

static bool open_nothing(clb_store *s) {
  if (!clb_cache_reserve(s))
    return clb_fail_store(s, "no addresses for an expert cache of %" PRIu64 " bytes", s->budget);
  s->io = open_backend(s, &clb_io_none, 1, NULL, 0);
  return s->io != NULL || clb_fail_store(s, "no memory for a simulation");
}

// A backend that cannot be had is replaced by pread, and the reason kept.
static bool open_io(clb_store *s, clb_io io, uint32_t n_threads) {
  char reason[128] = "";
  if (s->dry) return open_nothing(s);
  if (io == CLB_IO_MMAP && map_file(s)) {
    if (!clb_file_open_buffered(&s->file, clb_container_fd(s->container), "", s->error, sizeof s->error)) return false;
    s->io = open_backend(s, &clb_io_mmap, n_threads, reason, sizeof reason);
    if (s->io != NULL) {
      snprintf(s->reason, sizeof s->reason, "the file is mapped, as asked");
      return true;
    }
    snprintf(s->reason, sizeof s->reason, "mmap: %s, so pread is used; ", reason);
    unmap_file(s);
    clb_file_close(&s->file);
  }
  const bool opened =
      io == CLB_IO_BUFFERED
          ? clb_file_open_buffered(&s->file, clb_container_fd(s->container), "as asked", s->error, sizeof s->error)
          : clb_file_open(&s->file, clb_container_fd(s->container), s->error, sizeof s->error);
  if (!opened) return false;
  if (!clb_cache_reserve(s)) return clb_fail_store(s, "no memory for an expert cache of %" PRIu64 " bytes", s->budget);
  if (io == CLB_IO_URING) {
    s->io = open_backend(s, &clb_io_uring, n_threads, reason, sizeof reason);
    if (s->io == NULL) snprintf(s->reason, sizeof s->reason, "io_uring: %s, so pread is used; ", reason);
  }
  if (s->io == NULL) s->io = open_backend(s, &clb_io_pread, n_threads, reason, sizeof reason);
  if (s->io == NULL) return clb_fail_store(s, "%s", reason);
  const size_t n = strlen(s->reason);
  snprintf(s->reason + n, sizeof s->reason - n, "%s", s->file.reason);
  const size_t end = strlen(s->reason);
  if (n > 1 && end == n) s->reason[n - 2] = 0;  // the "; "
  return true;
}

static bool open_store(clb_store *s, const clb_store_options *options) {
  clb_store_sizes sizes;
  clb_store_measure(s->container, &sizes);
  uint32_t n_threads = options->io_threads == 0 ? CLB_STORE_DEFAULT_IO_THREADS : options->io_threads;
  if (n_threads > CLB_STORE_MAX_IO_THREADS) {
    return clb_fail_store(s, "io threads: %" PRIu32 ", expected at most %d", n_threads, CLB_STORE_MAX_IO_THREADS);
  }
  if ((unsigned)options->io > CLB_IO_BUFFERED)
    return clb_fail_store(s, "io: %d is no way of reading", (int)options->io);
  if (options->cache_bytes < sizes.minimum_bytes) {
    return clb_fail_store(s, "expert cache: %" PRIu64 " bytes, expected at least %" PRIu64 " (the two largest experts)",
                          options->cache_bytes, sizes.minimum_bytes);
  }
  s->budget = options->cache_bytes < sizes.all_bytes ? options->cache_bytes : sizes.all_bytes;
  s->check = options->check;
  s->n_blocks = (size_t)sizes.n_blocks;
  s->all_bytes = sizes.all_bytes;
  if (clb_container_fd(s->container) < 0)
    return clb_fail_store(s, "the container is in memory: it has no blocks to read");
  if (!clb_cache_plan(s) || !clb_cache_allocate(s) || !allocate_request(s)) {
    return clb_fail_store(s, "no memory for the tables of %" PRIu64 " experts", sizes.n_blocks);
  }
  const uint64_t piece = options->piece_bytes == 0 ? PIECE_BYTES : align_up(options->piece_bytes, CLB_IO_UNIT);
  s->piece_bytes = align_up(s->slot_bytes / MAX_PIECES, CLB_IO_UNIT);
  if (s->piece_bytes < piece) s->piece_bytes = piece;
  if (!open_io(s, options->io, n_threads)) return false;
  if (options->mirror != NULL && !clb_mirror_open(s, options->mirror, options->io == CLB_IO_BUFFERED)) return false;
  clb_hint_open(s);
  s->metrics.backend = s->backend->name;
  s->metrics.direct = s->file.direct;
  s->metrics.reason = s->reason;
  s->metrics.cache_bytes = s->budget;
  return true;
}

static clb_store *make_store(const clb_container *container, const clb_store_options *options, bool dry, char *error,
                             size_t error_bytes) {
  if (error_bytes > 0) error[0] = 0;
  clb_store *s = calloc(1, sizeof *s);
  if (s == NULL) {
    snprintf(error, error_bytes, "no memory for the expert store");
    return NULL;
  }
  s->container = container;
  s->dry = dry;
  s->file.fd = s->mirror.fd = -1;
  s->page = memory_page();
  s->n_free_transfers = N_TRANSFERS;
  s->retry = kNone;
  if (open_store(s, options)) return s;
  snprintf(error, error_bytes, "%s", s->error);
  clb_store_close(s);
  return NULL;
}

clb_store *clb_store_open(const clb_container *container, const clb_store_options *options, char *error,
                          size_t error_bytes) {
  return make_store(container, options, false, error, error_bytes);
}

clb_store *clb_store_open_dry(const clb_container *container, uint64_t cache_bytes, char *error, size_t error_bytes) {
  const clb_store_options options = {.cache_bytes = cache_bytes, .check = CLB_CHECK_NEVER};
  return make_store(container, &options, true, error, error_bytes);
}

void clb_store_close(clb_store *s) {
  if (s == NULL) return;
  if (s->io != NULL) {
    clb_store_end(s);
    (void)clb_hint_drop(s, true);
    while (s->n_unwanted > 0) s->n_unwanted -= s->backend->wait(s->io) != NULL;
    s->backend->close(s->io);
  }
  unmap_file(s);
  clb_file_close(&s->file);
  clb_file_close(&s->mirror);
  clb_cache_free(s);
  free(s->request.ready);
  free(s->request.missing);
  free(s->request.items);
  free(s);
}

const char *clb_store_error(const clb_store *s) {
  return s->error;
}

void clb_store_get_metrics(const clb_store *s, clb_store_metrics *out) {
  *out = s->metrics;
  out->used_bytes = s->sums[0] + s->sums[1] + s->sums[2];
}

// ---------------------------------------------------------------------------------------------------------------------
// Reads

size_t clb_pieces(const clb_store *s, uint64_t n_bytes) {
  const uint64_t n = (n_bytes + s->piece_bytes / 2) / s->piece_bytes;
  return n == 0 ? 1 : (size_t)n;
}

// On a reading thread, or on the caller's.
static void bytes_arrived(clb_read *read) {
  transfer *t = (transfer *)(void *)read;
  for (size_t i = 0; i < t->n_slots; i++) {
    slot *x = t->slots[i];
    if (atomic_fetch_sub(&x->pieces_left, 1) != 1 || x->check_bytes == 0) continue;
    x->found_crc = clb_crc32c(0, x->data, x->check_bytes);
    x->damaged = x->found_crc != x->crc32c;
  }
}

// A free transfer that reads `file` from `offset`. There must be one.
static transfer *new_transfer(clb_store *s, const clb_file *file, uint64_t offset, bool wanted) {
  transfer *t = s->transfers;
  while (t->busy) t++;
  s->n_free_transfers--;
  t->read = (clb_read){.file = file, .offset = offset, .urgent = wanted, .arrived = bytes_arrived};
  t->n_slots = 0;
  t->busy = true;
  t->wanted = wanted;
  return t;
}

static void add_part(transfer *t, slot *x, uint8_t *to, uint64_t n_bytes) {
  t->read.parts[t->read.n_parts++] = (struct iovec){to, (size_t)n_bytes};
  t->read.n_bytes += (size_t)n_bytes;
  t->slots[t->n_slots++] = x;
  x->transfers++;
}

static void submit(clb_store *s, transfer *t) {
  ++*(t->wanted ? &s->n_wanted : &s->n_unwanted);
  s->backend->submit(s->io, &t->read);
}

static void free_transfer(clb_store *s, transfer *t) {
  --*(t->wanted ? &s->n_wanted : &s->n_unwanted);
  t->busy = false;
  s->n_free_transfers++;
}

static void prepare_slot(const clb_store *s, slot *x, const clb_block *block, size_t n_pieces) {
  const block_state *b = &s->blocks[x->block];
  const bool check = s->check == CLB_CHECK_ALWAYS || (s->check == CLB_CHECK_FIRST && !b->checked);
  x->status = 0;
  x->damaged = false;
  x->check_bytes = check ? (size_t)block->bytes : 0;
  x->crc32c = block->crc32c;
  atomic_store(&x->pieces_left, (uint32_t)n_pieces);
}

static uint64_t place_of(const block_state *b, const clb_block *block) {
  return b->mirrored > 0 ? b->mirrored : block->offset;
}

void clb_read_block(clb_store *s, slot *x, const clb_block *block, bool wanted) {
  const block_state *b = &s->blocks[x->block];
  const uint64_t n_bytes = align_up(block->bytes, CLB_IO_UNIT);
  const size_t n_pieces = clb_pieces(s, n_bytes);
  const uint64_t piece = align_up((n_bytes + n_pieces - 1) / n_pieces, CLB_IO_UNIT);
  prepare_slot(s, x, block, (size_t)((n_bytes + piece - 1) / piece));
  for (uint64_t done = 0; done < n_bytes; done += piece) {
    transfer *t = new_transfer(s, clb_file_of(s, b), place_of(b, block) + done, wanted);
    add_part(t, x, x->data + done, n_bytes - done < piece ? n_bytes - done : piece);
    submit(s, t);
  }
}

static bool find_block(const clb_store *s, const block_state *b, clb_block *out) {
  const uint64_t expert = (uint64_t)(b - s->blocks) - s->rows[b->row].first_block;
  return clb_container_block(s->container, b->row, (size_t)expert, out);
}

// A block that was to be read with others: those that failed together are read one by one, so that the one that cannot
// be read is known.
static void start_retries(clb_store *s) {
  while (s->retry != kNone) {
    slot *x = &s->slots[s->retry];
    clb_block block;
    if (!find_block(s, &s->blocks[x->block], &block)) return;
    if (s->n_free_transfers < clb_pieces(s, align_up(block.bytes, CLB_IO_UNIT))) return;
    s->retry = x->next;
    clb_read_block(s, x, &block, x->pinned);
  }
}

// The next missing block; NULL when there is none, or no room.
static slot *take_missing(clb_store *s, clb_block *block) {
  request *q = &s->request;
  if (q->next_missing == q->n_missing) return NULL;
  const uint32_t position = q->missing[q->next_missing].position;
  if (!find_block(s, clb_block_of(s, position), block)) return NULL;
  if (s->n_free_transfers < clb_pieces(s, align_up(block->bytes, CLB_IO_UNIT))) return NULL;
  slot *x = clb_slot_take(s, clb_block_of(s, position), block, true, INFINITY);
  if (x == NULL) return NULL;
  q->items[position].kind = ITEM_LOADING;
  q->next_missing++;
  return x;
}

// Small blocks are joined: whether this one is, and whether it can join a read.
static bool is_small(const clb_store *s, const clb_block *block) {
  return align_up(block->bytes, CLB_IO_UNIT) <= s->piece_bytes / 2;
}

static bool follows(const clb_store *s, const transfer *t, const block_state *b, const clb_block *block) {
  return t->n_slots < CLB_READ_PARTS && clb_file_of(s, b) == t->read.file &&
         place_of(b, block) == t->read.offset + t->read.n_bytes &&
         t->read.n_bytes + align_up(block->bytes, CLB_IO_UNIT) <= s->piece_bytes;
}

static void join(const clb_store *s, transfer *t, slot *x, const clb_block *block) {
  prepare_slot(s, x, block, 1);
  add_part(t, x, x->data, align_up(block->bytes, CLB_IO_UNIT));
}

// Missing blocks that follow `x` in the file join its read.
static void start_joined(clb_store *s, slot *x, clb_block block) {
  const request *q = &s->request;
  const block_state *b = &s->blocks[x->block];
  transfer *t = new_transfer(s, clb_file_of(s, b), place_of(b, &block), true);
  join(s, t, x, &block);
  while (q->next_missing < q->n_missing) {
    b = clb_block_of(s, q->missing[q->next_missing].position);
    if (!find_block(s, b, &block)) break;
    if (!follows(s, t, b, &block) || (x = take_missing(s, &block)) == NULL) break;
    join(s, t, x, &block);
  }
  submit(s, t);
}

// Starts reading what is missing, as far as there is room.
static void start_reads(clb_store *s) {
  start_retries(s);
  clb_block block;
  slot *x;
  while (!s->request.failed && (x = take_missing(s, &block)) != NULL) {
    if (is_small(s, &block)) {
      start_joined(s, x, block);
    } else {
      clb_read_block(s, x, &block, true);
    }
  }
}

static void fail_read(clb_store *s, const slot *x) {
  const block_state *b = &s->blocks[x->block];
  const clb_row *row = clb_container_row(s->container, b->row);
  uint64_t expert = x->block - s->rows[b->row].first_block;
  char cause[ERROR_BYTES / 2];
  clb_block block = {0};
  (void)find_block(s, b, &block);
  if (x->status == 0) {
    snprintf(cause, sizeof cause,
             "the %" PRIu64 " bytes at offset %" PRIu64 " have CRC-32C %08" PRIx32 ", expected %08" PRIx32
             ": the container is damaged; 'colibri verify %s' tells where",
             block.bytes, block.offset, x->found_crc, block.crc32c, clb_container_path(s->container));
  } else {
    clb_file_describe(x->status, block.offset, (size_t)align_up(block.bytes, CLB_IO_UNIT), cause, sizeof cause);
  }
  clb_fail_store(s, "%slayer %" PRId32 " (row %" PRIu32 "), expert %" PRIu64 ": %s", row->stream == 0 ? "" : "MTP ",
                 row->layer, b->row, expert, cause);
  s->request.failed = true;
}

static void push_ready(clb_store *s, size_t position) {
  s->request.items[position].kind = ITEM_READY;
  s->request.ready[s->request.n_ready_pushed++] = (uint32_t)position;
}

static void push_retry(clb_store *s, slot *x) {
  x->next = s->retry;
  s->retry = (uint32_t)(x - s->slots);
}

// All pieces of a block are there, or cannot be had. What was read ahead in vain is read again when it is asked for.
static void finish_block(clb_store *s, slot *x) {
  block_state *b = &s->blocks[x->block];
  if (x->status != ECANCELED) s->metrics.reads++;
  if (x->status == 0 && !x->damaged) {
    b->checked = true;
    x->used = ++s->clock;
    clb_slot_set(s, x, SLOT_FILLED, x->pinned);
    if (b->position != kNone && s->request.items[b->position].kind == ITEM_LOADING) push_ready(s, b->position);
    return;
  }
  if (x->status != ECANCELED && b->mirrored > 0) {
    clb_mirror_lost(s, x);
    if (x->pinned && !s->request.failed) {
      push_retry(s, x);
      return;
    }
  }
  if (x->status == ECANCELED && x->pinned && !s->request.failed) {  // a hint given up, then asked for after all
    push_retry(s, x);
    return;
  }
  if (x->status != ECANCELED && x->pinned && !s->request.failed) fail_read(s, x);
  if (x->status == ECANCELED && x->read_ahead) s->metrics.hint_reads--;
  clb_slot_empty(s, x);
}

static void finish_transfer(clb_store *s, transfer *t) {
  const bool merged = t->n_slots > 1;
  const int status = t->read.status;
  free_transfer(s, t);
  if (status == 0) s->metrics.bytes_read += t->read.n_bytes;
  if (status == 0 && t->read.file == &s->mirror) s->metrics.mirror_bytes += t->read.n_bytes;
  for (size_t i = 0; i < t->n_slots; i++) {
    slot *x = t->slots[i];
    x->transfers--;
    if (status != 0 && merged && status != ECANCELED) {
      push_retry(s, x);
      continue;
    }
    if (status != 0 && x->status == 0) x->status = status;
    if (x->transfers == 0) finish_block(s, x);
  }
}

void clb_drop(clb_store *s, transfer *t) {
  t->read.status = ECANCELED;
  finish_transfer(s, t);
}

void clb_reap(clb_store *s) {
  for (clb_read *read; s->n_wanted + s->n_unwanted > 0 && (read = s->backend->poll(s->io)) != NULL;) {
    finish_transfer(s, (transfer *)(void *)read);
  }
}

static void wait_for_read(clb_store *s) {
  struct timespec t0, t1;
  clock_gettime(CLOCK_MONOTONIC, &t0);
  clb_read *read = s->backend->wait(s->io);
  clock_gettime(CLOCK_MONOTONIC, &t1);
  s->metrics.wait_ns += (uint64_t)(t1.tv_sec - t0.tv_sec) * 1000000000u + (uint64_t)t1.tv_nsec - (uint64_t)t0.tv_nsec;
  finish_transfer(s, (transfer *)(void *)read);
}

// ---------------------------------------------------------------------------------------------------------------------
// Requests

// Marks the experts of a request. False, with the text, when the list is no proper one; nothing is marked then.
static bool set_items(clb_store *s, size_t row, const uint32_t *experts, size_t n) {
  const clb_row *its_row = clb_container_row(s->container, row);
  if (its_row == NULL)
    return clb_fail_store(s, "row %zu: expected less than %zu", row, clb_container_n_rows(s->container));
  bool ok = true;
  size_t i = 0;
  s->request.row = row;
  for (; i < n && ok; i++) {
    if (experts[i] >= its_row->n_experts) {
      ok = clb_fail_store(s, "layer %" PRId32 " (row %zu): expert is %" PRIu32 ", expected less than %" PRIu32,
                          its_row->layer, row, experts[i], its_row->n_experts);
    } else if (s->blocks[s->rows[row].first_block + experts[i]].position != kNone) {
      ok = clb_fail_store(s, "layer %" PRId32 " (row %zu): expert %" PRIu32 " is named twice", its_row->layer, row,
                          experts[i]);
    } else {
      s->request.items[i] = (item){experts[i], ITEM_MISSING};
      clb_block_of(s, i)->position = (uint32_t)i;
    }
  }
  if (ok) return true;
  while (i-- > 0) {
    if (i < n && experts[i] < its_row->n_experts) s->blocks[s->rows[row].first_block + experts[i]].position = kNone;
  }
  return false;
}

static int compare_offsets(const void *a, const void *b) {
  const missing_item *x = a, *y = b;
  return (x->offset > y->offset) - (x->offset < y->offset);
}

// A block that a hint already has under way is waited for from now on.
static void adopt(clb_store *s, slot *x) {
  clb_slot_set(s, x, SLOT_LOADING, true);
  for (size_t i = 0; i < N_TRANSFERS; i++) {
    transfer *t = &s->transfers[i];
    if (!t->busy || t->wanted || t->slots[0] != x) continue;  // reads ahead are of one block
    const bool waiting = s->backend->withdraw(s->io, &t->read);
    s->n_unwanted--;
    s->n_wanted++;
    t->wanted = true;
    if (!waiting) continue;
    t->read.urgent = true;
    s->backend->submit(s->io, &t->read);
  }
}

static void look_up(clb_store *s, size_t position) {
  block_state *b = clb_block_of(s, position);
  clb_count_use(s, b);
  slot *x = b->slot == kNone ? NULL : &s->slots[b->slot];
  if (x != NULL && x->read_ahead) {
    x->read_ahead = false;
    s->ahead_bytes -= x->n_bytes;
    s->metrics.hint_useful_bytes += x->n_bytes;
  }
  if (x != NULL && x->kind == SLOT_FILLED) {
    s->metrics.hits++;
    clb_slot_set(s, x, SLOT_FILLED, true);
    push_ready(s, position);
    return;
  }
  s->metrics.misses++;
  if (x != NULL) {
    s->request.items[position].kind = ITEM_LOADING;
    adopt(s, x);
    return;
  }
  clb_block block = {0};
  (void)find_block(s, b, &block);
  s->request.missing[s->request.n_missing++] = (missing_item){block.offset, (uint32_t)position};
}

bool clb_store_begin(clb_store *s, size_t row, const uint32_t *experts, size_t n) {
  request *q = &s->request;
  if (q->open) return clb_fail_store(s, "a request is open, expected clb_store_end before the next one");
  if (!set_items(s, row, experts, n)) return false;
  q->open = true;
  q->failed = false;
  q->n = n;
  q->n_given = q->n_ready_pushed = q->n_missing = q->next_missing = 0;
  clb_reap(s);
  clb_hint_begin(s);
  clb_count_request(s, row);
  for (size_t i = 0; i < n; i++) look_up(s, i);
  qsort(q->missing, q->n_missing, sizeof *q->missing, compare_offsets);
  start_reads(s);
  return true;
}

// Whether anything that is under way may bring the request on: its own reads, or room that hints take.
static bool may_go_on(clb_store *s) {
  if (s->n_wanted > 0) return true;
  if (s->n_unwanted > 0 && clb_hint_drop(s, true)) start_reads(s);
  return s->n_wanted + s->n_unwanted > 0;
}

static clb_store_status hand_out(clb_store *s, clb_expert *out) {
  request *q = &s->request;
  const uint32_t position = q->ready[q->n_given++];
  const block_state *b = clb_block_of(s, position);
  slot *x = &s->slots[b->slot];
  clb_block block = {0};
  (void)find_block(s, b, &block);
  q->items[position].kind = ITEM_HELD;
  x->used = ++s->clock;
  *out = (clb_expert){.slot = position,
                      .expert = q->items[position].expert,
                      .data = x->data,
                      .layout = clb_container_layout(s->container, block.layout)};
  return CLB_STORE_READY;
}

static clb_store_status next_expert(clb_store *s, clb_expert *out, bool may_wait) {
  request *q = &s->request;
  if (!q->open) {
    clb_fail_store(s, "no request is open, expected clb_store_begin first");
    return CLB_STORE_FAILED;
  }
  clb_reap(s);
  start_reads(s);
  while (q->n_given == q->n_ready_pushed && !q->failed) {
    if (q->n_given == q->n) return CLB_STORE_DONE;
    if (!may_go_on(s)) return CLB_STORE_FULL;
    if (!may_wait) return CLB_STORE_PENDING;
    wait_for_read(s);
    start_reads(s);
  }
  return q->failed ? CLB_STORE_FAILED : hand_out(s, out);
}

clb_store_status clb_store_next(clb_store *s, clb_expert *out) {
  return next_expert(s, out, true);
}

clb_store_status clb_store_try_next(clb_store *s, clb_expert *out) {
  return next_expert(s, out, false);
}

void clb_store_release(clb_store *s, size_t position) {
  request *q = &s->request;
  if (!q->open || position >= q->n || q->items[position].kind != ITEM_HELD) return;
  q->items[position].kind = ITEM_RELEASED;
  clb_slot_set(s, &s->slots[clb_block_of(s, position)->slot], SLOT_FILLED, false);
  clb_reap(s);
  start_reads(s);
}

// Ends the request's reads: those that have not started are given up, the others waited for.
static void end_reads(clb_store *s) {
  for (size_t i = 0; i < N_TRANSFERS && s->n_wanted > 0; i++) {
    transfer *t = &s->transfers[i];
    if (t->busy && t->wanted && s->backend->withdraw(s->io, &t->read)) clb_drop(s, t);
  }
  while (s->n_wanted > 0) finish_transfer(s, (transfer *)(void *)s->backend->wait(s->io));
  while (s->retry != kNone) {
    slot *x = &s->slots[s->retry];
    s->retry = x->next;
    clb_slot_empty(s, x);
  }
}

void clb_store_end(clb_store *s) {
  request *q = &s->request;
  if (!q->open) return;
  q->failed = true;  // nothing new is started
  end_reads(s);
  for (size_t i = 0; i < q->n; i++) {
    block_state *b = clb_block_of(s, i);
    if (b->slot != kNone && s->slots[b->slot].pinned) clb_slot_set(s, &s->slots[b->slot], SLOT_FILLED, false);
    b->position = kNone;
  }
  clb_hint_end(s);
  q->open = false;
}

// ---------------------------------------------------------------------------------------------------------------------
// Preloading

typedef struct {
  uint64_t offset;
  size_t block;
} placed_block;

static int compare_places(const void *a, const void *b) {
  const placed_block *x = a, *y = b;
  return (x->offset > y->offset) - (x->offset < y->offset);
}

// Room and a slot for one block of the prefix; what comes first in the file counts as chosen more often. NULL: no room.
static slot *take_preloaded(clb_store *s, block_state *b, const clb_block *block, uint64_t n_bytes, double rank) {
  if (s->sums[1] + s->sums[2] + align_up(block->bytes, s->page) > n_bytes) return NULL;
  while (s->n_free_transfers < clb_pieces(s, align_up(block->bytes, CLB_IO_UNIT))) wait_for_read(s);
  slot *x = clb_slot_take(s, b, block, true, 0);
  if (x == NULL) return NULL;
  if (b->last == 0) b->count = rank;
  s->metrics.preloaded_bytes += align_up(block->bytes, CLB_IO_UNIT);
  return x;
}

// Starts reading what fits of the blocks in the order of the file.
static void read_prefix(clb_store *s, const placed_block *places, uint64_t n_bytes) {
  transfer *joining = NULL;  // small blocks may still join it
  for (size_t i = 0; i < s->n_blocks && !s->request.failed; i++) {
    block_state *b = &s->blocks[places[i].block];
    clb_block block;
    if (b->slot != kNone || !find_block(s, b, &block)) continue;
    if (joining != NULL && !(is_small(s, &block) && follows(s, joining, b, &block))) {
      submit(s, joining);
      joining = NULL;
    }
    slot *x = take_preloaded(s, b, &block, n_bytes, 1 - (double)i / (double)s->n_blocks);
    if (x == NULL) break;
    if (is_small(s, &block)) {
      if (joining == NULL) joining = new_transfer(s, clb_file_of(s, b), place_of(b, &block), true);
      join(s, joining, x, &block);
    } else {
      clb_read_block(s, x, &block, true);
    }
    clb_reap(s);
    start_retries(s);
  }
  if (joining != NULL) submit(s, joining);
}

static placed_block *blocks_by_place(const clb_store *s) {
  placed_block *places = malloc(s->n_blocks * sizeof *places);
  if (places == NULL) return NULL;
  for (size_t i = 0; i < s->n_blocks; i++) {
    clb_block block = {0};
    (void)find_block(s, &s->blocks[i], &block);
    places[i] = (placed_block){block.offset, i};
  }
  qsort(places, s->n_blocks, sizeof *places, compare_places);
  return places;
}

bool clb_store_preload(clb_store *s, uint64_t n_bytes) {
  if (s->request.open) return clb_fail_store(s, "a request is open, expected clb_store_end before preloading");
  if (n_bytes > s->budget) n_bytes = s->budget;
  placed_block *places = blocks_by_place(s);
  if (places == NULL) return clb_fail_store(s, "no memory to preload: a table of %zu blocks", s->n_blocks);
  s->request.failed = false;
  const uint64_t waited = s->metrics.wait_ns;
  read_prefix(s, places, n_bytes);
  for (start_retries(s); s->n_wanted > 0; start_retries(s)) wait_for_read(s);
  for (size_t i = 0; i < s->n_slots; i++) {
    if (s->slots[i].pinned) clb_slot_set(s, &s->slots[i], s->slots[i].kind, false);
  }
  s->metrics.wait_ns = waited;  // nobody computes yet
  free(places);
  return !s->request.failed;
}
