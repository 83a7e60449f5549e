/* libcolibri: executes a `model.colibri` container, reading experts on demand.
 *
 * A model handle holds a sequence: colibri_eval appends tokens to it and gives logits. It may hold several, which are
 * then evaluated together: see colibri_eval_sequences. The library never prints,
 * exits, aborts or reads the environment, and has no global state: any number of handles work side by side in one
 * process. One handle is used by one thread at a time; only colibri_cancel and colibri_wait may come from others.
 *
 * All large memory is planned and taken by colibri_open: resident tensors, keys and values (KV), the expert cache, and
 * scratch. What it will be is known beforehand from colibri_estimate, and kept within a budget.
 *
 * Logits are bit-identical for every cache size, number of threads, way of cutting a prompt into batches and other
 * sequences beside, in one precision and KV type and on one instruction set.
 *
 *     colibri_options options;
 *     colibri_options_init(&options);
 *     char error[COLIBRI_ERROR_BYTES];
 *     colibri_model *model;
 *     if (colibri_open("model.colibri", &options, &model, error, sizeof error) != COLIBRI_OK) ...
 *     if (colibri_eval(model, tokens, n_tokens, logits, 1) != COLIBRI_OK) ... colibri_error(model)
 *     colibri_close(model);
 */
#ifndef COLIBRI_H
#define COLIBRI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define COLIBRI_API __attribute__((visibility("default")))
#else
#define COLIBRI_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Room for any error text, with its terminating NUL. Texts are one line. */
#define COLIBRI_ERROR_BYTES 1024

/* -------------------------------------------------------------------------------------------------------------------
 * Status and version */

typedef enum {
  COLIBRI_OK = 0,
  COLIBRI_ERROR_ARGUMENT = 1,    /* the call asks for something that makes no sense */
  COLIBRI_ERROR_FORMAT = 2,      /* the container breaks its format, or its tensors do not fit its spec */
  COLIBRI_ERROR_UNSUPPORTED = 3, /* a sound container that this version cannot execute */
  COLIBRI_ERROR_MEMORY = 4,      /* memory could not be had, or the budget is below the minimum */
  COLIBRI_ERROR_IO = 5,          /* a read failed, or bytes did not match their checksum */
  COLIBRI_ERROR_NUMERIC = 6,     /* a NaN or an infinity came out */
  COLIBRI_CANCELLED = 7,         /* colibri_cancel was called */
  COLIBRI_BUSY = 8,              /* colibri_wait timed out, or a started evaluation is still running */
} colibri_status;

/* "0.1.0" */
COLIBRI_API const char *colibri_version(void);

/* A word for a status: "ok", "argument", "format", ... */
COLIBRI_API const char *colibri_status_name(colibri_status status);

/* -------------------------------------------------------------------------------------------------------------------
 * Options and memory */

/* When the CRC-32C of payload is compared. Metadata is checked at every open, whatever this says.
 *
 *                       resident tensors, embedding    expert blocks
 *   COLIBRI_CHECK_FIRST  at open                        the first time this model reads each
 *   COLIBRI_CHECK_ALWAYS at open                        every time one is read into the cache
 *   COLIBRI_CHECK_NEVER  no                             no
 *
 * What is in memory is not checked again. An embedding that is no output head stays in the file: it is checked as a
 * whole at open, and its rows are read later without a check. */
typedef enum {
  COLIBRI_CHECK_FIRST = 0,
  COLIBRI_CHECK_ALWAYS = 1,
  COLIBRI_CHECK_NEVER = 2,
} colibri_check;

/* How expert blocks are read. Bytes do not depend on it; what was really used is in colibri_metrics. */
typedef enum {
  COLIBRI_IO_AUTO = 0,     /* the one that measures best: pread */
  COLIBRI_IO_PREAD = 1,    /* a pool of threads, past the page cache (O_DIRECT) where the file system can */
  COLIBRI_IO_URING = 2,    /* io_uring, likewise; pread where the system refuses it */
  COLIBRI_IO_MMAP = 3,     /* the file is mapped: the page cache holds the blocks, the expert cache only counts them */
  COLIBRI_IO_BUFFERED = 4, /* the pool, through the page cache */
} colibri_io;

