// Evaluates models by the public header, under settings read from stdin: a job a line, of words "name=value" (see
// kNumbers). For each it prints "ok" and a hash of all logits of each sequence, then how often reading failed, how
// often it was cancelled, and the backend; or "error", a status and the text. Linked with --wrap=pread,preadv,madvise
// for `fault`.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include "colibri.h"

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) {                                                       \
      fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      abort();                                                                \
    }                                                                         \
  } while (0)

enum { MAX_SEQUENCES = 8, MAX_TOKENS = 4096 };

// ---------------------------------------------------------------------------------------------------------------------
// Faults of reads

enum { NO_FAULT, FAULT_EIO, FAULT_SHORT, FAULT_INTERRUPTED };

static _Atomic uint64_t fault;
static _Atomic int faults_left;

// Every third read is hit.
static uint64_t take_fault(void) {
  static _Atomic unsigned n_reads;
  const uint64_t kind = atomic_load(&fault);
  if (kind == NO_FAULT || atomic_fetch_add(&n_reads, 1) % 3 != 2) return NO_FAULT;
  return atomic_fetch_sub(&faults_left, 1) > 0 ? kind : NO_FAULT;
}

ssize_t __real_pread(int fd, void *buffer, size_t n, off_t offset);
ssize_t __wrap_pread(int fd, void *buffer, size_t n, off_t offset);
ssize_t __wrap_preadv(int fd, const struct iovec *parts, int n, off_t offset);
int __real_madvise(void *address, size_t n, int advice);
int __wrap_madvise(void *address, size_t n, int advice);

ssize_t __wrap_pread(int fd, void *buffer, size_t n, off_t offset) {
  const uint64_t kind = take_fault();
  if (kind == NO_FAULT) return __real_pread(fd, buffer, n, offset);
  if (kind == FAULT_SHORT) {
    const ssize_t got = __real_pread(fd, buffer, n, offset);
    return got > 5000 ? 5000 : got;
  }
  errno = kind == FAULT_EIO ? EIO : EINTR;
  return -1;
}

ssize_t __wrap_preadv(int fd, const struct iovec *parts, int n, off_t offset) {
  ssize_t sum = 0;
  for (int i = 0; i < n; i++) {
    const ssize_t got = __wrap_pread(fd, parts[i].iov_base, parts[i].iov_len, offset + sum);
    if (got < 0) return sum > 0 ? sum : got;
    sum += got;
    if ((size_t)got < parts[i].iov_len) break;
  }
  return sum;
}

int __wrap_madvise(void *address, size_t n, int advice) {
  const uint64_t kind = advice == 22 && n > 0 ? take_fault() : NO_FAULT;  // MADV_POPULATE_READ
  if (kind != FAULT_EIO && kind != FAULT_INTERRUPTED) return __real_madvise(address, n, advice);
  errno = kind == FAULT_EIO ? EFAULT : EINTR;
  return -1;
}

// ---------------------------------------------------------------------------------------------------------------------
// Jobs

typedef struct {
  char model[1024], mirror[1024];
  uint64_t precision, kv, io, io_threads, threads, pin, batch, cache, prefetch, preload, check, sequences;
  uint64_t first;    // number of the first sequence: its tokens are those it has among others
  uint64_t tokens;   // of each sequence but for a few less
  uint64_t split;    // 0: whole prompts, 1: pieces of any length, 2: a token at a time
  uint64_t observe;  // width of the widest expert: everything is recorded; 0: nothing
  uint64_t cancel;   // evaluations run in a thread of the model, and some are cancelled
  uint64_t fault;    // of NO_FAULT ...
  uint64_t seed;
} job;

static const struct {
  const char *name;
  size_t offset;
} kNumbers[] = {
    {"precision", offsetof(job, precision)},
    {"kv", offsetof(job, kv)},
    {"io", offsetof(job, io)},
    {"io_threads", offsetof(job, io_threads)},
    {"threads", offsetof(job, threads)},
    {"pin", offsetof(job, pin)},
    {"batch", offsetof(job, batch)},
    {"cache", offsetof(job, cache)},
    {"prefetch", offsetof(job, prefetch)},
    {"preload", offsetof(job, preload)},
    {"check", offsetof(job, check)},
    {"sequences", offsetof(job, sequences)},
    {"first", offsetof(job, first)},
    {"tokens", offsetof(job, tokens)},
    {"split", offsetof(job, split)},
    {"observe", offsetof(job, observe)},
    {"cancel", offsetof(job, cancel)},
    {"fault", offsetof(job, fault)},
    {"seed", offsetof(job, seed)},
};

