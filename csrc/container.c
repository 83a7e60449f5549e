// The reader of the container format. "Rule N" in a comment or an error text is a rule of docs/format.md.
//
// Nothing of a file is believed before it is compared with something already known, page 0 with the file's real size
// first: so every allocation is bounded by the file, and no sum or product can wrap (sizes are below 2^63, and each is
// checked against what is left before it is added).
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif

#include "container.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "blocks.h"
#include "crc32c.h"
#include "sha256.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "containers are little-endian, and read in place"
#endif
_Static_assert(sizeof(off_t) >= 8, "build with -D_FILE_OFFSET_BITS=64");

enum {
  SECTION_TABLE = 128,  // offset in page 0
  SECTION_ENTRY = 64,
  PAGE0_CRC = 4092,
  MIN_SECTIONS = 7,
  MAX_SECTIONS = 61,
  KV_MAX_ENTRIES = 4096,
  KV_MAX_BYTES = 8 << 20,
  KV_MAX_ELEMENTS = 1 << 18,  // of all arrays of a section
  KV_MAX_KEY = 128,
  MAX_BLOBS = 1024,
  BLOB_ENTRY = 32,
  MAX_NAME = 255,
  MAX_TENSORS = 1 << 14,
  TENSOR_ENTRY = 128,
  MAX_ROWS = 65536,
  MAX_COLUMNS = 65536,
  MAX_CELLS = 1 << 18,
  ROW_ENTRY = 32,
  CELL_BYTES = 64,
  MAX_LAYOUTS = 1024,
  LAYOUT_ENTRY = 576,
  PART_ENTRY = 64,
};

static const uint8_t kMagic[8] = {'C', 'O', 'L', 'I', 'B', 'R', 'I', 0};
static const uint64_t kMaxMetadata = (uint64_t)128 << 20;
static const uint64_t kMaxDimension = (uint64_t)1 << 48;
static const uint64_t kMaxSize = (uint64_t)1 << 63;  // sizes are below

enum section_kind {
  SECTION_SPEC = 1,
  SECTION_BLOBS = 2,
  SECTION_PROVENANCE = 3,
  SECTION_RESIDENT = 4,
  SECTION_ROWS = 5,
  SECTION_INDEX = 6,
  SECTION_LAYOUTS = 7,
  N_KNOWN_SECTIONS = 8,
  SECTION_TOKENIZER = 16,  // optional
};

static const char *const kSectionNames[N_KNOWN_SECTIONS] = {
    "", "spec", "blobs", "provenance", "resident directory", "row table", "expert index", "layout table"};

typedef struct {
  const uint8_t *p;
  uint64_t bytes;
} section;

typedef struct {
  uint16_t role;
  int32_t layer;
  uint32_t tensor;
} role_key;

struct clb_container {
  int fd;
  char *path;
  uint64_t alignment, file_size, data_offset, expert_offset;
  uint64_t metadata_end;
  uint32_t n_sections;
  uint8_t id[32];
  uint8_t *metadata;  // the file's bytes [4096, metadata_end)
  section sections[N_KNOWN_SECTIONS], tokenizer;

  clb_kv *spec;
  size_t n_spec;
  clb_tensor *tensors;
  size_t n_tensors;
  role_key *by_role;  // known roles, sorted by (role, layer)
  size_t n_by_role;
  clb_row *rows;
  size_t n_rows, n_columns;
  clb_layout *layouts;
  size_t n_layouts;
};

// Where the bytes come from, and where a refusal is written.
typedef struct {
  clb_container *c;
  int fd;                 // or -1:
  const uint8_t *memory;  // [memory_bytes]
  uint64_t memory_bytes;
  char *error;
  size_t error_bytes;
} loader;

// ---------------------------------------------------------------------------------------------------------------------
// Helpers

__attribute__((format(printf, 2, 3))) static bool fail(loader *r, const char *format, ...) {
  va_list args;
  va_start(args, format);
  if (r->error_bytes > 0) vsnprintf(r->error, r->error_bytes, format, args);
  va_end(args);
  return false;
}

static bool out_of_memory(loader *r, const char *what) {
  return fail(r, "no memory for the %s", what);
}

static uint16_t get_u16(const uint8_t *p) {
  uint16_t x;
  memcpy(&x, p, sizeof x);
  return x;
}

static uint32_t get_u32(const uint8_t *p) {
  uint32_t x;
  memcpy(&x, p, sizeof x);
  return x;
}

static int32_t get_i32(const uint8_t *p) {
  int32_t x;
  memcpy(&x, p, sizeof x);
  return x;
}

static uint64_t get_u64(const uint8_t *p) {
  uint64_t x;
  memcpy(&x, p, sizeof x);
  return x;
}

// x < 2^63 and a <= CLB_MAX_ALIGNMENT, a power of two
static uint64_t align_up(uint64_t x, uint64_t a) {
  return (x + a - 1) & ~(a - 1);
}

static bool is_zero(const uint8_t *p, uint64_t n) {
  // Each byte is the one before it: at memcmp's speed, for the reserve may be long.
  return n == 0 || (p[0] == 0 && memcmp(p, p + 1, (size_t)n - 1) == 0);
}

// A name as it may appear in one line of text: quoted, bounded, unprintable bytes as '?'.
typedef struct {
  char s[80];
} quoted;

