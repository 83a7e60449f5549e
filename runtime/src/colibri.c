// The public functions: checking arguments, cutting a prompt into batches, evaluating in a thread.
#include "colibri.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine.h"

struct colibri_model {
  clb_engine engine;
  colibri_memory memory;
  clb_store_metrics store_base;  // the store's counters at the last reset
  uint64_t *positions;           // [n_sequences]
  clb_span *spans;               // [n_sequences] of a batch
  colibri_append *jobs;          // [n_sequences] of an evaluation
  size_t *done;                  // [n_sequences] tokens of a job that were evaluated
  char error[COLIBRI_ERROR_BYTES];

  // A started evaluation. `running` and `result` are guarded by the mutex.
  pthread_mutex_t mutex;
  pthread_cond_t finished;
  pthread_t thread;
  bool started, running;
  colibri_status result;
  uint32_t *tokens;  // [n_sequences, ctx]
  size_t n_jobs;
};

const char *colibri_version(void) {
  return "0.1.0";
}

const char *colibri_status_name(colibri_status status) {
  static const char *const names[] = {"ok", "argument", "format",    "unsupported", "memory",
                                      "io", "numeric",  "cancelled", "busy"};
  return (size_t)status < sizeof names / sizeof *names ? names[status] : "unknown";
}

double clb_seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void colibri_options_init(colibri_options *options) {
  *options = (colibri_options){.struct_bytes = sizeof *options};
}

colibri_status colibri_estimate(const char *path, const colibri_options *options, colibri_memory *memory, char *error,
                                size_t error_bytes) {
  clb_engine engine = {.error = {error, error_bytes}};
  const colibri_status status = clb_engine_plan(&engine, path, options, memory);
  clb_engine_close(&engine);
  return status;
}

// ---------------------------------------------------------------------------------------------------------------------
// Open and close

static bool init_thread_state(colibri_model *m) {
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_mutex_init(&m->mutex, NULL);
  pthread_cond_init(&m->finished, &attributes);
  pthread_condattr_destroy(&attributes);
  const size_t n = m->engine.n_sequences;
  m->positions = calloc(n, sizeof *m->positions);
  m->spans = calloc(n, sizeof *m->spans);
  m->jobs = calloc(n, sizeof *m->jobs);
  m->done = calloc(n, sizeof *m->done);
  m->tokens = calloc(n * m->engine.ctx, sizeof *m->tokens);
  return m->positions && m->spans && m->jobs && m->done && m->tokens;
}

static void join_started(colibri_model *m) {
  if (m->started) pthread_join(m->thread, NULL);
  m->started = false;
}

void colibri_close(colibri_model *m) {
  if (!m) return;
  colibri_cancel(m);
  join_started(m);
  clb_engine_close(&m->engine);
  pthread_cond_destroy(&m->finished);
  pthread_mutex_destroy(&m->mutex);
  free(m->tokens);
  free(m->done);
  free(m->jobs);
  free(m->spans);
  free(m->positions);
  free(m);
}

colibri_status colibri_open(const char *path, const colibri_options *options, colibri_model **out, char *error,
                            size_t error_bytes) {
  *out = NULL;
  clb_error target = {error, error_bytes};
  colibri_model *m = calloc(1, sizeof *m);
  if (!m) return clb_fail(target, COLIBRI_ERROR_MEMORY, "no memory for a model");
  m->engine.error = target;
  colibri_status status = clb_engine_plan(&m->engine, path, options, &m->memory);
  if (!init_thread_state(m) && status == COLIBRI_OK) {
    status = clb_fail(target, COLIBRI_ERROR_MEMORY, "no memory for a context of tokens");
  }
  if (status == COLIBRI_OK) status = clb_engine_open(&m->engine);
  if (status != COLIBRI_OK) {
    colibri_close(m);
    return status;
  }
  m->engine.error = (clb_error){m->error, sizeof m->error};
  *out = m;
  return COLIBRI_OK;
}

