// Which blocks stay in memory.
//
// Memory. The cache is one reserved range of addresses, cut into slots as long as the largest block. Blocks of mixed
// sizes fill slots unequally, so the budget counts the pages a slot really occupies, and pages that a smaller block
// does not need are given back to the system. There are as many slots as blocks can ever be in memory at once. When all
// blocks are of one size, slots are the budget, and nothing is ever given back. With a mapped file a slot is a block's
// range of the mapping, and what is evicted is unmapped: the page cache then decides what really stays in memory.
//
// Eviction. What stays is what is likely to be chosen again: the block with the lowest score goes, and the score is the
// estimated chance that the next request of the block's row names it:
//   - its frequency: a count that fades by kFade with each request of the row, over what an always chosen block would
//     have. Counts go on for blocks that are not in memory, so a block that comes back is remembered;
//   - plus kRepeat if the row's last request named it: consecutive tokens choose alike;
//   - or what a hint is worth (store_hint.c), when a hint for the next request named it.
// Time is counted in requests of the row, not of the model: the layers are visited in a circle, and a block of a layer
// that comes up last is no worse than one of the layer just done. Equal scores: the one used last goes, as its turn
// comes up last. So a circle too large for the cache keeps a part of it, where least-recently-used would keep nothing.
//
// Scores of a row change only when the row is requested or hinted at, so each row remembers its lowest: finding a
// victim looks at one block a row, and at all blocks of the few rows that changed.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // madvise, MAP_NORESERVE
#endif

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "store_internal.h"

// The best of a grid on synthetic routing (skewed choices, a change of subject every 500 tokens, 0 to 40 % of the last
// token's experts chosen again); neighbours in the grid are within a point, and none of it is near a cliff.
static const double kFade = 0.99;
static const double kRepeat = 0.2;

// ---------------------------------------------------------------------------------------------------------------------
// Planning

static int compare_sizes(const void *a, const void *b) {
  const uint64_t *x = a, *y = b;
  return (*x > *y) - (*x < *y);
}

static bool make_classes(clb_store *s, const uint64_t *sizes, size_t n) {
  size_t n_classes = 1;  // and one for slots without memory
  for (size_t i = 0; i < n; i++) n_classes += i == 0 || sizes[i] != sizes[i - 1];
  s->classes = calloc(n_classes, sizeof *s->classes);
  if (s->classes == NULL) return false;
  s->classes[s->n_classes++] = (size_class){.top = kNone};
  for (size_t i = 0; i < n; i++) {
    if (i == 0 || sizes[i] != sizes[i - 1]) s->classes[s->n_classes++] = (size_class){sizes[i], kNone};
  }
  return true;
}

// The most blocks that fit into the budget at once.
bool clb_cache_plan(clb_store *s) {
  uint64_t *sizes = malloc(s->n_blocks * sizeof *sizes);
  if (sizes == NULL) return false;
  size_t n = 0;
  for (size_t r = 0; r < clb_container_n_rows(s->container); r++) {
    for (size_t e = 0; e < clb_container_row(s->container, r)->n_experts; e++) {
      clb_block block;
      if (clb_container_block(s->container, r, e, &block)) sizes[n++] = align_up(block.bytes, s->page);
    }
  }
  qsort(sizes, n, sizeof *sizes, compare_sizes);
  s->slot_bytes = sizes[n - 1];
  s->one_size = sizes[0] == s->slot_bytes;
  uint64_t left = s->budget;
  for (s->n_slots = 0; s->n_slots < n && sizes[s->n_slots] <= left; s->n_slots++) left -= sizes[s->n_slots];
  const bool ok = make_classes(s, sizes, n);
  free(sizes);
  return ok;
}

bool clb_cache_allocate(clb_store *s) {
  size_t n_rows = clb_container_n_rows(s->container);
  s->blocks = calloc(s->n_blocks, sizeof *s->blocks);
  s->rows = calloc(n_rows, sizeof *s->rows);
  s->slots = calloc(s->n_slots, sizeof *s->slots);
  if (s->blocks == NULL || s->rows == NULL || s->slots == NULL) return false;
  uint64_t block = 0;
  for (size_t r = 0; r < n_rows; r++) {
    s->rows[r] = (row_state){.first_block = block, .lowest_slot = kNone};
    for (uint32_t e = 0; e < clb_container_row(s->container, r)->n_experts; e++) {
      s->blocks[block++] = (block_state){.row = (uint32_t)r, .slot = kNone, .position = kNone};
    }
  }
  for (size_t i = s->n_slots; i-- > 0;) {
    s->slots[i].next = s->classes[0].top;
    s->classes[0].top = (uint32_t)i;
  }
  s->fade[0] = 1;
  for (size_t i = 1; i < FADE_STEPS; i++) s->fade[i] = s->fade[i - 1] * kFade;
  return true;
}

