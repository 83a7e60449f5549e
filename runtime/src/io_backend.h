/* How blocks get from the file into memory: a queue of reads in, finished reads out, in any order.
 *
 * The store is the only caller and calls from one thread; how a backend reads, and on how many threads, is its own
 * affair. A read belongs to the backend from submit until wait or poll returns it.
 */
#ifndef CLB_IO_BACKEND_H
#define CLB_IO_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "aligned_io.h"
#include "crc32c.h"

// Values of clb_read.status besides 0 and a positive errno.
enum { CLB_READ_CANCELLED = -1, CLB_READ_DAMAGED = -2 };

typedef struct clb_read {
  uint64_t offset;
  size_t n_bytes;
  void *buffer;
  size_t check_bytes;  // how many of them the CRC covers; 0: no check
  uint32_t crc32c;     // expected; when status is CLB_READ_DAMAGED, what was found
  int status;
  struct clb_read *next;  // the backend's
} clb_read;

typedef struct {
  const char *name;
  void *(*open)(const clb_file *file, size_t n_threads);  // the file outlives the backend; NULL on failure
  void (*close)(void *io);                                // with no read in flight
  void (*submit)(void *io, clb_read *read);               // does not wait for anything
  clb_read *(*poll)(void *io);                            // a finished read, or NULL
  clb_read *(*wait)(void *io);                            // a finished read; at least one is in flight
  void (*cancel)(void *io);                               // reads that have not started finish as CLB_READ_CANCELLED
} clb_io_backend;

extern const clb_io_backend clb_io_pread;  // a pool of threads that call pread

// The whole of one read on the calling thread, check included; sets status.
static inline void clb_read_run(const clb_file *file, clb_read *read) {
  read->status = clb_file_read(file, read->offset, read->buffer, read->n_bytes);
  if (read->status != 0 || read->check_bytes == 0) return;
  uint32_t found = clb_crc32c(0, read->buffer, read->check_bytes);
  if (found == read->crc32c) return;
  read->status = CLB_READ_DAMAGED;
  read->crc32c = found;
}

#endif