enum { COLIBRI_DEFAULT_BATCH_SIZE = 256 };
/* How products with weights are computed.
 *
 *   COLIBRI_EXACT  f32 activations and sums, whatever the weights' type
 *   COLIBRI_FAST   activations are quantized to 8 bits, in blocks of 32, where the weights are quantized; the router,
 *                  norms and attention stay f32 */
typedef enum {
  COLIBRI_EXACT = 0,
  COLIBRI_FAST = 1,
} colibri_precision;

/* How keys and values are kept. Q8_0 and Q4_0 need heads of a multiple of 32. */
typedef enum {
  COLIBRI_KV_DEFAULT = 0, /* F32 in exact precision, F16 in fast */
  COLIBRI_KV_F32 = 1,
  COLIBRI_KV_F16 = 2,
  COLIBRI_KV_Q8_0 = 3,
  COLIBRI_KV_Q4_0 = 4,
} colibri_kv_type;

typedef struct {
  size_t struct_bytes;         /* set by colibri_options_init */
  uint32_t n_threads;          /* compute threads; 0: one per available CPU */
  uint32_t io_threads;         /* reading threads; 0: the store's default */
  uint64_t ctx;                /* positions the KV holds; 0: the smaller of 4096 and the model's context length */
  uint64_t batch_size;         /* tokens evaluated at once; 0: COLIBRI_DEFAULT_BATCH_SIZE */
  uint64_t expert_cache_bytes; /* 0: what the budget leaves, at most all experts */
  colibri_check check;
  colibri_io io;
  uint32_t prefetch_depth; /* 0: off; 1 or 2: how many MoE layers ahead experts are guessed and read */
  uint64_t preload_bytes;  /* of the expert cache, filled at open with the first blocks of the file; UINT64_MAX: all */
  uint64_t ram_budget_bytes; /* what colibri_memory.total_bytes may be; 0: what is available, less a reserve */
  uint64_t logits_rows;      /* rows of logits that the caller will hold at once, for the budget; 0: 1 */
  bool pin_threads;          /* compute thread i stays on the i-th CPU it may use; thread 0 is the one that evaluates */
  colibri_precision precision;
  colibri_kv_type kv_type;
  const char *mirror;   /* NULL, or a file with some of the expert blocks once more, as 'colibri export' makes it: they
                           are read from there, and where that fails from the container. The file is opened once */
  uint64_t n_sequences; /* independent sequences, each with its own KV of ctx positions; 0: 1 */
} colibri_options;

COLIBRI_API void colibri_options_init(colibri_options *options);

/* What a model takes, in bytes, and what bounds it. Without expert_cache_bytes, total_bytes is at most budget_bytes. */
typedef struct {
  uint64_t ctx;            /* positions the KV holds */
  uint64_t context_length; /* the model's own limit of them */
  uint64_t vocab_size;     /* numbers in a row of logits; every token id is below it */
  uint64_t n_tokens;       /* ids the tokenizer can make */
  uint64_t metadata_bytes; /* spec, directory, index, blobs: read whole */
  uint64_t resident_bytes; /* tensors needed at every token */
  uint64_t kv_bytes;
  uint64_t cache_bytes;       /* expert cache by these options */
  uint64_t min_cache_bytes;   /* least the expert cache can be: two blocks */
  uint64_t token_bytes;       /* experts that one token uses, summed over the layers */
  uint64_t all_experts_bytes; /* a cache of this size holds every expert */
  uint64_t scratch_bytes;
  uint64_t other_bytes;     /* program, heap, stacks, tables, and the caller's logits_rows */
  uint64_t total_bytes;     /* metadata + resident + KV + cache + scratch + other: what the process is planned to be */
  uint64_t min_total_bytes; /* the least budget that these options allow */
  uint64_t budget_bytes;    /* as asked, or what is available less the reserve */
  uint64_t reserve_bytes;   /* of what is available, left to others; 0 when the budget was asked */
  uint64_t available_bytes; /* what the system has to give now */
  const char
      *available_limit; /* what sets that: "free memory", "control group", "RLIMIT_AS", "RLIMIT_DATA"; "": unknown */
} colibri_memory;

/* Reads metadata only. Fails as colibri_open would for what is visible there. */
COLIBRI_API colibri_status colibri_estimate(const char *path, const colibri_options *options, colibri_memory *memory,
                                            char *error, size_t error_bytes);

