// colibri-run: evaluates a text, or token ids, with a container and prints what it generates.
//
// A program over colibri.h and colibri_tokenizer.h and nothing else; it needs no Python. Exit codes: 0 done, 1 the job
// failed, 2 wrong usage, 130 interrupted.
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "colibri.h"
#include "report.h"
#include "text.h"

enum { EXIT_USAGE = 2, EXIT_INTERRUPTED = 130 };

static const char kHelp[] =
    "Usage: colibri-run MODEL --prompt TEXT [OPTIONS]\n"
    "       colibri-run MODEL --tokens IDS [OPTIONS]\n"
    "\n"
    "Evaluates a prompt with the container MODEL, reading experts on demand, and prints\n"
    "the text that it generates, or the ids for a prompt of ids.\n"
    "\n"
    "  --prompt TEXT             the prompt as text, for containers with tokenizer tables\n"
    "  --tokens IDS              the prompt as ids separated by commas\n"
    "  --max-tokens N            tokens to generate; 0: evaluate the prompt only [128]\n"
    "  --ctx N                   positions to make room for [prompt + max-tokens]\n"
    "  --threads N               compute threads; 0: all CPUs [0]\n"
    "  --batch-size N            prompt tokens evaluated at once [256]\n"
    "  --pin-threads             compute thread i stays on the i-th CPU\n"
    "  --precision HOW           fast or exact [fast; exact with --logits]\n"
    "  --kv-type TYPE            of keys and values: f32, f16, q8_0, q4_0 [f16; exact: f32]\n"
    "  --ram-budget SIZE         all memory, as 512M or 4G [what is available less a reserve]\n"
    "  --expert-cache SIZE       memory for experts [what the budget leaves]\n"
    "  --preload SIZE            of the expert cache, filled at open; 'all' [0]\n"
    "  --mirror PART             read from PART what it has of the expert blocks\n"
    "  --io HOW                  auto, pread, io_uring, mmap or buffered [auto]\n"
    "  --io-threads N            reads at once; 0: the default [0]\n"
    "  --prefetch-depth N        MoE layers ahead that experts are guessed for: 0, 1, 2 [0]\n"
    "  --temperature X           0: greedy, the most likely id [0]\n"
    "  --top-k N                 draw from the N most likely; 0: all [0]\n"
    "  --top-p X                 draw from the most likely that reach X [1]\n"
    "  --min-p X                 drop ids below X of the most likely [0]\n"
    "  --repetition-penalty X    weaken ids that are in the text already [1]\n"
    "  --seed N                  of the draw [0]\n"
    "  --ignore-eos              do not stop at an end-of-text id\n"
    "  --check WHEN              compare checksums of what is read: always, first (each\n"
    "                            block's first read), never [first]\n"
    "  --logits FILE.npy         write the prompt's logits, float32 [positions, vocab]\n"
    "  --json                    print one JSON document\n"
    "  --profile                 print where time went, by phase and layer\n"
    "  -h, --help                print this\n"
    "  --version                 print the version\n"
    "\n"
    "Examples:\n"
    "  colibri-run model.colibri --prompt 'The file system is' --max-tokens 64\n"
    "  colibri-run model.colibri --tokens 1,15043,3186 --max-tokens 16 --expert-cache 2G\n";

typedef struct {
  const char *model, *tokens_text, *prompt_text, *logits_path, *mirror;
  uint64_t max_tokens, ctx, threads, batch_size, expert_cache, ram_budget, preload, io_threads, prefetch_depth;
  colibri_sampling sampling;
  int check, io, precision, kv_type;
  bool ignore_eos, json, profile, pin_threads, help, version;
  bool has_seed, has_top_k, has_top_p, has_min_p;
} settings;

typedef struct {
  uint32_t *ids;  // prompt, then generated
  size_t n_prompt, n_generated;
  double prefill_seconds, decode_seconds;
  const char *stop_reason;
  colibri_sampler *sampler;
  colibri_advice advice[COLIBRI_MAX_ADVICE];
  size_t n_advice;
  run_profile profile;
  run_text text;
} outcome;

// What a signal handler may touch.
static colibri_model *g_model;
static volatile sig_atomic_t g_interrupted;

static volatile sig_atomic_t g_opening, g_json;

static void write_all(int fd, const char *text) {
  for (size_t left = strlen(text); left > 0;) {
    const ssize_t n = write(fd, text, left);
    if (n <= 0) return;
    text += n;
    left -= (size_t)n;
  }
}

