// Drives the expert store for tests/test_creader.py. Linked with --wrap=pread,preadv,open,mmap,madvise,syscall to
// inject faults and to see how much memory is really in use. In front of a mode may stand
//   --io pread|io_uring|mmap|buffered   how blocks are read (pread)
//   --piece N                           how many bytes at once
//   --hints                             before requests, guesses are made, right and wrong ones
//   --preload                           the cache is filled first
//   info FILE                              sizes, and how the file is read
//   random FILE SEED N CACHE THREADS CHECK N random requests, compared with the file; CACHE in bytes, "min" or "all"
//   faults FILE                            read errors, damaged and cut files; afterwards the store works
//   cut FILE                               the file is cut while it is open (it is afterwards, too)
//   blocked FILE                           io_uring refused by a seccomp filter, and unknown: pread, and said so
//   unpinned FILE                          io_uring without the right to lock memory
//   hints FILE                             guesses are read ahead, scored, given up, and never in the way
//   controller FILE                        hints that help and hints that do not; prints how far they went
//   preload FILE                           the first blocks of the file, as many as asked for
//   checks FILE                            which damage each check mode sees
//   overlap FILE                           reads run at once, and next to the use of what is in memory
//   misuse FILE                            wrong calls are refused and harmless
//   buffered FILE                          O_DIRECT refused by open, then by read: buffered, and said so
//   pair FILE FILE                         two stores at once, on two threads
//   circle FILE CACHE                      every expert of every row, again and again; prints the hit rate
//   trace FILE CACHE                       requests from stdin, "row expert expert ..." a line; prints the hit rate
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include "aligned_io.h"
#include "store.h"

#if defined(__has_include)
#if __has_include(<linux/io_uring.h>) && __has_include(<linux/seccomp.h>)
#define HAVE_URING 1
#include <linux/filter.h>
#include <linux/io_uring.h>
#include <linux/seccomp.h>
#endif
#endif

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) {                                                       \
      fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      abort();                                                                \
    }                                                                         \
  } while (0)

// ---------------------------------------------------------------------------------------------------------------------
// Faults

enum fault { NO_FAULT, FAULT_EIO, FAULT_SHORT, FAULT_INTERRUPTED, FAULT_END, FAULT_FLIP, FAULT_NOT_DIRECT, FAULT_SLOW };

static _Atomic int fault;
static _Atomic uint64_t fault_offset;                  // the read that covers it is hit
static _Atomic int faults_left;                        // negative: no end
static _Atomic useconds_t slow_microseconds = 200000;  // a read of FAULT_SLOW
static _Atomic bool refuse_direct_open;
static _Atomic int n_reading, most_reading;  // at once

static clb_io io = CLB_IO_PREAD;
static uint32_t piece_bytes;
static bool with_hints, with_preload;
static _Thread_local const char *container_path;

ssize_t __real_pread(int fd, void *buffer, size_t n, off_t offset);
ssize_t __wrap_pread(int fd, void *buffer, size_t n, off_t offset);
ssize_t __wrap_preadv(int fd, const struct iovec *parts, int n, off_t offset);
int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...);

static bool is_hit(uint64_t offset, size_t n) {
  uint64_t at = atomic_load(&fault_offset);
  if (at < offset || at - offset >= n) return false;
  int left = atomic_load(&faults_left);
  while (left != 0 && !atomic_compare_exchange_weak(&faults_left, &left, left < 0 ? left : left - 1)) {
  }
  return left != 0;
}

ssize_t __wrap_pread(int fd, void *buffer, size_t n, off_t offset) {
  int kind = atomic_load(&fault);
  if (kind == FAULT_SLOW) {
    int now = atomic_fetch_add(&n_reading, 1) + 1, most = atomic_load(&most_reading);
    while (now > most && !atomic_compare_exchange_weak(&most_reading, &most, now)) {
    }
    usleep(atomic_load(&slow_microseconds));
    atomic_fetch_sub(&n_reading, 1);
    return __real_pread(fd, buffer, n, offset);
  }
  if (kind == FAULT_NOT_DIRECT && (fcntl(fd, F_GETFL) & O_DIRECT) != 0) {
    errno = EINVAL;
    return -1;
  }
  if (kind == NO_FAULT || !is_hit((uint64_t)offset, n)) return __real_pread(fd, buffer, n, offset);
  if (kind == FAULT_EIO || kind == FAULT_INTERRUPTED) {
    errno = kind == FAULT_EIO ? EIO : EINTR;
    return -1;
  }
  if (kind == FAULT_END) return 0;
  ssize_t got = __real_pread(fd, buffer, n, offset);
  if (kind == FAULT_FLIP && got > 0) ((uint8_t *)buffer)[atomic_load(&fault_offset) - (uint64_t)offset] ^= 0x10;
  return kind == FAULT_SHORT && got > 5000 ? 5000 : got;  // no multiple of any unit
}

// One part at a time, so that the faults of pread are those of preadv.
ssize_t __wrap_preadv(int fd, const struct iovec *parts, int n, off_t offset) {
  ssize_t sum = 0;
  for (int i = 0; i < n; i++) {
    ssize_t got = __wrap_pread(fd, parts[i].iov_base, parts[i].iov_len, offset + sum);
    if (got < 0) return sum > 0 ? sum : got;
    sum += got;
    if ((size_t)got < parts[i].iov_len) break;
  }
  return sum;
}

int __wrap_open(const char *path, int flags, ...) {
  if (atomic_load(&refuse_direct_open) && (flags & O_DIRECT) != 0) {
    errno = EINVAL;
    return -1;
  }
  return __real_open(path, flags);
}

