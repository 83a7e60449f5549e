// Programs of pre-tokenizer patterns (docs/format.md, section 12), run by backtracking.
#ifndef CLB_PATTERN_H
#define CLB_PATTERN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
  uint32_t low, high;
} clb_class_item;

enum { CLB_SET_NEGATED = 1, CLB_SET_GOES_ON = 2 };

typedef struct {
  uint32_t first_item, n_items, flags;
} clb_class_set;

typedef struct {
  uint32_t op, a, b;
} clb_instruction;

typedef struct {
  const clb_class_item *items;
  const clb_class_set *sets;
  const clb_instruction *code;
  uint32_t n_items, n_sets, n_code;
} clb_patterns;

// Why they cannot be run, or NULL: every number is in bounds, and no instruction runs off the end.
const char *clb_patterns_problem(const clb_patterns *p);

// Where matching may still go: alternatives not tried yet, and a bound on all the work for a text.
typedef struct {
  uint32_t *stack;  // pairs of instruction and position
  size_t n, capacity, limit;
  uint64_t steps_left;
} clb_matcher;

typedef enum { CLB_MATCH_NONE, CLB_MATCH_FOUND, CLB_MATCH_MEMORY, CLB_MATCH_TOO_LONG } clb_match;

// Whether the program at `entry` matches from `at` on; *end is then where it does. The text is c[begin, stop).
clb_match clb_pattern_match(const clb_patterns *p, clb_matcher *m, uint32_t entry, const uint32_t *c, size_t begin,
                            size_t at, size_t stop, size_t *end);

#endif
