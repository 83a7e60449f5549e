// Damages a container under a model of libcolibri, for tests/test_rot.py; built with sanitizers.
//
//   flips FILE SEED N CHECK   N times: flips a random bit of tensors, blocks or padding, opens, evaluates, flips it
//   back later FILE CHECK          bits flip while the model is open cut FILE                  the file is truncated
//   while the model is open
//
// FILE is written to. CHECK is a colibri_check. Failures name the line and end the program.
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "colibri.h"
#include "container.h"
#include "crc32c.h"

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) {                                                       \
      fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      abort();                                                                \
    }                                                                         \
  } while (0)

enum { N_TOKENS = 5 };
static const uint32_t kTokens[N_TOKENS] = {1, 2, 3, 5, 7};

// ---------------------------------------------------------------------------------------------------------------------
// The file

typedef struct {
  const char *path;
  int fd;
  clb_container *container;
} file;

static file open_file(const char *path) {
  char error[COLIBRI_ERROR_BYTES];
  file f = {.path = path, .fd = open(path, O_RDWR | O_CLOEXEC), .container = NULL};
  f.container = clb_container_open(path, error, sizeof error);
  CHECK(f.fd >= 0 && f.container != NULL);
  return f;
}

static void close_file(file *f) {
  clb_container_close(f->container);
  close(f->fd);
}

static void flip(const file *f, uint64_t offset, unsigned bit) {
  uint8_t byte;
  CHECK(pread(f->fd, &byte, 1, (off_t)offset) == 1);
  byte = (uint8_t)(byte ^ 1u << bit);
  CHECK(pwrite(f->fd, &byte, 1, (off_t)offset) == 1);
}

// What lies at an offset: a tensor, a block, or padding.
typedef struct {
  const clb_tensor *tensor;
  bool is_block;
  size_t row, expert;
  uint64_t offset, n_bytes;
  uint32_t crc32c;
} place;

static place place_of(const file *f, uint64_t offset) {
  const clb_container *c = f->container;
  for (size_t i = 0; i < clb_container_n_tensors(c); i++) {
    const clb_tensor *t = clb_container_tensor(c, i);
    if (offset < t->offset || offset - t->offset >= t->bytes) continue;
    return (place){.tensor = t, .offset = t->offset, .n_bytes = t->bytes, .crc32c = t->crc32c};
  }
  for (size_t r = 0; r < clb_container_n_rows(c); r++) {
    for (size_t e = 0; e < clb_container_row(c, r)->n_experts; e++) {
      clb_block b;
      CHECK(clb_container_block(c, r, e, &b));
      if (offset < b.offset || offset - b.offset >= b.bytes) continue;
      return (place){
          .is_block = true, .row = r, .expert = e, .offset = b.offset, .n_bytes = b.bytes, .crc32c = b.crc32c};
    }
  }
  return (place){0};
}

static uint32_t crc_of(const file *f, const place *p) {
  uint8_t *bytes = malloc(p->n_bytes);
  CHECK(bytes != NULL && pread(f->fd, bytes, p->n_bytes, (off_t)p->offset) == (ssize_t)p->n_bytes);
  const uint32_t crc = clb_crc32c(0, bytes, p->n_bytes);
  free(bytes);
  return crc;
}

// ---------------------------------------------------------------------------------------------------------------------
// The model

// One evaluation: logits, [N_TOKENS, vocab], and what was said.
typedef struct {
  size_t n;
  float *logits;
  char error[COLIBRI_ERROR_BYTES];
} outcome;

static colibri_model *open_model(const char *path, colibri_check check, outcome *o, colibri_status *status) {
  colibri_options options;
  colibri_options_init(&options);
  options.n_threads = options.io_threads = 1;
  options.ctx = 8;
  options.check = check;
  colibri_memory memory;
  *status = colibri_estimate(path, &options, &memory, o->error, sizeof o->error);
  if (*status != COLIBRI_OK) return NULL;
  options.expert_cache_bytes = memory.min_cache_bytes;
  colibri_model *model;
  *status = colibri_open(path, &options, &model, o->error, sizeof o->error);
  CHECK((model != NULL) == (*status == COLIBRI_OK));
  return model;
}

