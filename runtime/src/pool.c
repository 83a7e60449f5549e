#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#include "cpus.h"

// `state` packs job number (24 bits), tasks of the job (20) and the next task to take (20). Taking a task is one
// compare-and-swap on all three, so a thread that slept through the end of a job cannot take a task of another one by
// mistake: if the swap succeeds, the task it took is one of the current job, whose fields are then stable until that
// task is reported done.
enum { TASK_BITS = 20, SPINS = 2000 };
#define TASK_MASK ((UINT64_C(1) << TASK_BITS) - 1)

struct clb_pool {
  _Atomic uint64_t state;
  _Atomic size_t done;
  _Atomic size_t n_sleeping;  // workers waiting on `wake`
  _Atomic bool caller_sleeps;
  _Atomic bool resting;  // no job is near: waiting threads do not spin
  _Atomic bool stop;
  clb_task_fn fn;
  void *context;
  size_t n_threads, n_started;
  pthread_mutex_t mutex;
  pthread_cond_t wake, finished;
  struct worker {
    clb_pool *pool;
    size_t number;
    pthread_t thread;
  } *workers;  // [n_threads - 1]
};

static void pause_cpu(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static bool has_tasks(uint64_t state) {
  return (state & TASK_MASK) < ((state >> TASK_BITS) & TASK_MASK);
}

// Runs tasks until the job has none left to take.
static void work(clb_pool *pool, size_t worker) {
  uint64_t state = atomic_load(&pool->state);
  while (has_tasks(state)) {
    if (!atomic_compare_exchange_weak(&pool->state, &state, state + 1)) continue;
    size_t n_tasks = (size_t)((state >> TASK_BITS) & TASK_MASK);
    pool->fn(pool->context, (size_t)(state & TASK_MASK), worker);
    if (atomic_fetch_add(&pool->done, 1) + 1 == n_tasks && atomic_load(&pool->caller_sleeps)) {
      pthread_mutex_lock(&pool->mutex);
      pthread_cond_signal(&pool->finished);
      pthread_mutex_unlock(&pool->mutex);
    }
    state = atomic_load(&pool->state);
  }
}

static void sleep_until_work(clb_pool *pool) {
  pthread_mutex_lock(&pool->mutex);
  atomic_fetch_add(&pool->n_sleeping, 1);
  while (!has_tasks(atomic_load(&pool->state)) && !atomic_load(&pool->stop)) {
    pthread_cond_wait(&pool->wake, &pool->mutex);
  }
  atomic_fetch_sub(&pool->n_sleeping, 1);
  pthread_mutex_unlock(&pool->mutex);
}

static void *worker_main(void *argument) {
  struct worker *self = argument;
  clb_pool *pool = self->pool;
  while (!atomic_load(&pool->stop)) {
    size_t spins = 0;
    bool busy = has_tasks(atomic_load(&pool->state));
    while (!busy && spins < SPINS && !atomic_load_explicit(&pool->resting, memory_order_relaxed)) {
      pause_cpu();
      spins++;
      busy = has_tasks(atomic_load(&pool->state));
    }
    if (!busy) sleep_until_work(pool);
    work(pool, self->number);
  }
  return NULL;
}

static bool start_worker(clb_pool *pool, size_t i, bool pin) {
  struct worker *worker = &pool->workers[i];
  *worker = (struct worker){.pool = pool, .number = i + 1};
  if (pthread_create(&worker->thread, NULL, worker_main, worker) != 0) return false;
  pool->n_started++;
  return !pin || clb_pin_thread(worker->thread, worker->number);
}

clb_pool *clb_pool_open(size_t n_threads, bool pin) {
  if (n_threads < 1 || n_threads > CLB_POOL_MAX_THREADS) return NULL;
  clb_pool *pool = calloc(1, sizeof *pool);
  if (!pool) return NULL;
  pool->n_threads = n_threads;
  pool->workers = calloc(n_threads, sizeof *pool->workers);
  pthread_mutex_init(&pool->mutex, NULL);
  pthread_cond_init(&pool->wake, NULL);
  pthread_cond_init(&pool->finished, NULL);
  bool ok = pool->workers != NULL;
  // Signals are the application's: they are delivered to its own threads only.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (size_t i = 0; ok && i + 1 < n_threads; i++) ok = start_worker(pool, i, pin);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (ok) return pool;
  clb_pool_close(pool);
  return NULL;
}

void clb_pool_close(clb_pool *pool) {
  if (!pool) return;
  pthread_mutex_lock(&pool->mutex);
  atomic_store(&pool->stop, true);
  pthread_cond_broadcast(&pool->wake);
  pthread_mutex_unlock(&pool->mutex);
  for (size_t i = 0; i < pool->n_started; i++) pthread_join(pool->workers[i].thread, NULL);
  pthread_cond_destroy(&pool->finished);
  pthread_cond_destroy(&pool->wake);
  pthread_mutex_destroy(&pool->mutex);
  free(pool->workers);
  free(pool);
}

size_t clb_pool_threads(const clb_pool *pool) {
  return pool->n_threads;
}

static void wait_until_done(clb_pool *pool, size_t n_tasks) {
  for (size_t spins = 0; spins < SPINS; spins++) {
    if (atomic_load(&pool->done) == n_tasks) return;
    pause_cpu();
  }
  pthread_mutex_lock(&pool->mutex);
  atomic_store(&pool->caller_sleeps, true);
  while (atomic_load(&pool->done) != n_tasks) pthread_cond_wait(&pool->finished, &pool->mutex);
  atomic_store(&pool->caller_sleeps, false);
  pthread_mutex_unlock(&pool->mutex);
}

void clb_pool_run(clb_pool *pool, clb_task_fn fn, void *context, size_t n_tasks) {
  if (n_tasks == 0) return;
  if (n_tasks == 1 || pool->n_threads == 1) {
    for (size_t task = 0; task < n_tasks; task++) fn(context, task, 0);
    return;
  }
  pool->fn = fn;
  pool->context = context;
  atomic_store(&pool->done, 0);
  atomic_store_explicit(&pool->resting, false, memory_order_relaxed);
  uint64_t job = (atomic_load(&pool->state) >> (2 * TASK_BITS)) + 1;
  atomic_store(&pool->state, (job << (2 * TASK_BITS)) | ((uint64_t)n_tasks << TASK_BITS));
  if (atomic_load(&pool->n_sleeping) > 0) {
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
  }
  work(pool, 0);
  wait_until_done(pool, n_tasks);
}

void clb_pool_rest(clb_pool *pool) {
  atomic_store_explicit(&pool->resting, true, memory_order_relaxed);
}