// ---------------------------------------------------------------------------------------------------------------------
// Faults of io_uring: its submissions are changed before the kernel sees them

static int refused_setup;  // errno of io_uring_setup, or 0

#ifdef HAVE_URING
enum { INJECT_RESULT = 1 };  // IORING_NOP_INJECT_RESULT, Linux 6.10

static _Thread_local struct io_uring_params ring;  // a store is called from one thread
static _Thread_local uint8_t *ring_map;
static _Thread_local struct io_uring_sqe *ring_sqes;

static size_t sqe_bytes(const struct io_uring_sqe *sqe) {
  if (sqe->opcode != IORING_OP_READV) return sqe->len;
  const struct iovec *parts = (const struct iovec *)(uintptr_t)sqe->addr;
  size_t n = 0;
  for (uint32_t i = 0; i < sqe->len; i++) n += parts[i].iov_len;
  return n;
}

static void change_sqe(struct io_uring_sqe *sqe) {
  const int kind = atomic_load(&fault);
  if (kind == FAULT_SHORT) {
    sqe->len = sqe->opcode == IORING_OP_READV ? 1 : sqe->len > 4096 ? 4096 : sqe->len;
  } else if (kind == FAULT_EIO || kind == FAULT_INTERRUPTED || kind == FAULT_END) {
    const uint64_t read = sqe->user_data;
    memset(sqe, 0, sizeof *sqe);
    sqe->opcode = IORING_OP_NOP;
    sqe->rw_flags = INJECT_RESULT;
    sqe->len = (uint32_t)(kind == FAULT_EIO ? -EIO : kind == FAULT_INTERRUPTED ? -EINTR : 0);
    sqe->user_data = read;
  }
}

static void change_submissions(void) {
  const uint32_t tail = *(uint32_t *)(void *)(ring_map + ring.sq_off.tail);
  const uint32_t *array = (uint32_t *)(void *)(ring_map + ring.sq_off.array);
  for (uint32_t i = *(uint32_t *)(void *)(ring_map + ring.sq_off.head); i != tail; i++) {
    struct io_uring_sqe *sqe = &ring_sqes[array[i & (ring.sq_entries - 1)]];
    if (sqe->opcode != IORING_OP_NOP && is_hit(sqe->off, sqe_bytes(sqe))) change_sqe(sqe);
  }
}
#endif

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);

long __wrap_syscall(long number, ...) {
  long a[6];
  va_list list;
  va_start(list, number);
  for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
  va_end(list);
#ifdef HAVE_URING
  if (number == SYS_io_uring_setup && refused_setup != 0) {
    errno = refused_setup;
    return -1;
  }
  if (number == SYS_io_uring_enter && atomic_load(&fault) != NO_FAULT) change_submissions();
  const long result = __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  if (number == SYS_io_uring_setup && result >= 0) ring = *(struct io_uring_params *)a[1];
  return result;
#else
  return __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory, and faults of a mapped file

static const uint8_t *_Atomic file_map;

int __real_madvise(void *address, size_t n, int advice);
int __wrap_madvise(void *address, size_t n, int advice);

int __wrap_madvise(void *address, size_t n, int advice) {
  const int kind = atomic_load(&fault);
  const bool matters = advice == 22 && n > 0 && (kind == FAULT_EIO || kind == FAULT_INTERRUPTED);  // MADV_POPULATE_READ
  if (!matters || !is_hit((uint64_t)((uint8_t *)address - file_map), n)) return __real_madvise(address, n, advice);
  errno = kind == FAULT_EIO ? EFAULT : EINTR;
  return -1;
}

// The last cache this thread reserved.
static _Thread_local void *arena;
static _Thread_local size_t arena_bytes;

void *__real_mmap(void *address, size_t n, int protection, int flags, int fd, off_t offset);
void *__wrap_mmap(void *address, size_t n, int protection, int flags, int fd, off_t offset);

void *__wrap_mmap(void *address, size_t n, int protection, int flags, int fd, off_t offset) {
  void *p = __real_mmap(address, n, protection, flags, fd, offset);
  if ((flags & MAP_NORESERVE) != 0 && p != MAP_FAILED) {
    arena = p;
    arena_bytes = n;
  }
  if (flags == MAP_SHARED && p != MAP_FAILED) file_map = p;
#ifdef HAVE_URING
  if ((flags & MAP_POPULATE) != 0 && offset == IORING_OFF_SQ_RING) ring_map = p;
  if ((flags & MAP_POPULATE) != 0 && offset == (off_t)IORING_OFF_SQES) ring_sqes = p;
#endif
  return p;
}

static uint64_t arena_in_memory(void) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE), n_pages = arena_bytes / page, n = 0;
  unsigned char *present = malloc(n_pages);
  CHECK(present != NULL && arena_bytes % page == 0 && mincore(arena, arena_bytes, present) == 0);
  for (size_t i = 0; i < n_pages; i++) n += present[i] & 1;
  free(present);
  return n * page;
}

// A damaged byte, for backends that do not read by pread, is damaged in the file.
static void flip_in_file(uint64_t offset) {
  uint8_t byte;
  const int fd = __real_open(container_path, O_RDWR);
  CHECK(fd >= 0 && __real_pread(fd, &byte, 1, (off_t)offset) == 1);
  byte ^= 0x10;
  CHECK(pwrite(fd, &byte, 1, (off_t)offset) == 1 && fsync(fd) == 0 && close(fd) == 0);
}