// While a model is opened there is nothing to tidy up, and no evaluation to cancel.
static void on_signal(int number) {
  (void)number;
  if (g_opening) {
    write_all(STDERR_FILENO, "error: interrupted\n");
    if (g_json) {
      write_all(STDOUT_FILENO,
                "{\n  \"ok\": false,\n  \"error\": {\"kind\": \"Interrupted\", \"message\": \"interrupted\"},\n"
                "  \"exit_code\": 130\n}\n");
    }
    _exit(EXIT_INTERRUPTED);
  }
  g_interrupted = 1;
  if (g_model) colibri_cancel(g_model);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// ---------------------------------------------------------------------------------------------------------------------
// Errors

static int fail(const settings *s, const char *kind, int exit_code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static int fail(const settings *s, const char *kind, int exit_code, const char *format, ...) {
  char text[2 * COLIBRI_ERROR_BYTES];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fprintf(stderr, "error: %s\n", text);
  if (s->json) {
    printf("{\n  \"ok\": false,\n  \"error\": {\"kind\": \"%s\", \"message\": ", kind);
    print_json_string(text);
    printf("},\n  \"exit_code\": %d\n}\n", exit_code);
  }
  return exit_code;
}

static int usage(const settings *s, const char *format, ...) __attribute__((format(printf, 2, 3)));

static int usage(const settings *s, const char *format, ...) {
  char text[COLIBRI_ERROR_BYTES];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return fail(s, "UsageError", EXIT_USAGE, "%s; see 'colibri-run -h'", text);
}

static int fail_status(const settings *s, colibri_status status, const char *text) {
  if (status == COLIBRI_ERROR_ARGUMENT) return fail(s, "UsageError", EXIT_USAGE, "%s", text);
  const char *name = status == COLIBRI_ERROR_FORMAT ? "FormatError" : "JobError";
  if (strstr(text, s->model)) return fail(s, name, EXIT_FAILURE, "%s", text);
  return fail(s, name, EXIT_FAILURE, "%s: %s", s->model, text);
}

// ---------------------------------------------------------------------------------------------------------------------
// Parsing

static bool parse_u64(const char *text, uint64_t max, uint64_t *out) {
  if (*text < '0' || *text > '9') return false;
  errno = 0;
  char *end;
  const unsigned long long value = strtoull(text, &end, 10);
  *out = value;
  return errno == 0 && *end == '\0' && value <= max;
}

// 4096, 64K, 512M, 4G, 1T: powers of 1024, with B or iB behind if you like.
static bool parse_size(const char *text, uint64_t *out) {
  static const char suffixes[] = "KMGT";
  if (*text < '0' || *text > '9') return false;
  errno = 0;
  char *end;
  const unsigned long long value = strtoull(text, &end, 10);
  if (errno != 0) return false;
  unsigned shift = 0;
  const char upper = (char)(*end >= 'a' && *end <= 'z' ? *end - 'a' + 'A' : *end);
  const char *suffix = upper ? strchr(suffixes, upper) : NULL;
  if (suffix) {
    shift = 10 * (unsigned)(suffix - suffixes + 1);
    end++;
    if (*end == 'i' || *end == 'I') end++;
  }
  if (*end == 'b' || *end == 'B') end++;
  *out = value << shift;
  return *end == '\0' && value <= UINT64_MAX >> 1 >> shift;
}

static bool parse_number(const char *text, double *out) {
  const bool starts_well = (*text >= '0' && *text <= '9') || *text == '.' || *text == '-';
  char *end;
  *out = strtod(text, &end);
  return starts_well && *end == '\0' && isfinite(*out);
}

typedef enum { FLAG, COUNT, SIZE, SIZE_OR_ALL, NUMBER, TEXT, CHOICE } option_kind;

typedef struct {
  const char *name;
  int value;
} choice;

static const choice kChecks[] = {
    {"always", COLIBRI_CHECK_ALWAYS}, {"first", COLIBRI_CHECK_FIRST}, {"never", COLIBRI_CHECK_NEVER}, {NULL, 0}};
static const choice kIo[] = {{"auto", COLIBRI_IO_AUTO},         {"pread", COLIBRI_IO_PREAD},
                             {"io_uring", COLIBRI_IO_URING},    {"mmap", COLIBRI_IO_MMAP},
                             {"buffered", COLIBRI_IO_BUFFERED}, {NULL, 0}};

static const choice kPrecisions[] = {{"exact", COLIBRI_EXACT}, {"fast", COLIBRI_FAST}, {NULL, 0}};
static const choice kKvTypes[] = {
    {"f32", COLIBRI_KV_F32}, {"f16", COLIBRI_KV_F16}, {"q8_0", COLIBRI_KV_Q8_0}, {"q4_0", COLIBRI_KV_Q4_0}, {NULL, 0}};

typedef struct {
  const char *name;
  option_kind kind;
  void *value;
  bool *given;            // or NULL
  const choice *choices;  // of a CHOICE
  uint64_t most;          // of a COUNT; 0: INT32_MAX
} option;

static bool parse_choice(const choice *choices, const char *text, int *out) {
  for (; choices->name; choices++) {
    if (strcmp(text, choices->name) != 0) continue;
    *out = choices->value;
    return true;
  }
  return false;
}

static bool parse_value(const option *o, const char *text) {
  if (o->kind == COUNT) return parse_u64(text, o->most ? o->most : INT32_MAX, o->value);
  if (o->kind == SIZE_OR_ALL && strcmp(text, "all") == 0) {
    *(uint64_t *)o->value = UINT64_MAX;
    return true;
  }
  if (o->kind == SIZE || o->kind == SIZE_OR_ALL) return parse_size(text, o->value) && *(uint64_t *)o->value > 0;
  if (o->kind == NUMBER) return parse_number(text, o->value);
  if (o->kind == CHOICE) return parse_choice(o->choices, text, o->value);
  *(const char **)o->value = text;
  return *text != '\0';
}

// What an option's value should have been, in `text`.
static void describe_expected(const option *o, char *text, size_t size) {
  if (o->kind == COUNT) {
    snprintf(text, size, "a whole number from 0 to %" PRIu64, o->most ? o->most : INT32_MAX);
  } else if (o->kind == CHOICE) {
    size_t used = 0;
    for (const choice *c = o->choices; c->name && used < size; c++) {
      const int n = snprintf(text + used, size - used, "%s%s",
                             c == o->choices ? ""
                             : c[1].name     ? ", "
                                             : " or ",
                             c->name);
      used += n > 0 ? (size_t)n : 0;
    }
  } else {
    snprintf(text, size, "%s",
             o->kind == SIZE          ? "a size above 0, as 512M or 4G"
             : o->kind == SIZE_OR_ALL ? "a size above 0, as 512M or 4G, or all"
             : o->kind == NUMBER      ? "a number"
                                      : "a value");
  }
}

// Handles argv[*i] and steps over it, and over its value.
static int parse_option(const settings *s, const option *options, size_t n_options, char **argv, int argc, int *i) {
  const char *argument = argv[*i], *equals = strchr(argument, '=');
  const size_t n_name = equals ? (size_t)(equals - argument) : strlen(argument);
  const option *o = NULL;
  for (size_t k = 0; k < n_options && !o; k++) {
    if (strlen(options[k].name) == n_name && memcmp(options[k].name, argument, n_name) == 0) o = &options[k];
  }
  if (!o) return usage(s, "no such option: %.*s", (int)n_name, argument);
  if (o->given) *o->given = true;
  (*i)++;
  if (o->kind == FLAG) {
    *(bool *)o->value = true;
    return equals ? usage(s, "%s takes no value", o->name) : 0;
  }
  if (!equals && *i >= argc) return usage(s, "%s needs a value", o->name);
  const char *text = equals ? equals + 1 : argv[(*i)++];
  if (parse_value(o, text)) return 0;
  char expected[128];
  describe_expected(o, expected, sizeof expected);
  return usage(s, "%s: expected %s, found '%s'", o->name, expected, text);
}

static int check_settings(const settings *s) {
  if (!s->model) return usage(s, "a MODEL is missing");
  if (!s->tokens_text && !s->prompt_text) return usage(s, "--prompt or --tokens is missing");
  if (s->tokens_text && s->prompt_text) return usage(s, "give one of --prompt and --tokens");
  if (s->sampling.temperature > 0) return 0;
  const char *needs = s->has_top_k   ? "--top-k"
                      : s->has_top_p ? "--top-p"
                      : s->has_min_p ? "--min-p"
                      : s->has_seed  ? "--seed"
                                     : NULL;
  return needs ? usage(s, "%s is about drawing tokens: it needs --temperature above 0", needs) : 0;
}

static int parse_settings(settings *s, int argc, char **argv) {
  *s = (settings){.max_tokens = 128};
  colibri_sampling_init(&s->sampling);
  uint64_t top_k = 0, seed = 0;
  bool has_precision = false;
  const option options[] = {
      {.name = "--prompt", .kind = TEXT, .value = &s->prompt_text},
      {.name = "--tokens", .kind = TEXT, .value = &s->tokens_text},
      {.name = "--max-tokens", .kind = COUNT, .value = &s->max_tokens},
      {.name = "--ctx", .kind = COUNT, .value = &s->ctx},
      {.name = "--threads", .kind = COUNT, .value = &s->threads},
      {.name = "--pin-threads", .kind = FLAG, .value = &s->pin_threads},
      {.name = "--batch-size", .kind = COUNT, .value = &s->batch_size},
      {.name = "--precision", .kind = CHOICE, .value = &s->precision, .given = &has_precision, .choices = kPrecisions},
      {.name = "--kv-type", .kind = CHOICE, .value = &s->kv_type, .choices = kKvTypes},
      {.name = "--ram-budget", .kind = SIZE, .value = &s->ram_budget},
      {.name = "--expert-cache", .kind = SIZE, .value = &s->expert_cache},
      {.name = "--preload", .kind = SIZE_OR_ALL, .value = &s->preload},
      {.name = "--mirror", .kind = TEXT, .value = &s->mirror},
      {.name = "--io", .kind = CHOICE, .value = &s->io, .choices = kIo},
      {.name = "--io-threads", .kind = COUNT, .value = &s->io_threads},
      {.name = "--prefetch-depth", .kind = COUNT, .value = &s->prefetch_depth, .most = 2},
      {.name = "--temperature", .kind = NUMBER, .value = &s->sampling.temperature},
      {.name = "--top-k", .kind = COUNT, .value = &top_k, .given = &s->has_top_k},
      {.name = "--top-p", .kind = NUMBER, .value = &s->sampling.top_p, .given = &s->has_top_p},
      {.name = "--min-p", .kind = NUMBER, .value = &s->sampling.min_p, .given = &s->has_min_p},
      {.name = "--repetition-penalty", .kind = NUMBER, .value = &s->sampling.repetition_penalty},
      {.name = "--seed", .kind = COUNT, .value = &seed, .given = &s->has_seed},
      {.name = "--ignore-eos", .kind = FLAG, .value = &s->ignore_eos},
      {.name = "--check", .kind = CHOICE, .value = &s->check, .choices = kChecks},
      {.name = "--logits", .kind = TEXT, .value = &s->logits_path},
      {.name = "--json", .kind = FLAG, .value = &s->json},
      {.name = "--profile", .kind = FLAG, .value = &s->profile},
      {.name = "--help", .kind = FLAG, .value = &s->help},
      {.name = "-h", .kind = FLAG, .value = &s->help},
      {.name = "--version", .kind = FLAG, .value = &s->version},
  };
  for (int i = 1; i < argc; i++) s->json = s->json || strcmp(argv[i], "--json") == 0;  // also for usage errors
  for (int i = 1; i < argc;) {
    if (argv[i][0] == '-') {
      const int failure = parse_option(s, options, sizeof options / sizeof *options, argv, argc, &i);
      if (failure) return failure;
    } else if (s->model) {
      return usage(s, "one MODEL expected, found '%s' too", argv[i]);
    } else {
      s->model = argv[i++];
    }
    if (s->help || s->version) return 0;
  }
  if (!has_precision) s->precision = s->logits_path ? COLIBRI_EXACT : COLIBRI_FAST;
  s->sampling.top_k = (uint32_t)top_k;
  s->sampling.seed = seed;
  return check_settings(s);
}

static int parse_tokens(const settings *s, outcome *o) {
  size_t n = 1;
  for (const char *c = s->tokens_text; *c; c++) n += *c == ',';
  o->ids = calloc(n + s->max_tokens, sizeof *o->ids);
  if (!o->ids) return fail(s, "JobError", EXIT_FAILURE, "no memory for %zu tokens", n + (size_t)s->max_tokens);
  const char *rest = s->tokens_text;
  for (o->n_prompt = 0; o->n_prompt < n; o->n_prompt++) {
    const size_t n_digits = strcspn(rest, ",");
    char digits[16] = "";
    uint64_t id = 0;
    if (n_digits < sizeof digits) memcpy(digits, rest, n_digits);
    if (!parse_u64(digits, UINT32_MAX, &id)) {
      return usage(s, "--tokens: expected ids separated by commas, found '%.*s'", (int)(n_digits < 32 ? n_digits : 32),
                   rest);
    }
    o->ids[o->n_prompt] = (uint32_t)id;
    rest += n_digits + (o->n_prompt + 1 < n);
  }
  return 0;
}

static int encode_prompt(const settings *s, outcome *o) {
  char error[COLIBRI_ERROR_BYTES];
  const colibri_status status =
      text_encode(&o->text, s->model, s->prompt_text, s->max_tokens, &o->ids, &o->n_prompt, error, sizeof error);
  if (status == COLIBRI_ERROR_UNSUPPORTED) return fail(s, "UsageError", EXIT_USAGE, "%s: %s", s->model, error);
  if (status != COLIBRI_OK) return fail_status(s, status, error);
  return o->n_prompt > 0 ? 0 : usage(s, "--prompt: the text has no tokens");
}

// ---------------------------------------------------------------------------------------------------------------------
// Logits as a .npy file (numpy's format, version 1.0)

typedef struct {
  FILE *file;
  char *partial;  // written first, then renamed
  int failed;     // errno of the first write that failed
} npy;

static void npy_open(npy *n, const char *path, size_t rows, uint64_t cols) {
  enum { PREFIX = 10, TOTAL = 128 };
  const size_t size = strlen(path) + sizeof ".partial";
  n->partial = malloc(size);
  if (n->partial) {
    snprintf(n->partial, size, "%s.partial", path);
    n->file = fopen(n->partial, "wbe");
  }
  if (!n->file) {
    n->failed = errno;
    return;
  }
  char header[TOTAL + 1];
  memset(header, ' ', sizeof header);
  memcpy(header, "\x93NUMPY\x01\x00", 8);
  header[8] = (char)(TOTAL - PREFIX);
  header[9] = 0;
  const int used = snprintf(header + PREFIX, TOTAL - PREFIX,
                            "{'descr': '<f4', 'fortran_order': False, 'shape': (%zu, %" PRIu64 "), }", rows, cols);
  header[PREFIX + used] = ' ';
  header[TOTAL - 1] = '\n';
  if (fwrite(header, 1, TOTAL, n->file) != TOTAL) n->failed = errno;
}

// Returns 0 or the errno of what failed.
static int npy_finish(npy *n, const char *path, bool keep) {
  if (n->file && fclose(n->file) != 0 && !n->failed) n->failed = errno;
  if (keep && !n->failed && rename(n->partial, path) != 0) n->failed = errno;
  if (n->partial && (n->failed || !keep)) unlink(n->partial);
  free(n->partial);
  return n->failed;
}

static bool is_same_file(const char *a, const char *b) {
  struct stat x, y;
  return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

// ---------------------------------------------------------------------------------------------------------------------
// Running

// The prompt, batch by batch. `last` is set to the last position's logits, a row of `logits` [batch_size or 1, vocab].
static colibri_status prefill(const settings *s, const colibri_info *info, const outcome *o, npy *file, float *logits,
                              float **last) {
  for (size_t done = 0; done < o->n_prompt;) {
    if (g_interrupted) return COLIBRI_CANCELLED;
    const size_t left = o->n_prompt - done, n = left < info->batch_size ? left : (size_t)info->batch_size;
    const size_t wanted = s->logits_path ? n : (done + n == o->n_prompt);
    const colibri_status status = colibri_eval(g_model, o->ids + done, n, logits, wanted);
    if (status != COLIBRI_OK) return status;
    const size_t floats = wanted * (size_t)info->vocab_size;
    if (file->file && fwrite(logits, sizeof *logits, floats, file->file) != floats) file->failed = errno;
    if (wanted) *last = logits + floats - info->vocab_size;
    done += n;
  }
  return COLIBRI_OK;
}

static bool show_token(const settings *s, outcome *o) {
  if (o->text.tokenizer) return text_add(&o->text, o->ids[o->n_prompt + o->n_generated - 1], !s->json);
  if (s->json) return true;
  printf("%s%" PRIu32, o->n_generated > 1 ? " " : "", o->ids[o->n_prompt + o->n_generated - 1]);
  fflush(stdout);
  return true;
}

static colibri_status decode(const settings *s, const colibri_info *info, outcome *o, float *logits) {
  o->stop_reason = "max-tokens";
  while (o->n_generated < s->max_tokens) {
    if (g_interrupted) return COLIBRI_CANCELLED;
    uint32_t token;
    colibri_status status = colibri_sampler_draw(o->sampler, logits, &token);
    if (status != COLIBRI_OK) return status;
    colibri_sampler_accept(o->sampler, token);
    o->ids[o->n_prompt + o->n_generated++] = token;
    const bool ended = !s->ignore_eos && colibri_is_eos(g_model, token);
    // The id that ends a text is no part of it.
    if (!(ended && o->text.tokenizer) && !show_token(s, o)) return COLIBRI_ERROR_MEMORY;
    if (ended) {
      o->stop_reason = "eos";
      break;
    }
    if (o->n_generated == s->max_tokens) break;
    if (colibri_position(g_model) == info->ctx) {
      o->stop_reason = "context";
      break;
    }
    const double start = now();
    status = colibri_eval(g_model, &token, 1, logits, 1);
    if (o->profile.token_seconds) o->profile.token_seconds[o->profile.n_token_seconds++] = now() - start;
    if (status != COLIBRI_OK) return status;
  }
  return COLIBRI_OK;
}

static void take_counters(const outcome *o, colibri_metrics *metrics, colibri_layer_metrics *layers) {
  colibri_get_metrics(g_model, metrics);
  for (size_t i = 0; i < o->profile.n_layers; i++) (void)colibri_get_layer_metrics(g_model, i, &layers[i]);
}

static int run_prompt(const settings *s, const colibri_info *info, outcome *o, float *logits) {
  npy file = {0};
  float *last = logits;
  if (s->logits_path) npy_open(&file, s->logits_path, o->n_prompt, info->vocab_size);
  const double start = now();
  colibri_status status = COLIBRI_OK;
  if (!file.failed) status = prefill(s, info, o, &file, logits, &last);
  o->prefill_seconds = now() - start;
  const int write_error = s->logits_path ? npy_finish(&file, s->logits_path, status == COLIBRI_OK) : 0;
  if (write_error) return fail(s, "OSError", EXIT_FAILURE, "%s: %s", s->logits_path, strerror(write_error));
  if (status == COLIBRI_OK) {
    for (size_t i = 0; i < o->n_prompt; i++) colibri_sampler_accept(o->sampler, o->ids[i]);
    take_counters(o, &o->profile.prefill, o->profile.prefill_layers);
    const double decoding = now();
    status = decode(s, info, o, last);
    o->decode_seconds = now() - decoding;
  } else {
    take_counters(o, &o->profile.prefill, o->profile.prefill_layers);
  }
  take_counters(o, &o->profile.total, o->profile.layers);
  if (o->text.tokenizer && !text_finish(&o->text, !s->json) && status == COLIBRI_OK) status = COLIBRI_ERROR_MEMORY;
  if (!s->json && o->n_generated > 0) printf("\n");
  if (status == COLIBRI_CANCELLED) {
    o->stop_reason = "interrupted";
    return EXIT_INTERRUPTED;
  }
  return status == COLIBRI_OK ? 0 : fail_status(s, status, colibri_error(g_model));
}

// ---------------------------------------------------------------------------------------------------------------------
// Reporting

// VmHWM and not getrusage, whose maximum includes what the parent had before exec. 0 when there is no /proc.
static uint64_t peak_rss_bytes(void) {
  FILE *file = fopen("/proc/self/status", "re");
  if (!file) return 0;
  char line[256];
  uint64_t kib = 0;
  while (fgets(line, sizeof line, file) && sscanf(line, "VmHWM: %" SCNu64, &kib) != 1) {
  }
  fclose(file);
  return kib * 1024;
}

static double tokens_per_second(const outcome *o) {
  const double steps = o->n_generated > 1 ? (double)(o->n_generated - 1) : 0;
  return o->decode_seconds > 0 ? steps / o->decode_seconds : 0;
}

// Reads that are buffered, or made by another backend than the one asked for.
static bool reading_warning(const colibri_metrics *m, char *text, size_t size) {
  snprintf(text, size, "%s%s", m->io_direct ? "" : "reads go through the page cache: ", m->io_reason);
  return !m->io_direct || m->io_reason[0] != 0;
}

static const char kOddPrompt[] = "the prompt is not UTF-8: U+FFFD stands for what is none";

// The texts of one kind; `last` is one more of it, or NULL.
static void print_advice_json(const outcome *o, bool warnings, const char *last) {
  bool first = !(warnings && o->text.odd_prompt);
  printf("[");
  if (!first) print_json_string(kOddPrompt);
  for (size_t i = 0; i < o->n_advice; i++) {
    if (o->advice[i].warning != warnings) continue;
    if (!first) printf(", ");
    print_json_string(o->advice[i].text);
    first = false;
  }
  if (last && !first) printf(", ");
  if (last) print_json_string(last);
  printf("]");
}

static void print_io_json(const colibri_metrics *m) {
  printf("  \"io\": {\"backend\": \"%s\", \"direct\": %s, \"bytes_read\": %" PRIu64 ", \"reads\": %" PRIu64 ", ",
         m->io_backend, m->io_direct ? "true" : "false", m->bytes_read, m->reads);
  if (m->expert_requests > 0) {
    printf("\"hit_rate\": %.6f, ", (double)m->expert_hits / (double)m->expert_requests);
  } else {
    printf("\"hit_rate\": null, ");
  }
  printf("\"wait_seconds\": %.6f},\n", m->io_wait_seconds);
}

static void print_json(const settings *s, outcome *o) {
  const colibri_metrics *m = &o->profile.total;
  printf("{\n");
  if (o->text.tokenizer) {
    printf("  \"text\": ");
    print_json_text(o->text.bytes, o->text.n_bytes);
    printf(",\n");
  }
  printf("  \"tokens\": [");
  for (size_t i = 0; i < o->n_generated; i++) printf("%s%" PRIu32, i ? ", " : "", o->ids[o->n_prompt + i]);
  printf("],\n  \"prompt_tokens\": %zu,\n  \"generated_tokens\": %zu,\n", o->n_prompt, o->n_generated);
  colibri_info info;
  colibri_get_info(g_model, &info);
  printf("  \"stop_reason\": \"%s\",\n  \"precision\": \"%s\",\n  \"kv_type\": \"%s\",\n", o->stop_reason,
         info.precision, info.kv_type);
  if (s->sampling.temperature > 0) {
    printf("  \"seed\": %" PRIu64 ",\n", s->sampling.seed);
  } else {
    printf("  \"seed\": null,\n");
  }
  printf("  \"prefill_seconds\": %.6f,\n  \"decode_seconds\": %.6f,\n", o->prefill_seconds, o->decode_seconds);
  printf("  \"tokens_per_second\": %.3f,\n  \"peak_rss_bytes\": %" PRIu64 ",\n  \"memory\": ", tokens_per_second(o),
         peak_rss_bytes());
  colibri_memory memory;
  colibri_get_memory(g_model, &memory);
  print_memory_json(&memory);
  printf(",\n");
  print_io_json(m);
  if (s->profile) {
    printf("  \"profile\": ");
    print_profile_json(&o->profile);
    printf(",\n");
  }
  char text[COLIBRI_ERROR_BYTES];
  printf("  \"notes\": ");
  print_advice_json(o, false, NULL);
  printf(",\n  \"warnings\": ");
  print_advice_json(o, true, reading_warning(m, text, sizeof text) ? text : NULL);
  printf("\n}\n");
}

static void print_report(const settings *s, outcome *o) {
  const colibri_metrics *m = &o->profile.total;
  fprintf(stderr, "prompt: %zu tokens in %.2f s\ngenerated: %zu tokens in %.2f s (%.1f tokens/s), stopped: %s\n",
          o->n_prompt, o->prefill_seconds, o->n_generated, o->decode_seconds, tokens_per_second(o), o->stop_reason);
  colibri_memory memory;
  colibri_get_memory(g_model, &memory);
  fprintf(stderr,
          "experts: cache %.1f of %.1f MiB, %.1f %% found in it;\n  %s %s, %" PRIu64
          " reads, %.1f MiB, waited %.2f s\n",
          (double)memory.cache_bytes / 0x1p20, (double)memory.all_experts_bytes / 0x1p20,
          m->expert_requests ? 100 * (double)m->expert_hits / (double)m->expert_requests : 0.0, m->io_backend,
          m->io_direct ? "direct" : "buffered", m->reads, (double)m->bytes_read / 0x1p20, m->io_wait_seconds);
  char text[COLIBRI_ERROR_BYTES];
  if (o->text.odd_prompt) fprintf(stderr, "warning: %s\n", kOddPrompt);
  if (reading_warning(m, text, sizeof text)) fprintf(stderr, "warning: %s\n", text);
  const uint64_t peak = peak_rss_bytes();
  if (peak > 0) fprintf(stderr, "memory: peak %.1f MiB\n", (double)peak / 0x1p20);
  if (s->profile) print_profile(&o->profile);
}

// ---------------------------------------------------------------------------------------------------------------------

static colibri_options engine_options(const settings *s) {
  colibri_options options;
  colibri_options_init(&options);
  options.n_threads = (uint32_t)s->threads;
  options.io_threads = (uint32_t)s->io_threads;
  options.batch_size = s->batch_size;
  options.ram_budget_bytes = s->ram_budget;
  options.expert_cache_bytes = s->expert_cache;
  options.preload_bytes = s->preload;
  options.mirror = s->mirror;
  options.prefetch_depth = (uint32_t)s->prefetch_depth;
  options.ctx = s->ctx;
  options.check = (colibri_check)s->check;
  options.io = (colibri_io)s->io;
  options.pin_threads = s->pin_threads;
  options.precision = (colibri_precision)s->precision;
  options.kv_type = (colibri_kv_type)s->kv_type;
  return options;
}

// Room for the prompt and what it may become, as far as the model goes; no budget is in the way of asking for that.
static colibri_status choose_ctx(const settings *s, const outcome *o, colibri_options *options, char *text,
                                 size_t text_bytes) {
  colibri_options ask = *options;
  colibri_memory memory;
  ask.ram_budget_bytes = UINT64_MAX;
  if (s->ctx == 0) ask.ctx = 1;
  const colibri_status status = colibri_estimate(s->model, &ask, &memory, text, text_bytes);
  if (status != COLIBRI_OK || s->ctx != 0) return status;
  const uint64_t wanted = o->n_prompt + s->max_tokens;
  options->ctx = wanted < memory.context_length ? wanted : memory.context_length;
  return COLIBRI_OK;
}

// What can be found wrong before anything is shown or read.
static int check_prompt(const settings *s, const outcome *o, const colibri_memory *m) {
  for (size_t i = 0; i < o->n_prompt; i++) {
    if (o->ids[i] < m->vocab_size) continue;
    return fail(s, "UsageError", EXIT_USAGE, "token %zu of the input is %" PRIu32 "; this model's ids end at %" PRIu64,
                i, o->ids[i], m->vocab_size - 1);
  }
  if (o->n_prompt <= m->ctx) return 0;
  return fail(s, "UsageError", EXIT_USAGE,
              "%zu tokens do not fit: the context has %" PRIu64 " positions (this model allows up to %" PRIu64 ")",
              o->n_prompt, m->ctx, m->context_length);
}

static int check_logits_path(const settings *s) {
  if (!s->logits_path) return 0;
  npy file = {0};
  npy_open(&file, s->logits_path, 0, 0);
  const int failure = npy_finish(&file, s->logits_path, false);
  return failure ? fail(s, "OSError", EXIT_FAILURE, "%s: %s", s->logits_path, strerror(failure)) : 0;
}

// Says what memory is planned, probes the drive where that is asked for or matters, and says what there is to warn of.
static colibri_status show_plan(const settings *s, const colibri_options *options, const colibri_memory *memory,
                                outcome *o, char *text, size_t text_bytes) {
  const double probe_seconds = 0.3;
  if (!s->json) print_memory(memory);
  run_profile *p = &o->profile;
  p->has_drive = s->profile || colibri_wants_probe(memory);
  if (p->has_drive) {
    const colibri_status status =
        colibri_probe_drive(s->model, options->io_threads, probe_seconds, &p->drive, text, text_bytes);
    if (status != COLIBRI_OK) return status;
  }
  o->n_advice = colibri_advise(memory, p->has_drive ? &p->drive : NULL, o->advice);
  for (size_t i = 0; i < o->n_advice && !s->json; i++) {
    fprintf(stderr, "%s: %s\n", o->advice[i].warning ? "warning" : "note", o->advice[i].text);
  }
  return COLIBRI_OK;
}

static int open_model(const settings *s, outcome *o) {
  colibri_options options = engine_options(s);
  char text[COLIBRI_ERROR_BYTES];
  colibri_status status = choose_ctx(s, o, &options, text, sizeof text);
  if (status == COLIBRI_OK && s->logits_path) {
    // As many as colibri_info.batch_size will be.
    const uint64_t batch = options.batch_size ? options.batch_size : COLIBRI_DEFAULT_BATCH_SIZE;
    options.logits_rows = batch < options.ctx ? batch : options.ctx;
  }
  colibri_memory memory;
  if (status == COLIBRI_OK) status = colibri_estimate(s->model, &options, &memory, text, sizeof text);
  if (status != COLIBRI_OK) return fail_status(s, status, text);
  int failure = check_prompt(s, o, &memory);
  if (!failure) failure = check_logits_path(s);
  if (failure) return failure;
  if (colibri_sampler_open(&s->sampling, memory.vocab_size, memory.n_tokens, &o->sampler, text, sizeof text) !=
      COLIBRI_OK) {
    return usage(s, "%s", text);
  }
  status = show_plan(s, &options, &memory, o, text, sizeof text);
  if (status == COLIBRI_OK) status = colibri_open(s->model, &options, &g_model, text, sizeof text);
  return status == COLIBRI_OK ? 0 : fail_status(s, status, text);
}

static int allocate_profile(const settings *s, const colibri_info *info, outcome *o) {
  run_profile *p = &o->profile;
  if (!s->profile) return 0;
  p->n_layers = (size_t)info->n_layers;
  p->prefill_layers = calloc(p->n_layers, sizeof *p->prefill_layers);
  p->layers = calloc(p->n_layers, sizeof *p->layers);
  p->token_seconds = calloc(s->max_tokens + 1, sizeof *p->token_seconds);
  if (p->prefill_layers && p->layers && p->token_seconds) return 0;
  return fail(s, "JobError", EXIT_FAILURE, "no memory for the times of %" PRIu64 " tokens", s->max_tokens);
}

static int run_model(const settings *s, const colibri_info *info, outcome *o) {
  int failure = allocate_profile(s, info, o);
  if (failure) return failure;
  const size_t rows = s->logits_path ? (size_t)info->batch_size : 1;
  float *logits = calloc(rows * (size_t)info->vocab_size, sizeof *logits);
  failure = logits ? run_prompt(s, info, o, logits)
                   : fail(s, "JobError", EXIT_FAILURE, "no memory for the logits of %zu positions", rows);
  free(logits);
  return failure;
}

static int run(const settings *s, outcome *o) {
  if (s->logits_path && is_same_file(s->model, s->logits_path)) {
    return usage(s, "--logits: '%s' is the model itself", s->logits_path);
  }
  g_json = s->json;
  g_opening = 1;
  int failure = open_model(s, o);
  g_opening = 0;
  if (failure) return failure;
  colibri_info info;
  colibri_get_info(g_model, &info);
  failure = run_model(s, &info, o);
  if (failure && failure != EXIT_INTERRUPTED) return failure;
  if (s->json) {
    print_json(s, o);
  } else {
    print_report(s, o);
  }
  return failure;
}

int main(int argc, char **argv) {
  settings s;
  int failure = parse_settings(&s, argc, argv);
  if (failure) return failure;
  if (s.help) return fputs(kHelp, stdout) < 0;
  if (s.version) return printf("colibri-run %s\n", colibri_version()) < 0;
  struct sigaction action = {.sa_handler = on_signal};
  sigemptyset(&action.sa_mask);
  outcome o = {.stop_reason = "max-tokens"};
  failure = s.prompt_text ? encode_prompt(&s, &o) : parse_tokens(&s, &o);
  sigaction(SIGINT, &action, NULL);
  sigaction(SIGTERM, &action, NULL);
  if (!failure) failure = run(&s, &o);
  colibri_model *model = g_model;
  g_model = NULL;
  colibri_close(model);
  colibri_sampler_close(o.sampler);
  free(o.profile.prefill_layers);
  free(o.profile.layers);
  free(o.profile.token_seconds);
  text_close(&o.text);
  free(o.ids);
  if (fflush(stdout) != 0 && !failure) failure = EXIT_FAILURE;
  return failure;
}