bool clb_cache_reserve(clb_store *s) {
  uint64_t size;
  if (__builtin_mul_overflow(s->slot_bytes, (uint64_t)s->n_slots, &size) || size > SIZE_MAX) return false;
  const int access = s->dry ? PROT_NONE : PROT_READ | PROT_WRITE;
  void *arena = mmap(NULL, (size_t)size, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (arena == MAP_FAILED) return false;
  s->arena = arena;
#ifdef MADV_HUGEPAGE
  // Huge pages reach into the next slot, which costs nothing only when every slot is filled to its end.
  (void)madvise(arena, (size_t)size, s->one_size ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
#ifdef MADV_DONTDUMP
  (void)madvise(arena, (size_t)size, MADV_DONTDUMP);
#endif
  return true;
}

void clb_cache_free(clb_store *s) {
  if (s->arena != NULL) munmap(s->arena, (size_t)(s->slot_bytes * s->n_slots));
  free(s->classes);
  free(s->slots);
  free(s->rows);
  free(s->blocks);
}

// ---------------------------------------------------------------------------------------------------------------------
// Scores

static double faded_count(const clb_store *s, const block_state *b) {
  uint64_t age = s->rows[b->row].requests - b->last;
  return age < FADE_STEPS ? b->count * s->fade[age] : 0;
}

static double score(const clb_store *s, const block_state *b) {
  const row_state *row = &s->rows[b->row];
  double chance = faded_count(s, b) / (row->full_count > 1 ? row->full_count : 1);
  if (b->last > 0 && b->last == row->requests) chance += kRepeat;
  const bool hinted = row->hint > 0 && b->hint == row->hint;
  return hinted && s->hint_worth > chance ? s->hint_worth : chance;
}

void clb_count_request(clb_store *s, size_t row) {
  s->rows[row].requests++;
  s->rows[row].full_count = 1 + s->rows[row].full_count * kFade;
  s->rows[row].stale = true;
}

void clb_count_use(clb_store *s, block_state *b) {
  b->count = 1 + faded_count(s, b);
  b->last = s->rows[b->row].requests;
}

static void find_lowest(const clb_store *s, row_state *row, size_t n_experts) {
  row->stale = false;
  row->lowest_slot = kNone;
  for (size_t e = 0; e < n_experts; e++) {
    const block_state *b = &s->blocks[row->first_block + e];
    if (b->slot == kNone || s->slots[b->slot].kind != SLOT_FILLED || s->slots[b->slot].pinned) continue;
    const double its_score = score(s, b);
    if (row->lowest_slot == kNone || its_score < row->lowest ||
        (its_score <= row->lowest && s->slots[b->slot].used > s->slots[row->lowest_slot].used)) {
      row->lowest_slot = b->slot;
      row->lowest = its_score;
    }
  }
}

static slot *find_victim(clb_store *s, double limit) {
  slot *victim = NULL;
  double lowest = limit;
  for (size_t r = 0; r < clb_container_n_rows(s->container); r++) {
    row_state *row = &s->rows[r];
    if (row->stale) find_lowest(s, row, clb_container_row(s->container, r)->n_experts);
    if (row->lowest_slot == kNone) continue;
    slot *x = &s->slots[row->lowest_slot];
    if (row->lowest < lowest || (victim != NULL && row->lowest <= lowest && x->used > victim->used)) {
      victim = x;
      lowest = row->lowest;
    }
  }
  return victim;
}

// ---------------------------------------------------------------------------------------------------------------------
// Slots

static uint64_t *sum_of(clb_store *s, const slot *x) {
  return &s->sums[x->kind == SLOT_EMPTY ? 0 : x->kind == SLOT_FILLED && !x->pinned ? 1 : 2];
}

static size_class *class_of(clb_store *s, uint64_t n_bytes) {
  size_t low = 0, high = s->n_classes;
  while (high - low > 1) {
    const size_t middle = (low + high) / 2;
    *(s->classes[middle].n_bytes <= n_bytes ? &low : &high) = middle;
  }
  return &s->classes[low];
}

void clb_slot_set(clb_store *s, slot *x, slot_kind kind, bool pinned) {
  *sum_of(s, x) -= x->n_bytes;
  x->kind = kind;
  x->pinned = pinned;
  *sum_of(s, x) += x->n_bytes;
  s->rows[s->blocks[x->block].row].stale = true;
}

static void push_empty(clb_store *s, slot *x) {
  size_class *c = class_of(s, x->n_bytes);
  x->next = c->top;
  c->top = (uint32_t)(x - s->slots);
}

static slot *pop_empty(clb_store *s, size_class *c) {
  slot *x = &s->slots[c->top];
  c->top = x->next;
  return x;
}

// Changes the memory an empty slot occupies.
static void resize_empty(clb_store *s, slot *x, uint64_t n_bytes) {
  if (n_bytes < x->n_bytes && s->arena != NULL) {
    uint8_t *p = s->arena + (uint64_t)(x - s->slots) * s->slot_bytes;
    (void)madvise(p + n_bytes, (size_t)(x->n_bytes - n_bytes), MADV_DONTNEED);
  }
  s->sums[0] = s->sums[0] - x->n_bytes + n_bytes;
  x->n_bytes = n_bytes;
}

// Whole pages of a block in a mapped file.
static void unmap_pages(const clb_store *s, const slot *x) {
  const uintptr_t from = (uintptr_t)align_up((uintptr_t)x->data, s->page);
  const uintptr_t to = ((uintptr_t)x->data + (uintptr_t)x->n_bytes) / s->page * s->page;
  if (to > from) (void)madvise((void *)from, to - from, MADV_DONTNEED);
}

void clb_slot_empty(clb_store *s, slot *x) {
  s->blocks[x->block].slot = kNone;
  if (x->read_ahead) s->ahead_bytes -= x->n_bytes;
  x->read_ahead = false;
  clb_slot_set(s, x, SLOT_EMPTY, false);
  if (s->map != NULL) {
    unmap_pages(s, x);
    resize_empty(s, x, 0);
  }
  push_empty(s, x);
}

static void evict(clb_store *s, slot *victim) {
  s->metrics.evictions++;
  if (victim->read_ahead) s->metrics.hint_wasted_bytes += victim->n_bytes;
  clb_slot_empty(s, victim);
}

// The class of the empty slot whose memory fits best: the one with the least that suffices, else the one with the most.
static size_class *best_class(clb_store *s, uint64_t n_bytes) {
  size_class *fitting = class_of(s, n_bytes);
  for (size_class *c = fitting; c < s->classes + s->n_classes; c++) {
    if (c->top != kNone) return c;
  }
  for (size_class *c = fitting; c-- > s->classes;) {
    if (c->top != kNone) return c;
  }
  return NULL;
}

// Takes memory from empty slots until the whole is within the budget.
static void trim_empty(clb_store *s) {
  for (size_t i = s->n_classes; i-- > 1;) {
    while (s->sums[0] + s->sums[1] + s->sums[2] > s->budget && s->classes[i].top != kNone) {
      slot *x = pop_empty(s, &s->classes[i]);
      resize_empty(s, x, 0);
      push_empty(s, x);
    }
  }
}

slot *clb_slot_take(clb_store *s, block_state *b, const clb_block *block, bool pinned, double limit) {
  const uint64_t n_bytes = align_up(block->bytes, s->page);
  if (n_bytes > s->budget - s->sums[2]) return NULL;
  size_class *best = best_class(s, n_bytes);
  while (best == NULL || n_bytes > s->budget - s->sums[2] - s->sums[1]) {
    slot *victim = find_victim(s, limit);
    if (victim == NULL) return NULL;
    evict(s, victim);
    best = best_class(s, n_bytes);
  }
  slot *x = pop_empty(s, best);
  resize_empty(s, x, n_bytes);
  x->block = (uint64_t)(b - s->blocks);
  x->data = s->map != NULL ? (uint8_t *)(uintptr_t)(s->map + block->offset)
                           : s->arena + (uint64_t)(x - s->slots) * s->slot_bytes;
  b->slot = (uint32_t)(x - s->slots);
  clb_slot_set(s, x, SLOT_LOADING, pinned);
  trim_empty(s);
  return x;
}
