// The pread backend: threads take reads from two queues, urgent ones first, and put them on a third.
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "io_backend.h"

typedef struct {
  clb_run_read *run;
  pthread_mutex_t mutex;
  pthread_cond_t has_work, has_finished;
  clb_read_queue urgent, spare, finished;
  size_t n_urgent_running, n_spare_running, most_spare;
  bool stop;
  size_t n_threads;
  pthread_t threads[];
} read_pool;

// Of the reads that nobody waits for, at most half of the threads have one: an urgent one never waits for all of them.
static clb_read *take_work(read_pool *pool) {
  clb_read *read = clb_read_pop(&pool->urgent);
  if (read == NULL && pool->n_urgent_running == 0 && pool->n_spare_running < pool->most_spare) {
    read = clb_read_pop(&pool->spare);
  }
  if (read != NULL) ++*(read->urgent ? &pool->n_urgent_running : &pool->n_spare_running);
  return read;
}

static void *run_thread(void *argument) {
  read_pool *pool = argument;
  pthread_mutex_lock(&pool->mutex);
  for (;;) {
    clb_read *read = take_work(pool);
    if (read == NULL) {
      if (pool->stop) break;
      pthread_cond_wait(&pool->has_work, &pool->mutex);
      continue;
    }
    pthread_mutex_unlock(&pool->mutex);
    read->status = pool->run(read);
    if (read->status == 0) read->arrived(read);
    pthread_mutex_lock(&pool->mutex);
    --*(read->urgent ? &pool->n_urgent_running : &pool->n_spare_running);
    clb_read_push(&pool->finished, read);
    pthread_cond_signal(&pool->has_finished);
    if (pool->n_urgent_running == 0 && pool->spare.first != NULL) pthread_cond_broadcast(&pool->has_work);
  }
  pthread_mutex_unlock(&pool->mutex);
  return NULL;
}

void clb_io_pool_close(void *io) {
  read_pool *pool = io;
  pthread_mutex_lock(&pool->mutex);
  pool->stop = true;
  pthread_cond_broadcast(&pool->has_work);
  pthread_mutex_unlock(&pool->mutex);
  for (size_t i = 0; i < pool->n_threads; i++) pthread_join(pool->threads[i], NULL);
  pthread_cond_destroy(&pool->has_finished);
  pthread_cond_destroy(&pool->has_work);
  pthread_mutex_destroy(&pool->mutex);
  free(pool);
}

// Signals are for the program's own threads.
static bool start_threads(read_pool *pool, size_t n_threads) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (pool->n_threads < n_threads && pthread_create(&pool->threads[pool->n_threads], NULL, run_thread, pool) == 0) {
    pool->n_threads++;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return pool->n_threads == n_threads;
}

static read_pool *open_pool(const clb_io_setup *setup, clb_run_read *run) {
  read_pool *pool = calloc(1, sizeof *pool + setup->n_threads * sizeof pool->threads[0]);
  if (pool == NULL) return NULL;
  pool->run = run;
  pool->most_spare = (setup->n_threads + 1) / 2;
  if (pthread_mutex_init(&pool->mutex, NULL) != 0) goto no_mutex;
  if (pthread_cond_init(&pool->has_work, NULL) != 0) goto no_work;
  if (pthread_cond_init(&pool->has_finished, NULL) != 0) goto no_finished;
  if (start_threads(pool, setup->n_threads)) return pool;
  clb_io_pool_close(pool);
  return NULL;
no_finished:
  pthread_cond_destroy(&pool->has_work);
no_work:
  pthread_mutex_destroy(&pool->mutex);
no_mutex:
  free(pool);
  return NULL;
}

void *clb_io_pool_open(const clb_io_setup *setup, clb_run_read *run, char *reason, size_t reason_bytes) {
  read_pool *pool = open_pool(setup, run);
  if (pool == NULL) snprintf(reason, reason_bytes, "cannot start %zu reading threads", setup->n_threads);
  return pool;
}

void clb_io_pool_submit(void *io, clb_read *read) {
  read_pool *pool = io;
  pthread_mutex_lock(&pool->mutex);
  clb_read_push(read->urgent ? &pool->urgent : &pool->spare, read);
  pthread_cond_signal(&pool->has_work);
  pthread_mutex_unlock(&pool->mutex);
}

clb_read *clb_io_pool_poll(void *io) {
  read_pool *pool = io;
  pthread_mutex_lock(&pool->mutex);
  clb_read *read = clb_read_pop(&pool->finished);
  pthread_mutex_unlock(&pool->mutex);
  return read;
}

clb_read *clb_io_pool_wait(void *io) {
  read_pool *pool = io;
  pthread_mutex_lock(&pool->mutex);
  while (pool->finished.first == NULL) pthread_cond_wait(&pool->has_finished, &pool->mutex);
  clb_read *read = clb_read_pop(&pool->finished);
  pthread_mutex_unlock(&pool->mutex);
  return read;
}

bool clb_io_pool_withdraw(void *io, clb_read *read) {
  read_pool *pool = io;
  pthread_mutex_lock(&pool->mutex);
  const bool removed = clb_read_remove(read->urgent ? &pool->urgent : &pool->spare, read);
  // Spare reads may have waited for this one.
  if (removed && pool->urgent.first == NULL && pool->spare.first != NULL) pthread_cond_broadcast(&pool->has_work);
  pthread_mutex_unlock(&pool->mutex);
  return removed;
}

// ---------------------------------------------------------------------------------------------------------------------

static int run_pread(clb_read *read) {
  if (read->n_parts > 1) return clb_file_readv(read->file, read->offset, read->parts, read->n_parts);
  return clb_file_read(read->file, read->offset, read->parts[0].iov_base, read->parts[0].iov_len);
}

static void *pread_open(const clb_io_setup *setup, char *reason, size_t reason_bytes) {
  return clb_io_pool_open(setup, run_pread, reason, reason_bytes);
}

const clb_io_backend clb_io_pread = {.name = "pread",
                                     .open = pread_open,
                                     .close = clb_io_pool_close,
                                     .submit = clb_io_pool_submit,
                                     .poll = clb_io_pool_poll,
                                     .wait = clb_io_pool_wait,
                                     .withdraw = clb_io_pool_withdraw};
