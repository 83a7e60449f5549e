// Opening a container for execution: sizes first, then memory, then the resident tensors.
#include <stdlib.h>
#include <sys/mman.h>

#include "crc32c.h"
#include "engine.h"

enum {
  DEFAULT_CTX = 4096,
  MAX_CTX = 1 << 20,
  MAX_BATCH = 4096,
  MAX_SEQUENCES = 256,
  MAX_PREFETCH_DEPTH = 2,
  READ_BYTES = 8 << 20,    // of one task
  VECTOR_ALIGNMENT = 16,   // floats
  SCRATCH_ALIGNMENT = 64,  // bytes
};

static uint64_t align_up(uint64_t n, uint64_t alignment) {
  return (n + alignment - 1) / alignment * alignment;
}
static uint64_t larger(uint64_t a, uint64_t b) {
  return a > b ? a : b;
}
static uint64_t smaller(uint64_t a, uint64_t b) {
  return a < b ? a : b;
}

// ---------------------------------------------------------------------------------------------------------------------
// Options

static colibri_status check_counts(const clb_engine *e, const colibri_options *o) {
  const uint64_t limit = smaller(e->graph.context_length, MAX_CTX);
  if (o->ctx > limit) {
    return clb_fail(e->error, COLIBRI_ERROR_ARGUMENT, "context of %llu: this model allows up to %llu",
                    (unsigned long long)o->ctx, (unsigned long long)limit);
  }
  if (o->batch_size > MAX_BATCH) {
    return clb_fail(e->error, COLIBRI_ERROR_ARGUMENT, "batch size of %llu: expected up to %d",
                    (unsigned long long)o->batch_size, MAX_BATCH);
  }
  if (o->n_sequences > MAX_SEQUENCES) {
    return clb_fail(e->error, COLIBRI_ERROR_ARGUMENT, "%llu sequences: expected up to %d",
                    (unsigned long long)o->n_sequences, MAX_SEQUENCES);
  }
  if (o->n_threads > CLB_POOL_MAX_THREADS || o->io_threads > CLB_STORE_MAX_IO_THREADS) {
    return clb_fail(e->error, COLIBRI_ERROR_ARGUMENT, "threads: expected up to %d for computing and %d for reading",
                    CLB_POOL_MAX_THREADS, CLB_STORE_MAX_IO_THREADS);
  }
  return COLIBRI_OK;
}

static colibri_status check_kinds(const clb_engine *e, const colibri_options *o) {
  if (o->check != COLIBRI_CHECK_FIRST && o->check != COLIBRI_CHECK_ALWAYS && o->check != COLIBRI_CHECK_NEVER) {
    return clb_fail(e->error, COLIBRI_ERROR_ARGUMENT, "check: expected a colibri_check, found %d", (int)o->check);
  }
  if ((unsigned)o->io > COLIBRI_IO_BUFFERED) {
    return clb_fail(e->error, COLIBRI_ERROR_ARGUMENT, "io: expected a colibri_io, found %d", (int)o->io);
  }
  if (o->prefetch_depth > MAX_PREFETCH_DEPTH) {
    return clb_fail(e->error, COLIBRI_ERROR_ARGUMENT, "prefetch depth: expected up to %d, found %u", MAX_PREFETCH_DEPTH,
                    o->prefetch_depth);
  }
  if (o->precision != COLIBRI_EXACT && o->precision != COLIBRI_FAST) {
    return clb_fail(e->error, COLIBRI_ERROR_ARGUMENT, "precision: expected a colibri_precision, found %d",
                    (int)o->precision);
  }
  return COLIBRI_OK;
}

static colibri_status choose_kv_type(clb_engine *e, colibri_kv_type asked) {
  static const uint32_t types[] = {[COLIBRI_KV_F32] = CLB_F32,
                                   [COLIBRI_KV_F16] = CLB_F16,
                                   [COLIBRI_KV_Q8_0] = CLB_Q8_0,
                                   [COLIBRI_KV_Q4_0] = CLB_Q4_0};
  if (asked == COLIBRI_KV_DEFAULT) asked = e->precision == COLIBRI_FAST ? COLIBRI_KV_F16 : COLIBRI_KV_F32;
  if ((size_t)asked >= sizeof types / sizeof *types) {
    return clb_fail(e->error, COLIBRI_ERROR_ARGUMENT, "kv type: expected a colibri_kv_type, found %d", (int)asked);
  }
  const clb_type *type = clb_type_by_id(types[asked]);
  const clb_graph *g = &e->graph;
  uint64_t key_bytes = 0, value_bytes = 0;
  if (!clb_row_bytes(type, g->kv_key_dim, &key_bytes) || !clb_row_bytes(type, g->kv_value_dim, &value_bytes)) {
    return clb_fail(e->error, COLIBRI_ERROR_ARGUMENT,
                    "kv type %s: needs heads of a multiple of %u, this model's have %llu; use f32 or f16", type->name,
                    type->block_weights, (unsigned long long)g->kv_key_dim);
  }
  e->kv.type = type->id;
  e->kv.key_bytes = key_bytes;
  e->kv.value_bytes = g->kv_values_in_keys ? 0 : value_bytes;
  return COLIBRI_OK;
}