static void set_word(job *j, char *word) {
  char *value = strchr(word, '=');
  CHECK(value != NULL);
  *value++ = '\0';
  if (strcmp(word, "model") == 0 || strcmp(word, "mirror") == 0) {
    snprintf(word[1] == 'o' ? j->model : j->mirror, sizeof j->model, "%s", value);
    return;
  }
  size_t i = 0;
  while (i < sizeof kNumbers / sizeof *kNumbers && strcmp(word, kNumbers[i].name) != 0) i++;
  CHECK(i < sizeof kNumbers / sizeof *kNumbers);
  const uint64_t number = strtoull(value, NULL, 10);
  memcpy((char *)j + kNumbers[i].offset, &number, sizeof number);
}

static job read_job(char *line) {
  job j = {.threads = 1, .sequences = 1, .tokens = 16};
  for (char *word = strtok(line, " \n"); word; word = strtok(NULL, " \n")) set_word(&j, word);
  CHECK(j.sequences <= MAX_SEQUENCES && j.tokens <= MAX_TOKENS);
  return j;
}

static colibri_options options_of(const job *j) {
  colibri_options o;
  colibri_options_init(&o);
  o.precision = (colibri_precision)j->precision;
  o.kv_type = (colibri_kv_type)j->kv;
  o.io = (colibri_io)j->io;
  o.io_threads = (uint32_t)j->io_threads;
  o.n_threads = (uint32_t)j->threads;
  o.pin_threads = j->pin != 0;
  o.batch_size = j->batch;
  o.expert_cache_bytes = j->cache;
  o.prefetch_depth = (uint32_t)j->prefetch;
  o.preload_bytes = j->preload;
  o.check = (colibri_check)j->check;
  o.n_sequences = j->sequences;
  o.mirror = j->mirror[0] ? j->mirror : NULL;
  o.ctx = j->tokens;
  return o;
}

// ---------------------------------------------------------------------------------------------------------------------
// Evaluation

typedef struct {
  const job *job;
  colibri_model *model;
  colibri_info info;
  uint64_t random;
  size_t n_failed, n_cancelled;
  size_t n_tokens[MAX_SEQUENCES], n_done[MAX_SEQUENCES];
  uint64_t hash[MAX_SEQUENCES];
  uint32_t *tokens[MAX_SEQUENCES];
  float *logits;  // [sum of n_tokens, vocab_size]
  const char *backend;
  _Atomic bool cancelling;
} work;

static size_t random_below(work *w, size_t n) {
  w->random = w->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (size_t)(w->random >> 33) % n;
}

static void make_tokens(work *w, size_t s) {
  const size_t number = w->job->first + s;
  w->n_tokens[s] = w->job->tokens > 3 * number ? w->job->tokens - 3 * number : 1;
  w->hash[s] = UINT64_C(14695981039346656037);
  w->tokens[s] = malloc(w->n_tokens[s] * sizeof *w->tokens[s]);
  CHECK(w->tokens[s] != NULL);
  for (size_t i = 0; i < w->n_tokens[s]; i++) {
    w->tokens[s][i] = (uint32_t)((i * i * 7 + i * 3 + number * 31) % w->info.vocab_size);
  }
}

// FNV-1a.
static void add_to_hash(uint64_t *hash, const float *x, size_t n) {
  for (size_t i = 0; i < n; i++) {
    uint32_t bits;
    memcpy(&bits, &x[i], sizeof bits);
    for (int shift = 0; shift < 32; shift += 8) *hash = (*hash ^ (bits >> shift & 255)) * UINT64_C(1099511628211);
  }
}

// The next tokens of the sequences that are not at their end; each gets a place for its logits.
static size_t next_appends(work *w, colibri_append *appends) {
  size_t n = 0, n_rows = 0;
  for (size_t s = 0; s < w->job->sequences; s++) {
    const size_t left = w->n_tokens[s] - w->n_done[s];
    if (left == 0) continue;
    const size_t take = w->job->split == 0 ? left : w->job->split == 1 ? 1 + random_below(w, left) : 1;
    appends[n++] = (colibri_append){.sequence = (uint32_t)s,
                                    .tokens = w->tokens[s] + w->n_done[s],
                                    .n_tokens = take,
                                    .logits = w->logits + n_rows * w->info.vocab_size,
                                    .n_logits = take};
    n_rows += take;
  }
  return n;
}

