// What there is to say about a model on this machine before it runs. Arithmetic on plans and measurements only.
#include <inttypes.h>
#include <stdio.h>

#include "colibri.h"

static const double kLittleToStream = 0.5;     // of all experts, used by each token
static const double kSlowTokensPerSecond = 1;  // below this the drive is worth a warning
static const double kSlowestDrive = 20e6;      // bytes per second that every drive in use gives

// A size as people read it: "37 B", "4.0 KiB", "1.3 GiB".
typedef struct {
  char text[16];
} size_text;

static size_text show(uint64_t n_bytes) {
  static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double size = (double)n_bytes;
  size_t unit = 0;
  while (size >= 999.5 && unit + 1 < sizeof units / sizeof *units) {
    size /= 1024;
    unit++;
  }
  size_text out;
  snprintf(out.text, sizeof out.text, "%.*f %s", unit == 0 || size >= 99.95 ? 0 : 1, size, units[unit]);
  return out;
}

// Bytes of experts that a token is expected to miss in the cache, were all experts equally likely.
static uint64_t missed_bytes(const colibri_memory *m) {
  if (m->all_experts_bytes == 0 || m->cache_bytes >= m->all_experts_bytes) return 0;
  const double share = (double)m->cache_bytes / (double)m->all_experts_bytes;
  return (uint64_t)((1 - share) * (double)m->token_bytes);
}

bool colibri_wants_probe(const colibri_memory *m) {
  return (double)missed_bytes(m) * kSlowTokensPerSecond > kSlowestDrive;
}

static bool advise_cache(const colibri_memory *m, const colibri_drive *d, colibri_advice *a) {
  (void)d;
  if (m->cache_bytes >= m->token_bytes || m->cache_bytes >= m->all_experts_bytes) return false;
  snprintf(
      a->text, sizeof a->text,
      "the expert cache (%s) is smaller than the experts of one token (%s): most will be read again for every token",
      show(m->cache_bytes).text, show(m->token_bytes).text);
  return true;
}

static bool advise_streaming(const colibri_memory *m, const colibri_drive *d, colibri_advice *a) {
  (void)d;
  const double share = m->all_experts_bytes ? (double)m->token_bytes / (double)m->all_experts_bytes : 0;
  if (m->cache_bytes >= m->all_experts_bytes || share < kLittleToStream) return false;
  snprintf(
      a->text, sizeof a->text,
      "each token uses %.0f %% of all experts (%s of %s): reading them on demand cannot save much; the model wants "
      "to be in memory as a whole",
      100 * share, show(m->token_bytes).text, show(m->all_experts_bytes).text);
  return true;
}

static bool advise_drive(const colibri_memory *m, const colibri_drive *d, colibri_advice *a) {
  const uint64_t missed = missed_bytes(m);
  if (!d || d->bytes_per_second <= 0 || missed == 0) return false;
  const double tokens = d->bytes_per_second / (double)missed;
  if (tokens >= kSlowTokensPerSecond) return false;
  snprintf(a->text, sizeof a->text,
           "the drive is slow for this model: it gives %.0f MB/s%s, and a token misses about %s of experts (%.0f %% of "
           "its %s, were all equally likely): about %.2g tokens/s",
           d->bytes_per_second / 1e6, d->direct ? "" : " (through the page cache)", show(missed).text,
           100 * (double)missed / (double)m->token_bytes, show(m->token_bytes).text, tokens);
  return true;
}

static bool advise_available(const colibri_memory *m, const colibri_drive *d, colibri_advice *a) {
  (void)d;
  if (m->available_limit[0] == '\0' || m->total_bytes <= m->available_bytes) return false;
  snprintf(a->text, sizeof a->text,
           "%s of memory are planned, but only %s are available (%s): pages may be swapped, or the process ended",
           show(m->total_bytes).text, show(m->available_bytes).text, m->available_limit);
  return true;
}

static bool note_fits(const colibri_memory *m, const colibri_drive *d, colibri_advice *a) {
  (void)d;
  if (m->all_experts_bytes == 0 || m->cache_bytes < m->all_experts_bytes) return false;
  snprintf(a->text, sizeof a->text, "all experts (%s) fit into the cache: each is read once",
           show(m->all_experts_bytes).text);
  return true;
}

static const struct {
  bool (*advise)(const colibri_memory *, const colibri_drive *, colibri_advice *);
  bool warning;
} kAdvice[] = {
    {advise_available, true}, {advise_cache, true}, {advise_streaming, true}, {advise_drive, true}, {note_fits, false}};

_Static_assert(sizeof kAdvice / sizeof *kAdvice <= COLIBRI_MAX_ADVICE, "callers have room for COLIBRI_MAX_ADVICE");

size_t colibri_advise(const colibri_memory *memory, const colibri_drive *drive, colibri_advice *advice) {
  size_t n = 0;
  for (size_t i = 0; i < sizeof kAdvice / sizeof *kAdvice; i++) {
    advice[n].warning = kAdvice[i].warning;
    if (kAdvice[i].advise(memory, drive, &advice[n])) n++;
  }
  return n;
}
