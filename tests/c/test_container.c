// Drives the container reader for tests/test_creader.py:
//   open FILE...           one line a file: "ok", or the refusal
//   dump FILE              what the reader found, line by line
//   flips FILE             flips every bit before data_offset; prints how many were accepted
//   cuts FILE              cuts the file everywhere before data_offset; prints how many were accepted
//   mutate FILE SEED N [OUT]   N random changes with checksums made to fit; prints accepted and refused. OUT gets each
//                          changed metadata, followed by a byte: 1 accepted, 0 refused
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check_container.h"
#include "container.h"
#include "crc32c.h"
#include "sha256.h"

// ---------------------------------------------------------------------------------------------------------------------
// open, dump

static int run_open(int n, char **paths) {
  for (int i = 0; i < n; i++) {
    char error[512];
    clb_container *c = clb_container_open(paths[i], error, sizeof error);
    CHECK((c == NULL) == (error[0] != 0) && strchr(error, '\n') == NULL);
    if (c != NULL) check_container(c);
    printf("%s\n", c != NULL ? "ok" : error);
    clb_container_close(c);
  }
  return 0;
}

static void print_hex(const uint8_t *p, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) printf("%02x", p[i]);
}

static void dump_spec(const clb_container *c) {
  for (size_t i = 0; i < clb_spec_n_keys(c); i++) {
    const clb_kv *kv = clb_spec_at(c, i);
    uint64_t n_bytes = kv->type == CLB_KV_STRING ? kv->n : kv->type == CLB_KV_STRING_ARRAY ? 0 : (uint64_t)kv->n * 8;
    printf("spec %.*s %" PRIu32 " %" PRIu32 " ", (int)kv->key_bytes, kv->key, kv->type, kv->n);
    print_hex(kv->value, n_bytes);
    printf("\n");
  }
}

static void dump_tensors(const clb_container *c) {
  for (size_t i = 0; i < clb_container_n_tensors(c); i++) {
    const clb_tensor *t = clb_container_tensor(c, i);
    printf("tensor %.*s role %u group %u layer %d type %" PRIu32 " shape", (int)t->name_bytes, t->name, t->role,
           t->group, (int)t->layer, t->type);
    for (uint32_t d = 0; d < t->n_dims; d++) printf(" %" PRIu64, t->shape[d]);
    printf(" at %" PRIu64 " + %" PRIu64 " alias %d crc %08" PRIx32 " sha ", t->offset, t->bytes,
           t->alias ? (int)t->alias_of : -1, t->crc32c);
    print_hex(t->sha256, 32);
    printf("\n");
  }
}

static void dump_blocks(const clb_container *c) {
  for (size_t l = 0; l < clb_container_n_layouts(c); l++) {
    const clb_layout *layout = clb_container_layout(c, (uint32_t)l);
    printf("layout %" PRIu64, layout->bytes);
    for (uint32_t i = 0; i < layout->n_parts; i++) {
      const clb_part *p = &layout->parts[i];
      printf(" | %u %" PRIu32 " %" PRIu64 "x%" PRIu64 " at %" PRIu64 " + %" PRIu64, p->role, p->type, p->rows, p->cols,
             p->offset, p->bytes);
    }
    printf("\n");
  }
  for (size_t r = 0; r < clb_container_n_rows(c); r++) {
    const clb_row *row = clb_container_row(c, r);
    printf("row layer %d stream %" PRIu32 "\n", (int)row->layer, row->stream);
    for (size_t e = 0; e < row->n_experts; e++) {
      clb_block b;
      CHECK(clb_container_block(c, r, e, &b));
      printf("block %" PRIu64 " + %" PRIu64 " layout %" PRIu32 " rank %" PRIu32 " crc %08" PRIx32 " sha ", b.offset,
             b.bytes, b.layout, b.rank, b.crc32c);
      print_hex(b.sha256, 32);
      printf("\n");
    }
  }
}

