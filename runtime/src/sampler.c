// Choosing a token from logits. Arithmetic is in double; the only random number of a draw is one double in [0, 1).
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "colibri.h"
#include "errors.h"

typedef struct {
  double value;  // logit, then probability
  uint32_t token;
} candidate;

struct colibri_sampler {
  colibri_sampling sampling;
  size_t vocab_size, n_tokens;
  uint64_t random[4];
  unsigned char *seen;    // [vocab_size]: accepted, for the repetition penalty
  candidate *candidates;  // [n_tokens]
};

// ---------------------------------------------------------------------------------------------------------------------
// Random numbers: xoshiro256++ seeded by splitmix64 (Blackman and Vigna, public domain)

static uint64_t splitmix64(uint64_t *state) {
  uint64_t z = (*state += UINT64_C(0x9E3779B97F4A7C15));
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

static uint64_t rotate_left(uint64_t x, unsigned k) {
  return (x << k) | (x >> (64 - k));
}

static double random_unit(uint64_t s[4]) {
  uint64_t result = rotate_left(s[0] + s[3], 23) + s[0];
  uint64_t t = s[1] << 17;
  s[2] ^= s[0];
  s[3] ^= s[1];
  s[1] ^= s[2];
  s[0] ^= s[3];
  s[2] ^= t;
  s[3] = rotate_left(s[3], 45);
  return (double)(result >> 11) * 0x1.0p-53;
}

// ---------------------------------------------------------------------------------------------------------------------
// Open and close

void colibri_sampling_init(colibri_sampling *sampling) {
  *sampling = (colibri_sampling){
      .struct_bytes = sizeof *sampling, .temperature = 0, .top_p = 1, .min_p = 0, .repetition_penalty = 1};
}

static colibri_status check_sampling(const colibri_sampling *s, clb_error error) {
  if (s->struct_bytes != sizeof *s) {
    return clb_fail(error, COLIBRI_ERROR_ARGUMENT, "sampling: call colibri_sampling_init first");
  }
  if (!(s->temperature >= 0 && isfinite(s->temperature))) {
    return clb_fail(error, COLIBRI_ERROR_ARGUMENT, "temperature: expected a number >= 0, found %g", s->temperature);
  }
  if (!(s->top_p > 0 && s->top_p <= 1)) {
    return clb_fail(error, COLIBRI_ERROR_ARGUMENT, "top-p: expected a number above 0 and up to 1, found %g", s->top_p);
  }
  if (!(s->min_p >= 0 && s->min_p <= 1)) {
    return clb_fail(error, COLIBRI_ERROR_ARGUMENT, "min-p: expected a number from 0 to 1, found %g", s->min_p);
  }
  if (!(s->repetition_penalty > 0 && isfinite(s->repetition_penalty))) {
    return clb_fail(error, COLIBRI_ERROR_ARGUMENT, "repetition penalty: expected a number above 0, found %g",
                    s->repetition_penalty);
  }
  return COLIBRI_OK;
}

colibri_status colibri_sampler_open(const colibri_sampling *sampling, uint64_t vocab_size, uint64_t n_tokens,
                                    colibri_sampler **out, char *text, size_t text_bytes) {
  clb_error error = {text, text_bytes};
  *out = NULL;
  colibri_status status = check_sampling(sampling, error);
  if (status != COLIBRI_OK) return status;
  if (n_tokens < 1 || n_tokens > vocab_size || vocab_size > UINT32_MAX) {
    return clb_fail(error, COLIBRI_ERROR_ARGUMENT, "sampler: expected 1 <= n_tokens <= vocab_size < 2^32");
  }
  colibri_sampler *sampler = calloc(1, sizeof *sampler);
  if (sampler) {
    sampler->seen = calloc((size_t)vocab_size, 1);
    sampler->candidates = calloc((size_t)n_tokens, sizeof *sampler->candidates);
  }
  if (!sampler || !sampler->seen || !sampler->candidates) {
    colibri_sampler_close(sampler);
    return clb_fail(error, COLIBRI_ERROR_MEMORY, "sampler: no memory for a vocabulary of %llu",
                    (unsigned long long)vocab_size);
  }
  sampler->sampling = *sampling;
  sampler->vocab_size = (size_t)vocab_size;
  sampler->n_tokens = (size_t)n_tokens;
  uint64_t seed = sampling->seed;
  for (size_t i = 0; i < 4; i++) sampler->random[i] = splitmix64(&seed);
  *out = sampler;
  return COLIBRI_OK;
}

void colibri_sampler_close(colibri_sampler *sampler) {
  if (!sampler) return;
  free(sampler->seen);
  free(sampler->candidates);
  free(sampler);
}

colibri_status colibri_sampler_accept(colibri_sampler *sampler, uint32_t token) {
  if (token >= sampler->vocab_size) return COLIBRI_ERROR_ARGUMENT;
  sampler->seen[token] = 1;
  return COLIBRI_OK;
}

// ---------------------------------------------------------------------------------------------------------------------
// Drawing

static double penalized(const colibri_sampler *s, const float *logits, size_t token) {
  double value = (double)logits[token];
  if (!s->seen[token]) return value;
  return value > 0 ? value / s->sampling.repetition_penalty : value * s->sampling.repetition_penalty;
}

static uint32_t greedy(const colibri_sampler *s, const float *logits) {
  size_t best = 0;
  double best_value = penalized(s, logits, 0);
  for (size_t token = 1; token < s->n_tokens; token++) {
    double value = penalized(s, logits, token);
    if (value > best_value) {
      best = token;
      best_value = value;
    }
  }
  return (uint32_t)best;
}

// Descending value, ascending id among equals: a total order, so the sort's algorithm does not matter.
static int by_value(const void *left, const void *right) {
  const candidate *a = left, *b = right;
  if (a->value != b->value) return a->value > b->value ? -1 : 1;
  return a->token < b->token ? -1 : a->token > b->token;
}

// The tokens worth sorting: what is less likely than e^-50 of the best weighs less, all together and for any
// vocabulary, than the step between two random numbers.
static size_t collect_candidates(colibri_sampler *s, const float *logits) {
  double best = -INFINITY;
  for (size_t i = 0; i < s->n_tokens; i++) best = fmax(best, penalized(s, logits, i));
  size_t n = 0;
  for (size_t i = 0; i < s->n_tokens; i++) {
    double value = penalized(s, logits, i);
    if (value >= best - 50 * s->sampling.temperature) s->candidates[n++] = (candidate){value, (uint32_t)i};
  }
  return n;
}

// Number of candidates, sorted, that top-k, top-p and min-p leave; their values become probabilities. At least one.
static size_t keep_likely(candidate *c, size_t n, const colibri_sampling *s) {
  if (s->top_k > 0 && s->top_k < n) n = s->top_k;
  double total = 0;
  for (size_t i = n; i-- > 0;) {
    c[i].value = exp((c[i].value - c[0].value) / s->temperature);
    total += c[i].value;
  }
  if (s->top_p < 1) {
    double sum = 0;
    size_t kept = 0;
    while (kept < n && (kept == 0 || sum < s->top_p * total)) sum += c[kept++].value;
    n = kept;
  }
  while (n > 1 && c[n - 1].value < s->min_p * c[0].value) n--;
  return n;
}

colibri_status colibri_sampler_draw(colibri_sampler *s, const float *logits, uint32_t *token) {
  for (size_t i = 0; i < s->n_tokens; i++) {
    if (!isfinite(logits[i])) return COLIBRI_ERROR_NUMERIC;
  }
  if (s->sampling.temperature == 0 || s->sampling.top_k == 1) {
    *token = greedy(s, logits);
    return COLIBRI_OK;
  }
  size_t n = collect_candidates(s, logits);
  qsort(s->candidates, n, sizeof *s->candidates, by_value);
  n = keep_likely(s->candidates, n, &s->sampling);
  double total = 0;
  for (size_t i = 0; i < n; i++) total += s->candidates[i].value;
  double target = random_unit(s->random) * total, sum = 0;
  size_t chosen = n - 1;
  for (size_t i = 0; i < n && chosen == n - 1; i++) {
    sum += s->candidates[i].value;
    if (sum > target) chosen = i;
  }
  *token = s->candidates[chosen].token;
  return COLIBRI_OK;
}