// Evaluates the prompt as a new sequence.
static colibri_status evaluate(colibri_model *model, outcome *o) {
  colibri_info info;
  colibri_get_info(model, &info);
  if (o->logits == NULL) {
    o->n = N_TOKENS * (size_t)info.vocab_size;
    o->logits = calloc(o->n, sizeof *o->logits);
    CHECK(o->logits != NULL);
  }
  CHECK(colibri_rewind(model, 0) == COLIBRI_OK);
  const colibri_status status = colibri_eval(model, kTokens, N_TOKENS, o->logits, N_TOKENS);
  CHECK(colibri_position(model) == (status == COLIBRI_OK ? N_TOKENS : 0));
  snprintf(o->error, sizeof o->error, "%s", status == COLIBRI_OK ? "" : colibri_error(model));
  for (size_t i = 0; status == COLIBRI_OK && i < o->n; i++) CHECK(isfinite(o->logits[i]));
  return status;
}

static colibri_status run(const char *path, colibri_check check, outcome *o) {
  colibri_status status;
  colibri_model *model = open_model(path, check, o, &status);
  if (status == COLIBRI_OK) status = evaluate(model, o);
  colibri_close(model);
  return status;
}

static bool same(const outcome *a, const outcome *b) {
  return a->n == b->n && memcmp(a->logits, b->logits, a->n * sizeof *a->logits) == 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// flips

static uint64_t random_u64(uint64_t *state) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return *state;
}

static void expect_words(const char *text, const char *words) {
  if (strstr(text, words) != NULL) return;
  fprintf(stderr, "expected '%s' in: %s\n", words, text);
  abort();
}

// The text names what is damaged, where, both checksums, and the command that tells more.
static void expect_place(const file *f, const place *p, const char *text) {
  char words[256];
  if (p->tensor != NULL) {
    snprintf(words, sizeof words, "tensor %.*s:", (int)p->tensor->name_bytes, p->tensor->name);
  } else {
    snprintf(words, sizeof words,
             "layer %" PRId32 " (row %zu), expert %zu:", clb_container_row(f->container, p->row)->layer, p->row,
             p->expert);
  }
  expect_words(text, words);
  snprintf(words, sizeof words,
           "the %" PRIu64 " bytes at offset %" PRIu64 " have CRC-32C %08" PRIx32 ", expected %08" PRIx32, p->n_bytes,
           p->offset, crc_of(f, p), p->crc32c);
  expect_words(text, words);
  snprintf(words, sizeof words, "'colibri verify %s'", f->path);
  expect_words(text, words);
}