static colibri_status check_options(clb_engine *e, const colibri_options *o) {
  CLB_TRY(check_counts(e, o));
  CLB_TRY(check_kinds(e, o));
  e->n_sequences = o->n_sequences ? o->n_sequences : 1;
  e->ctx = o->ctx ? o->ctx : smaller(e->graph.context_length, DEFAULT_CTX);
  e->batch_size = smaller(o->batch_size ? o->batch_size : COLIBRI_DEFAULT_BATCH_SIZE, e->ctx * e->n_sequences);
  e->n_threads = o->n_threads ? o->n_threads : smaller(clb_available_cpus(), CLB_POOL_MAX_THREADS);
  e->io_threads = o->io_threads;
  e->check = o->check;
  e->io = o->io;
  e->prefetch_depth = o->prefetch_depth;
  e->preload_bytes = o->preload_bytes;
  e->precision = o->precision;
  e->pin_threads = o->pin_threads;
  if (e->pin_threads && e->n_threads > clb_available_cpus()) {
    return clb_fail(e->error, COLIBRI_ERROR_ARGUMENT, "pinning of %zu threads: this process may use %zu CPUs",
                    e->n_threads, clb_available_cpus());
  }
  const uint64_t n_chunks = e->ctx / CLB_ATTENTION_CHUNK + 1;
  const uint64_t n_groups = clb_attention_groups(&e->graph);
  if (n_chunks * n_groups > CLB_POOL_MAX_TASKS || e->batch_size * n_groups > CLB_POOL_MAX_TASKS) {
    return clb_fail(e->error, COLIBRI_ERROR_ARGUMENT, "context of %llu, batch of %llu: too large for %llu key heads",
                    (unsigned long long)e->ctx, (unsigned long long)e->batch_size, (unsigned long long)n_groups);
  }
  return choose_kv_type(e, o->kv_type);
}

// ---------------------------------------------------------------------------------------------------------------------
// Sizes

static bool is_vector(const clb_tensor *t) {
  return t->n_dims == 1 || t->role == CLB_ROLE_SHARED_ROUTER;
}

// Whether the tensor's bytes are held in memory: all that the graph uses, but an embedding that is no head as well.
static bool is_resident(const clb_engine *e, const clb_tensor *t) {
  if (t->group == CLB_GROUP_OPTIONAL || t->role == CLB_ROLE_ROPE_FACTORS) return false;
  return !(e->embedding_on_demand && t->role == CLB_ROLE_TOKEN_EMBD);
}

typedef struct {
  uint64_t offset, end;  // in the file, multiples of CLB_IO_UNIT
  uint64_t arena_offset;
} file_range;

static int by_offset(const void *left, const void *right) {
  const file_range *a = left, *b = right;
  return a->offset < b->offset ? -1 : a->offset > b->offset;
}

// The stretches of the file that hold resident tensors, merged. `ranges` has room for all tensors.
static size_t resident_ranges(const clb_engine *e, file_range *ranges, uint64_t *n_bytes) {
  size_t n = 0;
  for (size_t i = 0; i < clb_container_n_tensors(e->container); i++) {
    const clb_tensor *t = clb_container_tensor(e->container, i);
    if (!is_resident(e, t)) continue;
    const uint64_t offset = t->offset / CLB_IO_UNIT * CLB_IO_UNIT;
    ranges[n++] = (file_range){.offset = offset, .end = align_up(t->offset + t->bytes, CLB_IO_UNIT)};
  }
  qsort(ranges, n, sizeof *ranges, by_offset);
  size_t merged = 0;
  for (size_t i = 0; i < n; i++) {
    if (merged > 0 && ranges[i].offset <= ranges[merged - 1].end) {
      ranges[merged - 1].end = larger(ranges[merged - 1].end, ranges[i].end);
    } else {
      ranges[merged++] = ranges[i];
    }
  }
  *n_bytes = 0;
  for (size_t i = 0; i < merged; i++) {
    ranges[i].arena_offset = *n_bytes;
    *n_bytes += ranges[i].end - ranges[i].offset;
  }
  return merged;
}

