// The expert store: a bounded cache of blocks, and the requests for them.
//
// Memory. The cache is one reserved range of addresses, cut into slots as long as the largest block. Blocks of mixed
// sizes fill slots unequally, so the budget counts the pages a slot really occupies, and pages that a smaller block
// does not need are given back to the system. There are as many slots as blocks can ever be in memory at once. When all
// blocks are of one size, slots are the budget, and nothing is ever given back.
//
// Eviction. What stays is what is likely to be chosen again: the block with the lowest score goes, and the score is the
// estimated chance that the next request of the block's row names it:
//   - its frequency: a count that fades by kFade with each request of the row, over what an always chosen block would
//     have. Counts go on for blocks that are not in memory, so a block that comes back is remembered;
//   - plus kRepeat if the row's last request named it: consecutive tokens choose alike.
// Time is counted in requests of the row, not of the model: the layers are visited in a circle, and a block of a layer
// that comes up last is no worse than one of the layer just done. Equal scores: the one used last goes, as its turn
// comes up last. So a circle too large for the cache keeps a part of it, where least-recently-used would keep nothing.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // madvise, MAP_NORESERVE
#endif

#include "store.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "aligned_io.h"
#include "io_backend.h"

// The best of a grid on synthetic routing (skewed choices, a change of subject every 500 tokens, 0 to 40 % of the last
// token's experts chosen again); neighbours in the grid are within a point, and none of it is near a cliff.
static const double kFade = 0.99;
static const double kRepeat = 0.2;
enum { FADE_STEPS = 1024, DEFAULT_IO_THREADS = 2, ERROR_BYTES = 1024 };

static const uint32_t kNone = UINT32_MAX;

// One expert of the container, in memory or not.
typedef struct {
  double count;   // as of request number `last` of its row
  uint64_t last;  // 0: never requested
  uint32_t row;
  uint32_t slot;      // or kNone
  uint32_t position;  // in the request, or kNone
  bool checked;       // its CRC was found right once
} block_state;

typedef struct {
  uint64_t first_block;
  uint64_t requests;
  double full_count;  // the count of a block that every request named
} row_state;

typedef enum { SLOT_EMPTY, SLOT_LOADING, SLOT_FILLED } slot_kind;

typedef struct {
  clb_read read;  // first: the backend's pointer is the slot's
  slot_kind kind;
  bool pinned;       // wanted by the request, or held by the caller
  uint64_t block;    // unless empty
  uint64_t used;     // number of its last use
  uint64_t n_bytes;  // of memory it occupies, also when empty
} slot;

typedef enum { ITEM_MISSING, ITEM_LOADING, ITEM_READY, ITEM_HELD, ITEM_RELEASED } item_kind;

typedef struct {
  uint32_t expert;
  item_kind kind;
} item;

typedef struct {
  bool open, failed;
  size_t row, n, n_given, n_ready_pushed, next_missing;
  item *items;      // [n], in the caller's order
  uint32_t *ready;  // [n_ready_pushed], positions in the order they became ready; the first n_given were handed out
} request;

struct clb_store {
  const clb_container *container;
  clb_file file;
  const clb_io_backend *backend;
  void *io;
  clb_check check;

  uint64_t page, budget, slot_bytes, occupied;  // occupied: the sum of the slots' n_bytes
  uint8_t *arena;
  size_t n_slots;
  slot *slots;
  bool one_size;

  block_state *blocks;
  row_state *rows;
  double fade[FADE_STEPS];

  request request;
  size_t in_flight;
  uint64_t clock;
  clb_store_metrics metrics;
  char error[ERROR_BYTES];
};

// ---------------------------------------------------------------------------------------------------------------------
// Sizes

static uint64_t align_up(uint64_t x, uint64_t unit) {
  return (x + unit - 1) / unit * unit;
}

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

static int compare_sizes(const void *a, const void *b) {
  const uint64_t *x = a, *y = b;
  return (*x > *y) - (*x < *y);
}