static int run_flips(const char *path, uint64_t seed, size_t n, colibri_check check) {
  file f = open_file(path);
  outcome clean = {0}, found = {0};
  CHECK(run(path, COLIBRI_CHECK_ALWAYS, &clean) == COLIBRI_OK);
  size_t in_tensors = 0, in_blocks = 0, in_padding = 0, refused = 0, changed = 0, numeric = 0, unread = 0;
  const uint64_t start = clb_container_data_offset(f.container), size = clb_container_file_size(f.container);
  for (size_t i = 0; i < n; i++) {
    const uint64_t offset = start + random_u64(&seed) % (size - start);
    const unsigned bit = (unsigned)(random_u64(&seed) % 8);
    const place p = place_of(&f, offset);
    const bool padding = p.n_bytes == 0;
    (padding ? &in_padding : p.is_block ? &in_blocks : &in_tensors)[0]++;
    flip(&f, offset, bit);
    const colibri_status status = run(path, check, &found);
    if (status == COLIBRI_ERROR_IO) {
      CHECK(check != COLIBRI_CHECK_NEVER && !padding);
      expect_place(&f, &p, found.error);
      refused++;
    } else if (status == COLIBRI_ERROR_NUMERIC) {
      CHECK(check == COLIBRI_CHECK_NEVER && !padding);
      numeric++;
    } else {
      CHECK(status == COLIBRI_OK);
      const bool is_same = same(&clean, &found);
      CHECK(is_same || (check == COLIBRI_CHECK_NEVER && !padding));
      changed += !is_same;
      unread += check != COLIBRI_CHECK_NEVER && !padding;
    }
    flip(&f, offset, bit);
  }
  CHECK(run(path, check, &found) == COLIBRI_OK && same(&clean, &found));
  printf("tensors %zu blocks %zu padding %zu refused %zu unread %zu changed %zu numeric %zu\n", in_tensors, in_blocks,
         in_padding, refused, unread, changed, numeric);
  free(clean.logits);
  free(found.logits);
  close_file(&f);
  return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// later

static uint64_t block_offset(const file *f, size_t row, size_t expert) {
  clb_block b;
  CHECK(clb_container_block(f->container, row, expert, &b));
  return b.offset;
}

static int run_later(const char *path, colibri_check check) {
  file f = open_file(path);
  outcome clean = {0}, found = {0};
  colibri_status status;
  colibri_model *model = open_model(path, check, &found, &status);
  CHECK(status == COLIBRI_OK && evaluate(model, &clean) == COLIBRI_OK);
  const clb_tensor *norm = clb_container_find(f.container, CLB_ROLE_OUTPUT_NORM, -1);
  CHECK(norm != NULL);
  flip(&f, norm->offset + 3, 6);  // held in memory: not read again
  CHECK(evaluate(model, &found) == COLIBRI_OK && same(&clean, &found));
  flip(&f, norm->offset + 3, 6);
  for (size_t row = 0; row < clb_container_n_rows(f.container); row++) {
    const uint64_t offset = block_offset(&f, row, 1) + 2;
    const place p = place_of(&f, offset);
    flip(&f, offset, 6);
    status = evaluate(model, &found);
    if (check == COLIBRI_CHECK_ALWAYS) {
      CHECK(status == COLIBRI_ERROR_IO);
      expect_place(&f, &p, found.error);
    } else {
      CHECK(status == COLIBRI_ERROR_NUMERIC || (status == COLIBRI_OK && !same(&clean, &found)));
    }
    flip(&f, offset, 6);
    if (check != COLIBRI_CHECK_ALWAYS) {  // drops the damaged block from the cache
      colibri_close(model);
      model = open_model(path, check, &found, &status);
    }
    CHECK(evaluate(model, &found) == COLIBRI_OK && same(&clean, &found));
  }
  colibri_close(model);
  free(clean.logits);
  free(found.logits);
  close_file(&f);
  return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// cut

static uint8_t *read_whole(const file *f, size_t size) {
  uint8_t *bytes = malloc(size);
  CHECK(bytes != NULL && pread(f->fd, bytes, size, 0) == (ssize_t)size);
  return bytes;
}

static int run_cut(const char *path) {
  file f = open_file(path);
  const uint64_t size = clb_container_file_size(f.container), data = clb_container_data_offset(f.container),
                 experts = clb_container_expert_offset(f.container);
  const uint64_t middle = block_offset(&f, 1, 2);
  const uint64_t cuts[] = {0,       1,      4096,          data,        data + 100, experts - 1,
                           experts, middle, middle + 5000, size - 4096, size - 1};
  uint8_t *bytes = read_whole(&f, size);
  outcome clean = {0}, found = {0};
  CHECK(run(path, COLIBRI_CHECK_FIRST, &clean) == COLIBRI_OK);
  for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
    for (int check = COLIBRI_CHECK_FIRST; check <= COLIBRI_CHECK_NEVER; check++) {
      colibri_status status;
      colibri_model *model = open_model(path, (colibri_check)check, &found, &status);
      CHECK(status == COLIBRI_OK && (i % 2 == 0 || evaluate(model, &found) == COLIBRI_OK));
      CHECK(ftruncate(f.fd, (off_t)cuts[i]) == 0);
      CHECK(evaluate(model, &found) == COLIBRI_ERROR_IO);
      expect_words(found.error, "it was cut since it was opened");
      CHECK(run(path, (colibri_check)check, &found) == COLIBRI_ERROR_FORMAT);  // and it cannot be opened again
      CHECK(pwrite(f.fd, bytes, size, 0) == (ssize_t)size);
      CHECK(evaluate(model, &found) == COLIBRI_OK && same(&clean, &found));  // the handle is as good as before
      colibri_close(model);
    }
  }
  free(bytes);
  free(clean.logits);
  free(found.logits);
  close_file(&f);
  return 0;
}

int main(int argc, char **argv) {
  if (argc == 6 && strcmp(argv[1], "flips") == 0) {
    return run_flips(argv[2], strtoull(argv[3], NULL, 0), strtoull(argv[4], NULL, 0),
                     (colibri_check)strtoul(argv[5], NULL, 0));
  }
  if (argc == 4 && strcmp(argv[1], "later") == 0) return run_later(argv[2], (colibri_check)strtoul(argv[3], NULL, 0));
  if (argc == 3 && strcmp(argv[1], "cut") == 0) return run_cut(argv[2]);
  return 2;
}
