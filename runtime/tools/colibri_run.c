// colibri-run: evaluates token ids with a container and prints the ids it generates.
//
// A program over colibri.h and nothing else; it needs no Python and no tokenizer. Exit codes: 0 done, 1 the job failed,
// 2 wrong usage, 130 interrupted.
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

enum { EXIT_USAGE = 2, EXIT_INTERRUPTED = 130 };

static const char kHelp[] =
    "Usage: colibri-run MODEL --tokens IDS [OPTIONS]\n"
    "\n"
    "Evaluates token ids with the container MODEL, reading experts on demand, and\n"
    "prints the ids it generates.\n"
    "\n"
    "  --tokens IDS              the prompt: ids separated by commas\n"
    "  --max-tokens N            tokens to generate; 0: evaluate the prompt only [128]\n"
    "  --ctx N                   positions to make room for [prompt + max-tokens]\n"
    "  --threads N               compute threads; 0: all CPUs [0]\n"
    "  --batch-size N            prompt tokens evaluated at once [256]\n"
    "  --expert-cache SIZE       memory for experts, as 512M or 4G [half of what is free]\n"
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
    "  --profile                 print where time went\n"
    "  -h, --help                print this\n"
    "  --version                 print the version\n"
    "\n"
    "Example:\n"
    "  colibri-run model.colibri --tokens 1,15043,3186 --max-tokens 16 --expert-cache 2G\n";

typedef struct {
  const char *model, *tokens_text, *logits_path;
  uint64_t max_tokens, ctx, threads, batch_size, expert_cache;
  colibri_sampling sampling;
  colibri_check check;
  bool ignore_eos, json, profile, help, version;
  bool has_seed, has_top_k, has_top_p, has_min_p;
} settings;

typedef struct {
  uint32_t *ids;  // prompt, then generated
  size_t n_prompt, n_generated;
  double prefill_seconds, decode_seconds;
  const char *stop_reason;
} outcome;

// What a signal handler may touch.
static colibri_model *g_model;
static volatile sig_atomic_t g_interrupted;

static void on_signal(int number) {
  (void)number;
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

static void print_json_string(const char *text) {
  putchar('"');
  for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
    if (*c == '"' || *c == '\\') {
      printf("\\%c", *c);
    } else if (*c < 0x20) {
      printf("\\u%04x", *c);
    } else {
      putchar(*c);
    }
  }
  putchar('"');
}

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

typedef enum { FLAG, COUNT, SIZE, NUMBER, TEXT, CHECK } option_kind;

typedef struct {
  const char *name;
  option_kind kind;
  void *value;
  bool *given;  // or NULL
} option;

static bool parse_check(const char *text, colibri_check *out) {
  static const struct {
    const char *name;
    colibri_check check;
  } names[] = {{"always", COLIBRI_CHECK_ALWAYS}, {"first", COLIBRI_CHECK_FIRST}, {"never", COLIBRI_CHECK_NEVER}};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    if (strcmp(text, names[i].name) != 0) continue;
    *out = names[i].check;
    return true;
  }
  return false;
}

static bool parse_value(const option *o, const char *text) {
  if (o->kind == COUNT) return parse_u64(text, INT32_MAX, o->value);
  if (o->kind == SIZE) return parse_size(text, o->value) && *(uint64_t *)o->value > 0;
  if (o->kind == NUMBER) return parse_number(text, o->value);
  if (o->kind == CHECK) return parse_check(text, o->value);
  *(const char **)o->value = text;
  return *text != '\0';
}

static const char *expected(option_kind kind) {
  if (kind == COUNT) return "a whole number from 0 to 2147483647";
  if (kind == SIZE) return "a size above 0, as 512M or 4G";
  if (kind == CHECK) return "always, first or never";
  return kind == NUMBER ? "a number" : "a value";
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
  return usage(s, "%s: expected %s, found '%s'", o->name, expected(o->kind), text);
}

