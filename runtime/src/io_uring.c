// The io_uring backend, by its system calls: one ring, whose reads are in the kernel's hands, and queues of those that
// are not yet. It has no threads but the kernel's: reads are handed over and found finished when the store calls, so
// more of them are in the kernel at once than a drive needs.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // syscall
#endif

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "io_backend.h"

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>) && defined(SYS_io_uring_setup)
#define HAVE_URING 1
#endif
#endif

#ifdef HAVE_URING
#include <linux/io_uring.h>

// With 1 MiB a read: 32 MiB under way, so that computing with one expert leaves a fast drive busy. Spare reads are few,
// as an urgent one has to wait for them.
enum { DEPTH = 32, SPARE_DEPTH = 4 };

enum { REGISTER_MAX_WORKERS = 19 };  // IORING_REGISTER_IOWQ_MAX_WORKERS of Linux 5.15, for older headers

static const size_t kMaxBuffer = (size_t)1 << 30;  // of one registered buffer
static const uint64_t kMostPinned = (uint64_t)8 << 30;

typedef struct {
  const clb_file *file;
  int fd;
  bool fixed_file;
  uint8_t *memory;      // registered, or NULL
  size_t buffer_bytes;  // of each registered buffer
  size_t memory_bytes;

  void *ring, *sqe_map;
  size_t ring_bytes, sqe_bytes;
  _Atomic uint32_t *sq_head, *sq_tail, *cq_head, *cq_tail;
  uint32_t sq_mask, cq_mask;
  uint32_t *sq_array;
  struct io_uring_sqe *sqes;
  const struct io_uring_cqe *cqes;

  clb_read_queue urgent, spare, finished;
  uint32_t n_entered;  // in the ring: handed to the kernel, or about to be
  uint32_t n_urgent_entered, n_spare_entered;
} uring;

// ---------------------------------------------------------------------------------------------------------------------
// Opening

static int enter(const uring *u, uint32_t n_submit, uint32_t n_wait) {
  const long result =
      syscall(SYS_io_uring_enter, u->fd, n_submit, n_wait, n_wait > 0 ? IORING_ENTER_GETEVENTS : 0, NULL, 0);
  return result < 0 ? -errno : (int)result;
}

static bool refused(const char *step, int number, char *reason, size_t reason_bytes) {
  char text[100];
  clb_describe_errno(number, text, sizeof text);
  snprintf(reason, reason_bytes, "%s failed: %s", step, text);
  return false;
}

static bool map_rings(uring *u, const struct io_uring_params *p) {
  const size_t sq = p->sq_off.array + p->sq_entries * sizeof(uint32_t);
  const size_t cq = p->cq_off.cqes + p->cq_entries * sizeof(struct io_uring_cqe);
  const int flags = MAP_SHARED | MAP_POPULATE;
  u->ring_bytes = sq > cq ? sq : cq;
  u->sqe_bytes = p->sq_entries * sizeof(struct io_uring_sqe);
  void *ring = mmap(NULL, u->ring_bytes, PROT_READ | PROT_WRITE, flags, u->fd, IORING_OFF_SQ_RING);
  if (ring == MAP_FAILED) return false;
  u->ring = ring;
  void *sqes = mmap(NULL, u->sqe_bytes, PROT_READ | PROT_WRITE, flags, u->fd, IORING_OFF_SQES);
  if (sqes == MAP_FAILED) return false;
  u->sqe_map = u->sqes = sqes;
  uint8_t *base = ring;
  u->sq_head = (_Atomic uint32_t *)(void *)(base + p->sq_off.head);
  u->sq_tail = (_Atomic uint32_t *)(void *)(base + p->sq_off.tail);
  u->sq_array = (uint32_t *)(void *)(base + p->sq_off.array);
  u->sq_mask = p->sq_entries - 1;
  u->cq_head = (_Atomic uint32_t *)(void *)(base + p->cq_off.head);
  u->cq_tail = (_Atomic uint32_t *)(void *)(base + p->cq_off.tail);
  u->cqes = (const struct io_uring_cqe *)(const void *)(base + p->cq_off.cqes);
  u->cq_mask = p->cq_entries - 1;
  return true;
}

static bool knows_read(const uring *u) {
  enum { N = IORING_OP_READ + 1 };
  struct io_uring_probe *probe = calloc(1, sizeof *probe + N * sizeof probe->ops[0]);
  if (probe == NULL) return false;
  const bool known = syscall(SYS_io_uring_register, u->fd, IORING_REGISTER_PROBE, probe, N) == 0 &&
                     probe->ops_len > IORING_OP_READ && (probe->ops[IORING_OP_READ].flags & IO_URING_OP_SUPPORTED) != 0;
  free(probe);
  return known;
}

