// How fast memory can be read: each thread sums up its own part of a large array, again and again.
//
// usage: bench_read THREADS [MIB_PER_THREAD] [SECONDS]     prints GB/s: the best pass of all threads together
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static pthread_barrier_t g_barrier;
static size_t g_n_words;
static volatile int g_stop;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Several sums, so that additions do not wait for one another; the compiler makes vectors of them.
static uint64_t sum(const uint64_t *words, size_t n) {
  uint64_t s[32] = {0};
  for (size_t i = 0; i + 32 <= n; i += 32) {
    for (size_t j = 0; j < 32; j++) s[j] += words[i + j];
  }
  for (size_t j = 1; j < 32; j++) s[0] += s[j];
  return s[0];
}

static void *reader(void *argument) {
  uint64_t *words = aligned_alloc(1 << 21, g_n_words * sizeof *words), total = 0;
  if (!words) exit(1);
  memset(words, 1, g_n_words * sizeof *words);
  while (!g_stop) {
    pthread_barrier_wait(&g_barrier);
    total += sum(words, g_n_words);
    pthread_barrier_wait(&g_barrier);
    pthread_barrier_wait(&g_barrier);
  }
  *(uint64_t *)argument = total;
  free(words);
  return NULL;
}

int main(int argc, char **argv) {
  const size_t n_threads = argc > 1 ? (size_t)atoi(argv[1]) : 1, mib = argc > 2 ? (size_t)atoi(argv[2]) : 512;
  const double seconds = argc > 3 ? atof(argv[3]) : 1;
  if (n_threads < 1 || n_threads > 256 || mib < 2) return 2;
  g_n_words = mib / 2 * 2 * (1 << 17);
  pthread_t threads[256];
  uint64_t totals[256] = {0};
  pthread_barrier_init(&g_barrier, NULL, (unsigned)n_threads + 1);
  for (size_t i = 0; i < n_threads; i++) pthread_create(&threads[i], NULL, reader, &totals[i]);
  double best = 0, start = 0;
  while (!g_stop) {
    pthread_barrier_wait(&g_barrier);
    const double before = now();
    if (start == 0) start = before;
    pthread_barrier_wait(&g_barrier);
    const double rate = (double)(n_threads * g_n_words * sizeof(uint64_t)) / (now() - before);
    if (rate > best) best = rate;
    g_stop = now() - start > seconds;
    pthread_barrier_wait(&g_barrier);
  }
  for (size_t i = 0; i < n_threads; i++) pthread_join(threads[i], NULL);
  uint64_t total = 0;
  for (size_t i = 0; i < n_threads; i++) total += totals[i];
  printf("%.2f\n", best / 1e9);
  return total == 0;
}