static void *cancel_soon(void *argument) {
  work *w = argument;
  while (atomic_load(&w->cancelling)) {
    usleep(300);
    colibri_cancel(w->model);
  }
  return NULL;
}

static void *wait_elsewhere(void *argument) {
  (void)colibri_wait(argument, 60);
  return NULL;
}

// In a thread of the model; with `cancel`, another thread keeps cancelling until it is over.
static colibri_status eval_started(work *w, const colibri_append *appends, size_t n, bool cancel) {
  pthread_t canceller, waiter;
  atomic_store(&w->cancelling, cancel);
  if (cancel) CHECK(pthread_create(&canceller, NULL, cancel_soon, w) == 0);
  colibri_status status = colibri_eval_sequences_start(w->model, appends, n);
  CHECK(status == COLIBRI_OK);
  CHECK(pthread_create(&waiter, NULL, wait_elsewhere, w->model) == 0);
  while ((status = colibri_wait(w->model, 0.001)) == COLIBRI_BUSY) {
    (void)colibri_check_input(w->model, appends->tokens, 1);  // COLIBRI_BUSY, unless it has just ended
  }
  atomic_store(&w->cancelling, false);
  CHECK(pthread_join(waiter, NULL) == 0);
  if (cancel) CHECK(pthread_join(canceller, NULL) == 0);
  return status;
}

// Again and again until it succeeds: what failed or was cancelled must have left everything as it was.
static colibri_status eval_until_done(work *w, const colibri_append *appends, size_t n) {
  for (size_t attempt = 0;; attempt++) {
    const colibri_status status = w->job->cancel ? eval_started(w, appends, n, attempt % 2 == 0 && attempt < 6)
                                                 : colibri_eval_sequences(w->model, appends, n);
    for (size_t s = 0; s < w->job->sequences && status != COLIBRI_OK; s++) {
      CHECK(colibri_sequence_position(w->model, (uint32_t)s) == w->n_done[s]);
    }
    if (status == COLIBRI_CANCELLED) {
      w->n_cancelled++;
    } else if (status == COLIBRI_ERROR_IO && atomic_load(&fault) == FAULT_EIO) {
      const char *text = colibri_error(w->model);
      CHECK((strstr(text, "expert ") || strstr(text, "of token_embd")) && strstr(text, strerror(EIO)));
      w->n_failed++;
    } else {
      return status;
    }
  }
}

static colibri_status evaluate_all(work *w) {
  colibri_append appends[MAX_SEQUENCES];
  for (size_t n; (n = next_appends(w, appends)) > 0;) {
    const colibri_status status = eval_until_done(w, appends, n);
    if (status != COLIBRI_OK) return status;
    for (size_t i = 0; i < n; i++) {
      const size_t s = appends[i].sequence;
      w->n_done[s] += appends[i].n_tokens;
      CHECK(colibri_sequence_position(w->model, (uint32_t)s) == w->n_done[s]);
      add_to_hash(&w->hash[s], appends[i].logits, appends[i].n_logits * w->info.vocab_size);
    }
  }
  return COLIBRI_OK;
}

// ---------------------------------------------------------------------------------------------------------------------
// What else a caller does

static void *zeros(size_t n, size_t size) {
  void *p = calloc(n ? n : 1, size);
  CHECK(p != NULL);
  return p;
}

static colibri_observation observe(work *w) {
  const size_t n = w->info.n_moe_layers * w->job->sequences * w->job->tokens * w->info.top_k;
  const size_t n_experts = w->info.n_moe_layers * w->info.max_experts;
  colibri_observation o = {.n_sequences = w->job->sequences, .n_positions = w->job->tokens, .width = w->job->observe};
  o.experts = zeros(n, sizeof *o.experts);
  o.weights = zeros(n, sizeof *o.weights);
  o.early = zeros(n, sizeof *o.early);
  o.inputs = zeros(n_experts * w->info.hidden_size, sizeof *o.inputs);
  o.hidden = zeros(n_experts * o.width, sizeof *o.hidden);
  CHECK(colibri_observe(w->model, &o) == COLIBRI_OK);
  return o;
}

static void end_observation(work *w, colibri_observation *o) {
  CHECK(colibri_observe(w->model, NULL) == COLIBRI_OK);
  for (size_t s = 0; s < w->job->sequences; s++) {
    CHECK(o->experts[s * o->n_positions * w->info.top_k] < w->info.max_experts);
  }
  free(o->experts);
  free(o->weights);
  free(o->early);
  free(o->inputs);
  free(o->hidden);
}