// Norms, biases and the shared router are held as f32.
static uint64_t vector_floats(const clb_engine *e) {
  uint64_t n = 0;
  for (size_t i = 0; i < clb_container_n_tensors(e->container); i++) {
    const clb_tensor *t = clb_container_tensor(e->container, i);
    if (is_resident(e, t) && is_vector(t)) n += align_up(t->shape[t->n_dims - 1], VECTOR_ALIGNMENT);
  }
  return n;
}

static void *take(uint8_t *base, uint64_t *used, uint64_t n_bytes) {
  uint8_t *place = base ? base + *used : NULL;
  *used += align_up(n_bytes, SCRATCH_ALIGNMENT);
  return place;
}

static float *take_floats(uint8_t *base, uint64_t *used, uint64_t n) {
  return take(base, used, n * sizeof(float));
}
static uint32_t *take_ids(uint8_t *base, uint64_t *used, uint64_t n) {
  return take(base, used, n * sizeof(uint32_t));
}

static clb_rows take_rows(uint8_t *base, uint64_t *used, uint64_t n, uint64_t n_cols, clb_kinds kinds) {
  clb_rows rows = {.ld = n_cols};
  rows.x = take_floats(base, used, n * n_cols);
  for (clb_fast_x_kind kind = CLB_FAST_X_NONE + 1; kind < CLB_FAST_X_KINDS; kind++) {
    if (!(kinds >> kind & 1)) continue;
    rows.code_bytes[kind] = clb_fast_x_bytes(kind, n_cols);
    rows.codes[kind] = take(base, used, n * rows.code_bytes[kind]);
  }
  return rows;
}

// For a thread: scores, queries and decoded values of a tile, and two sums of its heads. For a single token: the sums
// of all heads over every chunk, in the place of the former.
static void place_attention(clb_engine *e, uint8_t *base, uint64_t *used) {
  const clb_graph *g = &e->graph;
  clb_scratch *s = &e->scratch;
  const uint64_t d = g->kv_value_dim, heads = CLB_ATTENTION_TILE * (g->n_heads / clb_attention_groups(g));
  const bool direct = e->kv.type == CLB_F32 && !g->kv_values_in_keys;
  const uint64_t n_chunks = e->ctx / CLB_ATTENTION_CHUNK + 1;
  s->scores = take_floats(base, used, e->n_threads * heads * CLB_ATTENTION_CHUNK);
  s->queries = take_floats(base, used, e->n_threads * heads * g->kv_key_dim);
  s->partial = take_floats(base, used, larger(n_chunks * g->n_heads, 2 * e->n_threads * heads) * (d + 2));
  s->values = take_floats(base, used, direct ? 0 : e->n_threads * CLB_ATTENTION_CHUNK * d);
}

static void place_latent(clb_engine *e, const clb_layer_kinds *kinds, uint8_t *base, uint64_t *used) {
  const clb_graph *g = &e->graph;
  clb_scratch *s = &e->scratch;
  const uint64_t b = e->batch_size;
  s->q_latent = take_rows(base, used, b, g->q_lora, kinds->q_latent);
  s->kv_latent = take_floats(base, used, b * g->kv_key_dim);
  s->absorbed = take_floats(base, used, b * g->n_heads * g->kv_key_dim);
  s->mixed = take_floats(base, used, b * g->n_heads * g->kv_lora);
  s->latent_row = take_floats(base, used, e->n_threads * g->kv_lora);
}

static void place_feed_forward(clb_engine *e, const clb_layer_kinds *kinds, uint8_t *base, uint64_t *used) {
  const clb_graph *g = &e->graph;
  clb_scratch *s = &e->scratch;
  const uint64_t b = e->batch_size, h = g->hidden, group = larger(b, g->top_k);
  const uint64_t wide = larger(g->shared_width, g->dense_width);
  s->router = take_floats(base, used, b * g->max_experts);
  s->selection = take_floats(base, used, g->max_experts);
  s->weights = take_floats(base, used, b * g->top_k);
  s->gathered = take_rows(base, used, group, h, kinds->experts);
  s->hidden = take_rows(base, used, group, g->max_width, kinds->hidden);
  s->up = take_floats(base, used, group * g->max_width);
  s->bias = take_floats(base, used, g->expert_bias ? CLB_MAX_GROUP * (2 * g->max_width + h) : 0);
  s->wide = take_rows(base, used, b, wide, kinds->wide);
  s->wide_up = take_floats(base, used, b * wide);
  s->pairs = take_floats(base, used, b * g->top_k * h);
  s->chosen = take_ids(base, used, b * g->top_k);
  s->pair_of = take_ids(base, used, b * g->top_k);
  s->token_of = take_ids(base, used, b * g->top_k);
  s->start = take_ids(base, used, g->max_experts + 1);
  s->requested = take_ids(base, used, g->max_experts);
}

