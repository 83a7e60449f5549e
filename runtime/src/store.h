/* The expert store: expert blocks of an open container, read on demand into a bounded cache.
 *
 * The caller names the experts of one row that it needs, and gets them one at a time: those in memory first, while the
 * others are being read. It computes with each and releases it:
 *
 *     clb_store_begin(store, row, experts, n);
 *     for (;;) {
 *       clb_expert e;
 *       clb_store_status status = clb_store_next(store, &e);
 *       if (status != CLB_STORE_READY) break;  // CLB_STORE_DONE, or CLB_STORE_FAILED: clb_store_error(store)
 *       ... use e.data, compute into the output of position e.slot ...
 *       clb_store_release(store, e.slot);
 *     }
 *     clb_store_end(store);
 *
 * A request may name more experts than the cache holds: it is then served in waves, each release making room for the
 * next read. A caller may hold several experts at once; when those held leave no room for another one,
 * clb_store_next returns CLB_STORE_FULL and wants a release first. It never waits for anything but a read.
 *
 * Bytes do not depend on the cache: every block handed out is the container's payload, whatever was evicted before.
 *
 * One thread at a time calls a store; reading happens on the store's own threads. Stores share nothing with one
 * another. Nothing here prints, exits or looks at the environment.
 */
#ifndef COLIBRI_STORE_H
#define COLIBRI_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "container.h"

#if defined(__GNUC__)
#pragma GCC visibility push(default)  // part of the shared library
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct clb_store clb_store;

// What a cache for this container costs; bytes are whole pages.
typedef struct {
  uint64_t minimum_bytes;  // the two largest blocks: one being used, one being read
  uint64_t token_bytes;    // top_k blocks of every main row, as large as its largest: what one token can touch
  uint64_t all_bytes;      // every block
  uint64_t n_blocks;
} clb_store_sizes;

void clb_store_measure(const clb_container *container, clb_store_sizes *out);

typedef enum {
  CLB_CHECK_FIRST = 0,  // compare a block's CRC the first time it is read
  CLB_CHECK_ALWAYS,     // every time
  CLB_CHECK_NEVER,
} clb_check;

/* How blocks are read. With O_DIRECT bytes go past the page cache; where the file system refuses it they do not, and
 * the metrics say so.
 *
 * With CLB_IO_MMAP `data` points into a mapping of the file: nothing is copied, and what stays in memory is the
 * kernel's choice. The cache then bounds what is mapped at once, and a hit means that the block is within that bound,
 * not that the kernel kept its pages. A file that is cut, or a drive that fails, after a block was handed out ends the
 * process (SIGBUS); a read that fails before is an error like any other. */
typedef enum {
  CLB_IO_AUTO = 0,  // CLB_IO_PREAD
  CLB_IO_PREAD,     // io_threads threads, O_DIRECT
  CLB_IO_URING,     // io_uring, O_DIRECT; where the system refuses it: CLB_IO_PREAD
  CLB_IO_MMAP,      // Linux 5.14 or later; elsewhere CLB_IO_PREAD
  CLB_IO_BUFFERED,  // io_threads threads, through the page cache
} clb_io;

enum { CLB_STORE_MAX_IO_THREADS = 64, CLB_STORE_DEFAULT_IO_THREADS = 4 };

typedef struct {
  uint64_t cache_bytes;  // at least minimum_bytes; what exceeds all_bytes is not used
  uint32_t io_threads;   // 1 ... CLB_STORE_MAX_IO_THREADS; 0: the default
  clb_check check;
  clb_io io;
  uint32_t piece_bytes;  // how much is read at once: larger blocks are split, smaller neighbours joined; 0: 1 MiB
  /* NULL, or some of the blocks once more, on another drive: what 'colibri export' makes, or a container of the same
   * blocks. They are read from there, and where that fails from the container. It must outlive the store. */
  const clb_container *mirror;
} clb_store_options;

/* Reserves the cache and starts the reading threads. The container must outlive the store. NULL, and a one-line
 * `error`, on failure. */
clb_store *clb_store_open(const clb_container *container, const clb_store_options *options, char *error,
                          size_t error_bytes);
void clb_store_close(clb_store *store);  // also in the middle of a request; NULL is fine

