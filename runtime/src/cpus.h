// Processors: how many there are to use, and staying on one of them.
#ifndef CLB_CPUS_H
#define CLB_CPUS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

#ifdef __linux__
#include <sched.h>
typedef struct {
  cpu_set_t set;
} clb_affinity;
#else
typedef struct {
  int unused;
} clb_affinity;
#endif

size_t clb_available_cpus(void);  // that the calling thread may run on; at least 1

// Makes a thread run on the i-th processor that the calling thread may run on. False when there is no such processor,
// or the system cannot do it. (musl can pin a thread, but not the attributes of one to come.)
bool clb_pin_thread(pthread_t thread, size_t i);

// The same for the calling thread, until clb_unpin_self.
bool clb_pin_self(size_t i, clb_affinity *before);
void clb_unpin_self(const clb_affinity *before);

#endif