// Places scratch at base, or only measures it when base is NULL. Returns its bytes.
static uint64_t place_scratch(clb_engine *e, uint8_t *base) {
  const clb_graph *g = &e->graph;
  clb_scratch *s = &e->scratch;
  const uint64_t b = e->batch_size, h = g->hidden, d = g->head_dim;
  const bool mla = g->attention == CLB_ATTENTION_MLA;
  const clb_layer_kinds kinds = clb_kinds_of_all(e);
  uint64_t used = 0;
  s->x = take_floats(base, &used, b * h);
  s->normed = take_rows(base, &used, b, h, kinds.attention | kinds.feed_forward);
  s->q = take_floats(base, &used, b * g->n_heads * d);
  s->k = take_floats(base, &used, mla ? 0 : b * g->n_kv_heads * d);
  s->v = take_floats(base, &used, mla ? 0 : b * g->n_kv_heads * g->value_dim);
  s->attended = take_rows(base, &used, b, g->n_heads * g->value_dim, kinds.attended);
  s->attn_gate = take_floats(base, &used, g->attention_gate ? b * g->n_heads * g->value_dim : 0);
  if (mla) place_latent(e, &kinds, base, &used);
  s->projected = take_floats(base, &used, b * h);
  s->cos = take_floats(base, &used, g->n_ropes * b * (g->rope_dim / 2));
  s->sin = take_floats(base, &used, g->n_ropes * b * (g->rope_dim / 2));
  s->logits = take_floats(base, &used, g->vocab);
  s->sequence = take_ids(base, &used, b);
  s->position = take_ids(base, &used, b);
  s->row = take(base, &used, e->token_embd.row_bytes);
  place_attention(e, base, &used);
  place_feed_forward(e, &kinds, base, &used);
  return used;
}

// Stacked matrices of the heads are one matrix.
static clb_matrix matrix_of(const clb_tensor *t) {
  size_t rows = 1;
  for (size_t i = 0; i + 1 < t->n_dims; i++) rows *= t->shape[i];
  const size_t cols = t->shape[t->n_dims - 1];
  return (clb_matrix){.type = t->type, .rows = rows, .cols = cols, .row_bytes = t->bytes / rows, .data = NULL};
}

// What is not in an arena: estimates on the high side, but for the logits.
static uint64_t other_bytes(const clb_engine *e, uint64_t n_blocks, uint64_t logits_rows) {
  enum { PROGRAM = 6 << 20, PER_THREAD = 64 << 10, PER_BLOCK = 192, PER_TENSOR = 256, PER_POSITION = 8 };
  return PROGRAM + PER_THREAD * (e->n_threads + CLB_STORE_MAX_IO_THREADS) + PER_BLOCK * n_blocks +
         PER_TENSOR * clb_container_n_tensors(e->container) + PER_POSITION * e->ctx +
         larger(logits_rows, 1) * e->graph.vocab * sizeof(float);
}

// Address space of the stacks of computing and reading threads, which hardly take memory.
static uint64_t stack_bytes(const clb_engine *e) {
  pthread_attr_t attributes;
  size_t n_bytes = 0;
  if (pthread_attr_init(&attributes) != 0) return 0;
  (void)pthread_attr_getstacksize(&attributes, &n_bytes);
  pthread_attr_destroy(&attributes);
  const uint64_t n_reading = e->io_threads ? e->io_threads : CLB_STORE_DEFAULT_IO_THREADS;
  return (e->n_threads + n_reading) * (uint64_t)n_bytes;
}

static bool is_available_known(const colibri_memory *m) {
  return m->available_limit[0] != '\0';
}

static void find_available(const clb_engine *e, colibri_memory *m) {
  const clb_available available = clb_available_memory("", stack_bytes(e));
  m->available_limit = available.limit;
  m->available_bytes = is_available_known(m) ? available.bytes : 0;
}

static colibri_status refuse_budget(const clb_engine *e, const colibri_options *o, const colibri_memory *m) {
  const unsigned long long minimum = m->min_total_bytes;
  if (o->ram_budget_bytes == 0) {
    return clb_fail(e->error, COLIBRI_ERROR_MEMORY,
                    "%llu bytes of memory are needed at least, %llu are available (%s); a smaller context or batch "
                    "size needs less, and a budget of %llu is tried all the same",
                    minimum, (unsigned long long)m->available_bytes, m->available_limit, minimum);
  }
  return clb_fail(e->error, COLIBRI_ERROR_MEMORY,
                  "memory budget of %llu bytes: at least %llu are needed (resident tensors %llu, KV %llu, scratch "
                  "%llu, experts %llu, metadata and other %llu); a smaller context or batch size needs less",
                  (unsigned long long)o->ram_budget_bytes, minimum, (unsigned long long)m->resident_bytes,
                  (unsigned long long)m->kv_bytes, (unsigned long long)m->scratch_bytes,
                  (unsigned long long)m->cache_bytes, (unsigned long long)(m->metadata_bytes + m->other_bytes));
}