// Pins the cache, so that its pages are not looked up for each read: measured to give 2-9 % more bytes per second. The
// whole cache is then taken at open, which is why a very large one is not. Optional: RLIMIT_MEMLOCK may forbid it.
static void register_memory(uring *u, const clb_io_setup *setup) {
  if (setup->unit_bytes == 0 || setup->unit_bytes > kMaxBuffer) return;
  const size_t total = setup->unit_bytes * setup->n_units;
  if (total > kMostPinned) return;
  u->buffer_bytes = kMaxBuffer / setup->unit_bytes * setup->unit_bytes;
  const size_t n = (total + u->buffer_bytes - 1) / u->buffer_bytes;
  struct iovec *buffers = n > 1024 ? NULL : calloc(n, sizeof *buffers);
  if (buffers == NULL) return;
  for (size_t i = 0; i < n; i++) {
    const size_t from = i * u->buffer_bytes, left = total - from;
    buffers[i] = (struct iovec){setup->memory + from, left < u->buffer_bytes ? left : u->buffer_bytes};
  }
  if (syscall(SYS_io_uring_register, u->fd, IORING_REGISTER_BUFFERS, buffers, (unsigned)n) == 0) {
    u->memory = setup->memory;
    u->memory_bytes = total;
  } else {  // the kernel looks for the pages before it looks at the limit
    (void)madvise(setup->memory, total, MADV_DONTNEED);
  }
  free(buffers);
}

static void uring_close(void *io) {
  uring *u = io;
  if (u->sqe_map != NULL) munmap(u->sqe_map, u->sqe_bytes);
  if (u->ring != NULL) munmap(u->ring, u->ring_bytes);
  if (u->fd >= 0) close(u->fd);
  free(u);
}

static bool open_ring(uring *u, const clb_io_setup *setup, char *reason, size_t reason_bytes) {
  struct io_uring_params p = {0};
  const long fd = syscall(SYS_io_uring_setup, DEPTH, &p);
  if (fd < 0) return refused("io_uring_setup", errno, reason, reason_bytes);
  u->fd = (int)fd;
  if ((p.features & IORING_FEAT_SINGLE_MMAP) == 0 || (p.features & IORING_FEAT_NODROP) == 0 || !knows_read(u)) {
    snprintf(reason, reason_bytes, "this kernel's io_uring is too old (Linux 5.6 is needed)");
    return false;
  }
  if (!map_rings(u, &p)) return refused("mapping the ring", errno, reason, reason_bytes);
  const int file = setup->file->fd;
  u->fixed_file = syscall(SYS_io_uring_register, u->fd, IORING_REGISTER_FILES, &file, 1) == 0;
  register_memory(u, setup);
  // As many workers as the pool would have; older kernels choose by themselves.
  unsigned workers[2] = {(unsigned)setup->n_threads, (unsigned)setup->n_threads};
  (void)syscall(SYS_io_uring_register, u->fd, REGISTER_MAX_WORKERS, workers, 2);
  return true;
}

static void *uring_open(const clb_io_setup *setup, char *reason, size_t reason_bytes) {
  uring *u = calloc(1, sizeof *u);
  if (u == NULL) {
    snprintf(reason, reason_bytes, "no memory");
    return NULL;
  }
  u->fd = -1;
  u->file = setup->file;
  if (open_ring(u, setup, reason, reason_bytes)) return u;
  uring_close(u);
  return NULL;
}

// ---------------------------------------------------------------------------------------------------------------------
// Submitting

static void fill_sqe(const uring *u, struct io_uring_sqe *sqe, clb_read *read) {
  memset(sqe, 0, sizeof *sqe);
  const struct iovec *part = &read->parts[0];
  const bool fixed = u->fixed_file && read->file == u->file;
  sqe->fd = fixed ? 0 : read->file->fd;
  // Starting a large direct read takes 0.2-0.3 ms. Left to the kernel's workers, decoding with four fifths of the
  // experts read from the drive went 1.3 times as fast as when the computing thread did that.
  sqe->flags = IOSQE_ASYNC;
  if (fixed) sqe->flags |= IOSQE_FIXED_FILE;
  sqe->off = read->offset + read->n_done;
  sqe->user_data = (uint64_t)(uintptr_t)read;
  if (read->n_parts > 1) {
    sqe->opcode = IORING_OP_READV;
    sqe->addr = (uint64_t)(uintptr_t)read->parts;
    sqe->len = (uint32_t)read->n_parts;
    return;
  }
  sqe->opcode = IORING_OP_READ;
  sqe->addr = (uint64_t)(uintptr_t)part->iov_base;
  sqe->len = (uint32_t)part->iov_len;
  const size_t at = u->memory == NULL ? SIZE_MAX : (size_t)((uintptr_t)part->iov_base - (uintptr_t)u->memory);
  if (at >= u->memory_bytes) return;
  sqe->opcode = IORING_OP_READ_FIXED;
  sqe->buf_index = (uint16_t)(at / u->buffer_bytes);
}

static clb_read *take_read(uring *u) {
  if (u->n_entered == DEPTH) return NULL;
  clb_read *read = clb_read_pop(&u->urgent);
  if (read == NULL && u->n_urgent_entered == 0 && u->n_spare_entered < SPARE_DEPTH) read = clb_read_pop(&u->spare);
  return read;
}

static void count_entered(uring *u, const clb_read *read, uint32_t one) {
  u->n_entered += one;
  *(read->urgent ? &u->n_urgent_entered : &u->n_spare_entered) += one;
}