static int check_settings(const settings *s) {
  if (!s->model) return usage(s, "a MODEL is missing");
  if (!s->tokens_text) return usage(s, "--tokens is missing");
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
  const option options[] = {
      {"--tokens", TEXT, &s->tokens_text, NULL},
      {"--max-tokens", COUNT, &s->max_tokens, NULL},
      {"--ctx", COUNT, &s->ctx, NULL},
      {"--threads", COUNT, &s->threads, NULL},
      {"--batch-size", COUNT, &s->batch_size, NULL},
      {"--expert-cache", SIZE, &s->expert_cache, NULL},
      {"--temperature", NUMBER, &s->sampling.temperature, NULL},
      {"--top-k", COUNT, &top_k, &s->has_top_k},
      {"--top-p", NUMBER, &s->sampling.top_p, &s->has_top_p},
      {"--min-p", NUMBER, &s->sampling.min_p, &s->has_min_p},
      {"--repetition-penalty", NUMBER, &s->sampling.repetition_penalty, NULL},
      {"--seed", COUNT, &seed, &s->has_seed},
      {"--ignore-eos", FLAG, &s->ignore_eos, NULL},
      {"--check", CHECK, &s->check, NULL},
      {"--logits", TEXT, &s->logits_path, NULL},
      {"--json", FLAG, &s->json, NULL},
      {"--profile", FLAG, &s->profile, NULL},
      {"--help", FLAG, &s->help, NULL},
      {"-h", FLAG, &s->help, NULL},
      {"--version", FLAG, &s->version, NULL},
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

static void show_token(const settings *s, const outcome *o) {
  if (s->json) return;
  printf("%s%" PRIu32, o->n_generated > 1 ? " " : "", o->ids[o->n_prompt + o->n_generated - 1]);
  fflush(stdout);
}

static colibri_status decode(const settings *s, const colibri_info *info, colibri_sampler *sampler, outcome *o,
                             float *logits) {
  o->stop_reason = "max-tokens";
  while (o->n_generated < s->max_tokens) {
    if (g_interrupted) return COLIBRI_CANCELLED;
    uint32_t token;
    colibri_status status = colibri_sampler_draw(sampler, logits, &token);
    if (status != COLIBRI_OK) return status;
    colibri_sampler_accept(sampler, token);
    o->ids[o->n_prompt + o->n_generated++] = token;
    show_token(s, o);
    if (!s->ignore_eos && colibri_is_eos(g_model, token)) {
      o->stop_reason = "eos";
      break;
    }
    if (o->n_generated == s->max_tokens) break;
    if (colibri_position(g_model) == info->ctx) {
      o->stop_reason = "context";
      break;
    }
    status = colibri_eval(g_model, &token, 1, logits, 1);
    if (status != COLIBRI_OK) return status;
  }
  return COLIBRI_OK;
}

static int run_prompt(const settings *s, const colibri_info *info, colibri_sampler *sampler, outcome *o,
                      float *logits) {
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
    for (size_t i = 0; i < o->n_prompt; i++) colibri_sampler_accept(sampler, o->ids[i]);
    const double decoding = now();
    status = decode(s, info, sampler, o, last);
    o->decode_seconds = now() - decoding;
  }
  if (!s->json && o->n_generated > 0) printf("\n");
  if (status == COLIBRI_CANCELLED) {
    o->stop_reason = "interrupted";
    return EXIT_INTERRUPTED;
  }
  return status == COLIBRI_OK ? 0 : fail_status(s, status, colibri_error(g_model));
}

// ---------------------------------------------------------------------------------------------------------------------
// Reporting

// VmHWM and not getrusage, whose maximum includes what the parent had before exec.
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

static void print_json(const settings *s, const outcome *o, const colibri_metrics *m) {
  printf("{\n  \"tokens\": [");
  for (size_t i = 0; i < o->n_generated; i++) printf("%s%" PRIu32, i ? ", " : "", o->ids[o->n_prompt + i]);
  printf("],\n  \"prompt_tokens\": %zu,\n  \"generated_tokens\": %zu,\n", o->n_prompt, o->n_generated);
  printf("  \"stop_reason\": \"%s\",\n", o->stop_reason);
  char warning[COLIBRI_ERROR_BYTES];
  snprintf(warning, sizeof warning, "reads go through the page cache: %s", m->io_reason);
  printf("  \"warnings\": [");
  if (!m->io_direct) print_json_string(warning);
  printf("],\n");
  if (s->sampling.temperature > 0) {
    printf("  \"seed\": %" PRIu64 ",\n", s->sampling.seed);
  } else {
    printf("  \"seed\": null,\n");
  }
  printf("  \"prefill_seconds\": %.6f,\n  \"decode_seconds\": %.6f,\n", o->prefill_seconds, o->decode_seconds);
  printf("  \"tokens_per_second\": %.3f,\n  \"peak_rss_bytes\": %" PRIu64 ",\n", tokens_per_second(o),
         peak_rss_bytes());
  if (s->profile) {
    printf("  \"profile\": {\"seconds\": %.6f, \"attention_seconds\": %.6f, \"router_seconds\": %.6f, ", m->seconds,
           m->attention_seconds, m->router_seconds);
    printf("\"experts_seconds\": %.6f, \"io_wait_seconds\": %.6f, \"head_seconds\": %.6f},\n", m->experts_seconds,
           m->io_wait_seconds, m->head_seconds);
  }
  printf("  \"io\": {\"backend\": \"%s\", \"direct\": %s, \"bytes_read\": %" PRIu64 ", \"reads\": %" PRIu64 ", ",
         m->io_backend, m->io_direct ? "true" : "false", m->bytes_read, m->reads);
  if (m->expert_requests > 0) {
    printf("\"hit_rate\": %.6f, ", (double)m->expert_hits / (double)m->expert_requests);
  } else {
    printf("\"hit_rate\": null, ");
  }
  printf("\"wait_seconds\": %.6f},\n  \"warnings\": [", m->io_wait_seconds);
  if (!m->io_direct) {
    char text[COLIBRI_ERROR_BYTES];
    snprintf(text, sizeof text, "reads go through the page cache: %s", m->io_reason);
    print_json_string(text);
  }
  printf("]\n}\n");
}

static void print_profile(const colibri_metrics *m) {
  const struct {
    const char *name;
    double seconds;
  } parts[] = {{"attention", m->attention_seconds},
               {"router", m->router_seconds},
               {"experts", m->experts_seconds},
               {"io wait", m->io_wait_seconds},
               {"head", m->head_seconds}};
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
    fprintf(stderr, "  %-10s %8.3f s  %5.1f %%\n", parts[i].name, parts[i].seconds,
            m->seconds > 0 ? 100 * parts[i].seconds / m->seconds : 0.0);
  }
}