// Shares the budget out; all but the cache is known.
static colibri_status plan_cache(clb_engine *e, const colibri_options *o, const clb_store_sizes *sizes,
                                 colibri_memory *m) {
  m->min_cache_bytes = sizes->minimum_bytes;
  m->token_bytes = sizes->token_bytes;
  m->all_experts_bytes = sizes->all_bytes;
  if (o->expert_cache_bytes > 0 && o->expert_cache_bytes < sizes->minimum_bytes) {
    return clb_fail(e->error, COLIBRI_ERROR_MEMORY,
                    "expert cache of %llu bytes: this model needs at least %llu (two blocks)",
                    (unsigned long long)o->expert_cache_bytes, (unsigned long long)sizes->minimum_bytes);
  }
  find_available(e, m);
  const clb_budget_request request = {
      .fixed = m->metadata_bytes + m->resident_bytes + m->kv_bytes + m->scratch_bytes + m->other_bytes,
      .min_cache = sizes->minimum_bytes,
      .all_experts = sizes->all_bytes,
      .budget = o->ram_budget_bytes,
      .cache = o->expert_cache_bytes,
      .available = is_available_known(m) ? m->available_bytes : CLB_UNKNOWN_BYTES};
  const clb_budget budget = clb_split_budget(&request);
  m->cache_bytes = e->cache_bytes = budget.cache;
  e->cache_blocks =
      e->cache_bytes == sizes->all_bytes ? sizes->n_blocks : 2 * e->cache_bytes / (sizes->minimum_bytes + 1);
  m->total_bytes = request.fixed + budget.cache;
  m->min_total_bytes = budget.minimum;
  m->budget_bytes = budget.budget;
  m->reserve_bytes = budget.reserve;
  return budget.fits ? COLIBRI_OK : refuse_budget(e, o, m);
}

static colibri_status plan_memory(clb_engine *e, const colibri_options *options, colibri_memory *m) {
  const clb_graph *g = &e->graph;
  *m = (colibri_memory){.ctx = e->ctx,
                        .context_length = g->context_length,
                        .vocab_size = g->vocab,
                        .n_tokens = g->n_tokens,
                        .metadata_bytes = clb_container_data_offset(e->container)};
  if (e->mirror) m->metadata_bytes += clb_container_data_offset(e->mirror);
  file_range *ranges = calloc(clb_container_n_tensors(e->container), sizeof *ranges);
  if (!ranges) return clb_fail(e->error, COLIBRI_ERROR_MEMORY, "no memory for the tensor table");
  resident_ranges(e, ranges, &e->resident.n_bytes);
  free(ranges);
  e->vectors.n_bytes = align_up(vector_floats(e) * sizeof(float), CLB_IO_UNIT);
  e->kv_memory.n_bytes = align_up(clb_kv_rows(e) * (e->kv.key_bytes + e->kv.value_bytes), CLB_IO_UNIT);
  e->scratch_memory.n_bytes = align_up(place_scratch(e, NULL), CLB_IO_UNIT);
  m->resident_bytes = e->resident.n_bytes + e->vectors.n_bytes;
  m->kv_bytes = e->kv_memory.n_bytes;
  m->scratch_bytes = e->scratch_memory.n_bytes;
  clb_store_sizes sizes;
  clb_store_measure(e->container, &sizes);
  m->other_bytes = other_bytes(e, sizes.n_blocks, options->logits_rows);
  return plan_cache(e, options, &sizes, m);
}

colibri_status clb_engine_plan(clb_engine *e, const char *path, const colibri_options *options,
                               colibri_memory *memory) {
  e->file.fd = -1;
  colibri_options defaults;
  colibri_options_init(&defaults);
  if (!options) options = &defaults;
  if (options->struct_bytes != sizeof *options) {
    return clb_fail(e->error, COLIBRI_ERROR_ARGUMENT, "options: call colibri_options_init first");
  }
  char text[COLIBRI_ERROR_BYTES] = "";
  e->container = clb_container_open(path, text, sizeof text);
  if (!e->container) return clb_fail(e->error, COLIBRI_ERROR_FORMAT, "%s", text);
  if (options->mirror && !(e->mirror = clb_container_open(options->mirror, text, sizeof text))) {
    return clb_fail(e->error, COLIBRI_ERROR_FORMAT, "mirror %s", text);
  }
  CLB_TRY(clb_graph_load(e->container, &e->graph, e->error));
  CLB_TRY(check_options(e, options));
  clb_graph_use_context(&e->graph, e->ctx);
  e->token_embd = matrix_of(e->graph.token_embd);
  e->output = matrix_of(e->graph.output);
  e->embedding_offset = e->graph.token_embd->offset;
  e->embedding_on_demand = e->graph.output->offset != e->embedding_offset;
  CLB_TRY(clb_kinds_plan(e));
  return plan_memory(e, options, memory);
}

