// memory.h on the command line, for tests/test_budget.py:
//   available ROOT STACK_BYTES                                bytes, or unknown, and what sets the limit
//   split FIXED MIN_CACHE ALL_EXPERTS BUDGET CACHE AVAILABLE  budget, cache, reserve, minimum, fits; AVAILABLE may be
//                                                             "unknown"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"

int main(int argc, char **argv) {
  if (argc == 4 && strcmp(argv[1], "available") == 0) {
    const clb_available a = clb_available_memory(argv[2], strtoull(argv[3], NULL, 10));
    if (a.bytes == CLB_UNKNOWN_BYTES) {
      printf("unknown %s\n", a.limit);
    } else {
      printf("%" PRIu64 " %s\n", a.bytes, a.limit);
    }
    return 0;
  }
  if (argc != 8 || strcmp(argv[1], "split") != 0) return 2;
  uint64_t n[6];
  for (int i = 0; i < 6; i++) {
    n[i] = strcmp(argv[i + 2], "unknown") == 0 ? CLB_UNKNOWN_BYTES : strtoull(argv[i + 2], NULL, 10);
  }
  const clb_budget_request request = {
      .fixed = n[0], .min_cache = n[1], .all_experts = n[2], .budget = n[3], .cache = n[4], .available = n[5]};
  const clb_budget b = clb_split_budget(&request);
  printf("%" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %d\n", b.budget, b.cache, b.reserve, b.minimum, b.fits);
  return 0;
}
