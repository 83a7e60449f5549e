// What the parts of the expert store share. store.c: opening, requests and reads; store_cache.c: which blocks stay in
// memory; store_hint.c: reading ahead.
#ifndef CLB_STORE_INTERNAL_H
#define CLB_STORE_INTERNAL_H

#include <stdatomic.h>

#include "aligned_io.h"
#include "io_backend.h"
#include "store.h"

enum { FADE_STEPS = 1024, ERROR_BYTES = 1024, N_TRANSFERS = 256 };

static const uint32_t kNone = UINT32_MAX;

// ---------------------------------------------------------------------------------------------------------------------
// The cache

// One expert of the container, in memory or not.
typedef struct {
  double count;   // as of request number `last` of its row
  uint64_t last;  // 0: never requested
  uint64_t hint;  // number of the last hint that named it
  bool hint_new;  // it was not in memory then, or only because of a hint
  uint32_t row;
  uint32_t slot;      // or kNone
  uint32_t position;  // in the request, or kNone
  bool checked;       // its CRC was found right once
  uint64_t mirrored;  // where it is in the mirror; 0: it is not, or cannot be read there
} block_state;

typedef struct {
  uint64_t first_block;
  uint64_t requests;
  double full_count;  // the count of a block that every request named
  uint64_t hint;      // number of the hint for its next request; 0: none
  // The slot of the row that would be evicted first, and its score; looked for again when stale.
  bool stale;
  uint32_t lowest_slot;  // or kNone
  double lowest;
} row_state;

typedef enum { SLOT_EMPTY, SLOT_LOADING, SLOT_FILLED } slot_kind;

typedef struct {
  slot_kind kind;
  bool pinned;                   // wanted by the request, or held by the caller
  bool read_ahead;               // by a hint, and not asked for since
  uint64_t block;                // unless empty
  uint64_t used;                 // number of its last use
  uint64_t n_bytes;              // of memory it occupies, also when empty
  uint8_t *data;                 // unless empty
  uint32_t next;                 // slot: of the empty ones of this n_bytes, or to be read again
  uint32_t transfers;            // under way
  int status;                    // of the first that failed
  _Atomic uint32_t pieces_left;  // the thread that brings the last piece compares the CRC
  size_t check_bytes;            // how many bytes it covers; 0: no check
  uint32_t crc32c;               // expected
  bool damaged;
  uint32_t found_crc;  // when damaged
} slot;

// Empty slots of one size: a stack.
typedef struct {
  uint64_t n_bytes;
  uint32_t top;  // slot, or kNone
} size_class;

// ---------------------------------------------------------------------------------------------------------------------
// Requests and reads

typedef enum { ITEM_MISSING, ITEM_LOADING, ITEM_READY, ITEM_HELD, ITEM_RELEASED } item_kind;

typedef struct {
  uint32_t expert;
  item_kind kind;
} item;

typedef struct {
  uint64_t offset;
  uint32_t position;
} missing_item;

typedef struct {
  bool open, failed;
  size_t row, n, n_given, n_ready_pushed, n_missing, next_missing;
  item *items;            // [n], in the caller's order
  missing_item *missing;  // [n_missing], in the order of the file
  uint32_t *ready;        // [n_ready_pushed], positions as they became ready; the first n_given were handed out
} request;

// One read: a piece of a block, a block, or several blocks that follow one another in the file.
typedef struct {
  clb_read read;  // first: the backend's pointer is the transfer's
  slot *slots[CLB_READ_PARTS];
  size_t n_slots;
  bool busy, wanted;  // wanted: the open request waits for it
} transfer;

// ---------------------------------------------------------------------------------------------------------------------
// Reading ahead

// Which way of the two, following hints or not, makes compute wait less.
typedef struct {
  bool following;
  bool probing;                  // this window tries the way that lost
  uint32_t n_windows;            // finished
  uint32_t windows_left;         // until the next probe
  uint32_t hold;                 // windows from one probe to the next
  uint64_t n_requests, wait_ns;  // of this window
  double wait[2];                // nanoseconds a request waited, [following], lately; negative: not known
} controller;

