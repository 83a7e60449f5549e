/* How blocks get from the file into memory: a queue of reads in, finished reads out, in any order.
 *
 * The store is the only caller and calls from one thread; how a backend reads, and on how many threads, is its own
 * affair. A read belongs to the backend from submit until wait or poll returns it, or withdraw gives it back.
 *
 * Urgent reads are what compute waits for. The others run with spare bandwidth: a backend starts one only while no
 * urgent read is waiting or under way.
 */
#ifndef CLB_IO_BACKEND_H
#define CLB_IO_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "aligned_io.h"

enum { CLB_READ_PARTS = 16 };

// One range of the file, into n_parts buffers one after the other. All offsets, addresses and lengths are multiples of
// CLB_IO_UNIT.
typedef struct clb_read {
  const clb_file *file;
  uint64_t offset;
  size_t n_bytes;                      // the sum of the parts' lengths
  struct iovec parts[CLB_READ_PARTS];  // used up by the backend
  size_t n_parts;
  bool urgent;
  void (*arrived)(struct clb_read *read);  // called once, on the reading thread, when the bytes are there
  int status;                              // 0, or a positive errno
  size_t n_done;                           // the backend's: bytes that are there
  struct clb_read *next;                   // the backend's
} clb_read;

typedef struct {
  const clb_file *file;  // what most reads are of; outlives the backend, as do those of all reads
  size_t n_threads;
  // Where parts lie: n_units of unit_bytes. unit_bytes is 0 when pages of it may be given back to the system meanwhile.
  uint8_t *memory;
  size_t unit_bytes, n_units;
} clb_io_setup;

typedef struct {
  const char *name;
  void *(*open)(const clb_io_setup *setup, char *reason, size_t reason_bytes);  // NULL, and why, when it cannot be had
  void (*close)(void *io);                                                      // with no read in its hands
  void (*submit)(void *io, clb_read *read);                                     // does not wait for anything
  clb_read *(*poll)(void *io);                                                  // a finished read, or NULL
  clb_read *(*wait)(void *io);                 // a finished read; at least one is in the backend's hands
  bool (*withdraw)(void *io, clb_read *read);  // true: had not started, and is the caller's again
} clb_io_backend;

extern const clb_io_backend clb_io_pread;  // a pool of threads that call pread
extern const clb_io_backend clb_io_uring;  // one ring, no threads
extern const clb_io_backend clb_io_mmap;   // a pool of threads that bring in pages of a mapped file
extern const clb_io_backend clb_io_none;   // brings nothing, at once

// The pool of threads of clb_io_pread, for any way of reading: `run` reads all of one read, and returns its status.
typedef int clb_run_read(clb_read *read);
void *clb_io_pool_open(const clb_io_setup *setup, clb_run_read *run, char *reason, size_t reason_bytes);
void clb_io_pool_close(void *io);
void clb_io_pool_submit(void *io, clb_read *read);
clb_read *clb_io_pool_poll(void *io);
clb_read *clb_io_pool_wait(void *io);
bool clb_io_pool_withdraw(void *io, clb_read *read);

// First in, first out.
typedef struct {
  clb_read *first, *last;
} clb_read_queue;

static inline void clb_read_push(clb_read_queue *q, clb_read *read) {
  read->next = NULL;
  if (q->first == NULL) {
    q->first = read;
  } else {
    q->last->next = read;
  }
  q->last = read;
}

static inline clb_read *clb_read_pop(clb_read_queue *q) {
  clb_read *read = q->first;
  if (read != NULL) q->first = read->next;
  return read;
}

static inline bool clb_read_remove(clb_read_queue *q, const clb_read *read) {
  clb_read *before = NULL;
  for (clb_read *x = q->first; x != NULL; before = x, x = x->next) {
    if (x != read) continue;
    *(before == NULL ? &q->first : &before->next) = x->next;
    if (q->last == x) q->last = before;
    return true;
  }
  return false;
}

#endif
