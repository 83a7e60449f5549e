// The rows, layouts and index of experts: rules 18 to 24.
#include <stdio.h>
#include <stdlib.h>

#include "container_internal.h"

enum {
  MAX_ROWS = 65536,
  MAX_COLUMNS = 65536,
  MAX_CELLS = 1 << 18,
  ROW_ENTRY = 32,
  CELL_BYTES = 64,
  MAX_LAYOUTS = 1024,
  LAYOUT_ENTRY = 576,
  PART_ENTRY = 64,
};

// ---------------------------------------------------------------------------------------------------------------------
// Rows

static bool parse_row(loader *r, size_t i) {
  clb_container *c = r->c;
  const uint8_t *e = c->sections[SECTION_ROWS].p + 16 + i * ROW_ENTRY;
  clb_row *row = &c->rows[i];
  *row = (clb_row){get_i32(e), get_u32(e + 4), get_u32(e + 8)};
  if (get_u32(e + 12) != 0 || !is_zero(e + 16, 16)) {
    return clb_refuse(r, "rule 18: row %zu: flags or undescribed bytes are not zero", i);
  }
  if (row->stream > 1 || row->layer < 0) {
    return clb_refuse(r,
                      "rule 18: row %zu: stream is %" PRIu32 " and layer %" PRId32 ", expected 0 or 1 and at least 0",
                      i, row->stream, row->layer);
  }
  if (i > 0 && (row->stream < row[-1].stream || (row->stream == row[-1].stream && row->layer <= row[-1].layer))) {
    return clb_refuse(r,
                      "rule 18: row %zu: stream %" PRIu32 ", layer %" PRId32 " does not come after the row before it",
                      i, row->stream, row->layer);
  }
  if (row->n_experts < 1 || row->n_experts > c->n_columns) {
    return clb_refuse(r, "rule 18: row %zu (layer %" PRId32 "): n_experts is %" PRIu32 ", expected 1 ... %zu", i,
                      row->layer, row->n_experts, c->n_columns);
  }
  return true;
}