// ---------------------------------------------------------------------------------------------------------------------
// Reading

typedef struct {
  clb_engine *engine;
  const file_range *ranges;
  size_t n_ranges;
  _Atomic int read_error;          // errno of a failed read
  _Atomic uint64_t failed_offset;  // of that read
  _Atomic size_t failed_tensor;    // index + 1 of a tensor whose checksum is wrong
  _Atomic uint32_t found_crc;      // of that tensor
} load_job;

static size_t range_tasks(const file_range *r) {
  return (size_t)((r->end - r->offset + READ_BYTES - 1) / READ_BYTES);
}

static void read_task(void *context, size_t task, size_t worker) {
  (void)worker;
  load_job *job = context;
  const file_range *r = job->ranges;
  while (task >= range_tasks(r)) task -= range_tasks(r++);
  const uint64_t done = (uint64_t)task * READ_BYTES, left = r->end - r->offset - done;
  uint8_t *to = (uint8_t *)job->engine->resident.pages + r->arena_offset + done;
  const int failure = clb_file_read(&job->engine->file, r->offset + done, to, (size_t)smaller(left, READ_BYTES));
  if (failure == 0) return;
  atomic_store(&job->failed_offset, r->offset + done);
  atomic_store(&job->read_error, failure);
}

static uint8_t *locate(const load_job *job, uint64_t offset) {
  const file_range *r = job->ranges;
  while (offset >= r->end) r++;
  return (uint8_t *)job->engine->resident.pages + r->arena_offset + (offset - r->offset);
}

static void check_task(void *context, size_t task, size_t worker) {
  (void)worker;
  load_job *job = context;
  const clb_tensor *t = clb_container_tensor(job->engine->container, task);
  if (!is_resident(job->engine, t)) return;
  if (t->alias && is_resident(job->engine, clb_container_tensor(job->engine->container, t->alias_of))) return;
  const uint32_t found = clb_crc32c(0, locate(job, t->offset), t->bytes);
  if (found == t->crc32c) return;
  size_t none = 0;  // the first to fail is the one that is named
  if (atomic_compare_exchange_strong(&job->failed_tensor, &none, task + 1)) atomic_store(&job->found_crc, found);
}

static colibri_status damaged(const clb_engine *e, const clb_tensor *t, uint32_t found) {
  return clb_fail(e->error, COLIBRI_ERROR_IO,
                  "tensor %.*s: the %llu bytes at offset %llu have CRC-32C %08x, expected %08x: the container is "
                  "damaged; 'colibri verify %s' tells where",
                  (int)t->name_bytes, t->name, (unsigned long long)t->bytes, (unsigned long long)t->offset, found,
                  t->crc32c, clb_container_path(e->container));
}

static colibri_status failed_read(const clb_engine *e, const char *what, int number, uint64_t offset, size_t n_bytes) {
  char text[256];
  clb_file_describe(number, offset, n_bytes, text, sizeof text);
  return clb_fail(e->error, COLIBRI_ERROR_IO, "%s: %s", what, text);
}

// An embedding whose rows are read on demand, piece by piece through memory that is not in use yet.
static colibri_status check_embedding(const clb_engine *e) {
  const clb_tensor *t = e->graph.token_embd;
  const uint64_t piece = smaller(READ_BYTES, e->resident.n_bytes), end = t->offset + t->bytes;
  uint8_t *buffer = e->resident.pages;
  uint32_t crc = 0;
  for (uint64_t at = t->offset; at < end;) {
    const uint64_t start = at / CLB_IO_UNIT * CLB_IO_UNIT, n = smaller(align_up(end, CLB_IO_UNIT) - start, piece);
    const int failure = clb_file_read(&e->file, start, buffer, (size_t)n);
    if (failure != 0) return failed_read(e, "token_embd", failure, start, (size_t)n);
    const uint64_t stop = smaller(end, start + n);
    crc = clb_crc32c(crc, buffer + (at - start), (size_t)(stop - at));
    at = stop;
  }
  return crc == t->crc32c ? COLIBRI_OK : damaged(e, t, crc);
}

static colibri_status read_resident(clb_engine *e, load_job *job) {
  size_t n_tasks = 0;
  for (size_t i = 0; i < job->n_ranges; i++) n_tasks += range_tasks(&job->ranges[i]);
  clb_pool_run(e->pool, read_task, job, n_tasks);
  const int number = atomic_load(&job->read_error);
  if (number != 0) return failed_read(e, "resident tensors", number, job->failed_offset, READ_BYTES);
  if (e->check == COLIBRI_CHECK_NEVER) return COLIBRI_OK;
  clb_pool_run(e->pool, check_task, job, clb_container_n_tensors(e->container));
  const size_t failed = atomic_load(&job->failed_tensor);
  if (failed == 0) return COLIBRI_OK;
  return damaged(e, clb_container_tensor(e->container, failed - 1), job->found_crc);
}

