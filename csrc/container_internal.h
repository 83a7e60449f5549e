// What the parts of the container reader share. container.c: opening; container_sections.c: page 0 and the sections;
// container_spec.c: key-value sections, spec and blobs; container_tensors.c: resident tensors; container_experts.c:
// rows, layouts and index. "Rule N" in a comment or an error text is a rule of docs/format.md.
//
// Nothing of a file is believed before it is compared with something already known, page 0 with the file's real size
// first: so every allocation is bounded by the file, and no sum or product can wrap (sizes are below 2^63, and each is
// checked against what is left before it is added).
#ifndef CLB_CONTAINER_INTERNAL_H
#define CLB_CONTAINER_INTERNAL_H

#include <inttypes.h>
#include <string.h>
#include <sys/types.h>

#include "container.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "containers are little-endian, and read in place"
#endif
_Static_assert(sizeof(off_t) >= 8, "build with -D_FILE_OFFSET_BITS=64");

enum { MAX_NAME = 255 };

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

extern const char *const clb_section_names[N_KNOWN_SECTIONS];

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

// A name as it may appear in one line of text: quoted, bounded, unprintable bytes as '?'.
typedef struct {
  char s[80];
} quoted;

// ---------------------------------------------------------------------------------------------------------------------
// Fields and sizes

static inline uint16_t get_u16(const uint8_t *p) {
  uint16_t x;
  memcpy(&x, p, sizeof x);
  return x;
}

static inline uint32_t get_u32(const uint8_t *p) {
  uint32_t x;
  memcpy(&x, p, sizeof x);
  return x;
}

static inline int32_t get_i32(const uint8_t *p) {
  int32_t x;
  memcpy(&x, p, sizeof x);
  return x;
}

static inline uint64_t get_u64(const uint8_t *p) {
  uint64_t x;
  memcpy(&x, p, sizeof x);
  return x;
}

// x < 2^63 and a <= CLB_MAX_ALIGNMENT, a power of two
static inline uint64_t align_up(uint64_t x, uint64_t a) {
  return (x + a - 1) & ~(a - 1);
}

static inline bool is_zero(const uint8_t *p, uint64_t n) {
  // Each byte is the one before it: at memcmp's speed, for the reserve may be long.
  return n == 0 || (p[0] == 0 && memcmp(p, p + 1, (size_t)n - 1) == 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// container.c: what the checks share

// Writes the refusal; false, so that a check is one line: return clb_refuse(r, "rule 1: ...").
bool clb_refuse(loader *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
bool clb_refuse_memory(loader *r, const char *what);

quoted clb_quote(const void *name, uint64_t n_bytes);
bool clb_is_utf8(const uint8_t *p, uint64_t n_bytes);
bool clb_is_utf8_without_nul(const uint8_t *p, uint64_t n_bytes);

// As bytes; a prefix comes first.
int clb_compare_names(const void *a, uint64_t a_bytes, const void *b, uint64_t b_bytes);

// ---------------------------------------------------------------------------------------------------------------------
// The steps of opening, in their order: each believes what those before it have checked

// container_sections.c: rules 1 to 10.
bool clb_load_page0(loader *r, uint8_t *page);  // page [CLB_PAGE0_BYTES]
bool clb_load_sections(loader *r, const uint8_t *page);
bool clb_check_reserve(loader *r);

// container_spec.c: rules 11 to 13. A key-value section's entries become the caller's, to be freed, also on failure.
bool clb_parse_kv(loader *r, enum section_kind kind, clb_kv **out, size_t *n_out);
bool clb_check_spec(loader *r);
bool clb_check_blobs(loader *r);

// A u64 of the spec that rule 12 has seen.
uint64_t clb_spec_seen_u64(const clb_container *c, const char *key);

// container_tensors.c: rules 14 to 17.
bool clb_parse_directory(loader *r);

// Rule 15: the size of a tensor or part of this type and shape. `place` starts the error text.
bool clb_size_of_shape(loader *r, int rule, const char *place, uint32_t type, const uint64_t *shape, size_t n_dims,
                       uint64_t *n_bytes);

// container_experts.c: rules 18 to 24.
bool clb_parse_rows(loader *r);
bool clb_parse_layouts(loader *r);
bool clb_check_index(loader *r);
bool clb_check_census(loader *r);

#endif
