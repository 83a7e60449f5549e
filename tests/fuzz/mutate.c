#include "mutate.h"

#include <stdbool.h>
#include <string.h>

#include "blocks.h"
#include "check_container.h"
#include "container.h"
#include "crc32c.h"
#include "sha256.h"

enum {
  PAGE = 4096,
  MAX_SECTIONS = 12,  // of an input whose structure is followed
  SECTION_BYTES = 12288,
  SPEC = 1,
  BLOBS,
  PROVENANCE,
  DIRECTORY,
  ROWS,
  INDEX,
  LAYOUTS,
};

typedef struct {
  uint32_t kind, flags;
  size_t n;
  uint8_t bytes[SECTION_BYTES];
} section;

typedef struct {
  uint8_t page[PAGE];
  size_t n_sections;
  section sections[MAX_SECTIONS];
} draft;

static draft work, other;

// ---------------------------------------------------------------------------------------------------------------------
// Numbers

static uint64_t random_state;

static uint64_t random_u64(void) {  // splitmix64
  uint64_t z = random_state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

static size_t below(size_t n) {
  return n == 0 ? 0 : (size_t)(random_u64() % n);
}

static bool once_in(size_t n) {
  return below(n) == 0;
}

static uint64_t get(const uint8_t *p, size_t width) {
  uint64_t x = 0;
  memcpy(&x, p, width);
  return x;
}

static void put(uint8_t *p, uint64_t x, size_t width) {
  memcpy(p, &x, width);
}

static uint64_t align_up(uint64_t x, uint64_t a) {
  return a == 0 ? x : (x + a - 1) / a * a;
}

static uint64_t interesting(uint64_t now) {
  static const uint64_t values[] = {
      0,         1,          2,          3,          4,          5,          7,          8,
      16,        31,         32,         33,         63,         64,         127,        128,
      129,       255,        256,        4095,       4096,       65535,      65536,      65537,
      1 << 18,   0x7fffffff, 0x80000000, 0xffffffff, 1ull << 32, 1ull << 48, 1 << 20,    1ull << 62,
      INT64_MAX, 1ull << 63, UINT64_MAX, 999,        2 << 20,    1ull << 47, 1ull << 60, UINT64_MAX - 63};
  switch (below(5)) {
    case 0:
      return now + 1;
    case 1:
      return now - 1;
    case 2:
      return now ^ 1ull << below(64);
    case 3:
      return below(48);
    default:
      return values[below(sizeof values / sizeof values[0])];
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// A draft from bytes, and back

static bool load(draft *d, const uint8_t *data, size_t n) {
  if (n < PAGE) return false;
  memcpy(d->page, data, PAGE);
  d->n_sections = (size_t)get(d->page + 48, 4);
  if (d->n_sections > MAX_SECTIONS) return false;
  for (size_t i = 0; i < d->n_sections; i++) {
    const uint8_t *e = d->page + 128 + 64 * i;
    uint64_t offset = get(e + 8, 8), bytes = get(e + 16, 8);
    if (offset > n || bytes > n - offset || bytes > SECTION_BYTES) return false;
    section *s = &d->sections[i];
    s->kind = (uint32_t)get(e, 4);
    s->flags = (uint32_t)get(e + 4, 4);
    s->n = (size_t)bytes;
    memcpy(s->bytes, data + offset, s->n);
  }
  return true;
}

static void seal_page(uint8_t *page) {
  put(page + 4092, clb_crc32c(0, page, 4092), 4);
}

// Lays the sections out behind page 0, with checksums that hold. Returns the size, 0 if it exceeds `max`.
static size_t store(draft *d, uint8_t *out, size_t max) {
  size_t end = PAGE;
  for (size_t i = 0; i < d->n_sections; i++) {
    section *s = &d->sections[i];
    size_t start = (size_t)align_up(end, 64);
    if (start + s->n > max) return 0;
    memset(out + end, 0, start - end);
    memcpy(out + start, s->bytes, s->n);
    end = start + s->n;
    uint8_t *e = d->page + 128 + 64 * i;
    put(e, s->kind, 4);
    put(e + 4, s->flags, 4);
    put(e + 8, start, 8);
    put(e + 16, s->n, 8);
    put(e + 24, clb_crc32c(0, s->bytes, s->n), 4);
    clb_sha256(s->bytes, s->n, e + 32);
  }
  memset(d->page + 128 + 64 * d->n_sections, 0, 4092 - 128 - 64 * d->n_sections);
  put(d->page + 48, d->n_sections, 4);
  put(d->page + 56, end - PAGE, 8);
  clb_sha256(d->page + 128, 64 * d->n_sections, d->page + 88);
  seal_page(d->page);
  memcpy(out, d->page, PAGE);
  return end;
}

static section *find(draft *d, uint32_t kind) {
  for (size_t i = 0; i < d->n_sections; i++) {
    if (d->sections[i].kind == kind) return &d->sections[i];
  }
  return NULL;
}

// ---------------------------------------------------------------------------------------------------------------------
// Entries of a section

typedef struct {
  size_t at, n;
} span;

static size_t head_bytes(const section *s) {
  return s->kind == INDEX ? 0 : s->kind == DIRECTORY || s->kind == ROWS ? 16 : 8;
}

static size_t entry_bytes(const section *s) {
  return s->kind == DIRECTORY ? 128 : s->kind == ROWS || s->kind == BLOBS ? 32 : s->kind == LAYOUTS ? 576 : 64;
}

static size_t n_entries(const section *s) {
  size_t head = head_bytes(s), each = entry_bytes(s);
  size_t room = s->n > head ? (s->n - head) / each : 0;
  size_t said = s->kind == INDEX || s->n < 4 ? room : (size_t)get(s->bytes, 4);
  return said < room ? said : room;
}

// Walks the entries of a key-value section up to number `wanted`. Returns how many came before; where it is in *out, n
// = 0 if there is none.
static size_t walk_kv(const section *s, size_t wanted, span *out) {
  size_t at = 8, i = 0;
  *out = (span){0, 0};
  for (; at + 8 <= s->n; i++) {
    const uint8_t *e = s->bytes + at;
    uint64_t n = get(e + 4, 4), value = e[2] == 5 ? n : 8 * n;
    size_t value_at = 8 + (size_t)align_up(get(e, 2), 8);
    if (e[2] == 8) {
      value = 0;
      for (uint64_t k = 0; k < n && at + value_at + value + 4 <= s->n; k++) value += 4 + get(e + value_at + value, 4);
    }
    uint64_t bytes = value_at + align_up(value, 8);
    if (bytes > s->n - at) break;
    if (i == wanted) {
      *out = (span){at, (size_t)bytes};
      break;
    }
    at += (size_t)bytes;
  }
  return i;
}

static size_t kv_count(const section *s) {
  span none;
  return walk_kv(s, SIZE_MAX, &none);
}

static span any_kv(const section *s) {
  span found;
  (void)walk_kv(s, below(kv_count(s)), &found);
  return found;
}

static bool is_kv(const section *s) {
  return s->kind == SPEC || s->kind == PROVENANCE;
}

static span any_entry(const section *s) {
  if (is_kv(s)) return any_kv(s);
  size_t n = n_entries(s);
  if (n == 0) return (span){0, 0};
  return (span){head_bytes(s) + below(n) * entry_bytes(s), entry_bytes(s)};
}

static void cut(section *s, size_t at, size_t n) {
  memmove(s->bytes + at, s->bytes + at + n, s->n - at - n);
  s->n -= n;
}

static bool insert(section *s, size_t at, const uint8_t *bytes, size_t n) {
  uint8_t copy[1024];
  if (n > sizeof copy || n > SECTION_BYTES - s->n) return false;
  memcpy(copy, bytes, n);
  memmove(s->bytes + at + n, s->bytes + at, s->n - at);
  memcpy(s->bytes + at, copy, n);
  s->n += n;
  return true;
}

static void count_by(section *s, int by) {
  if (s->kind != INDEX && s->n >= 4) put(s->bytes, get(s->bytes, 4) + (uint64_t)by, 4);
}

// ---------------------------------------------------------------------------------------------------------------------
// Changes

static void change_field(uint8_t *p, size_t n) {
  size_t width = (size_t)1 << below(4);
  if (n < width) return;
  size_t at = below(n / width) * width;
  uint64_t value = once_in(4) ? get(p + below(n / width) * width, width) : interesting(get(p + at, width));
  put(p + at, value, width);
}

static void change_bytes(section *s) {
  size_t at = below(s->n), n = s->n - at < 64 ? s->n - at : 1 + below(64);
  size_t room = SECTION_BYTES - s->n < 64 ? 0 : 64;
  if (n == 0) return;
  uint8_t piece[192];
  memcpy(piece, s->bytes + at, n);
  size_t now = LLVMFuzzerMutate(piece, n, once_in(2) ? n : n + room);
  cut(s, at, n);
  (void)insert(s, at, piece, now);
}

static void change_entries(section *s) {
  span e = any_entry(s), f = any_entry(s);
  if (e.n == 0) return;
  uint8_t copy[1024];
  switch (below(4)) {
    case 0:
      cut(s, e.at, e.n);
      count_by(s, -1);
      break;
    case 1:
      if (insert(s, f.at, s->bytes + e.at, e.n)) count_by(s, 1);
      break;
    case 2:  // two fields of one entry, which often have to agree
      change_field(s->bytes + e.at, e.n);
      change_field(s->bytes + e.at, e.n);
      break;
    default:
      if (e.n != f.n || e.n > sizeof copy) return;
      memcpy(copy, s->bytes + e.at, e.n);
      memcpy(s->bytes + e.at, s->bytes + f.at, e.n);
      memcpy(s->bytes + f.at, copy, e.n);
  }
}

// The names behind the entries of the directory or the blobs.
static void change_name(section *s) {
  size_t names = head_bytes(s) + n_entries(s) * entry_bytes(s);
  if (names >= s->n) return;
  size_t at = names + below(s->n - names);
  if (once_in(2)) {
    s->bytes[at] = (uint8_t)(once_in(2) ? random_u64() : 'a' + below(26));
  } else {
    memmove(s->bytes + at, s->bytes + names, s->n - at < 4 ? s->n - at : 4);
  }
}

static void change_value(section *s) {
  static const uint8_t types[] = {1, 2, 3, 4, 5, 6, 7, 8, 0, 9, 255};
  span e = any_kv(s);
  if (e.n == 0) return;
  uint8_t *p = s->bytes + e.at;
  size_t value_at = 8 + (size_t)align_up(get(p, 2), 8);
  switch (below(5)) {
    case 0:
      p[2] = types[below(sizeof types)];
      break;
    case 1:
      put(p + 4, interesting(get(p + 4, 4)), 4);
      break;
    case 2:  // a longer or shorter array
      if (insert(s, e.at + e.n, s->bytes + e.at + e.n - 8, 8)) put(s->bytes + e.at + 4, get(p + 4, 4) + 1, 4);
      break;
    case 3:
      p[8 + below(get(p, 2))] = (uint8_t)"a.z_09A-\xff\0"[below(10)];
      break;
    default:
      if (value_at < e.n) change_field(p + value_at, e.n - value_at);
  }
}

static void change_page(draft *d) {
  size_t which = below(4);
  if (which == 0) {
    change_field(d->page, 88);
  } else if (which == 1) {
    put(d->page + 32, 4096ull << below(3), 8);
  } else if (which == 2 && d->n_sections > 0) {
    section *s = &d->sections[below(d->n_sections)];
    if (once_in(2)) s->kind = (uint32_t)interesting(s->kind);
    if (once_in(2)) s->flags = (uint32_t)interesting(s->flags);
  } else {
    change_field(d->page + 80, PAGE - 84);
  }
}

static void change_sections(draft *d) {
  if (d->n_sections == 0) return;
  size_t i = below(d->n_sections);
  section *s = &d->sections[i];
  if (once_in(3) && d->n_sections < MAX_SECTIONS) {
    d->sections[d->n_sections] = *s;
    d->sections[d->n_sections].kind = d->sections[d->n_sections - 1].kind + 1 + (uint32_t)below(12);
    d->sections[d->n_sections++].flags = once_in(4);
  } else if (once_in(3)) {
    memmove(s, s + 1, (d->n_sections - i - 1) * sizeof *s);
    d->n_sections--;
  } else if (s->n > 0) {
    cut(s, s->n - 1 - below(s->n < 9 ? s->n : 9), 1);
  }
}

static void change(draft *d) {
  if (d->n_sections == 0 || once_in(16)) {
    change_page(d);
    return;
  }
  if (once_in(48)) {
    change_sections(d);
    return;
  }
  section *s = &d->sections[below(d->n_sections)];
  size_t way = below(8);
  if (way < 2 && is_kv(s)) {
    change_value(s);
  } else if (way < 2 && (s->kind == DIRECTORY || s->kind == BLOBS)) {
    change_name(s);
  } else if (way < 4) {
    change_entries(s);
  } else if (way < 5) {
    if (s->n > 0) change_bytes(s);
  } else {
    span e = any_entry(s);
    if (e.n == 0 || once_in(4)) e = (span){0, s->n};
    change_field(s->bytes + e.at, e.n);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// What follows from the rest: each step may be left out, so that its check sees something wrong too

static bool leave_out(void) {
  return once_in(24);
}

static uint64_t size_of_shape(uint64_t type, const uint8_t *shape, uint64_t n_dims) {
  const clb_type *t = clb_type_by_id((uint32_t)type);
  uint64_t weights = 1;
  for (uint64_t i = 0; i < n_dims && i < 4; i++) weights *= get(shape + 8 * i, 8);
  return t == NULL ? weights * 4 : weights / t->block_weights * t->block_bytes;
}

static uint64_t fix_directory(section *s, uint64_t data_offset, uint64_t alignment) {
  size_t n = n_entries(s);
  uint64_t end = data_offset, names = 0, group = 0;
  if (s->n < 16) return end;
  put(s->bytes, n, 4);
  put(s->bytes + 8, s->n - 16 - 128 * n, 8);
  for (size_t i = 0; i < n; i++) {
    uint8_t *e = s->bytes + 16 + 128 * i;
    if (!leave_out()) put(e + 72, names, 4);
    if (i + 1 == n && !leave_out()) put(e + 76, s->n - 16 - 128 * n - names, 4);
    names += get(e + 76, 4);
    if (get(e + 28, 4) != 0) continue;
    if (!leave_out()) put(e + 8, size_of_shape(get(e + 16, 4), e + 40, get(e + 36, 4)), 8);
    if (!leave_out()) put(e, align_up(end, get(e + 22, 2) == group ? 64 : alignment), 8);
    group = get(e + 22, 2);
    end = get(e, 8) + get(e + 8, 8);
  }
  for (size_t i = 0; i < n; i++) {  // aliases repeat their target
    uint8_t *e = s->bytes + 16 + 128 * i;
    if (get(e + 28, 4) == 0 || get(e + 32, 4) >= n || leave_out()) continue;
    const uint8_t *target = s->bytes + 16 + 128 * get(e + 32, 4);
    memcpy(e, target, 20);
    memcpy(e + 36, target + 36, 36);
    memcpy(e + 80, target + 80, 48);
  }
  return align_up(end, alignment);
}

static void fix_layouts(section *s) {
  size_t n = n_entries(s);
  if (s->n >= 8) put(s->bytes, n, 4);
  for (size_t i = 0; i < n; i++) {
    uint8_t *e = s->bytes + 8 + 576 * i;
    uint64_t end = 0;
    for (size_t p = 0; p < get(e + 8, 4) && p < 8; p++) {
      uint8_t *part = e + 64 + 64 * p;
      if (!leave_out()) put(part + 8, align_up(end, 64), 8);
      if (!leave_out()) put(part + 16, size_of_shape(get(part + 4, 4), part + 24, 2), 8);
      end = get(part + 8, 8) + get(part + 16, 8);
    }
    if (!leave_out()) put(e, end, 8);
  }
}

static void fix_rows(section *s) {
  size_t n = n_entries(s);
  uint64_t widest = 0;
  if (s->n < 16) return;
  for (size_t i = 0; i < n; i++) {
    uint64_t n_experts = get(s->bytes + 16 + 32 * i + 8, 4);
    if (n_experts > widest) widest = n_experts;
  }
  put(s->bytes, n, 4);
  if (!leave_out()) put(s->bytes + 4, widest, 4);
}

// Makes the index fit the rows, and lays the blocks out. Returns the end of the file.
static uint64_t fix_index(section *s, const section *rows, const section *layouts, uint64_t start, uint64_t alignment) {
  uint64_t n_rows = get(rows->bytes, 4), n_columns = get(rows->bytes + 4, 4), end = start, rank = 0;
  if (rows->n < 16 || n_rows * n_columns * 64 > SECTION_BYTES || n_rows > 1024 || n_columns > 1024) return start;
  size_t wanted = (size_t)(n_rows * n_columns * 64);
  if (wanted > s->n) memset(s->bytes + s->n, 0, wanted - s->n);
  s->n = wanted;
  bool keep_ranks = once_in(24);
  for (uint64_t r = 0; r < n_rows && r < n_entries(rows); r++) {
    uint64_t n_experts = get(rows->bytes + 16 + 32 * r + 8, 4);
    for (uint64_t c = 0; c < n_columns; c++) {
      uint8_t *cell = s->bytes + (r * n_columns + c) * 64;
      uint64_t layout = get(cell + 16, 4);
      if (c >= n_experts) {
        if (!leave_out()) memset(cell, 0, 64);
        continue;
      }
      if (layout < n_entries(layouts) && !leave_out()) put(cell + 8, get(layouts->bytes + 8 + 576 * layout, 8), 8);
      if (!keep_ranks) put(cell + 20, rank, 4);
      rank++;
      put(cell + 26, 1, 2);
      if (!leave_out()) put(cell, end, 8);
      end = align_up(get(cell, 8) + get(cell + 8, 8), alignment);
    }
  }
  return end;
}

// Bytes of page 0 and the sections, laid out.
static uint64_t metadata_end(const draft *d) {
  uint64_t end = PAGE;
  for (size_t i = 0; i < d->n_sections; i++) end = align_up(end, 64) + d->sections[i].n;
  return end;
}

static void fix(draft *d) {
  section *directory = find(d, DIRECTORY), *rows = find(d, ROWS), *layouts = find(d, LAYOUTS), *index = find(d, INDEX);
  uint64_t alignment = get(d->page + 32, 8);
  if (directory == NULL || rows == NULL || layouts == NULL || index == NULL || alignment - 1 >= 1u << 21) return;
  if (!leave_out()) fix_layouts(layouts);
  if (!leave_out()) fix_rows(rows);
  uint64_t start = get(d->page + 72, 8);
  (void)fix_index(index, rows, layouts, start, alignment);  // for its size
  uint64_t data_offset = align_up(metadata_end(d), alignment);
  if (!leave_out()) put(d->page + 64, data_offset, 8);
  start = fix_directory(directory, data_offset, alignment);
  if (!leave_out()) put(d->page + 72, start, 8);
  uint64_t end = fix_index(index, rows, layouts, start, alignment);
  if (!leave_out()) put(d->page + 40, end, 8);
  for (size_t i = 0; i < d->n_sections; i++) {
    section *s = &d->sections[i];
    if (is_kv(s) && s->n >= 8 && !leave_out()) put(s->bytes, kv_count(s), 4);
  }
}

// Page 0 no longer fits what it describes, but its checksums hold.
static void change_stored_page(uint8_t *data) {
  uint64_t n_sections = get(data + 48, 4);
  if (once_in(2)) {
    change_field(data + 128 + 64 * below((size_t)n_sections), 64);
  } else {
    change_field(data, 88);
  }
  if (n_sections <= MAX_SECTIONS) clb_sha256(data + 128, (size_t)n_sections * 64, data + 88);
  seal_page(data);
}

// ---------------------------------------------------------------------------------------------------------------------
// Entry points

size_t fuzz_mutate(uint8_t *data, size_t n, size_t max, uint64_t seed) {
  random_state = seed;
  if (max > FUZZ_MAX_BYTES) max = FUZZ_MAX_BYTES;
  if (n <= max && load(&work, data, n)) {
    for (size_t i = 1 + below(3); i > 0; i--) change(&work);
    if (!once_in(16)) fix(&work);
    size_t stored = store(&work, data, max);
    if (stored > 0 && once_in(32)) change_stored_page(data);
    if (stored > 0 && !once_in(64)) return stored;
  }
  n = LLVMFuzzerMutate(data, n < max ? n : max, max);  // anything: the checks before the structure
  if (n >= PAGE && !once_in(4)) seal_page(data);
  return n;
}

size_t fuzz_cross(const uint8_t *a, size_t a_bytes, const uint8_t *b, size_t b_bytes, uint8_t *out, size_t max,
                  uint64_t seed) {
  random_state = seed;
  if (!load(&work, a, a_bytes) || !load(&other, b, b_bytes)) return 0;
  for (size_t i = 0; i < work.n_sections && i < other.n_sections; i++) {
    if (once_in(3)) work.sections[i] = other.sections[i];
  }
  fix(&work);
  return store(&work, out, max < FUZZ_MAX_BYTES ? max : FUZZ_MAX_BYTES);
}

int fuzz_open(const uint8_t *data, size_t n, char *error, size_t error_bytes) {
  size_t memory = n;
  uint64_t file_size = n;
  if (n >= PAGE) {
    uint64_t data_offset = get(data + 64, 8);
    if (data_offset > n && data_offset <= FUZZ_MAX_MEMORY) memory = (size_t)data_offset;
    file_size = get(data + 40, 8);
  }
  uint8_t *copy = malloc(memory > 0 ? memory : 1);  // ends where the bytes end: the sanitizer sees reads beyond
  CHECK(copy != NULL);
  if (n > 0) memcpy(copy, data, n);
  memset(copy + n, 0, memory - n);
  clb_container *c = clb_container_open_memory(copy, memory, file_size, error, error_bytes);
  free(copy);
  CHECK((c == NULL) == (error[0] != 0) && strchr(error, '\n') == NULL);
  if (c != NULL) check_container(c);
  clb_container_close(c);
  return c != NULL;
}