const char *colibri_error(const colibri_model *m) {
  return m->error;
}

void colibri_get_info(const colibri_model *m, colibri_info *info) {
  const clb_graph *g = &m->engine.graph;
  *info = (colibri_info){
      .n_layers = g->n_layers,
      .n_moe_layers = g->n_moe_layers,
      .hidden_size = g->hidden,
      .vocab_size = g->vocab,
      .n_tokens = g->n_tokens,
      .top_k = g->top_k,
      .max_experts = g->max_experts,
      .context_length = g->context_length,
      .ctx = m->engine.ctx,
      .batch_size = m->engine.batch_size,
      .n_sequences = m->engine.n_sequences,
      .n_threads = (uint32_t)m->engine.n_threads,
      .bos_id = g->bos_id,
      .eos_ids = g->eos_ids,
      .n_eos_ids = g->n_eos,
      .kernels = clb_kernels_name(m->engine.kernels),
      .precision = m->engine.precision == COLIBRI_FAST ? "fast" : "exact",
      .kv_type = clb_type_by_id(m->engine.kv.type)->name,
  };
}

void colibri_get_memory(const colibri_model *m, colibri_memory *memory) {
  *memory = m->memory;
}

bool colibri_is_eos(const colibri_model *m, uint64_t token) {
  for (size_t i = 0; i < m->engine.graph.n_eos; i++) {
    if (m->engine.graph.eos_ids[i] == token) return true;
  }
  return false;
}

// ---------------------------------------------------------------------------------------------------------------------
// Evaluation

static colibri_status check_not_running(colibri_model *m) {
  pthread_mutex_lock(&m->mutex);
  const bool running = m->running;
  pthread_mutex_unlock(&m->mutex);
  // The error text belongs to the running evaluation, so it is left alone.
  return running ? COLIBRI_BUSY : COLIBRI_OK;
}

static colibri_status check_input(colibri_model *m, size_t sequence, const uint32_t *tokens, size_t n_tokens) {
  const clb_engine *e = &m->engine;
  for (size_t i = 0; i < n_tokens; i++) {
    if (tokens[i] < e->graph.vocab) continue;
    return clb_fail(e->error, COLIBRI_ERROR_ARGUMENT, "token %zu of the input is %u; this model's ids end at %llu", i,
                    tokens[i], (unsigned long long)e->graph.vocab - 1);
  }
  if (n_tokens > e->ctx - m->positions[sequence]) {
    return clb_fail(e->error, COLIBRI_ERROR_ARGUMENT,
                    "%zu tokens do not fit: the context has %llu positions and %llu are used (this model allows a "
                    "context of up to %llu)",
                    n_tokens, (unsigned long long)e->ctx, (unsigned long long)m->positions[sequence],
                    (unsigned long long)e->graph.context_length);
  }
  return COLIBRI_OK;
}

colibri_status colibri_check_input(colibri_model *m, const uint32_t *tokens, size_t n_tokens) {
  const colibri_status status = check_not_running(m);
  return status == COLIBRI_OK ? check_input(m, 0, tokens, n_tokens) : status;
}

static colibri_status check_sequence(const colibri_model *m, uint64_t sequence) {
  if (sequence < m->engine.n_sequences) return COLIBRI_OK;
  return clb_fail(m->engine.error, COLIBRI_ERROR_ARGUMENT, "sequence %llu: this model was opened for %llu",
                  (unsigned long long)sequence, (unsigned long long)m->engine.n_sequences);
}

static colibri_status check_append(colibri_model *m, const colibri_append *a) {
  const clb_error error = m->engine.error;
  CLB_TRY(check_sequence(m, a->sequence));
  if (a->n_tokens == 0) return clb_fail(error, COLIBRI_ERROR_ARGUMENT, "evaluation of no tokens");
  if (a->n_logits > a->n_tokens || (a->n_logits > 0 && !a->logits)) {
    return clb_fail(error, COLIBRI_ERROR_ARGUMENT, "logits of %zu positions asked of %zu tokens", a->n_logits,
                    a->n_tokens);
  }
  return check_input(m, a->sequence, a->tokens, a->n_tokens);
}