/* What a drive gives to random reads of whole blocks, as many at once as reading threads, past the page cache. */
typedef struct {
  double bytes_per_second;
  uint64_t bytes, reads;
  double seconds;
  uint64_t block_bytes; /* of the largest block */
  uint32_t depth;       /* reads at once */
  bool direct;          /* false: the file system has no O_DIRECT, and memory may have answered */
} colibri_drive;

/* Reads blocks of the container for about `seconds` (0.3 is enough), `depth` at once; 0: as the pread backend does by
 * default. Takes one block of memory for each, until it returns. */
COLIBRI_API colibri_status colibri_probe_drive(const char *path, uint32_t depth, double seconds, colibri_drive *drive,
                                               char *error, size_t error_bytes);

/* Whether a token will miss so much of the experts that the drive's speed is worth a probe before colibri_advise. */
COLIBRI_API bool colibri_wants_probe(const colibri_memory *memory);

enum { COLIBRI_MAX_ADVICE = 8 };

typedef struct {
  bool warning; /* false: good to know */
  char text[256];
} colibri_advice;

/* What there is to say about this plan: a cache below one token's experts, a model not worth streaming, a drive too
 * slow (with `drive`, which may be NULL), more than is available, or that everything fits. Writes up to
 * COLIBRI_MAX_ADVICE, warnings first, and returns how many. */
COLIBRI_API size_t colibri_advise(const colibri_memory *memory, const colibri_drive *drive, colibri_advice *advice);

/* -------------------------------------------------------------------------------------------------------------------
 * Models */

typedef struct colibri_model colibri_model;

/* Opens a container. `options` may be NULL. On failure *model is NULL and `error` tells why. */
COLIBRI_API colibri_status colibri_open(const char *path, const colibri_options *options, colibri_model **model,
                                        char *error, size_t error_bytes);

/* Cancels and waits for what runs, then frees everything. NULL is fine. */
COLIBRI_API void colibri_close(colibri_model *model);

/* The text of the last error of this handle; "" before any. Valid until the next call with this handle. */
COLIBRI_API const char *colibri_error(const colibri_model *model);

typedef struct {
  uint64_t n_layers, n_moe_layers, hidden_size;
  uint64_t vocab_size; /* logits per position; every token id is below it */
  uint64_t n_tokens;   /* ids the tokenizer can make; ids from here on are never sampled */
  uint64_t top_k, max_experts;
  uint64_t context_length; /* the model's own limit */
  uint64_t ctx, batch_size, n_sequences;
  uint32_t n_threads;
  int64_t bos_id; /* -1: none */
  const uint64_t *eos_ids;
  size_t n_eos_ids;
  const char *kernels;   /* "scalar", "avx2", "neon" */
  const char *precision; /* "exact", "fast" */
  const char *kv_type;   /* "f32", "f16", "q8_0", "q4_0" */
} colibri_info;

/* Pointers in it live as long as the model. */
COLIBRI_API void colibri_get_info(const colibri_model *model, colibri_info *info);

/* The memory this model took, as colibri_estimate gives it. */
COLIBRI_API void colibri_get_memory(const colibri_model *model, colibri_memory *memory);

COLIBRI_API bool colibri_is_eos(const colibri_model *model, uint64_t token);

/* -------------------------------------------------------------------------------------------------------------------
 * Evaluation */

/* Whether these tokens can be appended now: ids in range, room in the context. */
COLIBRI_API colibri_status colibri_check_input(colibri_model *model, const uint32_t *tokens, size_t n_tokens);

/* Appends tokens to the sequence. Writes the logits of the last n_logits of these positions, [n_logits, vocab_size];
 * n_logits may be 0, `logits` is then not used. Logits that are not finite are COLIBRI_ERROR_NUMERIC.
 * After anything but COLIBRI_OK the sequence is as it was before the call, and `logits` is undefined. */
COLIBRI_API colibri_status colibri_eval(colibri_model *model, const uint32_t *tokens, size_t n_tokens, float *logits,
                                        size_t n_logits);

