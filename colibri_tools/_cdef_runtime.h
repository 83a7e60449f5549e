/* The declarations of runtime/include/colibri.h, for cffi; a test compares the two. */
#define COLIBRI_ERROR_BYTES 1024

typedef enum {
  COLIBRI_OK = 0,
  COLIBRI_ERROR_ARGUMENT = 1,
  COLIBRI_ERROR_FORMAT = 2,
  COLIBRI_ERROR_UNSUPPORTED = 3,
  COLIBRI_ERROR_MEMORY = 4,
  COLIBRI_ERROR_IO = 5,
  COLIBRI_ERROR_NUMERIC = 6,
  COLIBRI_CANCELLED = 7,
  COLIBRI_BUSY = 8,
} colibri_status;

const char *colibri_version(void);

const char *colibri_status_name(colibri_status status);

typedef enum {
  COLIBRI_CHECK_FIRST = 0,
  COLIBRI_CHECK_ALWAYS = 1,
  COLIBRI_CHECK_NEVER = 2,
} colibri_check;

typedef enum {
  COLIBRI_IO_AUTO = 0,
  COLIBRI_IO_PREAD = 1,
  COLIBRI_IO_URING = 2,
  COLIBRI_IO_MMAP = 3,
  COLIBRI_IO_BUFFERED = 4,
} colibri_io;

enum { COLIBRI_DEFAULT_BATCH_SIZE = 256 };

typedef enum {
  COLIBRI_EXACT = 0,
  COLIBRI_FAST = 1,
} colibri_precision;

typedef enum {
  COLIBRI_KV_DEFAULT = 0,
  COLIBRI_KV_F32 = 1,
  COLIBRI_KV_F16 = 2,
  COLIBRI_KV_Q8_0 = 3,
  COLIBRI_KV_Q4_0 = 4,
} colibri_kv_type;

typedef struct {
  size_t struct_bytes;
  uint32_t n_threads;
  uint32_t io_threads;
  uint64_t ctx;
  uint64_t batch_size;
  uint64_t expert_cache_bytes;
  colibri_check check;
  colibri_io io;
  uint32_t prefetch_depth;
  uint64_t preload_bytes;
  uint64_t ram_budget_bytes;
  uint64_t logits_rows;
  bool pin_threads;
  colibri_precision precision;
  colibri_kv_type kv_type;
  const char *mirror;
  uint64_t n_sequences;
} colibri_options;

void colibri_options_init(colibri_options *options);

typedef struct {
  uint64_t ctx;
  uint64_t context_length;
  uint64_t vocab_size;
  uint64_t n_tokens;
  uint64_t metadata_bytes;
  uint64_t resident_bytes;
  uint64_t kv_bytes;
  uint64_t cache_bytes;
  uint64_t min_cache_bytes;
  uint64_t token_bytes;
  uint64_t all_experts_bytes;
  uint64_t scratch_bytes;
  uint64_t other_bytes;
  uint64_t total_bytes;
  uint64_t min_total_bytes;
  uint64_t budget_bytes;
  uint64_t reserve_bytes;
  uint64_t available_bytes;
  const char *available_limit;
} colibri_memory;

colibri_status colibri_estimate(const char *path, const colibri_options *options, colibri_memory *memory,
                                            char *error, size_t error_bytes);

typedef struct {
  double bytes_per_second;
  uint64_t bytes, reads;
  double seconds;
  uint64_t block_bytes;
  uint32_t depth;
  bool direct;
} colibri_drive;

colibri_status colibri_probe_drive(const char *path, uint32_t depth, double seconds, colibri_drive *drive,
                                               char *error, size_t error_bytes);

bool colibri_wants_probe(const colibri_memory *memory);

enum { COLIBRI_MAX_ADVICE = 8 };

typedef struct {
  bool warning;
  char text[256];
} colibri_advice;

size_t colibri_advise(const colibri_memory *memory, const colibri_drive *drive, colibri_advice *advice);

typedef struct colibri_model colibri_model;

colibri_status colibri_open(const char *path, const colibri_options *options, colibri_model **model,
                                        char *error, size_t error_bytes);

void colibri_close(colibri_model *model);

const char *colibri_error(const colibri_model *model);