static void set_fault(enum fault kind, uint64_t offset, int count) {
  const bool in_file = io == CLB_IO_URING || io == CLB_IO_MMAP;
  if (in_file && atomic_load(&fault) == FAULT_FLIP) flip_in_file(atomic_load(&fault_offset));
  if (in_file && kind == FAULT_FLIP) flip_in_file(offset);
  atomic_store(&fault_offset, offset);
  atomic_store(&faults_left, count);
  atomic_store(&fault, kind);
}

// ---------------------------------------------------------------------------------------------------------------------
// Helpers

static clb_container *open_container(const char *path) {
  container_path = path;
  char error[512];
  clb_container *c = clb_container_open(path, error, sizeof error);
  if (c == NULL) fprintf(stderr, "%s\n", error);
  CHECK(c != NULL);
  return c;
}

static clb_store *open_store(const clb_container *c, uint64_t cache_bytes, uint32_t io_threads, clb_check check) {
  char error[512];
  clb_store_options options = {cache_bytes, io_threads, check, io, piece_bytes, NULL};
  clb_store *s = clb_store_open(c, &options, error, sizeof error);
  if (s == NULL) fprintf(stderr, "%s\n", error);
  CHECK(s != NULL && error[0] == 0);
  if (with_preload) CHECK(clb_store_preload(s, UINT64_MAX));
  return s;
}

static uint64_t cache_size(const clb_container *c, const char *text) {
  clb_store_sizes sizes;
  clb_store_measure(c, &sizes);
  if (strcmp(text, "min") == 0) return sizes.minimum_bytes;
  if (strcmp(text, "all") == 0) return sizes.all_bytes;
  return strtoull(text, NULL, 0);
}

static clb_store_metrics metrics_of(const clb_store *s) {
  clb_store_metrics m;
  clb_store_get_metrics(s, &m);
  return m;
}

static bool same_as_file(const clb_container *c, size_t row, const clb_expert *e) {
  clb_block block;
  CHECK(clb_container_block(c, row, e->expert, &block));
  CHECK(e->layout == clb_container_layout(c, block.layout) && (uintptr_t)e->data % 4096 == 0);
  uint8_t *expected = malloc((size_t)block.bytes);
  CHECK(expected != NULL);
  ssize_t got = __real_pread(clb_container_fd(c), expected, (size_t)block.bytes, (off_t)block.offset);
  bool same = got == (ssize_t)block.bytes && memcmp(expected, e->data, (size_t)block.bytes) == 0;
  free(expected);
  return same;
}

typedef struct {
  uint64_t state;
} rng;