/* colibri_eval in a thread of the model. `logits` must stay; tokens are copied. Until it is over, what evaluates,
 * rewinds or observes gives COLIBRI_BUSY; error text, positions and metrics are its own meanwhile, and are read
 * afterwards. */
COLIBRI_API colibri_status colibri_eval_start(colibri_model *model, const uint32_t *tokens, size_t n_tokens,
                                              float *logits, size_t n_logits);

/* Tokens to append to one sequence, and where its logits go, as colibri_eval takes them. */
typedef struct {
  uint32_t sequence; /* below n_sequences, and named once in a call */
  const uint32_t *tokens;
  size_t n_tokens;
  float *logits;
  size_t n_logits;
} colibri_append;

/* Appends to several sequences at once: tokens of all of them are evaluated in the same batches, and every distinct
 * expert of a batch is read once. A sequence gets the bits it would get by itself. colibri_eval is this with sequence
 * 0. Logits of one append that follow those of the one before in memory save a pass over the output head. */
COLIBRI_API colibri_status colibri_eval_sequences(colibri_model *model, const colibri_append *appends,
                                                  size_t n_appends);

/* The same in a thread of the model. */
COLIBRI_API colibri_status colibri_eval_sequences_start(colibri_model *model, const colibri_append *appends,
                                                        size_t n_appends);

/* Waits for what colibri_eval_start or colibri_eval_sequences_start started: its status, or COLIBRI_BUSY after
 * `seconds` (< 0: waits for ever). */
COLIBRI_API colibri_status colibri_wait(colibri_model *model, double seconds);

/* Ends the running evaluation at its next layer: it returns COLIBRI_CANCELLED. Without one it does nothing.
 * May be called from any thread, and from a signal handler. */
COLIBRI_API void colibri_cancel(colibri_model *model);

/* Tokens in the sequence: in sequence 0, or in any; 0 for one that does not exist. */
COLIBRI_API uint64_t colibri_position(const colibri_model *model);
COLIBRI_API uint64_t colibri_sequence_position(const colibri_model *model, uint32_t sequence);

/* Forgets the tokens from `position` on. COLIBRI_ERROR_ARGUMENT beyond the end. */
COLIBRI_API colibri_status colibri_rewind(colibri_model *model, uint64_t position);
COLIBRI_API colibri_status colibri_rewind_sequence(colibri_model *model, uint32_t sequence, uint64_t position);

/* Evaluates one token by itself and looks that all logits are finite and not all equal; then rewinds. */
COLIBRI_API colibri_status colibri_sanity_check(colibri_model *model);

/* What to record while evaluating, for statistics of routing. Arrays are the caller's, and may be NULL. Of MoE layer i
 * (in order of layers), sequence s and position p, choices are at
 * [((i * n_sequences + s) * n_positions + p) * top_k + slot], the router's best first. */
typedef struct {
  size_t n_sequences, n_positions; /* what is beyond is not recorded */
  uint32_t *experts;               /* chosen, */
  float *weights;                  /* and their weights: both or neither */
  uint32_t *early; /* what the layer's router makes of the residual stream one MoE layer before, after that one's
                      attention: what prefetch guesses. UINT32_MAX in the first MoE layer */
  double *inputs;  /* [n_moe_layers, max_experts, hidden_size] and */
  double *hidden;  /* [n_moe_layers, max_experts, width], both or neither: squares of what gate and up, and what down of
                      each expert multiply are added, column by column */
  size_t width;    /* of the widest expert */
} colibri_observation;

/* Records from now on, until the next call; NULL ends it. After a failed evaluation the sums hold a part of it. */
COLIBRI_API colibri_status colibri_observe(colibri_model *model, const colibri_observation *observation);

/* From now on the router's choices at positions below n_positions are written, for MoE layer i (in order of layers)
 * and position p, at [(i * n_positions + p) * top_k + slot]. Slots are in the router's order, best first.
 * experts == NULL stops it. Of several sequences, 0 is the one that is traced. It is colibri_observe of these. */
COLIBRI_API colibri_status colibri_trace(colibri_model *model, uint32_t *experts, float *weights, size_t n_positions);

/* -------------------------------------------------------------------------------------------------------------------
 * Metrics: counters since opening or the last reset. Times are of the evaluating thread, seconds. */