bool clb_parse_rows(loader *r) {
  clb_container *c = r->c;
  const section *s = &c->sections[SECTION_ROWS];
  if (s->bytes < 16)
    return clb_refuse(r, "rule 18: row table: the section has %" PRIu64 " bytes, expected 16", s->bytes);
  uint32_t n_rows = get_u32(s->p), n_columns = get_u32(s->p + 4);
  if (n_rows > MAX_ROWS || n_columns > MAX_COLUMNS || get_u32(s->p + 8) != ROW_ENTRY || get_u32(s->p + 12) != 0 ||
      s->bytes != 16 + (uint64_t)n_rows * ROW_ENTRY) {
    return clb_refuse(r,
                      "rule 18: row table: %" PRIu32 " rows of %" PRIu32 " bytes and %" PRIu32
                      " columns, expected at most 65536, "
                      "32, at most 65536 (and a zero word), and together the section's %" PRIu64,
                      n_rows, get_u32(s->p + 8), n_columns, s->bytes);
  }
  c->rows = calloc(n_rows > 0 ? n_rows : 1, sizeof *c->rows);
  if (c->rows == NULL) return clb_refuse_memory(r, "row table");
  c->n_rows = n_rows;
  c->n_columns = n_columns;
  uint32_t widest = 0;
  for (size_t i = 0; i < n_rows; i++) {
    if (!parse_row(r, i)) return false;
    if (c->rows[i].n_experts > widest) widest = c->rows[i].n_experts;
  }
  if ((uint64_t)n_rows * n_columns > MAX_CELLS) {
    return clb_refuse(
        r, "rule 18: row table: %" PRIu32 " rows of %" PRIu32 " columns are %" PRIu64 " cells, expected at most %d",
        n_rows, n_columns, (uint64_t)n_rows * n_columns, MAX_CELLS);
  }
  if (widest != n_columns) {
    return clb_refuse(r,
                      "rule 18: row table: n_columns is %" PRIu32 ", expected %" PRIu32 ", the most experts of a row",
                      n_columns, widest);
  }
  return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Layouts

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
    return clb_refuse(r, "rule 23: %s: role is %u, expected 1 ... 6 and more than the one before it", place,
                      part->role);
  }
  if (part->permutation != 0 || !is_zero(e + 40, 24)) {
    return clb_refuse(r, "rule 23: %s: permutation or undescribed bytes are not zero", place);
  }
  uint64_t bytes = 0;
  const uint64_t shape[2] = {part->rows, part->cols};
  if (!clb_size_of_shape(r, 23, place, part->type, shape, 2, &bytes)) return false;
  uint64_t expected = align_up(*end, 64);
  if (part->bytes != bytes || part->offset != expected || bytes >= kMaxSize - expected) {
    return clb_refuse(r, "rule 23: %s: %" PRIu64 " bytes at %" PRIu64 ", expected %" PRIu64 " at %" PRIu64, place,
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
    return clb_refuse(r, "rule 23: layout %zu: gate, up or down is missing", l);
  }
  uint64_t width = gate->rows, hidden = clb_spec_seen_u64(r->c, "hidden_size");
  if (gate->cols != hidden || up->rows != width || up->cols != hidden || down->rows != hidden || down->cols != width) {
    return clb_refuse(r,
                      "rule 23: layout %zu: gate is [%" PRIu64 ", %" PRIu64 "], up [%" PRIu64 ", %" PRIu64
                      "], down [%" PRIu64 ", %" PRIu64 "], expected [width, %" PRIu64 "] twice and [%" PRIu64
                      ", width]",
                      l, gate->rows, gate->cols, up->rows, up->cols, down->rows, down->cols, hidden, hidden);
  }
  const uint64_t bias_size[] = {width, width, hidden};
  for (uint16_t role = CLB_PART_GATE_BIAS; role <= CLB_PART_DOWN_BIAS; role++) {
    const clb_part *bias = find_part(layout, role);
    uint64_t n = bias_size[role - CLB_PART_GATE_BIAS];
    if (bias != NULL && (bias->rows != 1 || bias->cols != n)) {
      return clb_refuse(
          r, "rule 23: layout %zu: bias part of role %u is [%" PRIu64 ", %" PRIu64 "], expected [1, %" PRIu64 "]", l,
          role, bias->rows, bias->cols, n);
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
    return clb_refuse(
        r, "rule 23: layout %zu: n_parts is %" PRIu32 ", expected at most 8 (and zero flags and undescribed bytes)", l,
        n);
  }
  uint64_t end = 0;
  for (uint32_t i = 0; i < layout->n_parts; i++) {
    if (!parse_part(r, l, i, e + 64 + (size_t)i * PART_ENTRY, &end)) return false;
  }
  size_t used = 64 + (size_t)layout->n_parts * PART_ENTRY;
  if (!is_zero(e + used, LAYOUT_ENTRY - used))
    return clb_refuse(r, "rule 23: layout %zu: unused part slots are not zero", l);
  if (layout->bytes != end) {
    return clb_refuse(r, "rule 23: layout %zu: bytes is %" PRIu64 ", expected %" PRIu64 ", the end of its last part", l,
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
  if (entries == NULL) return clb_refuse_memory(r, "layout table");
  for (size_t i = 0; i < c->n_layouts; i++) entries[i] = base + i * LAYOUT_ENTRY;
  qsort(entries, c->n_layouts, sizeof *entries, compare_layouts);
  bool ok = true;
  for (size_t i = 1; i < c->n_layouts && ok; i++) {
    if (compare_layouts(&entries[i - 1], &entries[i]) == 0) {
      ok = clb_refuse(r, "rule 23: layouts %zu and %zu are equal", (size_t)(entries[i - 1] - base) / LAYOUT_ENTRY,
                      (size_t)(entries[i] - base) / LAYOUT_ENTRY);
    }
  }
  free(entries);
  return ok;
}

bool clb_parse_layouts(loader *r) {
  clb_container *c = r->c;
  const section *s = &c->sections[SECTION_LAYOUTS];
  if (s->bytes < 8)
    return clb_refuse(r, "rule 23: layout table: the section has %" PRIu64 " bytes, expected 8", s->bytes);
  uint32_t n = get_u32(s->p);
  if (n < 1 || n > MAX_LAYOUTS || get_u32(s->p + 4) != LAYOUT_ENTRY || s->bytes != 8 + (uint64_t)n * LAYOUT_ENTRY) {
    return clb_refuse(r,
                      "rule 23: layout table: %" PRIu32 " entries of %" PRIu32
                      " bytes, expected 1 ... 1024 of 576, and together "
                      "the section's %" PRIu64,
                      n, get_u32(s->p + 4), s->bytes);
  }
  c->layouts = calloc(n, sizeof *c->layouts);
  if (c->layouts == NULL) return clb_refuse_memory(r, "layout table");
  c->n_layouts = n;
  for (size_t i = 0; i < n; i++) {
    if (!parse_layout(r, i)) return false;
  }
  return check_layouts_distinct(r);
}

// ---------------------------------------------------------------------------------------------------------------------
// Index: the cell of every block

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
           clb_refuse(r, "rule 19: %s: the cell lies beyond the row's %" PRIu32 " experts and is not zero", place,
                      c->rows[row].n_experts);
  }
  uint32_t layout = get_u32(e + 16), rank = get_u32(e + 20);
  if (get_u16(e + 26) != 1 || get_u16(e + 24) != 0) {
    return clb_refuse(r, "rule 19: %s: flags are %u and part is %u, expected 1 and 0", place, get_u16(e + 26),
                      get_u16(e + 24));
  }
  if (layout >= c->n_layouts) {
    return clb_refuse(r, "rule 19: %s: layout is %" PRIu32 ", expected less than %zu", place, layout, c->n_layouts);
  }
  if (get_u64(e + 8) != c->layouts[layout].bytes) {
    return clb_refuse(r, "rule 19: %s: bytes is %" PRIu64 ", expected %" PRIu64 " as in layout %" PRIu32, place,
                      get_u64(e + 8), c->layouts[layout].bytes, layout);
  }
  if (rank >= n_blocks || by_rank[rank] != kNoCell) {
    return clb_refuse(r, "rule 20: %s: rank is %" PRIu32 ", expected one below %" PRIu64 " that no other block has",
                      place, rank, n_blocks);
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
      return clb_refuse(r,
                        "rule 20: row %zu (layer %" PRId32 "), expert %zu: %" PRIu64 " bytes at offset %" PRIu64
                        ", expected at %" PRIu64 " and within the file's %" PRIu64,
                        row, c->rows[row].layer, column, bytes, offset, at, c->file_size);
    }
    at = align_up(offset + bytes, c->alignment);
  }
  if (at != c->file_size) {
    return clb_refuse(r,
                      "rule 20: the last block's padding ends at %" PRIu64 ", expected the end of the file, %" PRIu64,
                      at, c->file_size);
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
    if (!layout_used[i]) return clb_refuse(r, "rule 23: layout %zu is used by no block", i);
  }
  return check_block_sequence(r, by_rank, n_blocks);
}