/* What the last call that failed had to say; "" when none did. Valid until the next call. */
const char *clb_store_error(const clb_store *store);

typedef struct {
  size_t slot;               // position in the list given to clb_store_begin
  uint32_t expert;           // experts[slot]
  const uint8_t *data;       // the payload, at a multiple of 4096; part p at data + layout->parts[p].offset
  const clb_layout *layout;  // the container's
} clb_expert;

typedef enum {
  CLB_STORE_FAILED = -1,
  CLB_STORE_DONE = 0,  // every expert of the request was handed out
  CLB_STORE_READY = 1,
  CLB_STORE_FULL = 2,     // release one of the experts you hold, then ask again
  CLB_STORE_PENDING = 3,  // clb_store_try_next only: the next one is being read
} clb_store_status;

/* Starts reading what is missing of `experts[n]`, distinct experts of `row`. False, and an error text, when the row or
 * an expert does not exist, one is named twice, or a request is open already. The list is copied. */
bool clb_store_begin(clb_store *store, size_t row, const uint32_t *experts, size_t n);

/* The next expert of the request, pinned until it is released. A block that cannot be read, or that fails its check,
 * ends the request: CLB_STORE_FAILED, and the text names layer, expert, offset and cause. Experts still held stay
 * valid until clb_store_end; the store can be used for further requests. */
clb_store_status clb_store_next(clb_store *store, clb_expert *out);

/* The same without waiting: CLB_STORE_PENDING while only a read would help. So a caller can take all that are ready now
 * and compute them together. */
clb_store_status clb_store_try_next(clb_store *store, clb_expert *out);

void clb_store_release(clb_store *store, size_t slot);  // of an expert that is held; others are left alone

/* Ends the request, releasing what is still held. May come at any time, also without a request. */
void clb_store_end(clb_store *store);

/* Fills the cache, or n_bytes of it, with the first blocks of the file, which are the hottest where the container is in
 * the order of hotness. Waits until they are there. Nothing is evicted for them; they stay by the same rule as others.
 * False, and the text, when one cannot be read. Not while a request is open. */
bool clb_store_preload(clb_store *store, uint64_t n_bytes);

/* A guess at the experts that the next request of `row` will name, the likeliest first. They are read with bandwidth
 * that no request wants, as far as they are worth more than what they replace; the call itself never waits. The store
 * compares how long requests wait with and without hints, and stops following them while they lose. Bytes handed out
 * never depend on hints. May come while a request is open. False for experts that do not exist; n may be 0. */
bool clb_store_hint(clb_store *store, size_t row, const uint32_t *experts, size_t n);

/* Whether a hint can be of any use: false when every block is in memory. */
bool clb_store_wants_hints(const clb_store *store);

typedef struct {
  const char *backend;         // "pread", "io_uring" or "mmap": the one in use
  bool direct;                 // past the page cache
  const char *reason;          // one line: why not direct, not the backend asked for, or not the mirror; "" otherwise
  uint64_t reads, bytes_read;  // blocks, whatever pieces they were read in
  uint64_t hits, misses;       // requested experts that were in memory, and that were not
  uint64_t evictions;
  uint64_t wait_ns;      // spent in clb_store_next waiting for reads
  uint64_t cache_bytes;  // the bound in force
  uint64_t used_bytes;   // of it, blocks in memory now
  uint64_t preloaded_bytes;
  uint64_t mirror_bytes;                  // of bytes_read, from the mirror
  uint64_t mirror_failures;               // blocks that could not be read there, and were read from the container
  uint64_t hints_followed, hints_paused;  // paused: counted, but not followed as following lost time
  uint64_t hint_guessed, hint_right;      // experts named by hints, and of these the ones that were then requested
  uint64_t hint_chosen;                   // experts of requests that a hint was about: right / chosen is the recall
  uint64_t hint_reads;                    // blocks read by hints; `reads` has them too
  uint64_t hint_useful_bytes, hint_wasted_bytes;  // of these: asked for later; evicted before
} clb_store_metrics;

void clb_store_get_metrics(const clb_store *store, clb_store_metrics *out);

#ifdef __cplusplus
}
#endif

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#endif
