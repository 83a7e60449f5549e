// The pread backend: threads take reads from one queue, first come first served, and put them on another.
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include "io_backend.h"

typedef struct {
  clb_read *first, *last;
} queue;

typedef struct {
  const clb_file *file;
  pthread_mutex_t mutex;
  pthread_cond_t has_work, has_finished;
  queue waiting, finished;
  bool stop;
  size_t n_threads;
  pthread_t threads[];
} pread_pool;

static void push(queue *q, clb_read *read) {
  read->next = NULL;
  if (q->first == NULL) {
    q->first = read;
  } else {
    q->last->next = read;
  }
  q->last = read;
}

static clb_read *pop(queue *q) {
  clb_read *read = q->first;
  if (read != NULL) q->first = read->next;
  return read;
}

static void *run_thread(void *argument) {
  pread_pool *pool = argument;
  pthread_mutex_lock(&pool->mutex);
  for (;;) {
    clb_read *read = pop(&pool->waiting);
    if (read == NULL) {
      if (pool->stop) break;
      pthread_cond_wait(&pool->has_work, &pool->mutex);
      continue;
    }
    pthread_mutex_unlock(&pool->mutex);
    clb_read_run(pool->file, read);
    pthread_mutex_lock(&pool->mutex);
    push(&pool->finished, read);
    pthread_cond_signal(&pool->has_finished);
  }
  pthread_mutex_unlock(&pool->mutex);
  return NULL;
}

static void pread_close(void *io) {
  pread_pool *pool = io;
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
static bool start_threads(pread_pool *pool, size_t n_threads) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (pool->n_threads < n_threads && pthread_create(&pool->threads[pool->n_threads], NULL, run_thread, pool) == 0) {
    pool->n_threads++;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return pool->n_threads == n_threads;
}

static void *pread_open(const clb_file *file, size_t n_threads) {
  pread_pool *pool = calloc(1, sizeof *pool + n_threads * sizeof pool->threads[0]);
  if (pool == NULL) return NULL;
  pool->file = file;
  if (pthread_mutex_init(&pool->mutex, NULL) != 0) goto no_mutex;
  if (pthread_cond_init(&pool->has_work, NULL) != 0) goto no_work;
  if (pthread_cond_init(&pool->has_finished, NULL) != 0) goto no_finished;
  if (start_threads(pool, n_threads)) return pool;
  pread_close(pool);
  return NULL;
no_finished:
  pthread_cond_destroy(&pool->has_work);
no_work:
  pthread_mutex_destroy(&pool->mutex);
no_mutex:
  free(pool);
  return NULL;
}

static void pread_submit(void *io, clb_read *read) {
  pread_pool *pool = io;
  pthread_mutex_lock(&pool->mutex);
  push(&pool->waiting, read);
  pthread_cond_signal(&pool->has_work);
  pthread_mutex_unlock(&pool->mutex);
}

static clb_read *pread_poll(void *io) {
  pread_pool *pool = io;
  pthread_mutex_lock(&pool->mutex);
  clb_read *read = pop(&pool->finished);
  pthread_mutex_unlock(&pool->mutex);
  return read;
}

static clb_read *pread_wait(void *io) {
  pread_pool *pool = io;
  pthread_mutex_lock(&pool->mutex);
  while (pool->finished.first == NULL) pthread_cond_wait(&pool->has_finished, &pool->mutex);
  clb_read *read = pop(&pool->finished);
  pthread_mutex_unlock(&pool->mutex);
  return read;
}

static void pread_cancel(void *io) {
  pread_pool *pool = io;
  pthread_mutex_lock(&pool->mutex);
  for (clb_read *read; (read = pop(&pool->waiting)) != NULL;) {
    read->status = CLB_READ_CANCELLED;
    push(&pool->finished, read);
  }
  pthread_mutex_unlock(&pool->mutex);
}

const clb_io_backend clb_io_pread = {"pread",    pread_open, pread_close, pread_submit,
                                     pread_poll, pread_wait, pread_cancel};