typedef struct {
  uint64_t n_layers, n_moe_layers, hidden_size;
  uint64_t vocab_size;
  uint64_t n_tokens;
  uint64_t top_k, max_experts;
  uint64_t context_length;
  uint64_t ctx, batch_size, n_sequences;
  uint32_t n_threads;
  int64_t bos_id;
  const uint64_t *eos_ids;
  size_t n_eos_ids;
  const char *kernels;
  const char *precision;
  const char *kv_type;
} colibri_info;

void colibri_get_info(const colibri_model *model, colibri_info *info);

void colibri_get_memory(const colibri_model *model, colibri_memory *memory);

bool colibri_is_eos(const colibri_model *model, uint64_t token);

colibri_status colibri_check_input(colibri_model *model, const uint32_t *tokens, size_t n_tokens);

colibri_status colibri_eval(colibri_model *model, const uint32_t *tokens, size_t n_tokens, float *logits,
                                        size_t n_logits);

colibri_status colibri_eval_start(colibri_model *model, const uint32_t *tokens, size_t n_tokens,
                                              float *logits, size_t n_logits);

typedef struct {
  uint32_t sequence;
  const uint32_t *tokens;
  size_t n_tokens;
  float *logits;
  size_t n_logits;
} colibri_append;

colibri_status colibri_eval_sequences(colibri_model *model, const colibri_append *appends,
                                                  size_t n_appends);

colibri_status colibri_eval_sequences_start(colibri_model *model, const colibri_append *appends,
                                                        size_t n_appends);

colibri_status colibri_wait(colibri_model *model, double seconds);

void colibri_cancel(colibri_model *model);

uint64_t colibri_position(const colibri_model *model);
uint64_t colibri_sequence_position(const colibri_model *model, uint32_t sequence);

colibri_status colibri_rewind(colibri_model *model, uint64_t position);
colibri_status colibri_rewind_sequence(colibri_model *model, uint32_t sequence, uint64_t position);

colibri_status colibri_sanity_check(colibri_model *model);

typedef struct {
  size_t n_sequences, n_positions;
  uint32_t *experts;
  float *weights;
  uint32_t *early;
  double *inputs;
  double *hidden;
  size_t width;
} colibri_observation;

colibri_status colibri_observe(colibri_model *model, const colibri_observation *observation);

colibri_status colibri_trace(colibri_model *model, uint32_t *experts, float *weights, size_t n_positions);

typedef struct {
  uint64_t tokens;
  uint64_t evals;
  double seconds;
  double attention_seconds;
  double router_seconds;
  double experts_seconds;
  double io_wait_seconds;
  double head_seconds;
  uint64_t expert_requests;
  uint64_t expert_hits;
  uint64_t reads, bytes_read;
  const char *io_backend;
  bool io_direct;
  const char *io_reason;
  uint64_t prefetch_guessed;
  uint64_t prefetch_right;
  uint64_t prefetch_chosen;
  uint64_t prefetch_reads;
  uint64_t prefetch_useful_bytes, prefetch_wasted_bytes;
  uint64_t prefetch_paused;
  uint64_t preloaded_bytes;
  uint64_t mirror_bytes;
  uint64_t mirror_failures;
  double preload_seconds;
} colibri_metrics;

void colibri_get_metrics(const colibri_model *model, colibri_metrics *metrics);

typedef struct {
  double attention_seconds, router_seconds, experts_seconds, io_wait_seconds;
  uint64_t expert_requests, expert_hits;
  uint64_t reads, bytes_read;
} colibri_layer_metrics;

colibri_status colibri_get_layer_metrics(const colibri_model *model, size_t layer,
                                                     colibri_layer_metrics *metrics);
void colibri_reset_metrics(colibri_model *model);

typedef struct {
  size_t struct_bytes;
  double temperature;
  uint32_t top_k;
  double top_p;
  double min_p;
  double repetition_penalty;
  uint64_t seed;
} colibri_sampling;

typedef struct colibri_sampler colibri_sampler;

void colibri_sampling_init(colibri_sampling *sampling);

colibri_status colibri_sampler_open(const colibri_sampling *sampling, uint64_t vocab_size,
                                                uint64_t n_tokens, colibri_sampler **sampler, char *error,
                                                size_t error_bytes);
void colibri_sampler_close(colibri_sampler *sampler);

colibri_status colibri_sampler_accept(colibri_sampler *sampler, uint32_t token);

colibri_status colibri_sampler_draw(colibri_sampler *sampler, const float *logits, uint32_t *token);