// Takes over what is to be evaluated.
static colibri_status take_jobs(colibri_model *m, const colibri_append *appends, size_t n) {
  CLB_TRY(check_not_running(m));
  const clb_error error = m->engine.error;
  if (n == 0) return clb_fail(error, COLIBRI_ERROR_ARGUMENT, "evaluation of no sequences");
  for (size_t i = 0; i < n; i++) {
    CLB_TRY(check_append(m, &appends[i]));
    for (size_t j = 0; j < i; j++) {
      if (appends[j].sequence != appends[i].sequence) continue;
      return clb_fail(error, COLIBRI_ERROR_ARGUMENT, "sequence %u is named twice", appends[i].sequence);
    }
  }
  memcpy(m->jobs, appends, n * sizeof *appends);
  m->n_jobs = n;
  return COLIBRI_OK;
}

// The next n tokens of a job.
static clb_span make_span(const colibri_model *m, size_t i, size_t n) {
  const colibri_append *a = &m->jobs[i];
  const size_t done = m->done[i], without_logits = a->n_tokens - a->n_logits;
  const size_t first = done < without_logits ? without_logits : done;  // whose logits are wanted
  const size_t wanted = first < done + n ? done + n - first : 0;
  return (clb_span){.sequence = a->sequence,
                    .position = m->positions[a->sequence] + done,
                    .tokens = a->tokens + done,
                    .n_tokens = n,
                    .logits = wanted ? a->logits + (first - without_logits) * m->engine.graph.vocab : NULL,
                    .n_logits = wanted};
}

// Fills a batch with what is left of the jobs, in their order: the fewest batches read experts the fewest times.
static clb_batch next_batch(colibri_model *m) {
  clb_batch batch = {.spans = m->spans};
  for (size_t i = 0; i < m->n_jobs; i++) {
    const size_t left = m->jobs[i].n_tokens - m->done[i], room = m->engine.batch_size - batch.n_tokens;
    const size_t n = left < room ? left : room;
    if (n == 0) continue;
    m->spans[batch.n_spans++] = make_span(m, i, n);
    batch.n_tokens += n;
    m->done[i] += n;
  }
  return batch;
}

// Evaluates the jobs. Sequences grow when all of it is done.
static colibri_status evaluate_here(colibri_model *m) {
  memset(m->done, 0, m->n_jobs * sizeof *m->done);
  for (clb_batch batch = next_batch(m); batch.n_tokens > 0; batch = next_batch(m)) {
    CLB_TRY(clb_forward(&m->engine, &batch));
  }
  for (size_t i = 0; i < m->n_jobs; i++) m->positions[m->jobs[i].sequence] += m->jobs[i].n_tokens;
  return COLIBRI_OK;
}

// The evaluating thread is the caller's: it is pinned meanwhile only.
static colibri_status evaluate(colibri_model *m) {
  clb_affinity before;
  if (!m->engine.pin_threads) return evaluate_here(m);
  if (!clb_pin_self(0, &before)) {
    return clb_fail(m->engine.error, COLIBRI_ERROR_ARGUMENT, "the evaluating thread cannot be pinned to a CPU");
  }
  const colibri_status status = evaluate_here(m);
  clb_unpin_self(&before);
  return status;
}

colibri_status colibri_eval_sequences(colibri_model *m, const colibri_append *appends, size_t n_appends) {
  CLB_TRY(take_jobs(m, appends, n_appends));
  atomic_store(&m->engine.cancelled, false);
  return evaluate(m);
}

colibri_status colibri_eval(colibri_model *m, const uint32_t *tokens, size_t n_tokens, float *logits, size_t n_logits) {
  const colibri_append append = {.tokens = tokens, .n_tokens = n_tokens, .logits = logits, .n_logits = n_logits};
  return colibri_eval_sequences(m, &append, 1);
}