static void sample_and_measure(work *w) {
  colibri_sampling sampling;
  colibri_sampling_init(&sampling);
  sampling.temperature = 0.9;
  sampling.top_k = 20;
  sampling.top_p = 0.9;
  sampling.repetition_penalty = 1.1;
  colibri_sampler *sampler;
  char error[COLIBRI_ERROR_BYTES];
  const uint64_t vocab = w->info.vocab_size;
  CHECK(colibri_sampler_open(&sampling, vocab, w->info.n_tokens, &sampler, error, sizeof error) == COLIBRI_OK);
  for (uint32_t token = 0, i = 0; i < 3; i++) {
    CHECK(colibri_sampler_draw(sampler, w->logits, &token) == COLIBRI_OK && token < vocab);
    CHECK(colibri_sampler_accept(sampler, token) == COLIBRI_OK);
  }
  colibri_sampler_close(sampler);
  colibri_metrics m;
  colibri_get_metrics(w->model, &m);
  CHECK(m.tokens > 0);
  w->backend = m.io_backend;
  colibri_layer_metrics layer;
  for (size_t i = 0; i < w->info.n_layers; i++) CHECK(colibri_get_layer_metrics(w->model, i, &layer) == COLIBRI_OK);
  colibri_reset_metrics(w->model);
}

// Twice, the second time with what the first left in the cache.
static colibri_status evaluate_job(work *w) {
  size_t n_rows = 0;
  for (size_t s = 0; s < w->job->sequences; s++) {
    make_tokens(w, s);
    n_rows += w->n_tokens[s];
  }
  w->logits = zeros(n_rows * w->info.vocab_size, sizeof(float));
  uint64_t first_hash[MAX_SEQUENCES];
  colibri_status status = COLIBRI_OK;
  for (int round = 0; round < 2 && status == COLIBRI_OK; round++) {
    atomic_store(&faults_left, 5);
    atomic_store(&fault, w->job->fault);
    status = evaluate_all(w);
    atomic_store(&fault, NO_FAULT);
    if (status != COLIBRI_OK) break;
    sample_and_measure(w);
    if (round == 1) CHECK(memcmp(first_hash, w->hash, w->job->sequences * sizeof *w->hash) == 0);
    if (round == 1) break;
    memcpy(first_hash, w->hash, sizeof first_hash);
    for (size_t s = 0; s < w->job->sequences; s++) {
      CHECK(colibri_rewind_sequence(w->model, (uint32_t)s, 0) == COLIBRI_OK);
      w->n_done[s] = 0;
      w->hash[s] = UINT64_C(14695981039346656037);
    }
  }
  return status;
}

static void run(const job *j) {
  char error[COLIBRI_ERROR_BYTES] = "";
  const colibri_options options = options_of(j);
  work w = {.job = j, .random = j->seed};
  colibri_status status = colibri_open(j->model, &options, &w.model, error, sizeof error);
  if (status != COLIBRI_OK) {
    printf("error %s %s\n", colibri_status_name(status), error);
    return;
  }
  colibri_get_info(w.model, &w.info);
  colibri_observation observation = {0};
  CHECK(colibri_sanity_check(w.model) == COLIBRI_OK);
  if (j->observe) observation = observe(&w);
  status = evaluate_job(&w);
  if (j->observe) end_observation(&w, &observation);
  if (status == COLIBRI_OK) {
    printf("ok");
    for (size_t s = 0; s < j->sequences; s++) printf(" %016" PRIx64, w.hash[s]);
    printf(" failed %zu cancelled %zu by %s\n", w.n_failed, w.n_cancelled, w.backend);
  } else {
    printf("error %s %s\n", colibri_status_name(status), colibri_error(w.model));
  }
  if (j->cancel) {  // closed while it evaluates
    CHECK(colibri_rewind(w.model, 0) == COLIBRI_OK);
    CHECK(colibri_eval_start(w.model, w.tokens[0], w.n_tokens[0], w.logits, 1) == COLIBRI_OK);
  }
  colibri_close(w.model);
  for (size_t s = 0; s < j->sequences; s++) free(w.tokens[s]);
  free(w.logits);
}

int main(void) {
  static char line[8192];
  while (fgets(line, sizeof line, stdin)) {
    const job j = read_job(line);
    run(&j);
    fflush(stdout);
  }
  return 0;
}