// ---------------------------------------------------------------------------------------------------------------------
// Binding tensors to memory

typedef struct {
  clb_engine *engine;
  const load_job *job;
  uint64_t used;  // floats of the vector arena
} binder;

static clb_matrix bind_matrix(const binder *b, const clb_tensor *t) {
  if (!t) return (clb_matrix){0};
  clb_matrix m = matrix_of(t);
  m.data = locate(b->job, t->offset);
  return m;
}

static const float *bind_vector(binder *b, const clb_tensor *t) {
  if (!t) return NULL;
  const size_t n = t->shape[t->n_dims - 1];
  float *to = (float *)b->engine->vectors.pages + b->used;
  clb_dequantize_with(b->engine->kernels, t->type, locate(b->job, t->offset), to, n);
  b->used += align_up(n, VECTOR_ALIGNMENT);
  return to;
}

static void bind_layer(binder *b, const clb_graph_layer *from, clb_layer *to) {
  to->q = bind_matrix(b, from->q);
  to->k = bind_matrix(b, from->k);
  to->v = bind_matrix(b, from->v);
  to->o = bind_matrix(b, from->o);
  to->attn_gate = bind_matrix(b, from->attn_gate);
  to->q_a = bind_matrix(b, from->q_a);
  to->kv_a = bind_matrix(b, from->kv_a);
  to->kv_b = bind_matrix(b, from->kv_b);
  to->k_b = bind_matrix(b, from->k_b);
  to->v_b = bind_matrix(b, from->v_b);
  to->router = bind_matrix(b, from->router);
  to->gate = bind_matrix(b, from->gate);
  to->up = bind_matrix(b, from->up);
  to->down = bind_matrix(b, from->down);
  to->attn_norm = bind_vector(b, from->attn_norm);
  to->ffn_norm = bind_vector(b, from->ffn_norm);
  to->q_norm = bind_vector(b, from->q_norm);
  to->k_norm = bind_vector(b, from->k_norm);
  to->q_bias = bind_vector(b, from->q_bias);
  to->k_bias = bind_vector(b, from->k_bias);
  to->v_bias = bind_vector(b, from->v_bias);
  to->o_bias = bind_vector(b, from->o_bias);
  to->shared_router = bind_vector(b, from->shared_router);
  to->attn_norm_bias = bind_vector(b, from->attn_norm_bias);
  to->ffn_norm_bias = bind_vector(b, from->ffn_norm_bias);
  to->sinks = bind_vector(b, from->sinks);
  to->router_bias = bind_vector(b, from->router_bias);
  to->attn_post_norm = bind_vector(b, from->attn_post_norm);
  to->ffn_post_norm = bind_vector(b, from->ffn_post_norm);
  to->select_bias = bind_vector(b, from->select_bias);
  to->q_a_norm = bind_vector(b, from->q_a_norm);
  to->q_a_bias = bind_vector(b, from->q_a_bias);
  to->kv_a_norm = bind_vector(b, from->kv_a_norm);
  to->kv_a_bias = bind_vector(b, from->kv_a_bias);
}

static colibri_status load_resident(clb_engine *e) {
  file_range *ranges = calloc(clb_container_n_tensors(e->container), sizeof *ranges);
  if (!ranges) return clb_fail(e->error, COLIBRI_ERROR_MEMORY, "no memory for the tensor table");
  load_job job = {.engine = e, .ranges = ranges};
  uint64_t n_bytes;
  job.n_ranges = resident_ranges(e, ranges, &n_bytes);
  colibri_status status = COLIBRI_OK;
  if (e->embedding_on_demand && e->check != COLIBRI_CHECK_NEVER) status = check_embedding(e);
  if (status == COLIBRI_OK) status = read_resident(e, &job);
  if (status == COLIBRI_OK) {
    binder b = {.engine = e, .job = &job};
    for (size_t i = 0; i < e->graph.n_layers; i++) bind_layer(&b, &e->graph.layers[i], &e->layers[i]);
    e->output = bind_matrix(&b, e->graph.output);
    e->output_norm = bind_vector(&b, e->graph.output_norm);
    e->output_norm_bias = bind_vector(&b, e->graph.output_norm_bias);
    e->output_bias = bind_vector(&b, e->graph.output_bias_of);
    if (!e->embedding_on_demand) e->token_embd = bind_matrix(&b, e->graph.token_embd);
  }
  free(ranges);
  return status;
}