static void *evaluation_thread(void *argument) {
  colibri_model *m = argument;
  const colibri_status status = evaluate(m);
  pthread_mutex_lock(&m->mutex);
  m->result = status;
  m->running = false;
  pthread_cond_broadcast(&m->finished);
  pthread_mutex_unlock(&m->mutex);
  return NULL;
}

static void copy_tokens(colibri_model *m) {
  for (size_t i = 0; i < m->n_jobs; i++) {
    uint32_t *copy = m->tokens + m->jobs[i].sequence * m->engine.ctx;
    memcpy(copy, m->jobs[i].tokens, m->jobs[i].n_tokens * sizeof *copy);
    m->jobs[i].tokens = copy;
  }
}

colibri_status colibri_eval_sequences_start(colibri_model *m, const colibri_append *appends, size_t n_appends) {
  CLB_TRY(take_jobs(m, appends, n_appends));
  join_started(m);
  copy_tokens(m);
  pthread_mutex_lock(&m->mutex);
  m->running = true;
  pthread_mutex_unlock(&m->mutex);
  atomic_store(&m->engine.cancelled, false);
  sigset_t all, before;  // signals are the application's
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  m->started = pthread_create(&m->thread, NULL, evaluation_thread, m) == 0;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (m->started) return COLIBRI_OK;
  pthread_mutex_lock(&m->mutex);
  m->running = false;
  pthread_mutex_unlock(&m->mutex);
  return clb_fail(m->engine.error, COLIBRI_ERROR_MEMORY, "an evaluation thread cannot be started");
}

colibri_status colibri_eval_start(colibri_model *m, const uint32_t *tokens, size_t n_tokens, float *logits,
                                  size_t n_logits) {
  const colibri_append append = {.tokens = tokens, .n_tokens = n_tokens, .logits = logits, .n_logits = n_logits};
  return colibri_eval_sequences_start(m, &append, 1);
}

static struct timespec seconds_from_now(double seconds) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  const double whole = floor(seconds);
  t.tv_sec += (time_t)whole;
  t.tv_nsec += (long)((seconds - whole) * 1e9);
  if (t.tv_nsec >= 1000000000L) {
    t.tv_nsec -= 1000000000L;
    t.tv_sec++;
  }
  return t;
}

colibri_status colibri_wait(colibri_model *m, double seconds) {
  const bool for_ever = !(seconds >= 0 && seconds < 1e9);
  const struct timespec until = seconds_from_now(for_ever ? 0 : seconds);
  pthread_mutex_lock(&m->mutex);
  int failure = 0;
  while (m->running && failure != ETIMEDOUT) {
    failure =
        for_ever ? pthread_cond_wait(&m->finished, &m->mutex) : pthread_cond_timedwait(&m->finished, &m->mutex, &until);
  }
  const colibri_status status = m->running ? COLIBRI_BUSY : m->result;
  pthread_mutex_unlock(&m->mutex);
  return status;
}

void colibri_cancel(colibri_model *m) {
  atomic_store(&m->engine.cancelled, true);
}

uint64_t colibri_sequence_position(const colibri_model *m, uint32_t sequence) {
  return sequence < m->engine.n_sequences ? m->positions[sequence] : 0;
}

uint64_t colibri_position(const colibri_model *m) {
  return m->positions[0];
}

colibri_status colibri_rewind_sequence(colibri_model *m, uint32_t sequence, uint64_t position) {
  CLB_TRY(check_not_running(m));
  CLB_TRY(check_sequence(m, sequence));
  if (position > m->positions[sequence]) {
    return clb_fail(m->engine.error, COLIBRI_ERROR_ARGUMENT, "rewinding to %llu: the sequence has %llu tokens",
                    (unsigned long long)position, (unsigned long long)m->positions[sequence]);
  }
  m->positions[sequence] = position;
  return COLIBRI_OK;
}