static int run_dump(const char *path, int n_blobs, char **blobs) {
  char error[512];
  clb_container *c = clb_container_open(path, error, sizeof error);
  if (c == NULL) {
    printf("%s\n", error);
    return 1;
  }
  printf("alignment %" PRIu64 " data %" PRIu64 " experts %" PRIu64 " size %" PRIu64 " id ", clb_container_alignment(c),
         clb_container_data_offset(c), clb_container_expert_offset(c), clb_container_file_size(c));
  print_hex(clb_container_id(c), 32);
  printf("\n");
  dump_spec(c);
  for (int i = 0; i < n_blobs; i++) {
    uint64_t n_bytes = 0;
    const uint8_t *blob = clb_container_blob(c, blobs[i], &n_bytes);
    CHECK(blob != NULL);
    printf("blob %s ", blobs[i]);
    print_hex(blob, n_bytes);
    printf("\n");
  }
  dump_tensors(c);
  dump_blocks(c);
  clb_container_close(c);
  return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Damage

typedef struct {
  uint8_t *bytes;  // up to data_offset
  size_t n;
  uint64_t file_size;
} metadata;

static uint64_t get_u64(const uint8_t *p) {
  uint64_t x;
  memcpy(&x, p, 8);
  return x;
}

static uint32_t get_u32(const uint8_t *p) {
  uint32_t x;
  memcpy(&x, p, 4);
  return x;
}

static metadata load(const char *path) {
  char error[512];
  clb_container *c = clb_container_open(path, error, sizeof error);
  CHECK(c != NULL);
  metadata m = {.n = (size_t)clb_container_data_offset(c), .file_size = clb_container_file_size(c)};
  clb_container_close(c);
  m.bytes = malloc(m.n);
  FILE *f = fopen(path, "rb");
  CHECK(m.bytes != NULL && f != NULL && fread(m.bytes, 1, m.n, f) == m.n);
  fclose(f);
  return m;
}

// Opens a copy that ends where the bytes end, so that a read beyond them is seen by the sanitizer.
static bool accepts(const uint8_t *bytes, size_t n, uint64_t file_size) {
  char error[512];
  uint8_t *copy = malloc(n > 0 ? n : 1);
  CHECK(copy != NULL);
  memcpy(copy, bytes, n);
  clb_container *c = clb_container_open_memory(copy, n, file_size, error, sizeof error);
  free(copy);
  CHECK((c == NULL) == (error[0] != 0) && strchr(error, '\n') == NULL);
  if (c != NULL) check_container(c);
  clb_container_close(c);
  return c != NULL;
}

static int run_flips(const char *path) {
  metadata m = load(path);
  size_t accepted = 0;
  CHECK(accepts(m.bytes, m.n, m.file_size));
  for (size_t bit = 0; bit < m.n * 8; bit++) {
    m.bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
    accepted += accepts(m.bytes, m.n, m.file_size);
    m.bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
  }
  printf("accepted %zu of %zu\n", accepted, m.n * 8);
  free(m.bytes);
  return 0;
}

static int run_cuts(const char *path) {
  metadata m = load(path);
  size_t accepted = 0;
  for (size_t n = 0; n < m.n; n++) {
    accepted += accepts(m.bytes, n, m.file_size);
    accepted += accepts(m.bytes, n, n);
  }
  printf("accepted %zu of %zu\n", accepted, m.n * 2);
  free(m.bytes);
  return 0;
}

static uint64_t random_state;

static uint64_t random_u64(void) {  // splitmix64
  uint64_t z = random_state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

static size_t random_below(size_t n) {
  return (size_t)(random_u64() % n);
}

static uint64_t interesting(uint64_t now) {
  static const uint64_t values[] = {0,
                                    1,
                                    2,
                                    3,
                                    7,
                                    8,
                                    63,
                                    64,
                                    127,
                                    128,
                                    255,
                                    256,
                                    4095,
                                    4096,
                                    65535,
                                    65536,
                                    1u << 20,
                                    0x7fffffff,
                                    0x80000000,
                                    0xffffffff,
                                    0x100000000,
                                    (uint64_t)1 << 48,
                                    (uint64_t)1 << 62,
                                    INT64_MAX,
                                    (uint64_t)1 << 63,
                                    UINT64_MAX};
  switch (random_below(6)) {
    case 0:
      return now + 1;
    case 1:
      return now - 1;
    case 2:
      return now + (random_u64() % 2 ? 4096 : 64);
    case 3:
      return now ^ (uint64_t)1 << random_below(64);
    case 4:
      return random_u64();
    default:
      return values[random_below(sizeof values / sizeof values[0])];
  }
}

// Makes the checksums of the section table and of page 0 fit, as far as the table makes sense.
static void seal(uint8_t *bytes, size_t n) {
  uint32_t n_sections = get_u32(bytes + 48);
  if (n_sections > 61) n_sections = 61;
  for (uint32_t i = 0; i < n_sections; i++) {
    uint8_t *e = bytes + 128 + i * 64;
    uint64_t offset = get_u64(e + 8), size = get_u64(e + 16);
    if (offset > n || size > n - offset) continue;
    uint32_t crc = clb_crc32c(0, bytes + offset, (size_t)size);
    memcpy(e + 24, &crc, 4);
    clb_sha256(bytes + offset, (size_t)size, e + 32);
  }
  clb_sha256(bytes + 128, (size_t)n_sections * 64, bytes + 88);
  uint32_t crc = clb_crc32c(0, bytes, 4092);
  memcpy(bytes + 4092, &crc, 4);
}

// One change: of a field of page 0 or the section table, or anywhere in a section.
static void mutate(uint8_t *bytes) {
  uint32_t n_sections = get_u32(bytes + 48);
  size_t at, range, width = (size_t)1 << random_below(4);
  size_t which = random_below(n_sections + 1);
  if (which == n_sections) {
    at = random_u64() % 2 ? 0 : 128;
    range = at == 0 ? 128 : (size_t)n_sections * 64;
  } else {
    at = (size_t)get_u64(bytes + 128 + which * 64 + 8);
    range = (size_t)get_u64(bytes + 128 + which * 64 + 16);
  }
  if (range < 16) return;
  size_t field = at + random_below(range - 8) / width * width;
  uint64_t value = 0;
  memcpy(&value, bytes + field, width);
  if (random_below(8) == 0) {
    memcpy(&value, bytes + at + random_below(range - 8), width);  // something from elsewhere
  } else {
    value = interesting(value);
  }
  memcpy(bytes + field, &value, width);
}

static int run_mutate(const char *path, uint64_t seed, size_t n, const char *out_path) {
  metadata m = load(path);
  FILE *out = out_path != NULL ? fopen(out_path, "wb") : NULL;
  CHECK(out_path == NULL || out != NULL);
  uint8_t *work = malloc(m.n);
  CHECK(work != NULL);
  random_state = seed;
  size_t accepted = 0;
  for (size_t i = 0; i < n; i++) {
    memcpy(work, m.bytes, m.n);
    size_t n_changes = 1 + random_below(3);
    for (size_t k = 0; k < n_changes; k++) {
      mutate(work);
      if (get_u32(work + 48) > 61) memcpy(work + 48, m.bytes + 48, 4);
      for (uint32_t s = 0; s < get_u32(work + 48); s++) {  // later changes stay within the bytes
        const uint8_t *e = work + 128 + s * 64;
        if (get_u64(e + 8) > m.n || get_u64(e + 16) > m.n - get_u64(e + 8)) n_changes = 0;
      }
    }
    seal(work, m.n);
    uint64_t file_size = out != NULL             ? m.file_size
                         : random_below(16) == 0 ? interesting(m.file_size)
                                                 : get_u64(work + 40);
    bool ok = accepts(work, m.n, file_size);
    accepted += ok;
    if (out != NULL) CHECK(fwrite(work, 1, m.n, out) == m.n && fputc(ok, out) != EOF);
  }
  printf("accepted %zu refused %zu\n", accepted, n - accepted);
  if (out != NULL) CHECK(fclose(out) == 0);
  free(work);
  free(m.bytes);
  return 0;
}

int main(int argc, char **argv) {
  if (argc > 2 && strcmp(argv[1], "open") == 0) return run_open(argc - 2, argv + 2);
  if (argc > 2 && strcmp(argv[1], "dump") == 0) return run_dump(argv[2], argc - 3, argv + 3);
  if (argc > 2 && strcmp(argv[1], "flips") == 0) return run_flips(argv[2]);
  if (argc > 2 && strcmp(argv[1], "cuts") == 0) return run_cuts(argv[2]);
  if (argc > 4 && strcmp(argv[1], "mutate") == 0) {
    return run_mutate(argv[2], strtoull(argv[3], NULL, 0), (size_t)strtoull(argv[4], NULL, 0),
                      argc > 5 ? argv[5] : NULL);
  }
  return 2;
}
