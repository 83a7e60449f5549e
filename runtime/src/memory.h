// How much memory there is to plan with, and how it is shared out.
#ifndef CLB_MEMORY_H
#define CLB_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

#define CLB_UNKNOWN_BYTES UINT64_MAX

typedef struct {
  uint64_t bytes;     // CLB_UNKNOWN_BYTES: unknown, which 0 is not
  const char *limit;  // what sets it: "free memory", "control group", "RLIMIT_AS", "RLIMIT_DATA"; "" when unknown
} clb_available;

/* The least of: the system's MemAvailable; what each control group from this process's own up to the topmost visible
 * one has left below its limit, inactive file pages counted as free; what RLIMIT_AS and RLIMIT_DATA leave, less
 * `stack_bytes` of threads to come, which those two count whole. /proc and the control groups are looked for under
 * `root`: "" but in tests. */
clb_available clb_available_memory(const char *root, uint64_t stack_bytes);

typedef struct {
  uint64_t fixed;                   // everything but the expert cache
  uint64_t min_cache, all_experts;  // the least and the most that the cache can be
  uint64_t budget, cache;           // as asked; 0: not asked
  uint64_t available;               // or CLB_UNKNOWN_BYTES
} clb_budget_request;

typedef struct {
  uint64_t budget, cache;
  uint64_t reserve;  // of `available`, left to others; 0 when the budget was asked
  uint64_t minimum;  // the least budget for what was asked
  bool fits;
} clb_budget;

/* A budget that was asked holds, or does not fit. The default is what is available less a sixteenth (at least 64 MiB,
 * at most 1 GiB), but the reserve is given up before the model is refused. A cache that was asked is what it is:
 * without a budget beside it, it is not held against what is available. */
clb_budget clb_split_budget(const clb_budget_request *request);

#endif
