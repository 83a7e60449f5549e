// A pool of threads that runs one job at a time: n_tasks calls of a function, shared out one by one.
//
// The calling thread takes part. Waiting threads spin for a moment, then sleep. Which thread runs a task is not
// defined, so tasks must write disjoint results; a late thread never delays a job it took no task of.
#ifndef CLB_POOL_H
#define CLB_POOL_H

#include <stdbool.h>
#include <stddef.h>

typedef struct clb_pool clb_pool;

enum { CLB_POOL_MAX_TASKS = (1 << 20) - 1, CLB_POOL_MAX_THREADS = 1024 };

// worker: 0 is the caller, up to n_threads - 1; the same thread always has the same number.
typedef void (*clb_task_fn)(void *context, size_t task, size_t worker);

// n_threads in 1 .. CLB_POOL_MAX_THREADS, the caller included. With `pin`, worker i stays on the i-th CPU that the
// calling thread may use; the caller itself is not pinned. NULL when threads cannot be had.
clb_pool *clb_pool_open(size_t n_threads, bool pin);
void clb_pool_close(clb_pool *pool);
size_t clb_pool_threads(const clb_pool *pool);

// Returns when all tasks are done. n_tasks <= CLB_POOL_MAX_TASKS. Not to be called from a task.
void clb_pool_run(clb_pool *pool, clb_task_fn fn, void *context, size_t n_tasks);

// Sends waiting threads to sleep until the next job, for a caller that is about to wait for something else.
void clb_pool_rest(clb_pool *pool);

#endif
