// The mmap backend: a pool of threads that have the kernel bring the pages of a mapped file into memory.
//
// The bytes are where they are handed out from: a read has no other buffer. MADV_POPULATE_READ waits until the pages
// are mapped and, unlike touching them, gives an error when one cannot be read. MADV_WILLNEED beforehand lets the
// kernel start on the whole of what is wanted while the threads wait for its first pages.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // madvise
#endif

#include <errno.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io_backend.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

// madvise wants whole pages, which may be larger than the file's units.
static int advise(const struct iovec *part, int advice) {
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = (uintptr_t)part->iov_base / page * page;
  const uintptr_t to = (uintptr_t)part->iov_base + part->iov_len;
  return madvise((void *)from, to - from, advice) == 0 ? 0 : errno;
}

static bool is_cut(const clb_read *read) {
  struct stat info;
  return fstat(read->file->fd, &info) == 0 && (uint64_t)info.st_size < read->offset + read->n_bytes;
}

static int run_populate(clb_read *read) {
  for (size_t i = 0; i < read->n_parts; i++) {
    int failure;
    while ((failure = advise(&read->parts[i], MADV_POPULATE_READ)) == EINTR || failure == EAGAIN) {
    }
    // EFAULT stands for the SIGBUS that touching the page would have been.
    if (failure == EFAULT) return is_cut(read) ? ENODATA : EIO;
    if (failure != 0) return failure;
  }
  return 0;
}

// An empty range is valid wherever the advice is known.
static void *mmap_open(const clb_io_setup *setup, char *reason, size_t reason_bytes) {
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  if (madvise((void *)page, 0, MADV_POPULATE_READ) != 0) {
    snprintf(reason, reason_bytes, "this system has no MADV_POPULATE_READ (Linux 5.14)");
    return NULL;
  }
  return clb_io_pool_open(setup, run_populate, reason, reason_bytes);
}

static void mmap_submit(void *io, clb_read *read) {
  if (read->urgent) {
    for (size_t i = 0; i < read->n_parts; i++) (void)advise(&read->parts[i], MADV_WILLNEED);
  }
  clb_io_pool_submit(io, read);
}

const clb_io_backend clb_io_mmap = {.name = "mmap",
                                    .open = mmap_open,
                                    .close = clb_io_pool_close,
                                    .submit = mmap_submit,
                                    .poll = clb_io_pool_poll,
                                    .wait = clb_io_pool_wait,
                                    .withdraw = clb_io_pool_withdraw};