bool clb_check_index(loader *r) {
  const clb_container *c = r->c;
  uint64_t expected = (uint64_t)c->n_rows * c->n_columns * CELL_BYTES, n_blocks = 0;
  if (c->sections[SECTION_INDEX].bytes != expected) {
    return clb_refuse(
        r, "rule 19: expert index: the section has %" PRIu64 " bytes, expected %" PRIu64 " for %zu rows of %zu columns",
        c->sections[SECTION_INDEX].bytes, expected, c->n_rows, c->n_columns);
  }
  for (size_t i = 0; i < c->n_rows; i++) n_blocks += c->rows[i].n_experts;
  uint32_t *by_rank = malloc((n_blocks > 0 ? (size_t)n_blocks : 1) * sizeof *by_rank);
  bool *layout_used = calloc(c->n_layouts, sizeof *layout_used);
  bool ok = by_rank != NULL && layout_used != NULL;
  ok = ok ? check_cells(r, by_rank, n_blocks, layout_used) : clb_refuse_memory(r, "expert index");
  free(by_rank);
  free(layout_used);
  return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// Rule 24: rows and the spec agree

// The router of a row of stream 0.
static bool check_router(loader *r, const clb_row *row) {
  const clb_tensor *router = clb_container_find(r->c, CLB_ROLE_ROUTER, row->layer);
  if (router == NULL) return clb_refuse(r, "rule 24: layer %" PRId32 " has experts and no router tensor", row->layer);
  if (router->shape[0] != row->n_experts) {
    quoted q = clb_quote(router->name, router->name_bytes);
    return clb_refuse(
        r, "rule 24: tensor %s: the router has %" PRIu64 " rows, expected %" PRIu32 " as layer %" PRId32 " has experts",
        q.s, router->shape[0], row->n_experts, row->layer);
  }
  return true;
}

bool clb_check_census(loader *r) {
  const clb_container *c = r->c;
  const uint64_t *moe_layers = NULL;
  size_t n_moe_layers = 0, row = 0;
  (void)clb_spec_u64_array(c, "moe_layers", &moe_layers, &n_moe_layers);
  uint64_t n_layers = clb_spec_seen_u64(c, "n_layers"), n_all = 0, top_k = clb_spec_seen_u64(c, "top_k");
  bool executable = false;
  (void)clb_spec_bool(c, "executable", &executable);
  for (size_t layer = 0; layer < n_moe_layers; layer++) {
    bool has_row = row < c->n_rows && c->rows[row].stream == 0 && (size_t)c->rows[row].layer == layer;
    if (has_row != (moe_layers[layer] == 1)) {
      return clb_refuse(r, "rule 24: layer %zu has %s row in stream 0, expected %s by moe_layers", layer,
                        has_row ? "a" : "no", has_row ? "none" : "one");
    }
    if (has_row && executable && !check_router(r, &c->rows[row])) return false;
    row += has_row ? 1 : 0;
  }
  if (__builtin_add_overflow(n_layers, clb_spec_seen_u64(c, "n_mtp_layers"), &n_all)) n_all = UINT64_MAX;
  for (size_t i = 0; i < c->n_rows; i++) {
    const clb_row *x = &c->rows[i];
    if ((i >= row && x->stream == 0) || (uint64_t)x->layer >= n_all) {
      return clb_refuse(r, "rule 24: row %zu: stream %" PRIu32 ", layer %" PRId32 " is not a layer of the spec", i,
                        x->stream, x->layer);
    }
    if (top_k > x->n_experts) {
      return clb_refuse(r, "rule 24: spec: top_k is %" PRIu64 ", expected at most %" PRIu32 ", the experts of row %zu",
                        top_k, x->n_experts, i);
    }
  }
  return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// What a container holds

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
