// Opening a container and what it holds at large; see container_internal.h for the parts of the reader.
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "container_internal.h"

// ---------------------------------------------------------------------------------------------------------------------
// What the checks share

bool clb_refuse(loader *r, const char *format, ...) {
  va_list args;
  va_start(args, format);
  if (r->error_bytes > 0) vsnprintf(r->error, r->error_bytes, format, args);
  va_end(args);
  return false;
}

bool clb_refuse_memory(loader *r, const char *what) {
  return clb_refuse(r, "no memory for the %s", what);
}

quoted clb_quote(const void *name, uint64_t n_bytes) {
  quoted q;
  const uint8_t *p = name;
  size_t limit = sizeof q.s - 6, at = 0;
  q.s[at++] = '"';
  for (uint64_t i = 0; i < n_bytes && at < limit; i++) {
    q.s[at++] = (p[i] >= 0x20 && p[i] < 0x7f && p[i] != '"') ? (char)p[i] : '?';
  }
  if (at - 1 < n_bytes) {
    memcpy(q.s + at, "...", 3);
    at += 3;
  }
  q.s[at++] = '"';
  q.s[at] = 0;
  return q;
}

// Length of the UTF-8 sequence at p, 0 when it is none (overlong forms, surrogates and beyond U+10FFFF included).
static size_t utf8_sequence(const uint8_t *p, uint64_t left) {
  uint8_t lead = p[0];
  if (lead < 0x80) return 1;
  size_t n = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || n > left) return 0;
  for (size_t i = 1; i < n; i++) {
    if ((p[i] & 0xc0) != 0x80) return 0;
  }
  if (lead == 0xe0 && p[1] < 0xa0) return 0;
  if (lead == 0xed && p[1] > 0x9f) return 0;
  if (lead == 0xf0 && p[1] < 0x90) return 0;
  if (lead == 0xf4 && p[1] > 0x8f) return 0;
  return n;
}

bool clb_is_utf8(const uint8_t *p, uint64_t n_bytes) {
  for (uint64_t i = 0; i < n_bytes;) {
    size_t n = utf8_sequence(p + i, n_bytes - i);
    if (n == 0) return false;
    i += n;
  }
  return true;
}

bool clb_is_utf8_without_nul(const uint8_t *p, uint64_t n_bytes) {
  return clb_is_utf8(p, n_bytes) && (n_bytes == 0 || memchr(p, 0, (size_t)n_bytes) == NULL);
}

int clb_compare_names(const void *a, uint64_t a_bytes, const void *b, uint64_t b_bytes) {
  uint64_t n = a_bytes < b_bytes ? a_bytes : b_bytes;
  int order = n == 0 ? 0 : memcmp(a, b, (size_t)n);
  if (order != 0) return order;
  return (a_bytes > b_bytes) - (a_bytes < b_bytes);
}

// ---------------------------------------------------------------------------------------------------------------------
// Open and close

static bool load(loader *r) {
  clb_container *c = r->c;
  uint8_t page[CLB_PAGE0_BYTES];
  if (c->file_size < CLB_PAGE0_BYTES || c->file_size >= kMaxSize) {
    return clb_refuse(
        r, "rule 5: the file has %" PRIu64 " bytes, expected at least 4096 (page 0): this is not a container",
        c->file_size);
  }
  clb_kv *provenance = NULL;
  size_t n_provenance = 0;
  bool ok = clb_load_page0(r, page) && clb_load_sections(r, page) && clb_check_reserve(r) &&
            clb_parse_kv(r, SECTION_SPEC, &c->spec, &c->n_spec) && clb_check_spec(r) &&
            clb_parse_kv(r, SECTION_PROVENANCE, &provenance, &n_provenance) && clb_check_blobs(r) &&
            clb_parse_directory(r) && clb_parse_rows(r) && clb_parse_layouts(r) && clb_check_index(r) &&
            clb_check_census(r);
  free(provenance);
  return ok;
}

// Loads through `r`, whose c, fd and memory are still unset; takes `fd` over.
static clb_container *open_common(loader *r, int fd, uint64_t file_size) {
  clb_container *c = calloc(1, sizeof *c);
  if (c == NULL) {
    clb_refuse_memory(r, "container");
    if (fd >= 0) close(fd);
    return NULL;
  }
  c->fd = r->fd = fd;
  c->file_size = file_size;
  r->c = c;
  if (load(r)) return c;
  clb_container_close(c);
  return NULL;
}

clb_container *clb_container_open(const char *path, char *error, size_t error_bytes) {
  // A FIFO must not block, nor a terminal become ours.
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  int number = errno;
  char reason[512];
  loader r = {.error = reason, .error_bytes = sizeof reason};
  clb_container *c = NULL;
  struct stat st;
  if (fd < 0) {
    const char *why = number == ENOENT ? "it does not exist" : number == EACCES ? "permission denied" : "open failed";
    clb_refuse(&r, "cannot open it: %s (errno %d)", why, number);
  } else if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
    clb_refuse(&r, "not a regular file, expected a container");
    close(fd);
  } else {
    c = open_common(&r, fd, (uint64_t)st.st_size);
  }
  if (c != NULL && (c->path = strdup(path)) == NULL) {
    clb_refuse_memory(&r, "path");
    clb_container_close(c);
    c = NULL;
  }
  if (error_bytes > 0) {
    error[0] = 0;
    if (c == NULL) snprintf(error, error_bytes, "%s: %s", path, reason);
  }
  return c;
}

clb_container *clb_container_open_memory(const uint8_t *metadata, size_t n_bytes, uint64_t file_size, char *error,
                                         size_t error_bytes) {
  loader r = {.memory = metadata, .memory_bytes = n_bytes, .error = error, .error_bytes = error_bytes};
  if (error_bytes > 0) error[0] = 0;
  return open_common(&r, -1, file_size);
}

void clb_container_close(clb_container *c) {
  if (c == NULL) return;
  if (c->fd >= 0) close(c->fd);
  free(c->path);
  free(c->metadata);
  free(c->spec);
  free(c->tensors);
  free(c->by_role);
  free(c->rows);
  free(c->layouts);
  free(c);
}

// ---------------------------------------------------------------------------------------------------------------------
// What a container holds

int clb_container_fd(const clb_container *c) {
  return c->fd;
}
const char *clb_container_path(const clb_container *c) {
  return c->path != NULL ? c->path : "";
}
uint64_t clb_container_alignment(const clb_container *c) {
  return c->alignment;
}
uint64_t clb_container_file_size(const clb_container *c) {
  return c->file_size;
}
uint64_t clb_container_data_offset(const clb_container *c) {
  return c->data_offset;
}
uint64_t clb_container_expert_offset(const clb_container *c) {
  return c->expert_offset;
}
const uint8_t *clb_container_id(const clb_container *c) {
  return c->id;
}
uint64_t clb_padded_bytes(const clb_container *c, uint64_t bytes) {
  return align_up(bytes, c->alignment);
}

const uint8_t *clb_container_tokenizer(const clb_container *c, uint64_t *n_bytes) {
  *n_bytes = c->tokenizer.bytes;
  return c->tokenizer.p;
}
