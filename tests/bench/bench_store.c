// The expert store against the drive: bytes per second of random requests, next to a plain loop of O_DIRECT reads of
// the same blocks. Both sides take turns; what is printed is each side's median and their ratio.
//
//   bench_store FILE [SECONDS [ROUNDS [CACHE_BLOCKS [IO_THREADS]]]]   default: 1 s a turn, 5 rounds, 16 blocks, 4
//
// ROUNDS 0 is the plain loop alone: bytes per second in pieces of 1 MiB and in whole blocks, two numbers on one line.
//
// The ceiling is the better of reading whole blocks and pieces of 1 MiB, by IO_THREADS threads that do nothing else.
// Drop the page cache beforehand for mmap and buffered: what they read may come from memory, and is marked so.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "aligned_io.h"
#include "store.h"

enum { MAX_ROUNDS = 99, MAX_THREADS = 64, PIECE = 1 << 20, MAX_EXPERTS = 4096 };

typedef struct {
  const clb_container *container;
  const char *path;
  double seconds;
  size_t n_rounds, cache_blocks, n_threads;
  uint64_t random;
  uint8_t *memory;  // [cache_blocks, slot_bytes]
  size_t slot_bytes;
} bench;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint64_t random_u64(uint64_t *state) {  // splitmix64
  uint64_t z = *state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

static void die(const char *text) {
  fprintf(stderr, "bench_store: %s\n", text);
  exit(1);
}

// ---------------------------------------------------------------------------------------------------------------------
// The drive

typedef struct {
  const bench *b;
  int fd;
  size_t piece;
  double until;
  _Atomic uint64_t n_taken, n_bytes;
  uint64_t seed;
} raw_job;

// The block that piece `i` is of: the same for all threads.
static clb_block random_block(const raw_job *job, uint64_t i) {
  uint64_t state = job->seed + i;
  const clb_container *c = job->b->container;
  const size_t row = (size_t)(random_u64(&state) % clb_container_n_rows(c));
  clb_block block = {0};
  (void)clb_container_block(c, row, (size_t)(random_u64(&state) % clb_container_row(c, row)->n_experts), &block);
  return block;
}

static void *raw_thread(void *argument) {
  raw_job *job = argument;
  while (now() < job->until) {
    const uint64_t i = atomic_fetch_add(&job->n_taken, 1);
    const clb_block first = random_block(job, 0);
    const uint64_t per_block = job->piece == 0 ? 1 : (first.bytes + job->piece - 1) / job->piece;
    const clb_block block = random_block(job, i / per_block);
    const uint64_t n_all = (block.bytes + CLB_IO_UNIT - 1) / CLB_IO_UNIT * CLB_IO_UNIT;
    const uint64_t from = job->piece == 0 ? 0 : i % per_block * job->piece;
    if (from >= n_all) continue;
    const size_t n = job->piece == 0 || n_all - from < job->piece ? (size_t)(n_all - from) : job->piece;
    // As a cache is filled: the same few pages over and over would stay in the processor's caches.
    uint8_t *buffer = job->b->memory + i / per_block % job->b->cache_blocks * job->b->slot_bytes + from;
    if (pread(job->fd, buffer, n, (off_t)(block.offset + from)) != (ssize_t)n) die("a direct read failed");
    atomic_fetch_add(&job->n_bytes, n);
  }
  return NULL;
}

static double run_raw(bench *b, size_t piece) {
  const int fd = open(b->path, O_RDONLY | O_DIRECT);
  if (fd < 0) die("O_DIRECT does not work on this file system: there is no ceiling to compare with");
  const double start = now();
  raw_job job = {.b = b, .fd = fd, .piece = piece, .until = start + b->seconds, .seed = random_u64(&b->random)};
  pthread_t threads[MAX_THREADS];
  for (size_t i = 0; i < b->n_threads; i++) pthread_create(&threads[i], NULL, raw_thread, &job);
  for (size_t i = 0; i < b->n_threads; i++) pthread_join(threads[i], NULL);
  close(fd);
  return (double)job.n_bytes / (now() - start);
}

// ---------------------------------------------------------------------------------------------------------------------
// The store

static uint64_t run_request(bench *b, clb_store *store, size_t row, size_t k) {
  static uint32_t experts[MAX_EXPERTS];
  const size_t n = clb_container_row(b->container, row)->n_experts;
  for (size_t i = 0; i < n; i++) experts[i] = (uint32_t)i;
  for (size_t i = 0; i < k; i++) {
    const size_t j = i + (size_t)(random_u64(&b->random) % (n - i));
    const uint32_t other = experts[j];
    experts[j] = experts[i];
    experts[i] = other;
  }
  if (!clb_store_begin(store, row, experts, k)) die(clb_store_error(store));
  uint64_t sum = 0;
  clb_expert e;
  clb_store_status status;
  while ((status = clb_store_next(store, &e)) == CLB_STORE_READY) {
    sum += e.data[0];
    clb_store_release(store, e.slot);
  }
  if (status != CLB_STORE_DONE) die(clb_store_error(store));
  clb_store_end(store);
  return sum;
}

static double run_store(bench *b, clb_store *store) {
  uint64_t k = 2;
  (void)clb_spec_u64(b->container, "top_k", &k);
  clb_store_metrics before, after;
  (void)posix_fadvise(clb_container_fd(b->container), 0, 0, POSIX_FADV_DONTNEED);
  clb_store_get_metrics(store, &before);
  const double start = now();
  for (size_t row = 0; now() - start < b->seconds; row = (row + 1) % clb_container_n_rows(b->container)) {
    (void)run_request(b, store, row, (size_t)k);
  }
  clb_store_get_metrics(store, &after);
  return (double)(after.bytes_read - before.bytes_read) / (now() - start);
}

static int compare(const void *a, const void *b) {
  const double *x = a, *y = b;
  return (*x > *y) - (*x < *y);
}

static double median(double *values, size_t n) {
  qsort(values, n, sizeof *values, compare);
  return values[n / 2];
}

static void parse(bench *b, int argc, char **argv) {
  if (argc < 2) die("usage: bench_store FILE [SECONDS [ROUNDS [CACHE_BLOCKS [IO_THREADS]]]]");
  *b = (bench){.path = argv[1],
               .seconds = argc > 2 ? atof(argv[2]) : 1,
               .n_rounds = argc > 3 ? strtoul(argv[3], NULL, 0) : 5,
               .cache_blocks = argc > 4 ? strtoul(argv[4], NULL, 0) : 16,
               .n_threads = argc > 5 ? strtoul(argv[5], NULL, 0) : 4,
               .random = 1};
  if (b->n_rounds > MAX_ROUNDS || b->n_threads < 1 || b->n_threads > MAX_THREADS) die("out of range");
}

static void take_memory(bench *b, const clb_store_sizes *sizes) {
  b->slot_bytes = (size_t)sizes->minimum_bytes;  // at least the largest block
  b->memory = clb_pages_alloc(b->cache_blocks * b->slot_bytes);
  if (b->memory == NULL) die("no memory");
  (void)madvise(b->memory, b->cache_blocks * b->slot_bytes, MADV_HUGEPAGE);  // as the store's
  memset(b->memory, 1, b->cache_blocks * b->slot_bytes);
}

int main(int argc, char **argv) {
  static const char *const names[] = {"pread", "io_uring", "mmap", "buffered"};
  static const clb_io ios[] = {CLB_IO_PREAD, CLB_IO_URING, CLB_IO_MMAP, CLB_IO_BUFFERED};
  char error[512];
  bench b;
  parse(&b, argc, argv);
  clb_container *container = clb_container_open(argv[1], error, sizeof error);
  if (container == NULL) die(error);
  b.container = container;
  clb_store_sizes sizes;
  clb_store_measure(container, &sizes);
  take_memory(&b, &sizes);
  if (b.n_rounds == 0) {
    const double pieces = run_raw(&b, PIECE);
    printf("%.0f %.0f\n", pieces, run_raw(&b, 0));
    clb_container_close(container);
    return 0;
  }
  static double raw[2][MAX_ROUNDS], ours[4][MAX_ROUNDS], ratio[4][MAX_ROUNDS];
  clb_store *stores[4];
  for (size_t i = 0; i < 4; i++) {
    const clb_store_options options = {.cache_bytes = sizes.minimum_bytes / 2 * b.cache_blocks,
                                       .io_threads = (uint32_t)b.n_threads,
                                       .check = CLB_CHECK_NEVER,
                                       .io = ios[i]};
    stores[i] = clb_store_open(container, &options, error, sizeof error);
    if (stores[i] == NULL) die(error);
  }
  for (size_t round = 0; round < b.n_rounds; round++) {
    for (size_t i = 0; i < 4; i++) {
      raw[0][round] = run_raw(&b, PIECE);
      ours[i][round] = run_store(&b, stores[i]);
      raw[1][round] = run_raw(&b, 0);
      const double ceiling = raw[0][round] > raw[1][round] ? raw[0][round] : raw[1][round];
      ratio[i][round] = ours[i][round] / ceiling;
    }
  }
  printf("blocks of %.2f MiB, cache of %zu, %zu threads, %zu rounds of %.1f s\n", (double)sizes.minimum_bytes / 0x1p21,
         b.cache_blocks, b.n_threads, b.n_rounds, b.seconds);
  printf("ceiling   1 MiB pieces %7.1f MB/s, whole blocks %7.1f MB/s (O_DIRECT)\n", median(raw[0], b.n_rounds) / 1e6,
         median(raw[1], b.n_rounds) / 1e6);
  for (size_t i = 0; i < 4; i++) {
    clb_store_metrics m;
    clb_store_get_metrics(stores[i], &m);
    printf("%-9s %7.1f MB/s, %5.1f %% of the ceiling of its round; %s, %s%s%s; hits %.1f %%\n", names[i],
           median(ours[i], b.n_rounds) / 1e6, 100 * median(ratio[i], b.n_rounds), m.backend,
           m.direct ? "direct" : "through the page cache", m.reason[0] != 0 ? ": " : "", m.reason,
           100 * (double)m.hits / (double)(m.hits + m.misses));
    clb_store_close(stores[i]);
  }
  clb_container_close(container);
  return 0;
}
