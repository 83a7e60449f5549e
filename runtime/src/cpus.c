#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // CPU_SET, pthread_setaffinity_np
#endif

#include "cpus.h"

#include <unistd.h>

#ifdef __linux__

size_t clb_available_cpus(void) {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return (size_t)CPU_COUNT(&set);
  const long n = sysconf(_SC_NPROCESSORS_ONLN);
  return n > 0 ? (size_t)n : 1;
}

static bool take_one(const cpu_set_t *allowed, size_t i, cpu_set_t *one) {
  CPU_ZERO(one);
  for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (!CPU_ISSET(cpu, allowed) || i-- > 0) continue;
    CPU_SET(cpu, one);
    return true;
  }
  return false;
}

bool clb_pin_thread(pthread_t thread, size_t i) {
  cpu_set_t allowed, one;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || !take_one(&allowed, i, &one)) return false;
  return pthread_setaffinity_np(thread, sizeof one, &one) == 0;
}

bool clb_pin_self(size_t i, clb_affinity *before) {
  cpu_set_t one;
  if (sched_getaffinity(0, sizeof before->set, &before->set) != 0 || !take_one(&before->set, i, &one)) return false;
  return sched_setaffinity(0, sizeof one, &one) == 0;
}

void clb_unpin_self(const clb_affinity *before) {
  (void)sched_setaffinity(0, sizeof before->set, &before->set);
}

#else

size_t clb_available_cpus(void) {
  const long n = sysconf(_SC_NPROCESSORS_ONLN);
  return n > 0 ? (size_t)n : 1;
}
bool clb_pin_thread(pthread_t thread, size_t i) {
  (void)thread, (void)i;
  return false;
}
bool clb_pin_self(size_t i, clb_affinity *before) {
  (void)i, (void)before;
  return false;
}
void clb_unpin_self(const clb_affinity *before) {
  (void)before;
}

#endif
