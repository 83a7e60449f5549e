// Reading ahead: blocks that a later request is likely to name.
//
// A hint costs nobody anything it does not have to: its reads wait until no request waits for one, it takes the place
// only of blocks that are worth less, and never more than a share of the cache. Still it can lose: the drive may have
// no bandwidth to spare, or the guesses be poor. So the store compares. It follows hints for some tokens and does not
// for some, and stays with the way in which requests waited less; from time to time it tries the other one again.
// Guesses are scored against what is then asked for, also when they are not followed.
#include "store_internal.h"

enum {
  WINDOW_TOKENS = 4,     // length of a window: so many requests of every row
  SETTLING_WINDOWS = 5,  // at the start both ways take turns; the first window fills the cache and does not count
  FIRST_HOLD = 8,
  LONGEST_HOLD = 128,  // windows
  CACHE_SHARE = 4,     // at most 1 / CACHE_SHARE of the cache holds what was read ahead and not asked for
};

static const double kFirstPrecision = 0.6;  // until guesses were scored
static const double kLearn = 0.05;          // weight of a request in the precision
static const double kGain = 0.98;           // following must cut the wait to this share

// What is in memory is the easier guess, so only those count that were not. A hint that comes true evicts nothing that
// the request itself would not have evicted. One that does not costs the reading of a block that was there, if that is
// asked for again. So it may replace what scores less than its odds, and is worth as much until its request comes.
static void learn_precision(clb_store *s, double found, double weight) {
  s->precision += weight * (found - s->precision);
  s->hint_worth = s->precision / (1 - (s->precision < 0.99 ? s->precision : 0.99));
}

void clb_hint_open(clb_store *s) {
  learn_precision(s, kFirstPrecision, 1);
  s->controller = (controller){.following = true, .hold = FIRST_HOLD, .wait = {-1, -1}};
}

// ---------------------------------------------------------------------------------------------------------------------
// The comparison

static void choose_way(controller *c) {
  if (c->n_windows < SETTLING_WINDOWS) {
    c->following = !c->following;
    return;
  }
  const bool best = c->wait[1] < kGain * c->wait[0];
  if (c->probing || c->n_windows == SETTLING_WINDOWS) {
    const bool confirmed = c->probing && c->following != best;
    c->hold = !confirmed ? FIRST_HOLD : c->hold * 2 < LONGEST_HOLD ? c->hold * 2 : LONGEST_HOLD;
    c->windows_left = c->hold;
    c->probing = false;
    c->following = best;
  } else if (c->windows_left > 0) {
    c->windows_left--;
  } else {
    c->probing = true;
    c->following = !c->following;
  }
}

static void end_window(controller *c) {
  if (++c->n_windows > 1) {
    double *wait = &c->wait[c->following];
    const double found = (double)c->wait_ns / (double)c->n_requests;
    *wait = *wait < 0 ? found : (*wait + found) / 2;
  }
  c->n_requests = c->wait_ns = 0;
  choose_way(c);
}

void clb_hint_end(clb_store *s) {
  if (!s->measured) return;
  controller *c = &s->controller;
  c->wait_ns += s->metrics.wait_ns - s->wait_before;
  if (++c->n_requests >= WINDOW_TOKENS * clb_container_n_rows(s->container)) end_window(c);
}

// ---------------------------------------------------------------------------------------------------------------------
// Reads

bool clb_hint_drop(clb_store *s, bool all) {
  bool any = false;
  for (size_t i = 0; i < N_TRANSFERS && s->n_unwanted > 0; i++) {
    transfer *t = &s->transfers[i];
    if (!t->busy || t->wanted) continue;
    const block_state *b = &s->blocks[t->slots[0]->block];
    if (!all && (b->position != kNone || b->row != s->request.row)) continue;
    if (!s->backend->withdraw(s->io, &t->read)) continue;
    clb_drop(s, t);
    any = true;
  }
  return any;
}

static void read_ahead(clb_store *s, block_state *b, const clb_block *block) {
  const uint64_t n_bytes = align_up(block->bytes, s->page);
  if (b->slot != kNone || b->position != kNone) return;  // it is there, or will be
  if (s->request.open && s->request.next_missing < s->request.n_missing) return;
  if (s->ahead_bytes + n_bytes > s->budget / CACHE_SHARE) return;
  // Half of the transfers are left to requests.
  if (s->n_free_transfers < N_TRANSFERS / 2 + clb_pieces(s, n_bytes)) return;
  slot *x = clb_slot_take(s, b, block, false, s->hint_worth);
  if (x == NULL) return;
  x->read_ahead = true;
  s->ahead_bytes += n_bytes;
  s->metrics.hint_reads++;
  clb_read_block(s, x, block, false);
}

// ---------------------------------------------------------------------------------------------------------------------
// Hints

bool clb_store_wants_hints(const clb_store *s) {
  return s->sums[1] + s->sums[2] < s->all_bytes;
}

bool clb_store_hint(clb_store *s, size_t row, const uint32_t *experts, size_t n) {
  const clb_row *its_row = clb_container_row(s->container, row);
  if (its_row == NULL) return false;
  for (size_t i = 0; i < n; i++) {
    if (experts[i] >= its_row->n_experts) return false;
  }
  row_state *state = &s->rows[row];
  state->hint = ++s->hint_clock;
  state->stale = true;
  s->hints_possible = true;
  for (size_t i = 0; i < n; i++) {
    block_state *b = &s->blocks[state->first_block + experts[i]];
    b->hint = state->hint;
    b->hint_new = b->slot == kNone || s->slots[b->slot].read_ahead;
  }
  clb_reap(s);
  if (!s->controller.following) {
    s->metrics.hints_paused++;
    return true;
  }
  s->metrics.hints_followed++;
  for (size_t i = 0; i < n; i++) {
    clb_block block;
    block_state *b = &s->blocks[state->first_block + experts[i]];
    if (clb_container_block(s->container, row, experts[i], &block)) read_ahead(s, b, &block);
  }
  return true;
}

// Scores the hint for the request's row; what it named wrongly and has not been started is given up.
void clb_hint_begin(clb_store *s) {
  row_state *row = &s->rows[s->request.row];
  s->measured = s->hints_possible || row->hint > 0;
  s->hints_possible = false;
  s->wait_before = s->metrics.wait_ns;
  if (row->hint == 0) return;
  const size_t n_experts = clb_container_row(s->container, s->request.row)->n_experts;
  size_t n_guessed = 0, n_right = 0, n_new = 0, n_new_right = 0;
  for (size_t e = 0; e < n_experts; e++) {
    const block_state *b = &s->blocks[row->first_block + e];
    if (b->hint != row->hint) continue;
    n_guessed++;
    n_right += b->position != kNone;
    n_new += b->hint_new;
    n_new_right += b->hint_new && b->position != kNone;
  }
  s->metrics.hint_guessed += n_guessed;
  s->metrics.hint_right += n_right;
  s->metrics.hint_chosen += s->request.n;
  if (n_new > 0) learn_precision(s, (double)n_new_right / (double)n_new, kLearn);
  row->hint = 0;
  (void)clb_hint_drop(s, false);
}