struct clb_store {
  const clb_container *container;
  clb_file file, mirror;  // mirror.fd is -1 without one
  const clb_io_backend *backend;
  void *io;
  clb_check check;
  bool dry;  // nothing is read, and the memory of the cache is not touched
  char reason[ERROR_BYTES];

  uint64_t page, all_bytes, budget, slot_bytes, piece_bytes;
  uint8_t *arena;      // [n_slots, slot_bytes], or
  const uint8_t *map;  // the whole file
  size_t map_bytes;
  size_t n_slots, n_blocks, n_classes;
  slot *slots;
  size_class *classes;  // by size
  uint64_t sums[3];     // memory of empty, of evictable and of other slots
  bool one_size;

  block_state *blocks;
  row_state *rows;
  double fade[FADE_STEPS];

  request request;
  transfer transfers[N_TRANSFERS];
  size_t n_free_transfers, n_wanted, n_unwanted;  // free, and in the backend's hands
  uint32_t retry;                                 // first slot to be read again by itself, or kNone
  uint64_t clock;

  bool hints_possible;               // a hint came since the last request began
  uint64_t hint_clock, ahead_bytes;  // ahead_bytes: read or being read ahead, and not asked for yet
  double precision, hint_worth;      // of guesses at blocks that are not in memory: share that comes true; their score
  uint64_t wait_before;              // metrics.wait_ns when the request began
  bool measured;                     // the request counts for the controller
  controller controller;

  clb_store_metrics metrics;
  char error[ERROR_BYTES];
};

static inline uint64_t align_up(uint64_t x, uint64_t unit) {
  return (x + unit - 1) / unit * unit;
}

static inline block_state *clb_block_of(clb_store *s, size_t position) {
  return &s->blocks[s->rows[s->request.row].first_block + s->request.items[position].expert];
}

// store_cache.c
bool clb_cache_plan(clb_store *s);      // slots and size classes for s->budget; false: no memory
bool clb_cache_allocate(clb_store *s);  // the tables
bool clb_cache_reserve(clb_store *s);   // the memory
void clb_cache_free(clb_store *s);
void clb_count_request(clb_store *s, size_t row);  // before its blocks are counted
void clb_count_use(clb_store *s, block_state *b);
void clb_slot_set(clb_store *s, slot *x, slot_kind kind, bool pinned);
void clb_slot_empty(clb_store *s, slot *x);
// A slot for a block, LOADING, within the budget, evicting what scores below `limit` as it must. NULL: too much is in
// use, or worth more.
slot *clb_slot_take(clb_store *s, block_state *b, const clb_block *block, bool pinned, double limit);

// store_mirror.c
bool clb_mirror_open(clb_store *s, const clb_container *mirror,
                     bool buffered);                // false, and the text: it is of another container
void clb_mirror_lost(clb_store *s, const slot *x);  // its block cannot be read there

// Where a block is to be read from.
static inline const clb_file *clb_file_of(const clb_store *s, const block_state *b) {
  return b->mirrored > 0 ? &s->mirror : &s->file;
}

// store.c
bool clb_fail_store(clb_store *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
// A store whose blocks cannot be looked at: what it keeps and what it would read is as ever.
clb_store *clb_store_open_dry(const clb_container *container, uint64_t cache_bytes, char *error, size_t error_bytes);
// Starts reading a block into its slot. There must be clb_pieces(s, n_bytes) free transfers.
void clb_read_block(clb_store *s, slot *x, const clb_block *block, bool wanted);
size_t clb_pieces(const clb_store *s, uint64_t n_bytes);
void clb_reap(clb_store *s);               // takes note of what has finished
void clb_drop(clb_store *s, transfer *t);  // of a read that was withdrawn

// store_hint.c
void clb_hint_open(clb_store *s);
void clb_hint_begin(clb_store *s);           // the request's blocks are marked, and not yet counted
bool clb_hint_drop(clb_store *s, bool all);  // withdraws reads of hints that have not started; whether there were any
void clb_hint_end(clb_store *s);             // the request is over

#endif