colibri_status colibri_rewind(colibri_model *m, uint64_t position) {
  return colibri_rewind_sequence(m, 0, position);
}

colibri_status colibri_sanity_check(colibri_model *m) {
  const colibri_status running = check_not_running(m);
  if (running != COLIBRI_OK) return running;
  clb_engine *e = &m->engine;
  const uint64_t position = m->positions[0];
  const uint32_t token =
      e->graph.bos_id >= 0 && (uint64_t)e->graph.bos_id < e->graph.vocab ? (uint32_t)e->graph.bos_id : 0;
  float *logits = e->scratch.logits;
  const clb_observer observer = e->observer;
  e->observer = (clb_observer){0};
  const colibri_status status = colibri_eval(m, &token, 1, logits, 1);
  e->observer = observer;
  if (status != COLIBRI_OK) return status;
  m->positions[0] = position;
  for (size_t i = 1; i < e->graph.vocab; i++) {
    if (logits[i] != logits[0]) return COLIBRI_OK;
  }
  return clb_fail(e->error, COLIBRI_ERROR_NUMERIC, "sanity check: all %llu logits of token %u are equal",
                  (unsigned long long)e->graph.vocab, token);
}

colibri_status colibri_observe(colibri_model *m, const colibri_observation *observation) {
  CLB_TRY(check_not_running(m));
  return clb_observer_set(&m->engine, observation);
}

colibri_status colibri_trace(colibri_model *m, uint32_t *experts, float *weights, size_t n_positions) {
  const colibri_observation o = {.n_sequences = 1, .n_positions = n_positions, .experts = experts, .weights = weights};
  return colibri_observe(m, experts ? &o : NULL);
}

// ---------------------------------------------------------------------------------------------------------------------
// Metrics

void colibri_get_metrics(const colibri_model *m, colibri_metrics *metrics) {
  clb_store_metrics store;
  clb_store_get_metrics(m->engine.store, &store);
  *metrics = m->engine.metrics;
  metrics->expert_hits = store.hits - m->store_base.hits;
  metrics->expert_requests = metrics->expert_hits + store.misses - m->store_base.misses;
  metrics->reads = store.reads - m->store_base.reads;
  metrics->bytes_read = store.bytes_read - m->store_base.bytes_read;
  metrics->prefetch_guessed = store.hint_guessed - m->store_base.hint_guessed;
  metrics->prefetch_right = store.hint_right - m->store_base.hint_right;
  metrics->prefetch_chosen = store.hint_chosen - m->store_base.hint_chosen;
  metrics->prefetch_reads = store.hint_reads - m->store_base.hint_reads;
  metrics->prefetch_useful_bytes = store.hint_useful_bytes - m->store_base.hint_useful_bytes;
  metrics->prefetch_wasted_bytes = store.hint_wasted_bytes - m->store_base.hint_wasted_bytes;
  metrics->prefetch_paused = store.hints_paused - m->store_base.hints_paused;
  metrics->preloaded_bytes = store.preloaded_bytes;
  metrics->mirror_bytes = store.mirror_bytes - m->store_base.mirror_bytes;
  metrics->mirror_failures = store.mirror_failures;
  metrics->preload_seconds = m->engine.preload_seconds;
  metrics->io_backend = store.backend;
  metrics->io_direct = store.direct;
  metrics->io_reason = store.reason;
}

colibri_status colibri_get_layer_metrics(const colibri_model *m, size_t layer, colibri_layer_metrics *metrics) {
  if (layer >= m->engine.graph.n_layers) return COLIBRI_ERROR_ARGUMENT;
  *metrics = m->engine.layer_metrics[layer];
  return COLIBRI_OK;
}

void colibri_reset_metrics(colibri_model *m) {
  clb_store_get_metrics(m->engine.store, &m->store_base);
  m->engine.metrics = (colibri_metrics){0};
  memset(m->engine.layer_metrics, 0, m->engine.graph.n_layers * sizeof *m->engine.layer_metrics);
}