static void finish(uring *u, clb_read *read, int status) {
  read->status = status;
  if (status == 0) read->arrived(read);
  clb_read_push(&u->finished, read);
}

// The kernel takes nothing that is in the ring: it comes back as failed.
static void fail_unsubmitted(uring *u, int number) {
  uint32_t tail = atomic_load_explicit(u->sq_tail, memory_order_relaxed);
  const uint32_t head = atomic_load_explicit(u->sq_head, memory_order_acquire);
  for (uint32_t i = head; i != tail; i++) {
    clb_read *read = (clb_read *)(uintptr_t)u->sqes[i & u->sq_mask].user_data;
    count_entered(u, read, UINT32_MAX);
    finish(u, read, number);
  }
  atomic_store_explicit(u->sq_tail, head, memory_order_release);
}

// Starts what may start; with `n_wait`, returns when so many reads have finished.
static void enter_reads(uring *u, uint32_t n_wait) {
  uint32_t tail = atomic_load_explicit(u->sq_tail, memory_order_relaxed);
  for (clb_read *read; (read = take_read(u)) != NULL; tail++) {
    fill_sqe(u, &u->sqes[tail & u->sq_mask], read);
    u->sq_array[tail & u->sq_mask] = tail & u->sq_mask;
    count_entered(u, read, 1);
  }
  atomic_store_explicit(u->sq_tail, tail, memory_order_release);
  const uint32_t n_new = tail - atomic_load_explicit(u->sq_head, memory_order_acquire);
  if (n_new == 0 && n_wait == 0) return;
  const int result = enter(u, n_new, n_wait);
  if (result < 0 && result != -EINTR && result != -EAGAIN && result != -EBUSY) fail_unsubmitted(u, -result);
}

// ---------------------------------------------------------------------------------------------------------------------
// Finishing

// Interrupted and short reads go on where they stopped. What a direct read returned is kept up to a whole unit only, so
// that what follows is aligned again.
static void take_result(uring *u, clb_read *read, int result) {
  count_entered(u, read, UINT32_MAX);
  clb_read_queue *again = read->urgent ? &u->urgent : &u->spare;
  if (result == -EINTR || result == -EAGAIN) {
    clb_read_push(again, read);
    return;
  }
  if (result < 0) {
    finish(u, read, -result);
    return;
  }
  const size_t got = (size_t)result, left = read->n_bytes - read->n_done;
  const size_t kept = got < left && read->file->direct ? got / CLB_IO_UNIT * CLB_IO_UNIT : got;
  read->n_done += kept;
  if (kept == 0 || kept >= left) {
    finish(u, read, kept == 0 ? ENODATA : 0);
    return;
  }
  read->n_parts = clb_parts_skip(read->parts, read->n_parts, kept);
  clb_read_push(again, read);
}

static void reap(uring *u) {
  uint32_t head = atomic_load_explicit(u->cq_head, memory_order_relaxed);
  while (head != atomic_load_explicit(u->cq_tail, memory_order_acquire)) {
    const struct io_uring_cqe cqe = u->cqes[head & u->cq_mask];
    atomic_store_explicit(u->cq_head, ++head, memory_order_release);
    take_result(u, (clb_read *)(uintptr_t)cqe.user_data, cqe.res);
  }
}

static void uring_submit(void *io, clb_read *read) {
  uring *u = io;
  clb_read_push(read->urgent ? &u->urgent : &u->spare, read);
  reap(u);
  enter_reads(u, 0);
}

static clb_read *uring_poll(void *io) {
  uring *u = io;
  reap(u);
  enter_reads(u, 0);
  return clb_read_pop(&u->finished);
}

static clb_read *uring_wait(void *io) {
  uring *u = io;
  reap(u);
  while (u->finished.first == NULL) {
    enter_reads(u, 1);
    reap(u);
  }
  return clb_read_pop(&u->finished);
}

static bool uring_withdraw(void *io, clb_read *read) {
  uring *u = io;
  return clb_read_remove(read->urgent ? &u->urgent : &u->spare, read);
}

#else

static void *uring_open(const clb_io_setup *setup, char *reason, size_t reason_bytes) {
  (void)setup;
  snprintf(reason, reason_bytes, "this build has no io_uring");
  return NULL;
}

// Not reached without an open ring.
static void uring_close(void *io) {
  (void)io;
}
static void uring_submit(void *io, clb_read *read) {
  (void)io;
  (void)read;
}
static clb_read *uring_poll(void *io) {
  (void)io;
  return NULL;
}
static clb_read *uring_wait(void *io) {
  (void)io;
  return NULL;
}
static bool uring_withdraw(void *io, clb_read *read) {
  (void)io;
  (void)read;
  return false;
}

#endif

const clb_io_backend clb_io_uring = {.name = "io_uring",
                                     .open = uring_open,
                                     .close = uring_close,
                                     .submit = uring_submit,
                                     .poll = uring_poll,
                                     .wait = uring_wait,
                                     .withdraw = uring_withdraw};
