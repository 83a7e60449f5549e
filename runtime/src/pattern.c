#include "pattern.h"

#include <stdlib.h>

#include "unicode.h"

enum { OP_MATCH, OP_CLASS, OP_SPLIT, OP_JUMP, OP_LOOK, OP_ATOMIC, OP_LINE_END, OP_BOUNDARY, N_OPS };
enum { MAX_DEPTH = 8 };
static const uint32_t kByCategory = (uint32_t)1 << 31;

// ---------------------------------------------------------------------------------------------------------------------
// Checks

static bool is_item(const clb_class_item *item) {
  if (item->low == kByCategory) return item->high >> 30 == 0;
  return item->low <= item->high && item->high <= CLB_LAST_CHARACTER;
}

static bool is_set(const clb_patterns *p, uint32_t i) {
  const clb_class_set *s = &p->sets[i];
  if (s->flags > (CLB_SET_NEGATED | CLB_SET_GOES_ON)) return false;
  if ((s->flags & CLB_SET_GOES_ON) && i + 1 >= p->n_sets) return false;
  return s->first_item <= p->n_items && s->n_items <= p->n_items - s->first_item;
}

static bool is_instruction(const clb_patterns *p, uint32_t i) {
  const clb_instruction *o = &p->code[i];
  switch (o->op) {
    case OP_MATCH:
    case OP_LINE_END:
      return o->a == 0 && o->b == 0;
    case OP_CLASS:
    case OP_BOUNDARY:
      return o->a < p->n_sets && o->b == 0;
    case OP_SPLIT:
      return o->a < p->n_code && o->b < p->n_code;
    case OP_JUMP:
      return o->a < p->n_code && o->b == 0;
    case OP_LOOK:
      return o->a < p->n_code && o->b <= 1;
    case OP_ATOMIC:
      return o->a < p->n_code && o->b == 0;
    default:
      return false;
  }
}

const char *clb_patterns_problem(const clb_patterns *p) {
  for (uint32_t i = 0; i < p->n_items; i++) {
    if (!is_item(&p->items[i])) return "a class item is out of range";
  }
  for (uint32_t i = 0; i < p->n_sets; i++) {
    if (!is_set(p, i)) return "a class set is out of range";
  }
  for (uint32_t i = 0; i < p->n_code; i++) {
    if (!is_instruction(p, i)) return "an instruction is out of range";
  }
  if (p->n_code > 0 && p->code[p->n_code - 1].op != OP_MATCH) return "the last instruction is no match";
  return NULL;
}

// ---------------------------------------------------------------------------------------------------------------------
// Running

static bool in_set(const clb_patterns *p, const clb_class_set *s, uint32_t c) {
  for (uint32_t i = 0; i < s->n_items; i++) {
    const clb_class_item *item = &p->items[s->first_item + i];
    const bool found =
        item->low == kByCategory ? (item->high >> clb_category(c) & 1) != 0 : c >= item->low && c <= item->high;
    if (found) return true;
  }
  return false;
}

static bool in_class(const clb_patterns *p, uint32_t set, uint32_t c) {
  for (;; set++) {
    const clb_class_set *s = &p->sets[set];
    if (in_set(p, s, c) == ((s->flags & CLB_SET_NEGATED) != 0)) return false;
    if (!(s->flags & CLB_SET_GOES_ON)) return true;
  }
}

static clb_match push(clb_matcher *m, uint32_t pc, size_t at) {
  if (m->n + 2 > m->capacity) {
    if (m->capacity >= m->limit) return CLB_MATCH_TOO_LONG;
    const size_t capacity = m->capacity ? 2 * m->capacity : 256;
    uint32_t *stack = realloc(m->stack, capacity * sizeof *stack);
    if (!stack) return CLB_MATCH_MEMORY;
    m->stack = stack;
    m->capacity = capacity;
  }
  m->stack[m->n++] = pc;
  m->stack[m->n++] = (uint32_t)at;
  return CLB_MATCH_FOUND;
}

typedef struct {
  const clb_patterns *p;
  clb_matcher *m;
  const uint32_t *c;
  size_t begin, stop;
} run;

static bool at_boundary(const run *r, uint32_t set, size_t at) {
  const bool before = at > r->begin && in_class(r->p, set, r->c[at - 1]);
  const bool after = at < r->stop && in_class(r->p, set, r->c[at]);
  return before != after;
}

static clb_match run_from(const run *r, uint32_t pc, size_t at, unsigned depth, size_t *end);

// A program in the program: one that only looks, or one that keeps its first match.
static clb_match run_inner(const run *r, const clb_instruction *o, uint32_t *pc, size_t *at, unsigned depth) {
  if (depth >= MAX_DEPTH) return CLB_MATCH_TOO_LONG;
  size_t end = *at;
  const clb_match found = run_from(r, *pc + 1, *at, depth + 1, &end);
  if (found > CLB_MATCH_FOUND) return found;
  *pc = o->a;
  if (o->op == OP_ATOMIC) {
    *at = end;
    return found;
  }
  return (found == CLB_MATCH_FOUND) != (o->b != 0) ? CLB_MATCH_FOUND : CLB_MATCH_NONE;
}

// One instruction; CLB_MATCH_NONE when it fails here.
static clb_match step(const run *r, uint32_t *pc, size_t *at, unsigned depth) {
  const clb_instruction *o = &r->p->code[*pc];
  bool holds = true;
  switch (o->op) {
    case OP_CLASS:
      holds = *at < r->stop && in_class(r->p, o->a, r->c[*at]);
      (*at)++;
      break;
    case OP_SPLIT:
      *pc = o->a;
      return push(r->m, o->b, *at);
    case OP_JUMP:
      *pc = o->a;
      return CLB_MATCH_FOUND;
    case OP_LINE_END:
      holds = *at == r->stop || r->c[*at] == '\n';
      break;
    case OP_BOUNDARY:
      holds = at_boundary(r, o->a, *at);
      break;
    default:
      return run_inner(r, o, pc, at, depth);
  }
  (*pc)++;
  return holds ? CLB_MATCH_FOUND : CLB_MATCH_NONE;
}

static clb_match run_from(const run *r, uint32_t pc, size_t at, unsigned depth, size_t *end) {
  clb_matcher *m = r->m;
  const size_t bottom = m->n;
  clb_match result;
  for (;;) {
    if (m->steps_left == 0) {
      result = CLB_MATCH_TOO_LONG;
      break;
    }
    m->steps_left--;
    if (r->p->code[pc].op == OP_MATCH) {
      *end = at;
      result = CLB_MATCH_FOUND;
      break;
    }
    result = step(r, &pc, &at, depth);
    if (result == CLB_MATCH_FOUND) continue;
    if (result != CLB_MATCH_NONE || m->n == bottom) break;
    at = m->stack[--m->n];
    pc = m->stack[--m->n];
  }
  m->n = bottom;
  return result;
}

clb_match clb_pattern_match(const clb_patterns *p, clb_matcher *m, uint32_t entry, const uint32_t *c, size_t begin,
                            size_t at, size_t stop, size_t *end) {
  const run r = {p, m, c, begin, stop};
  return run_from(&r, entry, at, 0, end);
}