static quoted quote(const void *name, uint64_t n_bytes) {
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

static bool is_utf8(const uint8_t *p, uint64_t n_bytes) {
  for (uint64_t i = 0; i < n_bytes;) {
    size_t n = utf8_sequence(p + i, n_bytes - i);
    if (n == 0) return false;
    i += n;
  }
  return true;
}

static bool is_utf8_without_nul(const uint8_t *p, uint64_t n_bytes) {
  return is_utf8(p, n_bytes) && (n_bytes == 0 || memchr(p, 0, (size_t)n_bytes) == NULL);
}

// As bytes; a prefix comes first.
static int compare_names(const void *a, uint64_t a_bytes, const void *b, uint64_t b_bytes) {
  uint64_t n = a_bytes < b_bytes ? a_bytes : b_bytes;
  int order = n == 0 ? 0 : memcmp(a, b, (size_t)n);
  if (order != 0) return order;
  return (a_bytes > b_bytes) - (a_bytes < b_bytes);
}

// ---------------------------------------------------------------------------------------------------------------------
// Types: what blocks.h decodes, and what is only carried

typedef struct {
  uint32_t id, block_weights, block_bytes;
} type_size;

static const type_size kCarriedTypes[] = {
    {9, 32, 40},                                         // q8_1
    {15, 256, 292},                                      // q8_k
    {24, 1, 1},     {25, 1, 2}, {26, 1, 4}, {27, 1, 8},  // i8 ... i64
    {28, 1, 8},                                          // f64
    {41, 128, 18},                                       // q1_0
};

static bool find_type(uint32_t id, type_size *out) {
  const clb_type *type = clb_type_by_id(id);
  if (type != NULL) {
    *out = (type_size){id, type->block_weights, type->block_bytes};
    return true;
  }
  for (size_t i = 0; i < sizeof kCarriedTypes / sizeof kCarriedTypes[0]; i++) {
    if (kCarriedTypes[i].id == id) {
      *out = kCarriedTypes[i];
      return true;
    }
  }
  return false;
}

// Rule 15: the size of a tensor or part of this type and shape. `place` starts the error text.
static bool size_of_shape(loader *r, int rule, const char *place, uint32_t type, const uint64_t *shape, size_t n_dims,
                          uint64_t *n_bytes) {
  type_size t;
  if (!find_type(type, &t))
    return fail(r, "rule %d: %s: type is %" PRIu32 ", expected a type of section 8", rule, place, type);
  uint64_t weights = 1;
  for (size_t i = 0; i < n_dims; i++) {
    if (shape[i] < 1 || shape[i] > kMaxDimension) {
      return fail(r, "rule %d: %s: shape[%zu] is %" PRIu64 ", expected 1 ... 2^48", rule, place, i, shape[i]);
    }
    if (__builtin_mul_overflow(weights, shape[i], &weights) || weights >= kMaxSize) {
      return fail(r, "rule %d: %s: the product of its shape is 2^63 or more", rule, place);
    }
  }
  if (shape[n_dims - 1] % t.block_weights != 0) {
    return fail(r,
                "rule %d: %s: its last dimension is %" PRIu64 ", expected a multiple of %" PRIu32 " for type %" PRIu32,
                rule, place, shape[n_dims - 1], t.block_weights, type);
  }
  if (__builtin_mul_overflow(weights / t.block_weights, (uint64_t)t.block_bytes, n_bytes) || *n_bytes >= kMaxSize) {
    return fail(r, "rule %d: %s: its size is 2^63 bytes or more", rule, place);
  }
  return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Page 0 and the sections

static bool read_at(loader *r, uint64_t offset, void *buffer, uint64_t n_bytes) {
  uint8_t *p = buffer;
  if (r->fd < 0) {
    if (offset > r->memory_bytes || n_bytes > r->memory_bytes - offset) {
      return fail(r, "the bytes at hand end at %" PRIu64 ", expected %" PRIu64 " more at offset %" PRIu64,
                  r->memory_bytes, n_bytes, offset);
    }
    memcpy(p, r->memory + offset, (size_t)n_bytes);
    return true;
  }
  while (n_bytes > 0) {
    size_t n = n_bytes < ((size_t)1 << 30) ? (size_t)n_bytes : (size_t)1 << 30;
    ssize_t got = pread(r->fd, p, n, (off_t)offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      int number = errno;
      return fail(r, "reading %" PRIu64 " bytes of metadata at offset %" PRIu64 " failed with errno %d%s", n_bytes,
                  offset, number, number == EIO ? " (EIO, input/output error)" : "");
    }
    if (got == 0)
      return fail(r, "rule 5: the file ends at %" PRIu64 ", expected %" PRIu64 " bytes more", offset, n_bytes);
    p += got;
    offset += (uint64_t)got;
    n_bytes -= (uint64_t)got;
  }
  return true;
}

static bool check_identity(loader *r, const uint8_t *page) {
  if (memcmp(page, kMagic, sizeof kMagic) != 0) {
    if (is_zero(page, CLB_PAGE0_BYTES)) {
      return fail(r, "rule 4: page 0 is empty, so this container was never finished; make it again");
    }
    quoted q = quote(page, sizeof kMagic);
    return fail(r, "rule 1: the file starts with %s, expected \"COLIBRI\" and a zero byte: this is not a container",
                q.s);
  }
  if (get_u32(page + 8) != 1) {
    return fail(r, "rule 1: page 0: version is %" PRIu32 ", expected 1; a newer tool may read it", get_u32(page + 8));
  }
  if (get_u32(page + 12) != CLB_PAGE0_BYTES) {
    return fail(r, "rule 1: page 0: page0_bytes is %" PRIu32 ", expected 4096", get_u32(page + 12));
  }
  uint32_t crc = clb_crc32c(0, page, PAGE0_CRC);
  if (get_u32(page + PAGE0_CRC) != crc) {
    return fail(r, "rule 4: page 0: its CRC is %08" PRIx32 ", expected %08" PRIx32 " as stored: page 0 is damaged", crc,
                get_u32(page + PAGE0_CRC));
  }
  uint64_t required = get_u64(page + 16);
  for (unsigned bit = 0; bit < 64; bit++) {
    if ((required >> bit & 1) != 0) {
      return fail(
          r,
          "rule 2: page 0: required feature bit %u is set, expected none that version 1 lacks; a newer tool may "
          "read it",
          bit);
    }
  }
  return true;
}

static bool check_page0_zeros(loader *r, const uint8_t *page) {
  uint32_t table_end = SECTION_TABLE + r->c->n_sections * SECTION_ENTRY;
  const uint32_t ranges[][2] = {{52, 56}, {80, 88}, {120, 128}, {table_end, PAGE0_CRC}};
  for (size_t i = 0; i < 4; i++) {
    uint32_t at = ranges[i][0];
    if (is_zero(page + at, ranges[i][1] - at)) continue;
    while (page[at] == 0) at++;
    return fail(r, "rule 10: page 0: byte %" PRIu32 " is %u, expected 0", at, page[at]);
  }
  return true;
}

static bool check_page0(loader *r, const uint8_t *page) {
  clb_container *c = r->c;
  if (!check_identity(r, page)) return false;
  c->alignment = get_u64(page + 32);
  bool power_of_two = c->alignment != 0 && (c->alignment & (c->alignment - 1)) == 0;
  if (!power_of_two || c->alignment < 4096 || c->alignment > CLB_MAX_ALIGNMENT) {
    return fail(r, "rule 3: page 0: alignment is %" PRIu64 ", expected a power of two, 4096 ... 2097152", c->alignment);
  }
  if (get_u64(page + 40) != c->file_size) {
    return fail(r, "rule 5: the file has %" PRIu64 " bytes, expected %" PRIu64 " (page 0): it was cut or grown",
                c->file_size, get_u64(page + 40));
  }
  c->n_sections = get_u32(page + 48);
  if (c->n_sections < MIN_SECTIONS || c->n_sections > MAX_SECTIONS) {
    return fail(r, "rule 6: page 0: n_sections is %" PRIu32 ", expected 7 ... 61", c->n_sections);
  }
  if (!check_page0_zeros(r, page)) return false;
  uint64_t metadata_bytes = get_u64(page + 56);
  if (metadata_bytes > kMaxMetadata || metadata_bytes > c->file_size - CLB_PAGE0_BYTES) {
    return fail(r, "rule 7: page 0: metadata_bytes is %" PRIu64 ", expected at most 128 MiB and what the file holds",
                metadata_bytes);
  }
  c->metadata_end = CLB_PAGE0_BYTES + metadata_bytes;
  c->data_offset = get_u64(page + 64);
  c->expert_offset = get_u64(page + 72);
  uint64_t latest = CLB_PAGE0_BYTES + 2 * (metadata_bytes + ((uint64_t)8 << 20));
  if (c->data_offset < c->metadata_end || c->data_offset > latest || c->data_offset > c->file_size ||
      c->data_offset % c->alignment != 0) {
    return fail(r,
                "rule 8: page 0: data_offset is %" PRIu64 ", expected a multiple of %" PRIu64 " between %" PRIu64
                " and %" PRIu64,
                c->data_offset, c->alignment, c->metadata_end, latest);
  }
  if (c->expert_offset < c->data_offset || c->expert_offset > c->file_size || c->expert_offset % c->alignment != 0) {
    return fail(r,
                "rule 14: page 0: expert_offset is %" PRIu64 ", expected a multiple of %" PRIu64 " between %" PRIu64
                " and %" PRIu64,
                c->expert_offset, c->alignment, c->data_offset, c->file_size);
  }
  clb_sha256(page + SECTION_TABLE, (size_t)c->n_sections * SECTION_ENTRY, c->id);
  if (memcmp(c->id, page + 88, sizeof c->id) != 0) {
    return fail(r, "rule 9: page 0: id is not the SHA-256 of the section table");
  }
  return true;
}

// A section's entry, given the kind of the one before and the end of the bytes before.
static bool check_section_entry(loader *r, const uint8_t *e, uint32_t i, uint32_t last_kind, uint64_t end) {
  uint32_t kind = get_u32(e), flags = get_u32(e + 4);
  uint64_t offset = get_u64(e + 8), bytes = get_u64(e + 16);
  if (kind <= last_kind) {
    return fail(r, "rule 6: section %" PRIu32 ": kind is %" PRIu32 ", expected more than the %" PRIu32 " before it", i,
                kind, last_kind);
  }
  if (flags > 1 || get_u32(e + 28) != 0) {
    return fail(r, "rule 10: section %" PRIu32 " (kind %" PRIu32 "): undescribed bytes are not zero", i, kind);
  }
  bool known = kind < N_KNOWN_SECTIONS;
  if (known && flags != 1) {
    return fail(r, "rule 6: section %" PRIu32 " (%s): flags are 0, expected 1", i, kSectionNames[kind]);
  }
  if (!known && flags == 1) {
    return fail(r, "rule 6: section %" PRIu32 ": kind %" PRIu32 " is required and unknown; a newer tool may read it", i,
                kind);
  }
  uint64_t expected = align_up(end, 64);
  if (offset != expected) {
    return fail(r, "rule 7: section %" PRIu32 " (kind %" PRIu32 "): offset is %" PRIu64 ", expected %" PRIu64, i, kind,
                offset, expected);
  }
  uint64_t metadata_end = r->c->metadata_end;
  if (offset > metadata_end || bytes > metadata_end - offset) {  // an empty one may start behind the end, too
    return fail(r,
                "rule 7: section %" PRIu32 " (kind %" PRIu32 "): %" PRIu64 " bytes at offset %" PRIu64
                ", expected to lie before the end of the metadata, %" PRIu64,
                i, kind, bytes, offset, metadata_end);
  }
  return true;
}

// Rule 7 (gaps) and rule 9.
static bool check_section_bytes(loader *r, const uint8_t *e, uint32_t i, uint64_t end) {
  const uint8_t *base = r->c->metadata;
  uint32_t kind = get_u32(e);
  uint64_t offset = get_u64(e + 8) - CLB_PAGE0_BYTES, bytes = get_u64(e + 16);
  if (offset > end - CLB_PAGE0_BYTES && !is_zero(base + (end - CLB_PAGE0_BYTES), offset - (end - CLB_PAGE0_BYTES))) {
    return fail(r, "rule 7: the gap before section %" PRIu32 " (kind %" PRIu32 ") is not zero", i, kind);
  }
  uint32_t crc = clb_crc32c(0, base + offset, (size_t)bytes);
  if (crc != get_u32(e + 24)) {
    return fail(r,
                "rule 9: section %" PRIu32 " (kind %" PRIu32 "): its CRC is %08" PRIx32 ", expected %08" PRIx32
                " as stored: it is damaged",
                i, kind, crc, get_u32(e + 24));
  }
  uint8_t digest[32];
  clb_sha256(base + offset, (size_t)bytes, digest);
  if (memcmp(digest, e + 32, sizeof digest) != 0) {
    return fail(r, "rule 9: section %" PRIu32 " (kind %" PRIu32 "): its SHA-256 is not the one stored: it is damaged",
                i, kind);
  }
  return true;
}

static bool load_sections(loader *r, const uint8_t *page) {
  clb_container *c = r->c;
  uint64_t n_bytes = c->metadata_end - CLB_PAGE0_BYTES;
  c->metadata = malloc(n_bytes > 0 ? (size_t)n_bytes : 1);
  if (c->metadata == NULL) return out_of_memory(r, "metadata");
  if (!read_at(r, CLB_PAGE0_BYTES, c->metadata, n_bytes)) return false;

  uint32_t last_kind = 0;
  uint64_t end = CLB_PAGE0_BYTES;
  for (uint32_t i = 0; i < c->n_sections; i++) {
    const uint8_t *e = page + SECTION_TABLE + i * SECTION_ENTRY;
    if (!check_section_entry(r, e, i, last_kind, end) || !check_section_bytes(r, e, i, end)) return false;
    last_kind = get_u32(e);
    end = get_u64(e + 8) + get_u64(e + 16);
    const section found = {c->metadata + (get_u64(e + 8) - CLB_PAGE0_BYTES), get_u64(e + 16)};
    if (last_kind < N_KNOWN_SECTIONS) c->sections[last_kind] = found;
    if (last_kind == SECTION_TOKENIZER) c->tokenizer = found;
  }
  if (end != c->metadata_end) {
    return fail(r, "rule 7: the last section ends at %" PRIu64 ", expected the end of the metadata, %" PRIu64, end,
                c->metadata_end);
  }
  for (size_t kind = 1; kind < N_KNOWN_SECTIONS; kind++) {
    if (c->sections[kind].p == NULL)
      return fail(r, "rule 6: there is no %s section (kind %zu)", kSectionNames[kind], kind);
  }
  return true;
}

static bool check_reserve(loader *r) {
  uint8_t chunk[16384];
  for (uint64_t at = r->c->metadata_end; at < r->c->data_offset;) {
    uint64_t left = r->c->data_offset - at;
    uint64_t n = left < sizeof chunk ? left : sizeof chunk;
    if (!read_at(r, at, chunk, n)) return false;
    if (!is_zero(chunk, n)) {
      return fail(r, "rule 8: the reserve has a byte that is not zero at or behind offset %" PRIu64, at);
    }
    at += n;
  }
  return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Key-value sections

// Rule 11: the value of one entry, `left` bytes from the section's end. Its unpadded size goes to *n_bytes.
static bool check_kv_value(loader *r, const char *place, uint32_t type, uint32_t n, const uint8_t *value, uint64_t left,
                           uint64_t *n_bytes) {
  if (type < CLB_KV_U64 || type > CLB_KV_STRING_ARRAY) {
    return fail(r, "rule 11: %s: type is %" PRIu32 ", expected 1 ... 8", place, type);
  }
  if (type <= CLB_KV_BOOL && n != 1) return fail(r, "rule 11: %s: n is %" PRIu32 ", expected 1", place, n);
  *n_bytes = type == CLB_KV_STRING ? n : type == CLB_KV_STRING_ARRAY ? (uint64_t)n * 4 : (uint64_t)n * 8;
  if (*n_bytes > left) {
    return fail(r,
                "rule 11: %s: the value needs %" PRIu64 " bytes, expected at most the %" PRIu64 " left in the section",
                place, *n_bytes, left);
  }
  if (type == CLB_KV_BOOL && get_u64(value) > 1) {
    return fail(r, "rule 11: %s: the bool is %" PRIu64 ", expected 0 or 1", place, get_u64(value));
  }
  if (type == CLB_KV_F64 || type == CLB_KV_F64_ARRAY) {
    for (uint32_t i = 0; i < n; i++) {
      if ((get_u64(value + (uint64_t)8 * i) >> 52 & 0x7ff) == 0x7ff) {
        return fail(r, "rule 11: %s: number %" PRIu32 " is not finite", place, i);
      }
    }
  }
  if (type == CLB_KV_STRING && !is_utf8_without_nul(value, n)) {
    return fail(r, "rule 11: %s: the string is not UTF-8 without NUL", place);
  }
  if (type != CLB_KV_STRING_ARRAY) return true;

  uint64_t at = 0;
  for (uint32_t i = 0; i < n; i++) {
    if (left - at < 4 || get_u32(value + at) > left - at - 4) {
      return fail(r, "rule 11: %s: string %" PRIu32 " reaches past the section", place, i);
    }
    uint32_t string_bytes = get_u32(value + at);
    if (!is_utf8_without_nul(value + at + 4, string_bytes)) {
      return fail(r, "rule 11: %s: string %" PRIu32 " is not UTF-8 without NUL", place, i);
    }
    at += 4 + (uint64_t)string_bytes;
  }
  *n_bytes = at;
  return true;
}

static bool check_key(const uint8_t *key, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    bool ok = (key[i] >= 'a' && key[i] <= 'z') || (key[i] >= '0' && key[i] <= '9') || key[i] == '_' || key[i] == '.';
    if (!ok) return false;
  }
  return true;
}

// The entry at *at, which moves behind it.
static bool parse_kv_entry(loader *r, const char *name, const section *s, uint32_t i, uint64_t *at, clb_kv *out) {
  const uint8_t *e = s->p + *at;
  uint64_t left = s->bytes - *at;
  if (left < 8) return fail(r, "rule 11: %s: entry %" PRIu32 " reaches past the section", name, i);
  uint32_t key_bytes = get_u16(e);
  if (key_bytes < 1 || key_bytes > KV_MAX_KEY || e[3] != 0) {
    return fail(r,
                "rule 11: %s: entry %" PRIu32 ": key_bytes is %" PRIu32 " and byte 3 is %u, expected 1 ... 128 and 0",
                name, i, key_bytes, e[3]);
  }
  uint64_t value_at = 8 + align_up(key_bytes, 8);
  if (value_at > left) return fail(r, "rule 11: %s: entry %" PRIu32 " reaches past the section", name, i);
  quoted q = quote(e + 8, key_bytes);
  if (!check_key(e + 8, key_bytes)) {
    return fail(r, "rule 11: %s: entry %" PRIu32 ": the key %s has a character outside a-z 0-9 _ .", name, i, q.s);
  }
  char place[160];
  snprintf(place, sizeof place, "%s: key %s", name, q.s);
  *out = (clb_kv){(const char *)(e + 8), key_bytes, e[2], get_u32(e + 4), e + value_at};
  uint64_t value_bytes = 0;
  if (!check_kv_value(r, place, out->type, out->n, out->value, left - value_at, &value_bytes)) return false;
  uint64_t padded = align_up(value_bytes, 8);
  if (padded > left - value_at) return fail(r, "rule 11: %s: its padding reaches past the section", place);
  if (!is_zero(e + 8 + key_bytes, value_at - 8 - key_bytes) ||
      !is_zero(out->value + value_bytes, padded - value_bytes)) {
    return fail(r, "rule 11: %s: its padding is not zero", place);
  }
  *at += value_at + padded;
  return true;
}

static bool parse_kv(loader *r, enum section_kind kind, clb_kv **out, size_t *n_out) {
  const section *s = &r->c->sections[kind];
  const char *name = kSectionNames[kind];
  if (s->bytes < 8 || s->bytes > KV_MAX_BYTES) {
    return fail(r, "rule 11: %s: the section has %" PRIu64 " bytes, expected 8 ... 8 MiB", name, s->bytes);
  }
  uint32_t count = get_u32(s->p);
  if (count > KV_MAX_ENTRIES || get_u32(s->p + 4) != 0) {
    return fail(r, "rule 11: %s: count is %" PRIu32 " and the word behind it %" PRIu32 ", expected at most 4096 and 0",
                name, count, get_u32(s->p + 4));
  }
  clb_kv *kvs = calloc(count > 0 ? count : 1, sizeof *kvs);
  if (kvs == NULL) return out_of_memory(r, name);
  *out = kvs;
  *n_out = count;
  uint64_t at = 8, n_elements = 0;
  for (uint32_t i = 0; i < count; i++) {
    if (!parse_kv_entry(r, name, s, i, &at, &kvs[i])) return false;
    n_elements += kvs[i].type >= CLB_KV_U64_ARRAY ? kvs[i].n : 0;
    if (n_elements > KV_MAX_ELEMENTS) {
      return fail(r, "rule 11: %s: the arrays have %" PRIu64 " elements, expected at most %d", name, n_elements,
                  KV_MAX_ELEMENTS);
    }
    if (i > 0 && compare_names(kvs[i - 1].key, kvs[i - 1].key_bytes, kvs[i].key, kvs[i].key_bytes) >= 0) {
      quoted q = quote(kvs[i].key, kvs[i].key_bytes);
      return fail(r, "rule 11: %s: key %s does not come after the one before it", name, q.s);
    }
  }
  if (at != s->bytes) {
    return fail(r, "rule 11: %s: the entries end at %" PRIu64 ", expected the end of the section, %" PRIu64, name, at,
                s->bytes);
  }
  return true;
}

// Section 7 of the document.
static const struct {
  const char *key;
  enum clb_kv_type type;
  bool optional;
} kSpecKeys[] = {
    {"family", CLB_KV_STRING, false},
    {"source_kind", CLB_KV_STRING, false},
    {"executable", CLB_KV_BOOL, false},
    {"executable_lacks", CLB_KV_STRING, true},
    {"tokenizer_lacks", CLB_KV_STRING, true},
    {"order", CLB_KV_STRING, false},
    {"n_layers", CLB_KV_U64, false},
    {"n_mtp_layers", CLB_KV_U64, false},
    {"hidden_size", CLB_KV_U64, false},
    {"vocab_size", CLB_KV_U64, false},
    {"context_length", CLB_KV_U64, false},
    {"top_k", CLB_KV_U64, false},
    {"expert_width", CLB_KV_U64, false},
    {"total_params", CLB_KV_U64, false},
    {"active_params", CLB_KV_U64, false},
    {"moe_layers", CLB_KV_U64_ARRAY, false},
    {"tokenizer", CLB_KV_STRING, false},
    {"bos_id", CLB_KV_I64, false},
    {"eos_ids", CLB_KV_U64_ARRAY, false},
    {"n_tokens", CLB_KV_U64, false},
    {"graph.attention", CLB_KV_STRING, false},
    {"graph.n_heads", CLB_KV_U64, false},
    {"graph.n_kv_heads", CLB_KV_U64, false},
    {"graph.head_dim", CLB_KV_U64, false},
    {"graph.attention_scale", CLB_KV_F64, false},
    {"graph.qkv_bias", CLB_KV_BOOL, false},
    {"graph.o_bias", CLB_KV_BOOL, false},
    {"graph.qk_norm", CLB_KV_STRING, false},
    {"graph.clip_qkv", CLB_KV_F64, false},
    {"graph.windows", CLB_KV_U64_ARRAY, false},
    {"graph.norm", CLB_KV_STRING, false},
    {"graph.norm_eps", CLB_KV_F64, false},
    {"graph.rope_dim", CLB_KV_U64, false},
    {"graph.rope_pairing", CLB_KV_STRING, false},
    {"graph.rope_inv_freq", CLB_KV_F64_ARRAY, false},
    {"graph.rope_factor", CLB_KV_F64, false},
    {"graph.activation", CLB_KV_STRING, false},
    {"graph.router_score", CLB_KV_STRING, false},
    {"graph.router_norm", CLB_KV_BOOL, false},
    {"graph.router_scale", CLB_KV_F64, false},
    {"graph.shared_width", CLB_KV_U64, false},
    {"graph.shared_gated", CLB_KV_BOOL, false},
    {"graph.dense_width", CLB_KV_U64, false},
    {"graph.rope_inv_freq_long", CLB_KV_F64_ARRAY, true},
    {"graph.rope_factor_long", CLB_KV_F64, true},
    {"graph.rope_original_context", CLB_KV_U64, true},
    {"graph.residual_scale", CLB_KV_F64, true},
    {"graph.logit_divisor", CLB_KV_F64, true},
    {"graph.activation_alpha", CLB_KV_F64, true},
    {"graph.activation_limit", CLB_KV_F64, true},
    {"graph.sinks", CLB_KV_BOOL, true},
    {"graph.router_bias", CLB_KV_BOOL, true},
    {"graph.output_bias", CLB_KV_BOOL, true},
    {"graph.qk_norm_after_rope", CLB_KV_BOOL, true},
    {"graph.experts_scale_input", CLB_KV_BOOL, true},
    {"graph.chunks", CLB_KV_U64_ARRAY, true},
    {"graph.router_jitter", CLB_KV_F64, true},
    {"graph.temperature_floor", CLB_KV_F64, true},
    {"graph.temperature_scale", CLB_KV_F64, true},
    {"graph.value_dim", CLB_KV_U64, true},
    {"graph.q_lora", CLB_KV_U64, true},
    {"graph.kv_lora", CLB_KV_U64, true},
    {"graph.latent_norm_eps", CLB_KV_F64, true},
    {"graph.attention_gate", CLB_KV_BOOL, true},
    {"graph.rope_layers", CLB_KV_U64_ARRAY, true},
    {"graph.pre_norm", CLB_KV_BOOL, true},
    {"graph.post_norm", CLB_KV_BOOL, true},
    {"graph.embedding_scale", CLB_KV_F64, true},
    {"graph.router_select_bias", CLB_KV_BOOL, true},
    {"graph.router_groups", CLB_KV_U64, true},
    {"graph.router_top_groups", CLB_KV_U64, true},
    {"graph.router_group_score", CLB_KV_STRING, true},
    {"graph.router_norm_add", CLB_KV_F64, true},
    {"graph.router_norm_min", CLB_KV_F64, true},
    {"graph.attention_softcap", CLB_KV_F64, true},
    {"graph.logit_softcap", CLB_KV_F64, true},
    {"graph.rope_of_layer", CLB_KV_U64_ARRAY, true},
    {"graph.rope_inv_freq_more", CLB_KV_F64_ARRAY, true},
    {"graph.rope_factor_more", CLB_KV_F64_ARRAY, true},
};

// A u64 of the spec that rule 12 has seen.
static uint64_t spec_u64(const clb_container *c, const char *key) {
  uint64_t x = 0;
  (void)clb_spec_u64(c, key, &x);
  return x;
}

static bool check_spec(loader *r) {
  for (size_t i = 0; i < sizeof kSpecKeys / sizeof kSpecKeys[0]; i++) {
    const clb_kv *kv = clb_spec_find(r->c, kSpecKeys[i].key);
    if (kv == NULL && !kSpecKeys[i].optional) {
      return fail(r, "rule 12: spec: there is no key \"%s\"", kSpecKeys[i].key);
    }
    if (kv != NULL && kv->type != (uint32_t)kSpecKeys[i].type) {
      return fail(r, "rule 12: spec: key \"%s\" has type %" PRIu32 ", expected %d", kSpecKeys[i].key, kv->type,
                  (int)kSpecKeys[i].type);
    }
  }
  const uint64_t *moe_layers = NULL;
  size_t n_moe_layers = 0;
  (void)clb_spec_u64_array(r->c, "moe_layers", &moe_layers, &n_moe_layers);
  if (n_moe_layers != spec_u64(r->c, "n_layers")) {
    return fail(r, "rule 12: spec: moe_layers has %zu entries, expected n_layers, %" PRIu64, n_moe_layers,
                spec_u64(r->c, "n_layers"));
  }
  for (size_t i = 0; i < n_moe_layers; i++) {
    if (moe_layers[i] > 1) {
      return fail(r, "rule 12: spec: moe_layers[%zu] is %" PRIu64 ", expected 0 or 1", i, moe_layers[i]);
    }
  }
  return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Blobs

// Rule 13: entry i; its name starts at *name_at, the data before it end at *data_at. All names lie within the section.
static bool check_blob(loader *r, uint32_t i, uint64_t *name_at, uint64_t *data_at) {
  const section *s = &r->c->sections[SECTION_BLOBS];
  const uint8_t *e = s->p + 8 + (uint64_t)i * BLOB_ENTRY;
  uint32_t name_offset = get_u32(e), name_bytes = get_u32(e + 4);
  uint64_t offset = get_u64(e + 8), bytes = get_u64(e + 16);
  if (name_bytes < 1 || name_bytes > MAX_NAME || get_u64(e + 24) != 0) {
    return fail(r, "rule 13: blob %" PRIu32 ": name_bytes is %" PRIu32 ", expected 1 ... 255 (and a zero last field)",
                i, name_bytes);
  }
  if (name_offset != *name_at) {
    return fail(r, "rule 13: blob %" PRIu32 ": its name is at %" PRIu32 ", expected at %" PRIu64, i, name_offset,
                *name_at);
  }
  const uint8_t *name = s->p + name_offset;
  quoted q = quote(name, name_bytes);
  if (!is_utf8_without_nul(name, name_bytes) || memchr(name, '/', name_bytes) != NULL ||
      memchr(name, '\\', name_bytes) != NULL) {
    return fail(r, "rule 13: blob %" PRIu32 ": the name %s is not UTF-8 without NUL, / and \\", i, q.s);
  }
  if (i > 0 && compare_names(s->p + get_u32(e - BLOB_ENTRY), get_u32(e - BLOB_ENTRY + 4), name, name_bytes) >= 0) {
    return fail(r, "rule 13: blob %" PRIu32 ": the name %s does not come after the one before it", i, q.s);
  }
  uint64_t expected = align_up(*data_at, 64);
  if (offset != expected || expected > s->bytes || bytes > s->bytes - expected) {
    return fail(r,
                "rule 13: blob %s: %" PRIu64 " bytes at %" PRIu64 ", expected at %" PRIu64
                " and within the section's %" PRIu64,
                q.s, bytes, offset, expected, s->bytes);
  }
  if (!is_zero(s->p + *data_at, expected - *data_at))
    return fail(r, "rule 13: the gap before blob %s is not zero", q.s);
  *name_at += name_bytes;
  *data_at = offset + bytes;
  return true;
}

static bool check_blobs(loader *r) {
  const section *s = &r->c->sections[SECTION_BLOBS];
  if (s->bytes < 8) return fail(r, "rule 13: blobs: the section has %" PRIu64 " bytes, expected at least 8", s->bytes);
  uint32_t count = get_u32(s->p);
  uint64_t entries_end = 8 + (uint64_t)count * BLOB_ENTRY;
  if (count > MAX_BLOBS || get_u32(s->p + 4) != 0 || entries_end > s->bytes) {
    return fail(
        r, "rule 13: blobs: count is %" PRIu32 ", expected at most 1024 and what the section holds (and a zero word)",
        count);
  }
  uint64_t names_end = entries_end;
  for (uint32_t i = 0; i < count; i++) {
    names_end += get_u32(s->p + 8 + (uint64_t)i * BLOB_ENTRY + 4);
  }
  if (names_end > s->bytes) return fail(r, "rule 13: blobs: the names reach past the section");
  uint64_t name_at = entries_end, data_at = names_end;
  for (uint32_t i = 0; i < count; i++) {
    if (!check_blob(r, i, &name_at, &data_at)) return false;
  }
  if (data_at != s->bytes) {
    return fail(r, "rule 13: blobs: the last datum ends at %" PRIu64 ", expected the end of the section, %" PRIu64,
                data_at, s->bytes);
  }
  return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Resident directory

typedef struct {
  uint16_t first, last;
} role_range;

static const role_range kRoleRanges[] = {{0, 8}, {16, 28}, {30, 31}, {32, 35}, {38, 39}, {40, 42}, {48, 51}, {64, 73}};

static bool is_known_role(uint16_t role) {
  for (size_t i = 0; i < sizeof kRoleRanges / sizeof kRoleRanges[0]; i++) {
    if (role >= kRoleRanges[i].first && role <= kRoleRanges[i].last) return true;
  }
  return false;
}

static quoted tensor_name(const clb_tensor *t) {
  return quote(t->name, t->name_bytes);
}

// The fields of entry i, and rules 14 to 17 as far as they concern one entry.
static bool parse_tensor(loader *r, size_t i, uint32_t name_at, const section *names) {
  const uint8_t *e = r->c->sections[SECTION_RESIDENT].p + 16 + i * TENSOR_ENTRY;
  clb_tensor *t = &r->c->tensors[i];
  uint32_t name_offset = get_u32(e + 72), name_bytes = get_u32(e + 76);
  if (name_bytes < 1 || name_bytes > MAX_NAME || name_offset != name_at || name_bytes > names->bytes - name_at) {
    return fail(r,
                "rule 16: tensor %zu: its name has %" PRIu32 " bytes at %" PRIu32 ", expected 1 ... 255 at %" PRIu32
                " and within the names",
                i, name_bytes, name_offset, name_at);
  }
  *t = (clb_tensor){.name = (const char *)names->p + name_offset,
                    .name_bytes = name_bytes,
                    .type = get_u32(e + 16),
                    .role = get_u16(e + 20),
                    .group = get_u16(e + 22),
                    .layer = get_i32(e + 24),
                    .alias = (get_u32(e + 28) & 1) != 0,
                    .alias_of = get_u32(e + 32),
                    .n_dims = get_u32(e + 36),
                    .offset = get_u64(e),
                    .bytes = get_u64(e + 8),
                    .crc32c = get_u32(e + 80),
                    .sha256 = e + 96};
  for (size_t d = 0; d < 4; d++) t->shape[d] = get_u64(e + 40 + 8 * d);
  quoted q = tensor_name(t);
  if (!is_utf8((const uint8_t *)t->name, name_bytes))
    return fail(r, "rule 16: tensor %zu: the name %s is not UTF-8", i, q.s);
  if (t->n_dims < 1 || t->n_dims > 4) {
    return fail(r, "rule 15: tensor %s: n_dims is %" PRIu32 ", expected 1 ... 4", q.s, t->n_dims);
  }
  for (uint32_t d = t->n_dims; d < 4; d++) {
    if (t->shape[d] != 0) return fail(r, "rule 15: tensor %s: unused shape[%" PRIu32 "] is not zero", q.s, d);
  }
  char place[160];
  snprintf(place, sizeof place, "tensor %s", q.s);
  uint64_t bytes = 0;
  if (!size_of_shape(r, 15, place, t->type, t->shape, t->n_dims, &bytes)) return false;
  if (t->bytes != bytes) {
    return fail(r, "rule 15: tensor %s: bytes is %" PRIu64 ", expected %" PRIu64 " from its type and shape", q.s,
                t->bytes, bytes);
  }
  if (get_u32(e + 28) > 1 || !is_zero(e + 84, 12) || (!t->alias && t->alias_of != 0)) {
    return fail(
        r, "rule 14: tensor %s: an undescribed flag or byte is not zero, or alias_of is set without being an alias",
        q.s);
  }
  return true;
}

// Rules 14 (group order) and 17, given the tensor before.
static bool check_tensor_place(loader *r, size_t i) {
  const clb_tensor *t = &r->c->tensors[i];
  quoted q = tensor_name(t);
  if (t->group < CLB_GROUP_EVERY_TOKEN || t->group > CLB_GROUP_OPTIONAL || (i > 0 && t->group < t[-1].group)) {
    return fail(r, "rule 14: tensor %s: group is %u, expected 1 ... 3 and not below the one before it", q.s, t->group);
  }
  uint64_t n_layers;
  if (__builtin_add_overflow(spec_u64(r->c, "n_layers"), spec_u64(r->c, "n_mtp_layers"), &n_layers))
    n_layers = UINT64_MAX;
  if (t->layer < -1 || (t->layer >= 0 && (uint64_t)t->layer >= n_layers)) {
    return fail(r, "rule 17: tensor %s: layer is %" PRId32 ", expected -1 or less than %" PRIu64, q.s, t->layer,
                n_layers);
  }
  if (t->group != CLB_GROUP_OPTIONAL && (t->role == CLB_ROLE_OTHER || !is_known_role(t->role))) {
    return fail(r, "rule 17: tensor %s: role is %u, expected one of the table other than 0 in group %u", q.s, t->role,
                t->group);
  }
  return true;
}

// Rule 14: an alias repeats what its target says.
static bool check_alias(loader *r, size_t i) {
  const clb_container *c = r->c;
  const clb_tensor *t = &c->tensors[i];
  quoted q = tensor_name(t);
  if (t->alias_of >= c->n_tensors || c->tensors[t->alias_of].alias) {
    return fail(r, "rule 14: tensor %s: alias_of is %" PRIu32 ", expected an entry below %zu that is not an alias", q.s,
                t->alias_of, c->n_tensors);
  }
  const clb_tensor *target = &c->tensors[t->alias_of];
  if (t->offset != target->offset || t->bytes != target->bytes || t->type != target->type ||
      t->n_dims != target->n_dims || memcmp(t->shape, target->shape, sizeof t->shape) != 0 ||
      t->crc32c != target->crc32c || memcmp(t->sha256, target->sha256, 32) != 0) {
    return fail(r,
                "rule 14: tensor %s: offset, bytes, type, shape or checksums differ from those of the tensor it is an "
                "alias of",
                q.s);
  }
  return true;
}

// Rule 14: tensors follow each other from data_offset to expert_offset.
static bool check_tensor_sequence(loader *r) {
  const clb_container *c = r->c;
  uint64_t end = c->data_offset;
  uint16_t group = 0;
  for (size_t i = 0; i < c->n_tensors; i++) {
    const clb_tensor *t = &c->tensors[i];
    if (t->alias) {
      if (!check_alias(r, i)) return false;
      continue;
    }
    uint64_t expected = align_up(end, t->group != group ? c->alignment : 64);
    if (t->offset != expected || expected > c->expert_offset || t->bytes > c->expert_offset - expected) {
      quoted q = tensor_name(t);
      return fail(r,
                  "rule 14: tensor %s: %" PRIu64 " bytes at offset %" PRIu64 ", expected at %" PRIu64
                  " and within expert_offset, %" PRIu64,
                  q.s, t->bytes, t->offset, expected, c->expert_offset);
    }
    end = t->offset + t->bytes;
    group = t->group;
  }
  if (align_up(end, c->alignment) != c->expert_offset) {
    return fail(
        r, "rule 14: page 0: expert_offset is %" PRIu64 ", expected %" PRIu64 ", the aligned end of the last tensor",
        c->expert_offset, align_up(end, c->alignment));
  }
  return true;
}

typedef struct {
  const char *p;
  uint32_t n_bytes;
} name_ref;

static int compare_name_refs(const void *a, const void *b) {
  const name_ref *x = a, *y = b;
  return compare_names(x->p, x->n_bytes, y->p, y->n_bytes);
}

static bool check_names_unique(loader *r) {
  const clb_container *c = r->c;
  if (c->n_tensors == 0) return true;
  name_ref *names = malloc(c->n_tensors * sizeof *names);
  if (names == NULL) return out_of_memory(r, "tensor names");
  for (size_t i = 0; i < c->n_tensors; i++) names[i] = (name_ref){c->tensors[i].name, c->tensors[i].name_bytes};
  qsort(names, c->n_tensors, sizeof *names, compare_name_refs);
  bool ok = true;
  for (size_t i = 1; i < c->n_tensors && ok; i++) {
    if (compare_name_refs(&names[i - 1], &names[i]) == 0) {
      quoted q = quote(names[i].p, names[i].n_bytes);
      ok = fail(r, "rule 16: two tensors have the name %s", q.s);
    }
  }
  free(names);
  return ok;
}

static int compare_roles(const void *a, const void *b) {
  const role_key *x = a, *y = b;
  if (x->role != y->role) return x->role < y->role ? -1 : 1;
  return (x->layer > y->layer) - (x->layer < y->layer);
}

// Rule 17: a role once per layer; leaves the table for clb_container_find.
static bool index_roles(loader *r) {
  clb_container *c = r->c;
  c->by_role = malloc((c->n_tensors > 0 ? c->n_tensors : 1) * sizeof *c->by_role);
  if (c->by_role == NULL) return out_of_memory(r, "tensor roles");
  for (size_t i = 0; i < c->n_tensors; i++) {
    const clb_tensor *t = &c->tensors[i];
    if (t->role == CLB_ROLE_OTHER || !is_known_role(t->role)) continue;
    c->by_role[c->n_by_role++] = (role_key){t->role, t->layer, (uint32_t)i};
  }
  qsort(c->by_role, c->n_by_role, sizeof *c->by_role, compare_roles);
  for (size_t i = 1; i < c->n_by_role; i++) {
    if (compare_roles(&c->by_role[i - 1], &c->by_role[i]) == 0) {
      quoted q = tensor_name(&c->tensors[c->by_role[i].tensor]), p = tensor_name(&c->tensors[c->by_role[i - 1].tensor]);
      return fail(r, "rule 17: tensors %s and %s both have role %u in layer %" PRId32, p.s, q.s, c->by_role[i].role,
                  c->by_role[i].layer);
    }
  }
  return true;
}

static bool parse_directory(loader *r) {
  clb_container *c = r->c;
  const section *s = &c->sections[SECTION_RESIDENT];
  if (s->bytes < 16)
    return fail(r, "rule 16: resident directory: the section has %" PRIu64 " bytes, expected 16", s->bytes);
  uint32_t n_tensors = get_u32(s->p);
  uint64_t names_bytes = get_u64(s->p + 8), names_at = 16 + (uint64_t)n_tensors * TENSOR_ENTRY;
  if (n_tensors > MAX_TENSORS || get_u32(s->p + 4) != TENSOR_ENTRY || names_at > s->bytes ||
      names_bytes != s->bytes - names_at) {
    return fail(r,
                "rule 16: resident directory: %" PRIu32 " entries of %" PRIu32 " bytes and %" PRIu64
                " bytes of names, expected at most 16384, 128, and together the section's %" PRIu64,
                n_tensors, get_u32(s->p + 4), names_bytes, s->bytes);
  }
  c->tensors = calloc(n_tensors > 0 ? n_tensors : 1, sizeof *c->tensors);
  if (c->tensors == NULL) return out_of_memory(r, "resident directory");
  c->n_tensors = n_tensors;
  section names = {s->p + names_at, names_bytes};
  uint32_t name_at = 0;
  for (size_t i = 0; i < n_tensors; i++) {
    if (!parse_tensor(r, i, name_at, &names) || !check_tensor_place(r, i)) return false;
    name_at += c->tensors[i].name_bytes;
  }
  if (name_at != names_bytes) {
    return fail(r, "rule 16: resident directory: the names end at %" PRIu32 ", expected %" PRIu64, name_at,
                names_bytes);
  }
  return check_names_unique(r) && index_roles(r) && check_tensor_sequence(r);
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows, layouts, expert index

static bool parse_row(loader *r, size_t i) {
  clb_container *c = r->c;
  const uint8_t *e = c->sections[SECTION_ROWS].p + 16 + i * ROW_ENTRY;
  clb_row *row = &c->rows[i];
  *row = (clb_row){get_i32(e), get_u32(e + 4), get_u32(e + 8)};
  if (get_u32(e + 12) != 0 || !is_zero(e + 16, 16)) {
    return fail(r, "rule 18: row %zu: flags or undescribed bytes are not zero", i);
  }
  if (row->stream > 1 || row->layer < 0) {
    return fail(r, "rule 18: row %zu: stream is %" PRIu32 " and layer %" PRId32 ", expected 0 or 1 and at least 0", i,
                row->stream, row->layer);
  }
  if (i > 0 && (row->stream < row[-1].stream || (row->stream == row[-1].stream && row->layer <= row[-1].layer))) {
    return fail(r, "rule 18: row %zu: stream %" PRIu32 ", layer %" PRId32 " does not come after the row before it", i,
                row->stream, row->layer);
  }
  if (row->n_experts < 1 || row->n_experts > c->n_columns) {
    return fail(r, "rule 18: row %zu (layer %" PRId32 "): n_experts is %" PRIu32 ", expected 1 ... %zu", i, row->layer,
                row->n_experts, c->n_columns);
  }
  return true;
}

static bool parse_rows(loader *r) {
  clb_container *c = r->c;
  const section *s = &c->sections[SECTION_ROWS];
  if (s->bytes < 16) return fail(r, "rule 18: row table: the section has %" PRIu64 " bytes, expected 16", s->bytes);
  uint32_t n_rows = get_u32(s->p), n_columns = get_u32(s->p + 4);
  if (n_rows > MAX_ROWS || n_columns > MAX_COLUMNS || get_u32(s->p + 8) != ROW_ENTRY || get_u32(s->p + 12) != 0 ||
      s->bytes != 16 + (uint64_t)n_rows * ROW_ENTRY) {
    return fail(r,
                "rule 18: row table: %" PRIu32 " rows of %" PRIu32 " bytes and %" PRIu32
                " columns, expected at most 65536, "
                "32, at most 65536 (and a zero word), and together the section's %" PRIu64,
                n_rows, get_u32(s->p + 8), n_columns, s->bytes);
  }
  c->rows = calloc(n_rows > 0 ? n_rows : 1, sizeof *c->rows);
  if (c->rows == NULL) return out_of_memory(r, "row table");
  c->n_rows = n_rows;
  c->n_columns = n_columns;
  uint32_t widest = 0;
  for (size_t i = 0; i < n_rows; i++) {
    if (!parse_row(r, i)) return false;
    if (c->rows[i].n_experts > widest) widest = c->rows[i].n_experts;
  }
  if ((uint64_t)n_rows * n_columns > MAX_CELLS) {
    return fail(
        r, "rule 18: row table: %" PRIu32 " rows of %" PRIu32 " columns are %" PRIu64 " cells, expected at most %d",
        n_rows, n_columns, (uint64_t)n_rows * n_columns, MAX_CELLS);
  }
  if (widest != n_columns) {
    return fail(r, "rule 18: row table: n_columns is %" PRIu32 ", expected %" PRIu32 ", the most experts of a row",
                n_columns, widest);
  }
  return true;
}

static const clb_part *find_part(const clb_layout *layout, uint16_t role) {
  for (uint32_t i = 0; i < layout->n_parts; i++) {
    if (layout->parts[i].role == role) return &layout->parts[i];
  }
  return NULL;
}

// Rule 23, one part slot; the part before it ends at *end.
static bool parse_part(loader *r, size_t l, uint32_t i, const uint8_t *e, uint64_t *end) {
  clb_layout *layout = &r->c->layouts[l];
  clb_part *part = &layout->parts[i];
  *part = (clb_part){.role = get_u16(e),
                     .permutation = get_u16(e + 2),
                     .type = get_u32(e + 4),
                     .offset = get_u64(e + 8),
                     .bytes = get_u64(e + 16),
                     .rows = get_u64(e + 24),
                     .cols = get_u64(e + 32)};
  char place[64];
  snprintf(place, sizeof place, "layout %zu, part %" PRIu32, l, i);
  if (part->role < CLB_PART_GATE || part->role > CLB_PART_DOWN_BIAS || (i > 0 && part->role <= part[-1].role)) {
    return fail(r, "rule 23: %s: role is %u, expected 1 ... 6 and more than the one before it", place, part->role);
  }
  if (part->permutation != 0 || !is_zero(e + 40, 24)) {
    return fail(r, "rule 23: %s: permutation or undescribed bytes are not zero", place);
  }
  uint64_t bytes = 0;
  const uint64_t shape[2] = {part->rows, part->cols};
  if (!size_of_shape(r, 23, place, part->type, shape, 2, &bytes)) return false;
  uint64_t expected = align_up(*end, 64);
  if (part->bytes != bytes || part->offset != expected || bytes >= kMaxSize - expected) {
    return fail(r, "rule 23: %s: %" PRIu64 " bytes at %" PRIu64 ", expected %" PRIu64 " at %" PRIu64, place,
                part->bytes, part->offset, bytes, expected);
  }
  *end = part->offset + part->bytes;
  return true;
}

static bool check_layout_shapes(loader *r, size_t l) {
  const clb_layout *layout = &r->c->layouts[l];
  const clb_part *gate = find_part(layout, CLB_PART_GATE), *up = find_part(layout, CLB_PART_UP);
  const clb_part *down = find_part(layout, CLB_PART_DOWN);
  if (gate == NULL || up == NULL || down == NULL) {
    return fail(r, "rule 23: layout %zu: gate, up or down is missing", l);
  }
  uint64_t width = gate->rows, hidden = spec_u64(r->c, "hidden_size");
  if (gate->cols != hidden || up->rows != width || up->cols != hidden || down->rows != hidden || down->cols != width) {
    return fail(r,
                "rule 23: layout %zu: gate is [%" PRIu64 ", %" PRIu64 "], up [%" PRIu64 ", %" PRIu64 "], down [%" PRIu64
                ", %" PRIu64 "], expected [width, %" PRIu64 "] twice and [%" PRIu64 ", width]",
                l, gate->rows, gate->cols, up->rows, up->cols, down->rows, down->cols, hidden, hidden);
  }
  const uint64_t bias_size[] = {width, width, hidden};
  for (uint16_t role = CLB_PART_GATE_BIAS; role <= CLB_PART_DOWN_BIAS; role++) {
    const clb_part *bias = find_part(layout, role);
    uint64_t n = bias_size[role - CLB_PART_GATE_BIAS];
    if (bias != NULL && (bias->rows != 1 || bias->cols != n)) {
      return fail(r,
                  "rule 23: layout %zu: bias part of role %u is [%" PRIu64 ", %" PRIu64 "], expected [1, %" PRIu64 "]",
                  l, role, bias->rows, bias->cols, n);
    }
  }
  return true;
}

static bool parse_layout(loader *r, size_t l) {
  clb_layout *layout = &r->c->layouts[l];
  const uint8_t *e = r->c->sections[SECTION_LAYOUTS].p + 8 + l * LAYOUT_ENTRY;
  layout->bytes = get_u64(e);
  layout->n_parts = get_u32(e + 8);
  if (layout->n_parts > CLB_MAX_PARTS || get_u32(e + 12) != 0 || !is_zero(e + 16, 48)) {
    uint32_t n = layout->n_parts;
    layout->n_parts = 0;
    return fail(
        r, "rule 23: layout %zu: n_parts is %" PRIu32 ", expected at most 8 (and zero flags and undescribed bytes)", l,
        n);
  }
  uint64_t end = 0;
  for (uint32_t i = 0; i < layout->n_parts; i++) {
    if (!parse_part(r, l, i, e + 64 + (size_t)i * PART_ENTRY, &end)) return false;
  }
  size_t used = 64 + (size_t)layout->n_parts * PART_ENTRY;
  if (!is_zero(e + used, LAYOUT_ENTRY - used)) return fail(r, "rule 23: layout %zu: unused part slots are not zero", l);
  if (layout->bytes != end) {
    return fail(r, "rule 23: layout %zu: bytes is %" PRIu64 ", expected %" PRIu64 ", the end of its last part", l,
                layout->bytes, end);
  }
  return check_layout_shapes(r, l);
}

static int compare_layouts(const void *a, const void *b) {
  const uint8_t *const *x = a, *const *y = b;
  return memcmp(*x, *y, LAYOUT_ENTRY);
}

static bool check_layouts_distinct(loader *r) {
  const clb_container *c = r->c;
  const uint8_t *base = c->sections[SECTION_LAYOUTS].p + 8;
  const uint8_t **entries = malloc(c->n_layouts * sizeof *entries);
  if (entries == NULL) return out_of_memory(r, "layout table");
  for (size_t i = 0; i < c->n_layouts; i++) entries[i] = base + i * LAYOUT_ENTRY;
  qsort(entries, c->n_layouts, sizeof *entries, compare_layouts);
  bool ok = true;
  for (size_t i = 1; i < c->n_layouts && ok; i++) {
    if (compare_layouts(&entries[i - 1], &entries[i]) == 0) {
      ok = fail(r, "rule 23: layouts %zu and %zu are equal", (size_t)(entries[i - 1] - base) / LAYOUT_ENTRY,
                (size_t)(entries[i] - base) / LAYOUT_ENTRY);
    }
  }
  free(entries);
  return ok;
}

static bool parse_layouts(loader *r) {
  clb_container *c = r->c;
  const section *s = &c->sections[SECTION_LAYOUTS];
  if (s->bytes < 8) return fail(r, "rule 23: layout table: the section has %" PRIu64 " bytes, expected 8", s->bytes);
  uint32_t n = get_u32(s->p);
  if (n < 1 || n > MAX_LAYOUTS || get_u32(s->p + 4) != LAYOUT_ENTRY || s->bytes != 8 + (uint64_t)n * LAYOUT_ENTRY) {
    return fail(r,
                "rule 23: layout table: %" PRIu32 " entries of %" PRIu32
                " bytes, expected 1 ... 65536 of 576, and together "
                "the section's %" PRIu64,
                n, get_u32(s->p + 4), s->bytes);
  }
  c->layouts = calloc(n, sizeof *c->layouts);
  if (c->layouts == NULL) return out_of_memory(r, "layout table");
  c->n_layouts = n;
  for (size_t i = 0; i < n; i++) {
    if (!parse_layout(r, i)) return false;
  }
  return check_layouts_distinct(r);
}

static const uint8_t *cell_at(const clb_container *c, size_t row, size_t column) {
  return c->sections[SECTION_INDEX].p + (row * c->n_columns + column) * CELL_BYTES;
}

static const uint32_t kNoCell = UINT32_MAX;

// Rules 19 and 20 for one cell: its fields, and its rank into by_rank[n_blocks] as [row * n_columns + column].
static bool check_cell(loader *r, size_t row, size_t column, uint32_t *by_rank, uint64_t n_blocks, bool *layout_used) {
  const clb_container *c = r->c;
  const uint8_t *e = cell_at(c, row, column);
  char place[96];
  snprintf(place, sizeof place, "row %zu (layer %" PRId32 "), expert %zu", row, c->rows[row].layer, column);
  if (column >= c->rows[row].n_experts) {
    return is_zero(e, CELL_BYTES) ||
           fail(r, "rule 19: %s: the cell lies beyond the row's %" PRIu32 " experts and is not zero", place,
                c->rows[row].n_experts);
  }
  uint32_t layout = get_u32(e + 16), rank = get_u32(e + 20);
  if (get_u16(e + 26) != 1 || get_u16(e + 24) != 0) {
    return fail(r, "rule 19: %s: flags are %u and part is %u, expected 1 and 0", place, get_u16(e + 26),
                get_u16(e + 24));
  }
  if (layout >= c->n_layouts) {
    return fail(r, "rule 19: %s: layout is %" PRIu32 ", expected less than %zu", place, layout, c->n_layouts);
  }
  if (get_u64(e + 8) != c->layouts[layout].bytes) {
    return fail(r, "rule 19: %s: bytes is %" PRIu64 ", expected %" PRIu64 " as in layout %" PRIu32, place,
                get_u64(e + 8), c->layouts[layout].bytes, layout);
  }
  if (rank >= n_blocks || by_rank[rank] != kNoCell) {
    return fail(r, "rule 20: %s: rank is %" PRIu32 ", expected one below %" PRIu64 " that no other block has", place,
                rank, n_blocks);
  }
  layout_used[layout] = true;
  by_rank[rank] = (uint32_t)(row * c->n_columns + column);
  return true;
}

// Rule 20: blocks follow each other in order of rank, from expert_offset to the end of the file.
static bool check_block_sequence(loader *r, const uint32_t *by_rank, uint64_t n_blocks) {
  const clb_container *c = r->c;
  uint64_t at = c->expert_offset;
  for (uint64_t rank = 0; rank < n_blocks; rank++) {
    size_t row = by_rank[rank] / c->n_columns, column = by_rank[rank] % c->n_columns;
    const uint8_t *e = cell_at(c, row, column);
    uint64_t offset = get_u64(e), bytes = get_u64(e + 8);
    if (offset != at || at > c->file_size || bytes > c->file_size - at) {
      return fail(r,
                  "rule 20: row %zu (layer %" PRId32 "), expert %zu: %" PRIu64 " bytes at offset %" PRIu64
                  ", expected at %" PRIu64 " and within the file's %" PRIu64,
                  row, c->rows[row].layer, column, bytes, offset, at, c->file_size);
    }
    at = align_up(offset + bytes, c->alignment);
  }
  if (at != c->file_size) {
    return fail(r, "rule 20: the last block's padding ends at %" PRIu64 ", expected the end of the file, %" PRIu64, at,
                c->file_size);
  }
  return true;
}

static bool check_cells(loader *r, uint32_t *by_rank, uint64_t n_blocks, bool *layout_used) {
  const clb_container *c = r->c;
  for (uint64_t i = 0; i < n_blocks; i++) by_rank[i] = kNoCell;
  for (size_t row = 0; row < c->n_rows; row++) {
    for (size_t column = 0; column < c->n_columns; column++) {
      if (!check_cell(r, row, column, by_rank, n_blocks, layout_used)) return false;
    }
  }
  for (size_t i = 0; i < c->n_layouts; i++) {
    if (!layout_used[i]) return fail(r, "rule 23: layout %zu is used by no block", i);
  }
  return check_block_sequence(r, by_rank, n_blocks);
}

static bool check_index(loader *r) {
  const clb_container *c = r->c;
  uint64_t expected = (uint64_t)c->n_rows * c->n_columns * CELL_BYTES, n_blocks = 0;
  if (c->sections[SECTION_INDEX].bytes != expected) {
    return fail(
        r, "rule 19: expert index: the section has %" PRIu64 " bytes, expected %" PRIu64 " for %zu rows of %zu columns",
        c->sections[SECTION_INDEX].bytes, expected, c->n_rows, c->n_columns);
  }
  for (size_t i = 0; i < c->n_rows; i++) n_blocks += c->rows[i].n_experts;
  uint32_t *by_rank = malloc((n_blocks > 0 ? (size_t)n_blocks : 1) * sizeof *by_rank);
  bool *layout_used = calloc(c->n_layouts, sizeof *layout_used);
  bool ok = by_rank != NULL && layout_used != NULL;
  ok = ok ? check_cells(r, by_rank, n_blocks, layout_used) : out_of_memory(r, "expert index");
  free(by_rank);
  free(layout_used);
  return ok;
}

// Rule 24: the router of a row of stream 0.
static bool check_router(loader *r, const clb_row *row) {
  const clb_tensor *router = clb_container_find(r->c, CLB_ROLE_ROUTER, row->layer);
  if (router == NULL) return fail(r, "rule 24: layer %" PRId32 " has experts and no router tensor", row->layer);
  if (router->shape[0] != row->n_experts) {
    quoted q = tensor_name(router);
    return fail(
        r, "rule 24: tensor %s: the router has %" PRIu64 " rows, expected %" PRIu32 " as layer %" PRId32 " has experts",
        q.s, router->shape[0], row->n_experts, row->layer);
  }
  return true;
}

static bool check_census(loader *r) {
  const clb_container *c = r->c;
  const uint64_t *moe_layers = NULL;
  size_t n_moe_layers = 0, row = 0;
  (void)clb_spec_u64_array(c, "moe_layers", &moe_layers, &n_moe_layers);
  uint64_t n_layers = spec_u64(c, "n_layers"), n_all = 0, top_k = spec_u64(c, "top_k");
  bool executable = false;
  (void)clb_spec_bool(c, "executable", &executable);
  for (size_t layer = 0; layer < n_moe_layers; layer++) {
    bool has_row = row < c->n_rows && c->rows[row].stream == 0 && (size_t)c->rows[row].layer == layer;
    if (has_row != (moe_layers[layer] == 1)) {
      return fail(r, "rule 24: layer %zu has %s row in stream 0, expected %s by moe_layers", layer,
                  has_row ? "a" : "no", has_row ? "none" : "one");
    }
    if (has_row && executable && !check_router(r, &c->rows[row])) return false;
    row += has_row ? 1 : 0;
  }
  if (__builtin_add_overflow(n_layers, spec_u64(c, "n_mtp_layers"), &n_all)) n_all = UINT64_MAX;
  for (size_t i = 0; i < c->n_rows; i++) {
    const clb_row *x = &c->rows[i];
    if ((i >= row && x->stream == 0) || (uint64_t)x->layer >= n_all) {
      return fail(r, "rule 24: row %zu: stream %" PRIu32 ", layer %" PRId32 " is not a layer of the spec", i, x->stream,
                  x->layer);
    }
    if (top_k > x->n_experts) {
      return fail(r, "rule 24: spec: top_k is %" PRIu64 ", expected at most %" PRIu32 ", the experts of row %zu", top_k,
                  x->n_experts, i);
    }
  }
  return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Open and close

static bool load(loader *r) {
  clb_container *c = r->c;
  uint8_t page[CLB_PAGE0_BYTES];
  if (c->file_size < CLB_PAGE0_BYTES || c->file_size >= kMaxSize) {
    return fail(r, "rule 5: the file has %" PRIu64 " bytes, expected at least 4096 (page 0): this is not a container",
                c->file_size);
  }
  clb_kv *provenance = NULL;
  size_t n_provenance = 0;
  bool ok = read_at(r, 0, page, sizeof page) && check_page0(r, page) && load_sections(r, page) && check_reserve(r) &&
            parse_kv(r, SECTION_SPEC, &c->spec, &c->n_spec) && check_spec(r) &&
            parse_kv(r, SECTION_PROVENANCE, &provenance, &n_provenance) && check_blobs(r) && parse_directory(r) &&
            parse_rows(r) && parse_layouts(r) && check_index(r) && check_census(r);
  free(provenance);
  return ok;
}

// Loads through `r`, whose c, fd and memory are still unset; takes `fd` over.
static clb_container *open_common(loader *r, int fd, uint64_t file_size) {
  clb_container *c = calloc(1, sizeof *c);
  if (c == NULL) {
    out_of_memory(r, "container");
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
    fail(&r, "cannot open it: %s (errno %d)", why, number);
  } else if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
    fail(&r, "not a regular file, expected a container");
    close(fd);
  } else {
    c = open_common(&r, fd, (uint64_t)st.st_size);
  }
  if (c != NULL && (c->path = strdup(path)) == NULL) {
    out_of_memory(&r, "path");
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

size_t clb_container_n_tensors(const clb_container *c) {
  return c->n_tensors;
}

const clb_tensor *clb_container_tensor(const clb_container *c, size_t i) {
  return i < c->n_tensors ? &c->tensors[i] : NULL;
}

const clb_tensor *clb_container_find(const clb_container *c, uint16_t role, int32_t layer) {
  if (c->n_by_role == 0) return NULL;
  role_key key = {role, layer, 0};
  const role_key *found = bsearch(&key, c->by_role, c->n_by_role, sizeof key, compare_roles);
  return found == NULL ? NULL : &c->tensors[found->tensor];
}

size_t clb_container_n_rows(const clb_container *c) {
  return c->n_rows;
}
size_t clb_container_n_columns(const clb_container *c) {
  return c->n_columns;
}

const clb_row *clb_container_row(const clb_container *c, size_t row) {
  return row < c->n_rows ? &c->rows[row] : NULL;
}

static int compare_rows(const void *a, const void *b) {
  const clb_row *x = a, *y = b;
  if (x->stream != y->stream) return x->stream < y->stream ? -1 : 1;
  return (x->layer > y->layer) - (x->layer < y->layer);
}

ptrdiff_t clb_container_row_of(const clb_container *c, uint32_t stream, int32_t layer) {
  if (c->n_rows == 0) return -1;
  clb_row key = {layer, stream, 0};
  const clb_row *found = bsearch(&key, c->rows, c->n_rows, sizeof key, compare_rows);
  return found == NULL ? -1 : found - c->rows;
}

bool clb_container_block(const clb_container *c, size_t row, size_t expert, clb_block *out) {
  if (row >= c->n_rows || expert >= c->rows[row].n_experts) return false;
  const uint8_t *e = cell_at(c, row, expert);
  *out = (clb_block){get_u64(e), get_u64(e + 8), get_u32(e + 16), get_u32(e + 20), get_u32(e + 28), e + 32};
  return true;
}

size_t clb_container_n_layouts(const clb_container *c) {
  return c->n_layouts;
}

const clb_layout *clb_container_layout(const clb_container *c, uint32_t layout) {
  return layout < c->n_layouts ? &c->layouts[layout] : NULL;
}

// ---------------------------------------------------------------------------------------------------------------------
// Spec and blobs

size_t clb_spec_n_keys(const clb_container *c) {
  return c->n_spec;
}
const clb_kv *clb_spec_at(const clb_container *c, size_t i) {
  return i < c->n_spec ? &c->spec[i] : NULL;
}

const clb_kv *clb_spec_find(const clb_container *c, const char *key) {
  size_t low = 0, high = c->n_spec, key_bytes = strlen(key);
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    int order = compare_names(c->spec[middle].key, c->spec[middle].key_bytes, key, key_bytes);
    if (order == 0) return &c->spec[middle];
    if (order < 0) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return NULL;
}

static const clb_kv *find_typed(const clb_container *c, const char *key, enum clb_kv_type type) {
  const clb_kv *kv = clb_spec_find(c, key);
  return kv != NULL && kv->type == (uint32_t)type ? kv : NULL;
}

bool clb_spec_u64(const clb_container *c, const char *key, uint64_t *out) {
  const clb_kv *kv = find_typed(c, key, CLB_KV_U64);
  if (kv != NULL) *out = get_u64(kv->value);
  return kv != NULL;
}

bool clb_spec_i64(const clb_container *c, const char *key, int64_t *out) {
  const clb_kv *kv = find_typed(c, key, CLB_KV_I64);
  if (kv != NULL) memcpy(out, kv->value, sizeof *out);
  return kv != NULL;
}

bool clb_spec_f64(const clb_container *c, const char *key, double *out) {
  const clb_kv *kv = find_typed(c, key, CLB_KV_F64);
  if (kv != NULL) memcpy(out, kv->value, sizeof *out);
  return kv != NULL;
}

bool clb_spec_bool(const clb_container *c, const char *key, bool *out) {
  const clb_kv *kv = find_typed(c, key, CLB_KV_BOOL);
  if (kv != NULL) *out = get_u64(kv->value) == 1;
  return kv != NULL;
}

bool clb_spec_string(const clb_container *c, const char *key, const char **out, size_t *n_bytes) {
  const clb_kv *kv = find_typed(c, key, CLB_KV_STRING);
  if (kv == NULL) return false;
  *out = (const char *)kv->value;
  *n_bytes = kv->n;
  return true;
}

// Values lie at multiples of 8 of the metadata, which malloc aligned.
bool clb_spec_u64_array(const clb_container *c, const char *key, const uint64_t **out, size_t *n) {
  const clb_kv *kv = find_typed(c, key, CLB_KV_U64_ARRAY);
  if (kv == NULL) return false;
  *out = (const uint64_t *)(const void *)kv->value;
  *n = kv->n;
  return true;
}

bool clb_spec_f64_array(const clb_container *c, const char *key, const double **out, size_t *n) {
  const clb_kv *kv = find_typed(c, key, CLB_KV_F64_ARRAY);
  if (kv == NULL) return false;
  *out = (const double *)(const void *)kv->value;
  *n = kv->n;
  return true;
}

const uint8_t *clb_container_blob(const clb_container *c, const char *name, uint64_t *n_bytes) {
  const section *s = &c->sections[SECTION_BLOBS];
  uint32_t count = get_u32(s->p);
  for (uint32_t i = 0; i < count; i++) {
    const uint8_t *e = s->p + 8 + (uint64_t)i * BLOB_ENTRY;
    if (compare_names(s->p + get_u32(e), get_u32(e + 4), name, strlen(name)) == 0) {
      *n_bytes = get_u64(e + 16);
      return s->p + get_u64(e + 8);
    }
  }
  return NULL;
}

const uint8_t *clb_container_tokenizer(const clb_container *c, uint64_t *n_bytes) {
  *n_bytes = c->tokenizer.bytes;
  return c->tokenizer.p;
}