static void print_report(const settings *s, const outcome *o, const colibri_metrics *m) {
  fprintf(stderr, "prompt: %zu tokens in %.2f s; generated: %zu tokens in %.2f s (%.1f tokens/s), stopped: %s\n",
          o->n_prompt, o->prefill_seconds, o->n_generated, o->decode_seconds, tokens_per_second(o), o->stop_reason);
  colibri_memory memory;
  colibri_get_memory(g_model, &memory);
  fprintf(stderr,
          "experts: cache %.1f of %.1f MiB, %.1f %% found in it; %s %s, %" PRIu64 " reads, %.1f MiB, waited %.2f s\n",
          (double)memory.cache_bytes / 0x1p20, (double)memory.all_experts_bytes / 0x1p20,
          m->expert_requests ? 100 * (double)m->expert_hits / (double)m->expert_requests : 0.0, m->io_backend,
          m->io_direct ? "direct" : "buffered", m->reads, (double)m->bytes_read / 0x1p20, m->io_wait_seconds);
  if (!m->io_direct) fprintf(stderr, "warning: reads go through the page cache: %s\n", m->io_reason);
  fprintf(stderr, "memory: peak %.1f MiB\n", (double)peak_rss_bytes() / 0x1p20);
  if (s->profile) print_profile(m);
}

// ---------------------------------------------------------------------------------------------------------------------

static int open_model(const settings *s, const outcome *o) {
  colibri_options options;
  colibri_options_init(&options);
  options.n_threads = (uint32_t)s->threads;
  options.batch_size = s->batch_size;
  options.expert_cache_bytes = s->expert_cache;
  options.ctx = s->ctx;
  options.check = s->check;
  char text[COLIBRI_ERROR_BYTES];
  colibri_memory memory;
  colibri_status status = colibri_estimate(s->model, &options, &memory, text, sizeof text);
  if (status == COLIBRI_OK) {
    const uint64_t wanted = o->n_prompt + s->max_tokens;
    if (s->ctx == 0) options.ctx = wanted < memory.context_length ? wanted : memory.context_length;
    status = colibri_open(s->model, &options, &g_model, text, sizeof text);
  }
  return status == COLIBRI_OK ? 0 : fail_status(s, status, text);
}

static int run(const settings *s, outcome *o) {
  if (s->logits_path && is_same_file(s->model, s->logits_path)) {
    return usage(s, "--logits: '%s' is the model itself", s->logits_path);
  }
  int failure = open_model(s, o);
  if (failure) return failure;
  colibri_info info;
  colibri_get_info(g_model, &info);
  const colibri_status status = colibri_check_input(g_model, o->ids, o->n_prompt);
  if (status != COLIBRI_OK) return fail_status(s, status, colibri_error(g_model));
  char text[COLIBRI_ERROR_BYTES];
  colibri_sampler *sampler = NULL;
  if (colibri_sampler_open(&s->sampling, info.vocab_size, info.n_tokens, &sampler, text, sizeof text) != COLIBRI_OK) {
    return usage(s, "%s", text);
  }
  const size_t rows = s->logits_path ? (size_t)info.batch_size : 1;
  float *logits = calloc(rows * (size_t)info.vocab_size, sizeof *logits);
  failure = logits ? run_prompt(s, &info, sampler, o, logits)
                   : fail(s, "JobError", EXIT_FAILURE, "no memory for the logits of %zu positions", rows);
  free(logits);
  colibri_sampler_close(sampler);
  if (failure && failure != EXIT_INTERRUPTED) return failure;
  colibri_metrics metrics;
  colibri_get_metrics(g_model, &metrics);
  if (s->json) {
    print_json(s, o, &metrics);
  } else {
    print_report(s, o, &metrics);
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
  failure = parse_tokens(&s, &o);
  sigaction(SIGINT, &action, NULL);
  sigaction(SIGTERM, &action, NULL);
  if (!failure) failure = run(&s, &o);
  colibri_model *model = g_model;
  g_model = NULL;
  colibri_close(model);
  free(o.ids);
  if (fflush(stdout) != 0 && !failure) failure = EXIT_FAILURE;
  return failure;
}