// The most blocks that fit into the budget at once.
static bool count_slots(clb_store *s, uint64_t n_blocks) {
  uint64_t *sizes = malloc((size_t)n_blocks * sizeof *sizes);
  if (sizes == NULL) return false;
  uint64_t n = 0;
  for (size_t r = 0; r < clb_container_n_rows(s->container); r++) {
    for (size_t e = 0; e < clb_container_row(s->container, r)->n_experts; e++) {
      sizes[n++] = block_memory(s->container, r, e, s->page);
    }
  }
  qsort(sizes, (size_t)n, sizeof *sizes, compare_sizes);
  s->slot_bytes = sizes[n - 1];
  s->one_size = sizes[0] == s->slot_bytes;
  uint64_t left = s->budget;
  for (s->n_slots = 0; s->n_slots < n && sizes[s->n_slots] <= left; s->n_slots++) left -= sizes[s->n_slots];
  free(sizes);
  return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Open and close

__attribute__((format(printf, 2, 3))) static bool fail(clb_store *s, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(s->error, sizeof s->error, format, args);
  va_end(args);
  return false;
}

static bool reserve_arena(clb_store *s) {
  uint64_t size;
  if (__builtin_mul_overflow(s->slot_bytes, (uint64_t)s->n_slots, &size) || size > SIZE_MAX) return false;
  void *arena = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (arena == MAP_FAILED) return false;
  s->arena = arena;
#ifdef MADV_HUGEPAGE
  // Huge pages reach into the next slot, which costs nothing only when every slot is filled to its end.
  (void)madvise(arena, (size_t)size, s->one_size ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
#ifdef MADV_DONTDUMP
  (void)madvise(arena, (size_t)size, MADV_DONTDUMP);
#endif
  return true;
}

static bool allocate_tables(clb_store *s, uint64_t n_blocks) {
  size_t n_rows = clb_container_n_rows(s->container), n_columns = clb_container_n_columns(s->container);
  s->blocks = calloc((size_t)n_blocks, sizeof *s->blocks);
  s->rows = calloc(n_rows, sizeof *s->rows);
  s->slots = calloc(s->n_slots, sizeof *s->slots);
  s->request.items = calloc(n_columns, sizeof *s->request.items);
  s->request.ready = calloc(n_columns, sizeof *s->request.ready);
  if (s->blocks == NULL || s->rows == NULL || s->slots == NULL || s->request.items == NULL ||
      s->request.ready == NULL) {
    return false;
  }
  uint64_t block = 0;
  for (size_t r = 0; r < n_rows; r++) {
    s->rows[r].first_block = block;
    for (uint32_t e = 0; e < clb_container_row(s->container, r)->n_experts; e++) {
      s->blocks[block++] = (block_state){.row = (uint32_t)r, .slot = kNone, .position = kNone};
    }
  }
  s->fade[0] = 1;
  for (size_t i = 1; i < FADE_STEPS; i++) s->fade[i] = s->fade[i - 1] * kFade;
  return true;
}

static bool open_store(clb_store *s, const clb_store_options *options) {
  clb_store_sizes sizes;
  clb_store_measure(s->container, &sizes);
  uint32_t n_threads = options->io_threads == 0 ? DEFAULT_IO_THREADS : options->io_threads;
  if (n_threads > CLB_STORE_MAX_IO_THREADS) {
    return fail(s, "io threads: %" PRIu32 ", expected at most %d", n_threads, CLB_STORE_MAX_IO_THREADS);
  }
  if (options->cache_bytes < sizes.minimum_bytes) {
    return fail(s, "expert cache: %" PRIu64 " bytes, expected at least %" PRIu64 " (the two largest experts)",
                options->cache_bytes, sizes.minimum_bytes);
  }
  s->budget = options->cache_bytes < sizes.all_bytes ? options->cache_bytes : sizes.all_bytes;
  s->check = options->check;
  if (clb_container_fd(s->container) < 0) return fail(s, "the container is in memory: it has no blocks to read");
  if (!clb_file_open(&s->file, clb_container_fd(s->container), s->error, sizeof s->error)) return false;
  if (!count_slots(s, sizes.n_blocks) || !allocate_tables(s, sizes.n_blocks)) {
    return fail(s, "no memory for the tables of %" PRIu64 " experts", sizes.n_blocks);
  }
  if (!reserve_arena(s)) return fail(s, "no memory for an expert cache of %" PRIu64 " bytes", s->budget);
  s->io = s->backend->open(&s->file, n_threads);
  if (s->io == NULL) return fail(s, "cannot start %" PRIu32 " reading threads", n_threads);
  s->metrics.backend = s->backend->name;
  s->metrics.direct = s->file.direct;
  s->metrics.reason = s->file.reason;
  s->metrics.cache_bytes = s->budget;
  return true;
}

clb_store *clb_store_open(const clb_container *container, const clb_store_options *options, char *error,
                          size_t error_bytes) {
  if (error_bytes > 0) error[0] = 0;
  clb_store *s = calloc(1, sizeof *s);
  if (s == NULL) {
    snprintf(error, error_bytes, "no memory for the expert store");
    return NULL;
  }
  s->container = container;
  s->file.fd = -1;
  s->backend = &clb_io_pread;
  s->page = memory_page();
  if (open_store(s, options)) return s;
  snprintf(error, error_bytes, "%s", s->error);
  clb_store_close(s);
  return NULL;
}

void clb_store_close(clb_store *s) {
  if (s == NULL) return;
  if (s->io != NULL) {
    clb_store_end(s);
    s->backend->close(s->io);
  }
  clb_file_close(&s->file);
  if (s->arena != NULL) munmap(s->arena, (size_t)(s->slot_bytes * s->n_slots));
  free(s->request.ready);
  free(s->request.items);
  free(s->slots);
  free(s->rows);
  free(s->blocks);
  free(s);
}

const char *clb_store_error(const clb_store *s) {
  return s->error;
}

void clb_store_get_metrics(const clb_store *s, clb_store_metrics *out) {
  *out = s->metrics;
  out->used_bytes = s->occupied;
}

// ---------------------------------------------------------------------------------------------------------------------
// Eviction

static double faded_count(const clb_store *s, const block_state *b) {
  uint64_t age = s->rows[b->row].requests - b->last;
  return age < FADE_STEPS ? b->count * s->fade[age] : 0;
}

static double score(const clb_store *s, const block_state *b) {
  const row_state *row = &s->rows[b->row];
  return faded_count(s, b) / row->full_count + (b->last == row->requests ? kRepeat : 0);
}

// Counts a request of the row before its blocks are counted.
static void count_request(clb_store *s, size_t row) {
  s->rows[row].requests++;
  s->rows[row].full_count = 1 + s->rows[row].full_count * kFade;
}

static void count_use(clb_store *s, block_state *b) {
  b->count = 1 + faded_count(s, b);
  b->last = s->rows[b->row].requests;
}

static void empty_slot(clb_store *s, slot *x) {
  s->blocks[x->block].slot = kNone;
  x->kind = SLOT_EMPTY;
  x->pinned = false;
}

static slot *find_victim(clb_store *s) {
  slot *victim = NULL;
  double lowest = 0;
  for (size_t i = 0; i < s->n_slots; i++) {
    slot *x = &s->slots[i];
    if (x->kind != SLOT_FILLED || x->pinned) continue;
    double its_score = score(s, &s->blocks[x->block]);
    if (victim == NULL || its_score < lowest || (its_score <= lowest && x->used > victim->used)) {
      victim = x;
      lowest = its_score;
    }
  }
  return victim;
}

// ---------------------------------------------------------------------------------------------------------------------
// Slots

// Gives back a slot's memory beyond n_bytes.
static void trim_slot(clb_store *s, slot *x, uint64_t n_bytes) {
  if (x->n_bytes <= n_bytes) return;
  uint8_t *p = s->arena + (uint64_t)(x - s->slots) * s->slot_bytes;
  (void)madvise(p + n_bytes, (size_t)(x->n_bytes - n_bytes), MADV_DONTNEED);
  s->occupied -= x->n_bytes - n_bytes;
  x->n_bytes = n_bytes;
}

// The empty slot whose memory fits best: the one with the least that suffices, else the one with the most.
static slot *find_empty(clb_store *s, uint64_t n_bytes) {
  slot *best = NULL;
  for (size_t i = 0; i < s->n_slots; i++) {
    slot *x = &s->slots[i];
    if (x->kind != SLOT_EMPTY) continue;
    bool suffices = x->n_bytes >= n_bytes;
    bool better = best == NULL || (best->n_bytes >= n_bytes ? suffices && x->n_bytes < best->n_bytes
                                                            : suffices || x->n_bytes > best->n_bytes);
    if (better) best = x;
  }
  return best;
}

// An empty slot with room for n_bytes within the budget, evicting as it must. NULL while too much is in use.
static slot *take_slot(clb_store *s, uint64_t n_bytes) {
  uint64_t busy = 0, idle = 0;  // what cannot be evicted, and what can
  for (size_t i = 0; i < s->n_slots; i++) {
    const slot *x = &s->slots[i];
    if (x->kind == SLOT_EMPTY) continue;
    *(x->pinned || x->kind == SLOT_LOADING ? &busy : &idle) += x->n_bytes;
  }
  if (n_bytes > s->budget - busy) return NULL;
  slot *best = find_empty(s, n_bytes);
  while (best == NULL || n_bytes > s->budget - busy - idle) {
    slot *victim = find_victim(s);
    if (victim == NULL) return NULL;
    idle -= victim->n_bytes;
    s->metrics.evictions++;
    empty_slot(s, victim);
    best = find_empty(s, n_bytes);
  }
  trim_slot(s, best, n_bytes);
  for (size_t i = 0; i < s->n_slots && s->occupied + (n_bytes - best->n_bytes) > s->budget; i++) {
    if (s->slots[i].kind == SLOT_EMPTY && &s->slots[i] != best) trim_slot(s, &s->slots[i], 0);
  }
  s->occupied += n_bytes - best->n_bytes;
  best->n_bytes = n_bytes;
  return best;
}

// ---------------------------------------------------------------------------------------------------------------------
// Requests

static block_state *block_of(clb_store *s, size_t position) {
  return &s->blocks[s->rows[s->request.row].first_block + s->request.items[position].expert];
}

static void push_ready(clb_store *s, size_t position) {
  s->request.items[position].kind = ITEM_READY;
  s->request.ready[s->request.n_ready_pushed++] = (uint32_t)position;
}

static void start_read(clb_store *s, size_t position, slot *x, const clb_block *block) {
  block_state *b = block_of(s, position);
  x->kind = SLOT_LOADING;
  x->pinned = true;
  x->block = (uint64_t)(b - s->blocks);
  b->slot = (uint32_t)(x - s->slots);
  bool check = s->check == CLB_CHECK_ALWAYS || (s->check == CLB_CHECK_FIRST && !b->checked);
  x->read = (clb_read){.offset = block->offset,
                       .n_bytes = (size_t)align_up(block->bytes, CLB_IO_UNIT),
                       .buffer = s->arena + (uint64_t)(x - s->slots) * s->slot_bytes,
                       .check_bytes = check ? (size_t)block->bytes : 0,
                       .crc32c = block->crc32c};
  s->request.items[position].kind = ITEM_LOADING;
  s->in_flight++;
  s->metrics.reads++;
  s->backend->submit(s->io, &x->read);
}

// Starts reading what is missing, as far as there is room.
static void start_reads(clb_store *s) {
  request *q = &s->request;
  for (; q->next_missing < q->n && !q->failed; q->next_missing++) {
    const item *it = &q->items[q->next_missing];
    if (it->kind != ITEM_MISSING) continue;
    clb_block block;
    if (!clb_container_block(s->container, q->row, it->expert, &block)) return;
    slot *x = take_slot(s, align_up(block.bytes, s->page));
    if (x == NULL) return;
    start_read(s, q->next_missing, x, &block);
  }
}

static void fail_read(clb_store *s, const slot *x) {
  const block_state *b = &s->blocks[x->block];
  const clb_row *row = clb_container_row(s->container, b->row);
  uint64_t expert = x->block - s->rows[b->row].first_block;
  char cause[ERROR_BYTES / 2];
  if (x->read.status == CLB_READ_DAMAGED) {
    clb_block block = {0};
    (void)clb_container_block(s->container, b->row, (size_t)expert, &block);
    snprintf(cause, sizeof cause,
             "the %" PRIu64 " bytes at offset %" PRIu64 " have CRC-32C %08" PRIx32 ", expected %08" PRIx32
             ": the container is damaged; 'colibri verify %s' tells where",
             block.bytes, block.offset, x->read.crc32c, block.crc32c, clb_container_path(s->container));
  } else {
    clb_file_describe(x->read.status, x->read.offset, x->read.n_bytes, cause, sizeof cause);
  }
  fail(s, "%slayer %" PRId32 " (row %" PRIu32 "), expert %" PRIu64 ": %s", row->stream == 0 ? "" : "MTP ", row->layer,
       b->row, expert, cause);
  s->request.failed = true;
}

// Takes note of a finished read.
static void finish_read(clb_store *s, clb_read *read) {
  slot *x = (slot *)(void *)read;
  block_state *b = &s->blocks[x->block];
  s->in_flight--;
  if (read->status == 0) {
    s->metrics.bytes_read += read->n_bytes;
    x->kind = SLOT_FILLED;
    x->used = ++s->clock;
    b->checked = true;
    push_ready(s, b->position);
    return;
  }
  if (read->status != CLB_READ_CANCELLED && !s->request.failed) fail_read(s, x);
  if (read->status == CLB_READ_CANCELLED) s->metrics.reads--;
  empty_slot(s, x);
}

// Marks the experts of a request. False, with the text, when the list is no proper one; nothing is marked then.
static bool set_items(clb_store *s, size_t row, const uint32_t *experts, size_t n) {
  const clb_row *its_row = clb_container_row(s->container, row);
  if (its_row == NULL) return fail(s, "row %zu: expected less than %zu", row, clb_container_n_rows(s->container));
  bool ok = true;
  size_t i = 0;
  s->request.row = row;
  for (; i < n && ok; i++) {
    if (experts[i] >= its_row->n_experts) {
      ok = fail(s, "layer %" PRId32 " (row %zu): expert is %" PRIu32 ", expected less than %" PRIu32, its_row->layer,
                row, experts[i], its_row->n_experts);
    } else if (s->blocks[s->rows[row].first_block + experts[i]].position != kNone) {
      ok = fail(s, "layer %" PRId32 " (row %zu): expert %" PRIu32 " is named twice", its_row->layer, row, experts[i]);
    } else {
      s->request.items[i] = (item){experts[i], ITEM_MISSING};
      block_of(s, i)->position = (uint32_t)i;
    }
  }
  if (ok) return true;
  while (i-- > 0) {
    if (i < n && experts[i] < its_row->n_experts) s->blocks[s->rows[row].first_block + experts[i]].position = kNone;
  }
  return false;
}

bool clb_store_begin(clb_store *s, size_t row, const uint32_t *experts, size_t n) {
  request *q = &s->request;
  if (q->open) return fail(s, "a request is open, expected clb_store_end before the next one");
  if (!set_items(s, row, experts, n)) return false;
  q->open = true;
  q->failed = false;
  q->n = n;
  q->n_given = q->n_ready_pushed = q->next_missing = 0;
  count_request(s, row);
  for (size_t i = 0; i < n; i++) {
    block_state *b = block_of(s, i);
    count_use(s, b);
    if (b->slot == kNone) {
      s->metrics.misses++;
      continue;
    }
    s->metrics.hits++;
    s->slots[b->slot].pinned = true;
    push_ready(s, i);
  }
  start_reads(s);
  return true;
}

static void wait_for_read(clb_store *s) {
  struct timespec t0, t1;
  clock_gettime(CLOCK_MONOTONIC, &t0);
  clb_read *read = s->backend->wait(s->io);
  clock_gettime(CLOCK_MONOTONIC, &t1);
  s->metrics.wait_ns += (uint64_t)(t1.tv_sec - t0.tv_sec) * 1000000000u + (uint64_t)t1.tv_nsec - (uint64_t)t0.tv_nsec;
  finish_read(s, read);
}

static clb_store_status next_expert(clb_store *s, clb_expert *out, bool wait) {
  request *q = &s->request;
  if (!q->open) {
    fail(s, "no request is open, expected clb_store_begin first");
    return CLB_STORE_FAILED;
  }
  for (clb_read *read; s->in_flight > 0 && (read = s->backend->poll(s->io)) != NULL;) finish_read(s, read);
  start_reads(s);
  while (q->n_given == q->n_ready_pushed && !q->failed) {
    if (q->n_given == q->n) return CLB_STORE_DONE;
    if (s->in_flight == 0) return CLB_STORE_FULL;
    if (!wait) return CLB_STORE_PENDING;
    wait_for_read(s);
  }
  if (q->failed) return CLB_STORE_FAILED;

  uint32_t position = q->ready[q->n_given++];
  slot *x = &s->slots[block_of(s, position)->slot];
  clb_block block = {0};
  (void)clb_container_block(s->container, q->row, q->items[position].expert, &block);
  q->items[position].kind = ITEM_HELD;
  x->used = ++s->clock;
  *out = (clb_expert){.slot = position,
                      .expert = q->items[position].expert,
                      .data = s->arena + (uint64_t)(x - s->slots) * s->slot_bytes,
                      .layout = clb_container_layout(s->container, block.layout)};
  return CLB_STORE_READY;
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
  s->slots[block_of(s, position)->slot].pinned = false;
  start_reads(s);
}

void clb_store_end(clb_store *s) {
  request *q = &s->request;
  if (!q->open) return;
  if (s->in_flight > 0) s->backend->cancel(s->io);
  while (s->in_flight > 0) finish_read(s, s->backend->wait(s->io));
  for (size_t i = 0; i < q->n; i++) {
    block_state *b = block_of(s, i);
    if (b->slot != kNone) s->slots[b->slot].pinned = false;
    b->position = kNone;
  }
  q->open = false;
}