// ---------------------------------------------------------------------------------------------------------------------
// Open and close

static colibri_status allocate(clb_engine *e, clb_arena *arena, const char *what) {
  arena->pages = clb_pages_alloc(arena->n_bytes);
  if (arena->pages) return COLIBRI_OK;
  return clb_fail(e->error, COLIBRI_ERROR_MEMORY, "%s: no memory for %llu bytes", what,
                  (unsigned long long)arena->n_bytes);
}

static colibri_status allocate_all(clb_engine *e) {
  CLB_TRY(allocate(e, &e->resident, "resident tensors"));
  CLB_TRY(allocate(e, &e->vectors, "norms and biases"));
  CLB_TRY(allocate(e, &e->kv_memory, "keys and values; a smaller context needs less"));
  CLB_TRY(allocate(e, &e->scratch_memory, "scratch; a smaller batch size needs less"));
  // Only a hint: weights are read from one end to the other.
  (void)madvise(e->resident.pages, e->resident.n_bytes, MADV_HUGEPAGE);
  place_scratch(e, e->scratch_memory.pages);
  e->kv.keys = e->kv_memory.pages;
  e->kv.values = e->kv.keys + clb_kv_rows(e) * e->kv.key_bytes;
  e->layers = calloc(e->graph.n_layers, sizeof *e->layers);
  e->layer_metrics = calloc(e->graph.n_layers, sizeof *e->layer_metrics);
  if (!e->layers || !e->layer_metrics) {
    return clb_fail(e->error, COLIBRI_ERROR_MEMORY, "no memory for the layer table");
  }
  return COLIBRI_OK;
}

static clb_check store_check(colibri_check check) {
  if (check == COLIBRI_CHECK_NEVER) return CLB_CHECK_NEVER;
  return check == COLIBRI_CHECK_ALWAYS ? CLB_CHECK_ALWAYS : CLB_CHECK_FIRST;
}

static clb_io store_io(colibri_io io) {
  static const clb_io ios[] = {CLB_IO_AUTO, CLB_IO_PREAD, CLB_IO_URING, CLB_IO_MMAP, CLB_IO_BUFFERED};
  return ios[io];
}

static colibri_status preload(clb_engine *e) {
  if (e->preload_bytes == 0) return COLIBRI_OK;
  const double before = clb_seconds();
  if (!clb_store_preload(e->store, e->preload_bytes)) {
    return clb_fail(e->error, COLIBRI_ERROR_IO, "%s", clb_store_error(e->store));
  }
  e->preload_seconds = clb_seconds() - before;
  return COLIBRI_OK;
}

colibri_status clb_engine_open(clb_engine *e) {
  char text[COLIBRI_ERROR_BYTES] = "";
  e->kernels = clb_kernels_best();
  CLB_TRY(allocate_all(e));
  e->pool = clb_pool_open(e->n_threads, e->pin_threads);
  if (!e->pool) return clb_fail(e->error, COLIBRI_ERROR_MEMORY, "%zu compute threads cannot be started", e->n_threads);
  if (!clb_file_open(&e->file, clb_container_fd(e->container), text, sizeof text)) {
    return clb_fail(e->error, COLIBRI_ERROR_IO, "%s", text);
  }
  const clb_store_options options = {.cache_bytes = e->cache_bytes,
                                     .mirror = e->mirror,
                                     .io_threads = (uint32_t)e->io_threads,
                                     .check = store_check(e->check),
                                     .io = store_io(e->io)};
  e->store = clb_store_open(e->container, &options, text, sizeof text);
  if (!e->store) return clb_fail(e->error, COLIBRI_ERROR_IO, "%s", text);
  if (e->prefetch_depth > 0) {
    e->prefetch = clb_prefetch_open(&e->graph, e->prefetch_depth);
    if (!e->prefetch) return clb_fail(e->error, COLIBRI_ERROR_MEMORY, "no memory for prefetching");
  }
  CLB_TRY(load_resident(e));
  return preload(e);
}

void clb_engine_close(clb_engine *e) {
  clb_prefetch_close(e->prefetch);
  clb_observer_clear(e);
  clb_store_close(e->store);
  if (e->file.fd >= 0) clb_file_close(&e->file);
  clb_pool_close(e->pool);
  clb_arena *const arenas[] = {&e->resident, &e->vectors, &e->kv_memory, &e->scratch_memory};
  for (size_t i = 0; i < sizeof arenas / sizeof *arenas; i++) {
    if (arenas[i]->pages) clb_pages_free(arenas[i]->pages, arenas[i]->n_bytes);
  }
  free(e->layers);
  free(e->kinds);
  free(e->layer_metrics);
  clb_graph_free(&e->graph);
  clb_container_close(e->mirror);
  clb_container_close(e->container);
}