static uint64_t random_u64(rng *r) {  // splitmix64
  uint64_t z = r->state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

static size_t random_below(rng *r, size_t n) {
  return (size_t)(random_u64(r) % n);
}

// The whole of a request, one expert held at a time. False when it failed.
static bool run_request(clb_store *s, const clb_container *c, size_t row, const uint32_t *experts, size_t n) {
  CHECK(clb_store_begin(s, row, experts, n));
  size_t n_seen = 0;
  clb_store_status status;
  clb_expert e;
  while ((status = clb_store_next(s, &e)) == CLB_STORE_READY) {
    CHECK(e.slot < n && experts[e.slot] == e.expert && same_as_file(c, row, &e));
    n_seen++;
    clb_store_release(s, e.slot);
  }
  CHECK(status == CLB_STORE_DONE || status == CLB_STORE_FAILED);
  CHECK(status == CLB_STORE_FAILED || n_seen == n);
  clb_store_end(s);
  return status == CLB_STORE_DONE;
}

// ---------------------------------------------------------------------------------------------------------------------
// random

static void shuffled_experts(rng *r, uint32_t *experts, size_t n) {
  for (size_t i = 0; i < n; i++) {
    size_t j = random_below(r, i + 1);
    experts[i] = experts[j];
    experts[j] = (uint32_t)i;
  }
}

// Guesses at the coming request, partly right, and at another one; now and then time for them to be read.
static void guess_at_random(clb_store *s, const clb_container *c, rng *r, size_t row, const uint32_t *experts,
                            size_t n) {
  uint32_t others[256];
  size_t other = random_below(r, clb_container_n_rows(c)), n_others = clb_container_row(c, other)->n_experts;
  shuffled_experts(r, others, n_others);
  if (random_below(r, 2) == 0) CHECK(clb_store_hint(s, other, others, random_below(r, n_others + 1)));
  if (random_below(r, 4) != 0) CHECK(clb_store_hint(s, row, experts, random_below(r, n + 1)));
  if (random_below(r, 2) == 0) usleep((useconds_t)random_below(r, 1000));
}

// A request with up to `patience` experts held at once, some of them kept until the end, now and then given up early.
static void run_random_request(clb_store *s, const clb_container *c, rng *r) {
  size_t row = random_below(r, clb_container_n_rows(c)), n_experts = clb_container_row(c, row)->n_experts;
  uint32_t experts[256];
  CHECK(n_experts <= 256);
  shuffled_experts(r, experts, n_experts);
  size_t n = random_below(r, n_experts + 1), patience = 1 + random_below(r, 4), n_held = 0, n_seen = 0;
  size_t give_up = random_below(r, 10) == 0 ? random_below(r, n + 1) : n + 1;
  if (with_hints) guess_at_random(s, c, r, row, experts, n);
  clb_expert held[256];
  bool seen[256] = {false};
  CHECK(clb_store_begin(s, row, experts, n));
  while (n_seen < give_up) {
    clb_expert e;
    clb_store_status status = random_below(r, 2) == 0 ? clb_store_next(s, &e) : clb_store_try_next(s, &e);
    if (status == CLB_STORE_DONE) break;
    if (status == CLB_STORE_PENDING) status = clb_store_next(s, &e);
    CHECK(status == CLB_STORE_READY || (status == CLB_STORE_FULL && n_held > 0));
    if (status == CLB_STORE_READY) {
      CHECK(e.slot < n && experts[e.slot] == e.expert && !seen[e.slot]);
      seen[e.slot] = true;
      n_seen++;
      held[n_held++] = e;
    }
    if (n_held < patience && status == CLB_STORE_READY) continue;
    size_t i = random_below(r, n_held);
    CHECK(same_as_file(c, row, &held[i]));  // still, after all that was read since
    clb_store_release(s, held[i].slot);
    held[i] = held[--n_held];
  }
  CHECK(n_seen == n || give_up <= n);
  for (size_t i = 0; i < n_held; i++) CHECK(same_as_file(c, row, &held[i]));
  clb_store_end(s);
}

// A mapped file has no cache of its own; io_uring may take the whole of it at open.
static bool memory_is_kept(const clb_store *s, uint64_t cache) {
  if (io == CLB_IO_MMAP) return true;
  return arena_in_memory() <= (io == CLB_IO_URING ? cache : metrics_of(s).used_bytes);
}

static void run_random(const clb_container *c, uint64_t seed, size_t n, uint64_t cache, uint32_t threads,
                       clb_check check) {
  clb_store *s = open_store(c, cache, threads, check);
  rng r = {seed};
  for (size_t i = 0; i < n; i++) {
    run_random_request(s, c, &r);
    CHECK(metrics_of(s).used_bytes <= cache && memory_is_kept(s, cache));
  }
  clb_store_metrics m = metrics_of(s);
  clb_store_sizes sizes;
  clb_store_measure(c, &sizes);
  if (cache >= sizes.all_bytes) CHECK(m.evictions == 0 && (m.reads <= sizes.n_blocks || with_hints));
  CHECK(m.reads <= m.misses + m.hint_reads + (with_preload ? sizes.n_blocks : 0));
  printf("hits %" PRIu64 " misses %" PRIu64 " reads %" PRIu64 " evictions %" PRIu64 " used %" PRIu64 "\n", m.hits,
         m.misses, m.reads, m.evictions, m.used_bytes);
  if (random_below(&r, 2) == 0) CHECK(clb_store_begin(s, 0, &(uint32_t){0}, 1));  // closing in the middle is fine
  clb_store_close(s);
}

// ---------------------------------------------------------------------------------------------------------------------
// faults

static void expect_failure(clb_store *s, const clb_container *c, const char *const *words) {
  const uint32_t experts[] = {0, 1, 2, 3};
  CHECK(!run_request(s, c, 1, experts, 4));
  printf("%s\n", clb_store_error(s));
  for (; *words != NULL; words++) CHECK(strstr(clb_store_error(s), *words) != NULL);
  set_fault(NO_FAULT, 0, 0);
  CHECK(run_request(s, c, 1, experts, 4));
}

static int run_faults(const char *path) {
  clb_container *c = open_container(path);
  clb_block block;
  CHECK(clb_container_block(c, 1, 2, &block));
  char offset[32];
  snprintf(offset, sizeof offset, "%" PRIu64, block.offset);
  for (int round = 0; round < 2; round++) {
    uint64_t cache = cache_size(c, round == 0 ? "min" : "all");
    for (uint32_t threads = 1; threads <= 4; threads++) {
      clb_store *s = open_store(c, cache, threads, CLB_CHECK_FIRST);
      set_fault(FAULT_EIO, block.offset, -1);
      expect_failure(s, c, (const char *[]){"layer 1", "expert 2", offset, "nput/output error", NULL});
      clb_store_close(s);

      if (io != CLB_IO_MMAP) {  // "cut" is that for a mapped file
        s = open_store(c, cache, threads, CLB_CHECK_FIRST);
        set_fault(FAULT_END, block.offset + 4096, -1);
        expect_failure(s, c, (const char *[]){"layer 1", "expert 2", offset, "the file ends", NULL});
        clb_store_close(s);
      }

      s = open_store(c, cache, threads, CLB_CHECK_ALWAYS);
      set_fault(FAULT_FLIP, block.offset + block.bytes - 1, -1);
      expect_failure(s, c, (const char *[]){"layer 1", "expert 2", offset, "CRC-32C", "damaged", NULL});
      clb_store_close(s);

      const uint32_t experts[] = {3, 2, 1, 0};
      s = open_store(c, cache, threads, CLB_CHECK_FIRST);
      set_fault(FAULT_INTERRUPTED, block.offset, 100);
      CHECK(run_request(s, c, 1, experts, 4) && atomic_load(&faults_left) == 0);
      clb_store_close(s);

      if (io != CLB_IO_MMAP) {
        s = open_store(c, cache, threads, CLB_CHECK_FIRST);
        set_fault(FAULT_SHORT, block.offset, 1);
        CHECK(run_request(s, c, 1, experts, 4) && atomic_load(&faults_left) == 0);
        clb_store_close(s);
      }
      set_fault(NO_FAULT, 0, 0);
    }
  }
  clb_container_close(c);
  return 0;
}

// As many reads at once as there are threads, and what is in memory comes without waiting for any.
static int run_overlap(const char *path) {
  clb_container *c = open_container(path);
  clb_store *s = open_store(c, cache_size(c, "all"), 3, CLB_CHECK_FIRST);
  const uint32_t there[] = {4, 2}, experts[] = {0, 4, 1, 2, 3};
  CHECK(run_request(s, c, 1, there, 2));
  uint64_t waited = metrics_of(s).wait_ns;
  set_fault(FAULT_SLOW, 0, 0);
  CHECK(clb_store_begin(s, 1, experts, 5));
  for (size_t i = 0; i < 2; i++) {
    clb_expert e;
    CHECK(clb_store_next(s, &e) == CLB_STORE_READY && e.expert == there[i] && same_as_file(c, 1, &e));
    clb_store_release(s, e.slot);
  }
  CHECK(metrics_of(s).wait_ns == waited);
  for (size_t i = 0; i < 3; i++) {
    clb_expert e;
    CHECK(clb_store_next(s, &e) == CLB_STORE_READY && same_as_file(c, 1, &e));
  }
  CHECK(metrics_of(s).wait_ns - waited > 50000000u);
  CHECK(atomic_load(&most_reading) == 3);
  set_fault(NO_FAULT, 0, 0);
  clb_store_close(s);
  clb_container_close(c);
  return 0;
}

// A bit that flips after the first read is seen by CLB_CHECK_ALWAYS only; before, by CLB_CHECK_NEVER never.
static int run_checks(const char *path) {
  clb_container *c = open_container(path);
  clb_block block;
  CHECK(clb_container_block(c, 1, 0, &block));
  const uint32_t experts[] = {0, 1, 2, 3, 4, 5}, first[] = {0};
  static const clb_check checks[] = {CLB_CHECK_FIRST, CLB_CHECK_ALWAYS, CLB_CHECK_NEVER};
  for (int i = 0; i < 3; i++) {
    for (int early = 0; early < 2; early++) {
      clb_store *s = open_store(c, cache_size(c, "min"), 1, checks[i]);
      if (early == 0) {
        CHECK(run_request(s, c, 1, first, 1));
        for (size_t r = 0; r < 6; r++) CHECK(run_request(s, c, r % 2 == 0 ? 0 : 2, experts, 6));  // evicts it
      }
      uint64_t reads = metrics_of(s).reads;
      set_fault(FAULT_FLIP, block.offset, -1);
      clb_expert e;
      CHECK(clb_store_begin(s, 1, first, 1));
      clb_store_status status = clb_store_next(s, &e);
      CHECK(metrics_of(s).reads == reads + 1);
      bool seen = checks[i] == CLB_CHECK_ALWAYS || (checks[i] == CLB_CHECK_FIRST && early == 1);
      CHECK(status == (seen ? CLB_STORE_FAILED : CLB_STORE_READY));
      set_fault(NO_FAULT, 0, 0);
      clb_store_close(s);
    }
  }
  clb_container_close(c);
  return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// misuse, buffered, info

static int run_misuse(const char *path) {
  clb_container *c = open_container(path);
  char error[512];
  clb_store_sizes sizes;
  clb_store_measure(c, &sizes);
  clb_store_options options = {sizes.minimum_bytes - 1, 1, CLB_CHECK_FIRST, io, 0, NULL};
  CHECK(clb_store_open(c, &options, error, sizeof error) == NULL && strstr(error, "expected at least") != NULL);
  options = (clb_store_options){UINT64_MAX, CLB_STORE_MAX_IO_THREADS + 1, CLB_CHECK_FIRST, io, 0, NULL};
  CHECK(clb_store_open(c, &options, error, sizeof error) == NULL && strstr(error, "io threads") != NULL);

  clb_store *s = open_store(c, UINT64_MAX, 0, CLB_CHECK_FIRST);  // cut to all blocks
  CHECK(metrics_of(s).cache_bytes == sizes.all_bytes);
  clb_expert e;
  const uint32_t twice[] = {1, 2, 1}, beyond[] = {0, 1000}, good[] = {2, 0};
  CHECK(clb_store_error(s)[0] == 0 && clb_store_next(s, &e) == CLB_STORE_FAILED);
  CHECK(!clb_store_begin(s, clb_container_n_rows(c), good, 2) && strstr(clb_store_error(s), "row") != NULL);
  CHECK(!clb_store_begin(s, 0, twice, 3) && strstr(clb_store_error(s), "expert 1 is named twice") != NULL);
  CHECK(!clb_store_begin(s, 0, beyond, 2) && strstr(clb_store_error(s), "expert is 1000") != NULL);
  CHECK(metrics_of(s).misses == 0);
  CHECK(run_request(s, c, 0, good, 2) && run_request(s, c, 0, good, 0));
  CHECK(clb_store_begin(s, 0, good, 2) && !clb_store_begin(s, 0, good, 2));
  clb_store_release(s, 0);  // not held yet
  clb_store_release(s, 7);
  CHECK(clb_store_next(s, &e) == CLB_STORE_READY && same_as_file(c, 0, &e));
  clb_store_release(s, e.slot);
  clb_store_release(s, e.slot);
  clb_store_end(s);
  clb_store_end(s);
  CHECK(run_request(s, c, 0, good, 2) && metrics_of(s).hits == 4);
  clb_store_close(s);
  clb_store_close(NULL);

  clb_file file;
  void *pages = clb_pages_alloc(8192);
  CHECK(pages != NULL && clb_file_open(&file, clb_container_fd(c), error, sizeof error));
  CHECK(clb_file_read(&file, 512, pages, 4096) == EINVAL && clb_file_read(&file, 0, pages, 512) == EINVAL);
  CHECK(clb_file_read(&file, 0, (char *)pages + 512, 4096) == EINVAL);
  CHECK(clb_file_read(&file, (uint64_t)INT64_MAX / 4096 * 4096, pages, 8192) == EINVAL);
  CHECK(clb_file_read(&file, clb_container_file_size(c), pages, 4096) == ENODATA);
  CHECK(clb_file_read(&file, 0, pages, 8192) == 0 && memcmp(pages, "COLIBRI", 8) == 0);
  clb_file_close(&file);
  clb_file_close(&file);
  clb_pages_free(pages, 8192);
  clb_container_close(c);
  return 0;
}

static void print_info(const clb_container *c) {
  clb_store_sizes sizes;
  clb_store_measure(c, &sizes);
  clb_store *s = open_store(c, sizes.minimum_bytes, 1, CLB_CHECK_ALWAYS);
  clb_store_metrics m = metrics_of(s);
  printf("minimum %" PRIu64 " token %" PRIu64 " all %" PRIu64 " blocks %" PRIu64
         " backend %s direct %d reason \"%s\"\n",
         sizes.minimum_bytes, sizes.token_bytes, sizes.all_bytes, sizes.n_blocks, m.backend, m.direct, m.reason);
  const uint32_t experts[] = {0, 1, 2};
  CHECK(run_request(s, c, 0, experts, 3) && (m.reason[0] == 0) == m.direct);
  clb_store_close(s);
}

static int run_buffered(const char *path) {
  clb_container *c = open_container(path);
  atomic_store(&refuse_direct_open, true);
  print_info(c);
  atomic_store(&refuse_direct_open, false);
  set_fault(FAULT_NOT_DIRECT, 0, 0);
  print_info(c);
  clb_container_close(c);
  return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// cut, blocked, unpinned

static int run_cut(const char *path) {
  clb_container *c = open_container(path);
  const uint32_t experts[] = {0, 1, 2, 3};
  clb_block block;
  CHECK(clb_container_block(c, 1, 2, &block));
  clb_store *s = open_store(c, cache_size(c, "all"), 2, CLB_CHECK_FIRST);
  CHECK(run_request(s, c, 0, experts, 1));
  CHECK(truncate(path, (off_t)block.offset) == 0);
  CHECK(!run_request(s, c, 1, experts, 4));
  printf("%s\n", clb_store_error(s));
  CHECK(strstr(clb_store_error(s), "layer 1") != NULL && strstr(clb_store_error(s), "the file ends") != NULL);
  for (uint32_t e = 0; e < clb_container_row(c, 1)->n_experts; e++) {  // what is before the cut
    clb_block other;
    CHECK(clb_container_block(c, 1, e, &other));
    if (other.offset < block.offset) CHECK(run_request(s, c, 1, &e, 1));
  }
  clb_store_close(s);
  clb_container_close(c);
  return 0;
}

static void expect_pread(const clb_container *c, const char *word) {
  const uint32_t experts[] = {0, 1, 2};
  io = CLB_IO_URING;
  clb_store *s = open_store(c, cache_size(c, "min"), 2, CLB_CHECK_FIRST);
  clb_store_metrics m = metrics_of(s);
  printf("%s: %s\n", m.backend, m.reason);
  CHECK(strcmp(m.backend, "pread") == 0 && strncmp(m.reason, "io_uring: ", 10) == 0);
  CHECK(strstr(m.reason, word) != NULL && strchr(m.reason, '\n') == NULL && run_request(s, c, 0, experts, 3));
  clb_store_close(s);
}

static int run_blocked(const char *path) {
  clb_container *c = open_container(path);
  refused_setup = ENOSYS;
  expect_pread(c, "not implemented");
  refused_setup = 0;
#ifdef HAVE_URING
  struct sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
  CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
  expect_pread(c, "not permitted");
#endif
  clb_container_close(c);
  return 0;
}

// Little memory may be locked: enough for a ring, not for the cache; then none. Newer kernels count rings, too.
static int run_unpinned(const char *path) {
  clb_container *c = open_container(path);
  const rlim_t limits[] = {1 << 16, 0};
  const uint32_t experts[] = {0, 1, 2, 3};
  io = CLB_IO_URING;
  for (int i = 0; i < 2; i++) {
    const struct rlimit limit = {limits[i], limits[i]};
    CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    if (geteuid() == 0) CHECK(seteuid(65534) == 0 && prctl(PR_SET_DUMPABLE, 1) == 0);  // gives up CAP_IPC_LOCK
    clb_store *s = open_store(c, cache_size(c, "all"), 1, CLB_CHECK_FIRST);
    CHECK(arena_in_memory() == 0 && run_request(s, c, 0, experts, 4));
    printf("%s\n", metrics_of(s).backend);
    clb_store_close(s);
    CHECK(seteuid(getuid()) == 0 && prctl(PR_SET_DUMPABLE, 1) == 0);  // the leak checker needs it
  }
  clb_container_close(c);
  return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// hints, preload

// Reads ahead have no other sign of their end than that a request finds them.
static void wait_for_reads(clb_store *s) {
  for (int i = 0; i < 20; i++) {
    usleep(5000);
    CHECK(clb_store_hint(s, 3, NULL, 0));  // io_uring looks for finished reads when it is called
  }
}

static int run_hints(const char *path) {
  clb_container *c = open_container(path);
  const uint32_t all[] = {0, 1, 2, 3, 4, 5}, two[] = {1, 2}, other[] = {5}, beyond[] = {1000};
  clb_store *s = open_store(c, cache_size(c, "all"), 2, CLB_CHECK_FIRST);
  CHECK(!clb_store_hint(s, 99, two, 2) && !clb_store_hint(s, 0, beyond, 1) && clb_store_wants_hints(s));
  CHECK(clb_store_hint(s, 1, two, 2));
  wait_for_reads(s);
  CHECK(run_request(s, c, 1, (const uint32_t[]){2, 4}, 2));  // one right, one wrong
  clb_store_metrics m = metrics_of(s);
  CHECK(m.hint_guessed == 2 && m.hint_right == 1 && m.hint_chosen == 2 && m.hint_reads == 2 && m.hits == 1);
  CHECK(m.hint_useful_bytes > 0 && m.reads == 3 && m.misses == 1);

  CHECK(clb_store_begin(s, 2, all, 6) && clb_store_hint(s, 3, two, 2));  // while a request is open
  clb_expert e;
  for (size_t i = 0; i < 6; i++) CHECK(clb_store_next(s, &e) == CLB_STORE_READY && same_as_file(c, 2, &e));
  CHECK(clb_store_next(s, &e) == CLB_STORE_DONE);
  clb_store_end(s);
  CHECK(run_request(s, c, 3, two, 2) && metrics_of(s).hint_right == 3);

  // A damaged guess is nobody's failure until it is asked for.
  clb_block block;
  CHECK(clb_container_block(c, 0, 5, &block));
  set_fault(FAULT_EIO, block.offset, -1);
  CHECK(clb_store_hint(s, 0, other, 1));
  wait_for_reads(s);
  CHECK(run_request(s, c, 0, two, 2) && !run_request(s, c, 0, other, 1));
  set_fault(NO_FAULT, 0, 0);
  CHECK(run_request(s, c, 0, other, 1));
  clb_store_close(s);

  // The smallest cache has no room for guesses, and works.
  s = open_store(c, cache_size(c, "min"), 2, CLB_CHECK_FIRST);
  CHECK(clb_store_hint(s, 1, two, 2) && run_request(s, c, 1, two, 2) && metrics_of(s).hint_reads == 0);
  clb_store_close(s);
  clb_container_close(c);
  return 0;
}

// Hints for the next request, then time to compute, then the request.
static clb_store_metrics follow_hints(const clb_container *c, bool right, useconds_t computing) {
  clb_store *s = open_store(c, cache_size(c, "all") / 2, 2, CLB_CHECK_NEVER);
  rng r = {7};
  atomic_store(&slow_microseconds, 1000);
  set_fault(FAULT_SLOW, 0, 0);
  for (size_t i = 0; i < 50 * 16; i++) {
    const size_t row = i % clb_container_n_rows(c), n_experts = clb_container_row(c, row)->n_experts;
    uint32_t experts[256];
    shuffled_experts(&r, experts, n_experts);
    CHECK(clb_store_hint(s, row, right ? experts : experts + 2, 2));
    usleep(computing);
    CHECK(run_request(s, c, row, experts, 2));
  }
  set_fault(NO_FAULT, 0, 0);
  clb_store_metrics m = metrics_of(s);
  CHECK(m.hint_right == (right ? m.hint_guessed : 0) && m.hint_guessed == 1600);
  clb_store_close(s);
  return m;
}

static int run_controller(const char *path) {
  clb_container *c = open_container(path);
  const clb_store_metrics right = follow_hints(c, true, 3000), wrong = follow_hints(c, false, 3000);
  printf("right followed %.3f\n", (double)right.hints_followed / (double)(right.hints_followed + right.hints_paused));
  printf("wrong reads %" PRIu64 "\n", wrong.hint_reads);
  clb_container_close(c);
  return 0;
}

static size_t n_hits_of_first(clb_store *s, const clb_container *c, uint64_t below) {
  size_t n = 0;
  for (size_t row = 0; row < clb_container_n_rows(c); row++) {
    for (uint32_t e = 0; e < clb_container_row(c, row)->n_experts; e++) {
      clb_block block;
      CHECK(clb_container_block(c, row, e, &block));
      if (block.offset >= below) continue;
      const uint64_t hits = metrics_of(s).hits;
      CHECK(run_request(s, c, row, &e, 1));
      n += metrics_of(s).hits - hits;
    }
  }
  return n;
}

static int run_preload(const char *path) {
  clb_container *c = open_container(path);
  clb_store_sizes sizes;
  clb_store_measure(c, &sizes);
  const uint64_t block = sizes.minimum_bytes / 2, first = clb_container_expert_offset(c);
  clb_store *s = open_store(c, 8 * block, 2, CLB_CHECK_FIRST);
  CHECK(clb_store_preload(s, 0) && metrics_of(s).used_bytes == 0);
  CHECK(clb_store_preload(s, 5 * block) && metrics_of(s).preloaded_bytes == 5 * block);
  CHECK(n_hits_of_first(s, c, first + 5 * block) == 5);
  CHECK(clb_store_preload(s, UINT64_MAX) && metrics_of(s).used_bytes == 8 * block && metrics_of(s).evictions == 0);
  CHECK(n_hits_of_first(s, c, first + 8 * block) == 8);
  clb_store_close(s);

  s = open_store(c, UINT64_MAX, 2, CLB_CHECK_FIRST);
  set_fault(FAULT_EIO, first + 3 * block, -1);
  CHECK(!clb_store_preload(s, UINT64_MAX) && strstr(clb_store_error(s), "nput/output error") != NULL);
  set_fault(NO_FAULT, 0, 0);
  CHECK(clb_store_preload(s, UINT64_MAX) && metrics_of(s).used_bytes == sizes.all_bytes && !clb_store_wants_hints(s));
  CHECK(n_hits_of_first(s, c, UINT64_MAX) == sizes.n_blocks);
  CHECK(clb_store_begin(s, 0, &(uint32_t){0}, 1) && !clb_store_preload(s, 1));
  clb_store_close(s);
  clb_container_close(c);
  return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// pair, circle, trace

static void *run_one_of_pair(void *path) {
  clb_container *c = open_container(path);
  run_random(c, 5, 60, cache_size(c, "min") * 2, 2, CLB_CHECK_FIRST);
  clb_container_close(c);
  return NULL;
}

static int run_pair(char **paths) {
  pthread_t threads[2];
  for (int i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, run_one_of_pair, paths[i]) == 0);
  for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
  return 0;
}

static void print_hit_rate(const clb_store *s) {
  clb_store_metrics m = metrics_of(s);
  printf("hit rate %.4f\n", (double)m.hits / (double)(m.hits + m.misses));
}

static int run_circle(const char *path, const char *cache) {
  clb_container *c = open_container(path);
  clb_store *s = open_store(c, cache_size(c, cache), 2, CLB_CHECK_NEVER);
  for (int round = 0; round < 50; round++) {
    for (size_t row = 0; row < clb_container_n_rows(c); row++) {
      for (uint32_t e = 0; e < clb_container_row(c, row)->n_experts; e++) CHECK(run_request(s, c, row, &e, 1));
    }
  }
  print_hit_rate(s);
  clb_store_close(s);
  clb_container_close(c);
  return 0;
}

static int run_trace(const char *path, const char *cache) {
  clb_container *c = open_container(path);
  clb_store *s = open_store(c, cache_size(c, cache), 2, CLB_CHECK_NEVER);
  char line[4096];
  while (fgets(line, sizeof line, stdin) != NULL) {
    uint32_t experts[256];
    size_t n = 0;
    char *at = line;
    size_t row = strtoull(at, &at, 10);
    while (*at == ' ') experts[n++] = (uint32_t)strtoul(at, &at, 10);
    CHECK(run_request(s, c, row, experts, n));
  }
  print_hit_rate(s);
  clb_store_close(s);
  clb_container_close(c);
  return 0;
}

static clb_io io_of(const char *name) {
  static const char *const names[] = {"auto", "pread", "io_uring", "mmap", "buffered"};
  for (int i = 0; i < 5; i++) {
    if (strcmp(name, names[i]) == 0) return (clb_io)i;
  }
  CHECK(false);
  return CLB_IO_AUTO;
}

static int parse_switches(int argc, char **argv) {
  int i = 1;
  for (; i < argc && strncmp(argv[i], "--", 2) == 0; i++) {
    if (strcmp(argv[i], "--hints") == 0) {
      with_hints = true;
    } else if (strcmp(argv[i], "--preload") == 0) {
      with_preload = true;
    } else if (strcmp(argv[i], "--io") == 0 && i + 1 < argc) {
      io = io_of(argv[++i]);
    } else if (strcmp(argv[i], "--piece") == 0 && i + 1 < argc) {
      piece_bytes = (uint32_t)strtoul(argv[++i], NULL, 0);
    } else {
      CHECK(false);
    }
  }
  return i - 1;
}

int main(int argc, char **argv) {
  const int n_switches = parse_switches(argc, argv);
  argc -= n_switches;
  argv += n_switches;
  const char *mode = argc > 2 ? argv[1] : "";
  if (strcmp(mode, "random") == 0 && argc == 8) {
    clb_container *c = open_container(argv[2]);
    run_random(c, strtoull(argv[3], NULL, 0), strtoull(argv[4], NULL, 0), cache_size(c, argv[5]),
               (uint32_t)strtoul(argv[6], NULL, 0), (clb_check)strtoul(argv[7], NULL, 0));
    clb_container_close(c);
    return 0;
  }
  if (strcmp(mode, "info") == 0) {
    clb_container *c = open_container(argv[2]);
    print_info(c);
    clb_container_close(c);
    return 0;
  }
  if (strcmp(mode, "faults") == 0) return run_faults(argv[2]);
  if (strcmp(mode, "cut") == 0) return run_cut(argv[2]);
  if (strcmp(mode, "blocked") == 0) return run_blocked(argv[2]);
  if (strcmp(mode, "unpinned") == 0) return run_unpinned(argv[2]);
  if (strcmp(mode, "controller") == 0) return run_controller(argv[2]);
  if (strcmp(mode, "hints") == 0) return run_hints(argv[2]);
  if (strcmp(mode, "preload") == 0) return run_preload(argv[2]);
  if (strcmp(mode, "checks") == 0) return run_checks(argv[2]);
  if (strcmp(mode, "overlap") == 0) return run_overlap(argv[2]);
  if (strcmp(mode, "misuse") == 0) return run_misuse(argv[2]);
  if (strcmp(mode, "buffered") == 0) return run_buffered(argv[2]);
  if (strcmp(mode, "pair") == 0 && argc == 4) return run_pair(argv + 2);
  if (strcmp(mode, "circle") == 0 && argc == 4) return run_circle(argv[2], argv[3]);
  if (strcmp(mode, "trace") == 0 && argc == 4) return run_trace(argv[2], argv[3]);
  return 2;
}