typedef struct {
  uint64_t tokens;          /* evaluated */
  uint64_t evals;           /* batches they were evaluated in */
  double seconds;           /* inside evaluation; the parts below add up to about this */
  double attention_seconds; /* norms, q, k, v, rope, attention, output projection */
  double router_seconds;
  double experts_seconds;     /* computing routed, shared and dense feed-forward networks */
  double io_wait_seconds;     /* compute waited for an expert's bytes */
  double head_seconds;        /* embedding, final norm, logits */
  uint64_t expert_requests;   /* distinct experts asked of the store, summed over batches and layers */
  uint64_t expert_hits;       /* of these, found in the cache */
  uint64_t reads, bytes_read; /* of expert blocks */
  const char *io_backend;     /* "pread" */
  bool io_direct;             /* reads bypass the page cache */
  const char
      *io_reason; /* why they do not, why it is another backend than asked, or what the mirror lacked; "" otherwise */
  uint64_t prefetch_guessed; /* experts a guess named, and of these the ones that were then chosen */
  uint64_t prefetch_right;
  uint64_t prefetch_chosen; /* experts chosen where there was a guess: right / chosen is its recall */
  uint64_t prefetch_reads;  /* blocks read because of a guess, before anything asked for them */
  uint64_t prefetch_useful_bytes, prefetch_wasted_bytes; /* of these: asked for while in memory; evicted unused */
  uint64_t prefetch_paused; /* guesses that were not followed because following them lost time */
  uint64_t preloaded_bytes; /* read by preload_bytes */
  uint64_t mirror_bytes;    /* of bytes_read, from the mirror */
  uint64_t mirror_failures; /* blocks that could not be read there, and were read from the container */
  double preload_seconds;
} colibri_metrics;

COLIBRI_API void colibri_get_metrics(const colibri_model *model, colibri_metrics *metrics);

/* The part of them that belongs to one layer; embedding, final norm and logits belong to none. */
typedef struct {
  double attention_seconds, router_seconds, experts_seconds, io_wait_seconds;
  uint64_t expert_requests, expert_hits;
  uint64_t reads, bytes_read; /* started and finished while this layer was computed */
} colibri_layer_metrics;

/* COLIBRI_ERROR_ARGUMENT from n_layers on. */
COLIBRI_API colibri_status colibri_get_layer_metrics(const colibri_model *model, size_t layer,
                                                     colibri_layer_metrics *metrics);
COLIBRI_API void colibri_reset_metrics(colibri_model *model);

/* -------------------------------------------------------------------------------------------------------------------
 * Sampling. The draw depends on nothing but the logits, these numbers and the tokens accepted. */

typedef struct {
  size_t struct_bytes;       /* set by colibri_sampling_init */
  double temperature;        /* 0: greedy, the lowest id among equals */
  uint32_t top_k;            /* keep the k most likely; 0: all */
  double top_p;              /* keep the fewest whose probabilities reach this; 1: all */
  double min_p;              /* drop what is less likely than this share of the most likely; 0: none */
  double repetition_penalty; /* divides positive, multiplies negative logits of accepted tokens; 1: off */
  uint64_t seed;
} colibri_sampling;

typedef struct colibri_sampler colibri_sampler;

COLIBRI_API void colibri_sampling_init(colibri_sampling *sampling);

/* A sampler over [vocab_size] logits that never gives an id from n_tokens on. Applied in this order: repetition
 * penalty, temperature, top-k, top-p, min-p. On failure *sampler is NULL. */
COLIBRI_API colibri_status colibri_sampler_open(const colibri_sampling *sampling, uint64_t vocab_size,
                                                uint64_t n_tokens, colibri_sampler **sampler, char *error,
                                                size_t error_bytes);
COLIBRI_API void colibri_sampler_close(colibri_sampler *sampler);

/* Counts a token as part of the text, for the repetition penalty. */
COLIBRI_API colibri_status colibri_sampler_accept(colibri_sampler *sampler, uint32_t token);

/* Chooses a token; logits are not changed. COLIBRI_ERROR_NUMERIC when a logit is NaN or infinite. */
COLIBRI_API colibri_status colibri_sampler_draw(colibri_sampler *sampler, const float *logits, uint32_t *token);

#ifdef __cplusplus
}
#endif

#endif
