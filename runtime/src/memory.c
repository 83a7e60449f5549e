#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine.h"

static bool read_number(const char *path, uint64_t *out) {
  FILE *file = fopen(path, "re");
  if (!file) return false;
  bool ok = fscanf(file, "%" SCNu64, out) == 1;
  fclose(file);
  return ok;
}

static uint64_t system_available(void) {
  FILE *file = fopen("/proc/meminfo", "re");
  if (!file) return 0;
  char line[128];
  uint64_t kib = 0;
  while (fgets(line, sizeof line, file) && sscanf(line, "MemAvailable: %" SCNu64, &kib) != 1) {
  }
  fclose(file);
  return kib * 1024;
}

// What the control group leaves, where it sets a limit (version 2, then version 1, as seen from inside).
static uint64_t group_available(void) {
  static const char *const files[][2] = {
      {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"},
      {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"},
  };
  for (size_t i = 0; i < 2; i++) {
    uint64_t limit, used;
    if (read_number(files[i][0], &limit) && read_number(files[i][1], &used)) return limit > used ? limit - used : 0;
  }
  return UINT64_MAX;
}

uint64_t clb_available_memory(void) {
  uint64_t system = system_available(), group = group_available();
  return group < system ? group : system;
}

size_t clb_available_cpus(void) {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    int n = CPU_COUNT(&set);
    if (n > 0) return (size_t)n;
  }
#endif
  long n = sysconf(_SC_NPROCESSORS_ONLN);
  return n > 0 ? (size_t)n : 1;
}

double clb_seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
