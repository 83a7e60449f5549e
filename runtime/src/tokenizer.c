// Text to token ids and back, from a container's tokenizer tables (docs/format.md, section 12).
//
// The tables are untrusted: colibri_tokenizer_parse compares every number in them with what it counts or points into,
// and bounds what encoding a text can take. What is done is what the tokenizers library does for the same tokenizer.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "colibri_tokenizer.h"
#include "container.h"
#include "errors.h"
#include "pattern.h"
#include "unicode.h"

enum { KIND_BYTES = 1, KIND_PIECES = 2 };
enum { IGNORE_MERGES = 1, BYTE_FALLBACK = 2, FUSE_UNKNOWN = 4, STRIP_SPACE = 8, ALL_FLAGS = 15 };
enum { TOKEN_IN_MODEL = 1, TOKEN_SPECIAL = 2, TOKEN_BYTE = 4, TOKEN_ABSENT = 8, ALL_TOKEN_FLAGS = 15 };
enum { ADDED_NORMALIZED = 1, ADDED_LSTRIP = 2, ADDED_RSTRIP = 4, ALL_ADDED_FLAGS = 7 };
enum { NORMALIZE_NFC = 1, NORMALIZE_REPLACE = 2, NORMALIZE_PREPEND = 3 };
enum { STEP_ISOLATED = 1, STEP_MATCHES = 2, STEP_BETWEEN = 3, STEP_MATCH_BEGINS = 4, STEP_METASPACE = 5 };
enum { SCHEME_NEVER = 0, SCHEME_FIRST = 1, SCHEME_ALWAYS = 2 };
enum {
  MAX_TOKENS = 1 << 24,
  MAX_MERGES = 1 << 24,
  MAX_ADDED = 1 << 16,
  MAX_CODE = 1 << 14,
  MAX_SETS = 1 << 12,
  MAX_ITEMS = 1 << 16,
  MAX_STEPS = 64,
  MAX_NORMALIZERS = 16,
  MAX_AROUND = 64,
  STEPS_PER_CHARACTER = 4096,  // of pattern programs
  GROWTH = 64,                 // of a text by its normalizers
};
static const uint32_t kNoId = UINT32_MAX;
static const char kSpace[] = "\xe2\x96\x81";  // U+2581
enum { SPACE_BYTES = 3 };

typedef struct {
  uint32_t version, kind, flags, n_tokens, n_merges, n_added, n_items, n_sets, n_code, n_steps, n_normalizers, n_prefix,
      n_suffix, unknown_id, text_bytes, zero;
} table_head;

typedef struct {
  uint32_t text;
  uint16_t n_bytes, flags;
} token;

typedef struct {
  uint32_t left, right, result;
} merge;

typedef struct {
  uint32_t id, text;
  uint16_t n_bytes, flags;
} added_token;

typedef struct {
  uint32_t kind, a, b;
} cut_step;

typedef struct {
  uint32_t op, old_text, old_bytes, new_text, new_bytes;
} normalizer;

_Static_assert(sizeof(table_head) == 64 && sizeof(token) == 8 && sizeof(merge) == 12 && sizeof(added_token) == 12 &&
                   sizeof(cut_step) == 12 && sizeof(normalizer) == 20 && sizeof(clb_class_item) == 8 &&
                   sizeof(clb_class_set) == 12 && sizeof(clb_instruction) == 12,
               "the tables are read in place");

struct colibri_tokenizer {
  uint8_t *section;  // a copy; everything below points into it
  const table_head *head;
  const token *tokens;
  const merge *merges;
  const added_token *added;
  clb_patterns patterns;
  const cut_step *steps;
  const normalizer *normalizers;
  const uint32_t *prefix, *suffix;
  const uint8_t *text;

  uint32_t *by_text;  // hash of the model's tokens
  uint32_t *by_pair;  // hash of merges
  size_t text_mask, pair_mask;
  uint32_t byte_ids[256];
  uint32_t *by_first;         // added tokens by their first byte
  uint32_t first_place[257];  // in by_first
};

// ---------------------------------------------------------------------------------------------------------------------
// Hashes

static size_t hash_bytes(const uint8_t *p, size_t n) {
  uint64_t h = 0xcbf29ce484222325u;
  for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001b3u;
  return (size_t)(h ^ h >> 29);
}

static size_t hash_pair(uint32_t left, uint32_t right) {
  uint64_t h = ((uint64_t)left << 32 | right) * 0x9e3779b97f4a7c15u;
  return (size_t)(h ^ h >> 32);
}

static size_t power_of_two_above(size_t n) {
  size_t size = 16;
  while (size < 2 * n) size *= 2;
  return size;
}

static uint32_t find_text(const colibri_tokenizer *t, const uint8_t *p, size_t n) {
  for (size_t i = hash_bytes(p, n);; i++) {
    const uint32_t id = t->by_text[i & t->text_mask];
    if (id == kNoId) return kNoId;
    const token *k = &t->tokens[id];
    if (k->n_bytes == n && memcmp(t->text + k->text, p, n) == 0) return id;
  }
}

// The rank of a merge, or kNoId.
static uint32_t find_pair(const colibri_tokenizer *t, uint32_t left, uint32_t right) {
  for (size_t i = hash_pair(left, right);; i++) {
    const uint32_t rank = t->by_pair[i & t->pair_mask];
    if (rank == kNoId || (t->merges[rank].left == left && t->merges[rank].right == right)) return rank;
  }
}

static uint32_t *new_slots(size_t n, size_t *mask) {
  const size_t size = power_of_two_above(n);
  uint32_t *slots = malloc(size * sizeof *slots);
  if (slots) memset(slots, 0xff, size * sizeof *slots);
  *mask = size - 1;
  return slots;
}

static bool hash_tokens(colibri_tokenizer *t) {
  t->by_text = new_slots(t->head->n_tokens, &t->text_mask);
  t->by_pair = new_slots(t->head->n_merges, &t->pair_mask);
  if (!t->by_text || !t->by_pair) return false;
  for (uint32_t id = 0; id < t->head->n_tokens; id++) {
    const token *k = &t->tokens[id];
    if (!(k->flags & TOKEN_IN_MODEL) || find_text(t, t->text + k->text, k->n_bytes) != kNoId) continue;
    size_t i = hash_bytes(t->text + k->text, k->n_bytes);
    while (t->by_text[i & t->text_mask] != kNoId) i++;
    t->by_text[i & t->text_mask] = id;
  }
  for (uint32_t rank = 0; rank < t->head->n_merges; rank++) {
    const merge *m = &t->merges[rank];
    size_t i = hash_pair(m->left, m->right);
    // Of two merges of one pair the later one counts, as in a map that is filled in order.
    while (t->by_pair[i & t->pair_mask] != kNoId) {
      const merge *other = &t->merges[t->by_pair[i & t->pair_mask]];
      if (other->left == m->left && other->right == m->right) break;
      i++;
    }
    t->by_pair[i & t->pair_mask] = rank;
  }
  return true;
}

static void find_bytes(colibri_tokenizer *t) {
  for (unsigned byte = 0; byte < 256; byte++) {
    static const char digits[] = "0123456789ABCDEF";
    const uint8_t raw = (uint8_t)byte;
    const uint8_t name[6] = {'<', '0', 'x', (uint8_t)digits[byte >> 4], (uint8_t)digits[byte & 15], '>'};
    t->byte_ids[byte] = t->head->kind == KIND_BYTES ? find_text(t, &raw, 1) : find_text(t, name, sizeof name);
  }
}

// Added tokens by their first byte.
static bool sort_added(colibri_tokenizer *t) {
  const uint32_t n = t->head->n_added;
  t->by_first = malloc(((size_t)n + 1) * sizeof *t->by_first);
  if (!t->by_first) return false;
  uint32_t *places = t->first_place;
  for (uint32_t i = 0; i < n; i++) places[t->text[t->added[i].text] + 1]++;
  for (unsigned byte = 0; byte < 256; byte++) places[byte + 1] += places[byte];
  uint32_t next[256];
  memcpy(next, places, sizeof next);
  for (uint32_t i = 0; i < n; i++) t->by_first[next[t->text[t->added[i].text]]++] = i;
  return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Opening

static bool in_text(const table_head *h, uint32_t offset, uint32_t n_bytes) {
  return offset <= h->text_bytes && n_bytes <= h->text_bytes - offset;
}

static const char *head_problem(const table_head *h) {
  if (h->version != 1) return "its version is not 1";
  if (h->kind != KIND_BYTES && h->kind != KIND_PIECES) return "its kind is unknown";
  if (h->flags > ALL_FLAGS || h->zero != 0) return "it has unknown flags";
  const struct {
    uint32_t n, limit;
  } counts[] = {
      {h->n_tokens, MAX_TOKENS}, {h->n_merges, MAX_MERGES}, {h->n_added, MAX_ADDED},
      {h->n_items, MAX_ITEMS},   {h->n_sets, MAX_SETS},     {h->n_code, MAX_CODE},
      {h->n_steps, MAX_STEPS},   {h->n_prefix, MAX_AROUND}, {h->n_normalizers, MAX_NORMALIZERS},
      {h->n_suffix, MAX_AROUND},
  };
  for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
    if (counts[i].n > counts[i].limit) return "a count is above its limit";
  }
  if (h->n_tokens == 0) return "it has no tokens";
  if (h->unknown_id != UINT32_MAX && h->unknown_id >= h->n_tokens) return "the unknown token is out of range";
  return NULL;
}

// Sets the pointers. Whether the section has exactly the size that its head says.
static bool place_tables(colibri_tokenizer *t, size_t n_bytes) {
  const table_head *h = t->head;
  const uint64_t sizes[] = {
      sizeof *h,
      (uint64_t)h->n_tokens * sizeof(token),
      (uint64_t)h->n_merges * sizeof(merge),
      (uint64_t)h->n_added * sizeof(added_token),
      (uint64_t)h->n_items * sizeof(clb_class_item),
      (uint64_t)h->n_sets * sizeof(clb_class_set),
      (uint64_t)h->n_code * sizeof(clb_instruction),
      (uint64_t)h->n_steps * sizeof(cut_step),
      (uint64_t)h->n_normalizers * sizeof(normalizer),
      (uint64_t)h->n_prefix * sizeof(uint32_t),
      (uint64_t)h->n_suffix * sizeof(uint32_t),
      h->text_bytes,
  };
  enum { N = sizeof sizes / sizeof *sizes };
  uint64_t ends[N], end = 0;
  for (size_t i = 0; i < N; i++) ends[i] = end += sizes[i];
  if (end != n_bytes) return false;
  const uint8_t *p = t->section;
  t->tokens = (const token *)(p + ends[0]);
  t->merges = (const merge *)(p + ends[1]);
  t->added = (const added_token *)(p + ends[2]);
  t->patterns.items = (const clb_class_item *)(p + ends[3]);
  t->patterns.sets = (const clb_class_set *)(p + ends[4]);
  t->patterns.code = (const clb_instruction *)(p + ends[5]);
  t->steps = (const cut_step *)(p + ends[6]);
  t->normalizers = (const normalizer *)(p + ends[7]);
  t->prefix = (const uint32_t *)(p + ends[8]);
  t->suffix = (const uint32_t *)(p + ends[9]);
  t->text = p + ends[10];
  t->patterns.n_items = h->n_items;
  t->patterns.n_sets = h->n_sets;
  t->patterns.n_code = h->n_code;
  return true;
}

static const char *tokens_problem(const colibri_tokenizer *t) {
  const table_head *h = t->head;
  for (uint32_t i = 0; i < h->n_tokens; i++) {
    const token *k = &t->tokens[i];
    if (!in_text(h, k->text, k->n_bytes) || k->flags > ALL_TOKEN_FLAGS) return "a token is out of range";
    if ((k->flags & TOKEN_BYTE) && k->n_bytes != 6) return "a byte token has not six characters";
  }
  for (uint32_t i = 0; i < h->n_merges; i++) {
    const merge *m = &t->merges[i];
    if (m->left >= h->n_tokens || m->right >= h->n_tokens || m->result >= h->n_tokens) return "a merge is out of range";
  }
  for (uint32_t i = 0; i < h->n_added; i++) {
    const added_token *a = &t->added[i];
    const bool sound = a->id < h->n_tokens && a->n_bytes > 0 && in_text(h, a->text, a->n_bytes);
    if (!sound || a->flags > ALL_ADDED_FLAGS) return "an added token is out of range";
  }
  for (uint32_t i = 0; i < h->n_prefix; i++) {
    if (t->prefix[i] >= h->n_tokens) return "an id before the text is out of range";
  }
  for (uint32_t i = 0; i < h->n_suffix; i++) {
    if (t->suffix[i] >= h->n_tokens) return "an id behind the text is out of range";
  }
  return NULL;
}

static const char *steps_problem(const colibri_tokenizer *t) {
  const table_head *h = t->head;
  for (uint32_t i = 0; i < h->n_steps; i++) {
    const cut_step *s = &t->steps[i];
    const bool metaspace = s->kind == STEP_METASPACE;
    if (s->kind < STEP_ISOLATED || s->kind > STEP_METASPACE || s->b != 0) return "a step is unknown";
    if (metaspace ? s->a > SCHEME_ALWAYS || i > 0 : s->a >= h->n_code) return "a step is out of range";
  }
  for (uint32_t i = 0; i < h->n_normalizers; i++) {
    const normalizer *n = &t->normalizers[i];
    if (n->op < NORMALIZE_NFC || n->op > NORMALIZE_PREPEND) return "a normalizer is unknown";
    const bool has_text = n->op != NORMALIZE_NFC;
    if (!in_text(h, n->old_text, n->old_bytes) || !in_text(h, n->new_text, n->new_bytes) ||
        has_text != (n->old_bytes > 0)) {
      return "a normalizer is out of range";
    }
  }
  return clb_patterns_problem(&t->patterns);
}

static const char *problem(colibri_tokenizer *t, size_t n_bytes) {
  const char *text = n_bytes < sizeof *t->head ? "it is cut" : head_problem(t->head);
  if (!text && !place_tables(t, n_bytes)) text = "its size is not what its counts say";
  if (!text) text = tokens_problem(t);
  return text ? text : steps_problem(t);
}

static colibri_status parse(const void *tables, size_t n_bytes, colibri_tokenizer *t, clb_error error) {
  t->section = malloc(n_bytes ? n_bytes : 1);
  if (!t->section) return clb_fail(error, COLIBRI_ERROR_MEMORY, "no memory for %zu bytes of tokenizer tables", n_bytes);
  memcpy(t->section, tables, n_bytes);
  t->head = (const table_head *)t->section;
  const char *what = problem(t, n_bytes);
  if (what) return clb_fail(error, COLIBRI_ERROR_FORMAT, "tokenizer tables: %s", what);
  if (!hash_tokens(t) || !sort_added(t)) {
    return clb_fail(error, COLIBRI_ERROR_MEMORY, "no memory for the hashes of the tokenizer tables");
  }
  find_bytes(t);
  return COLIBRI_OK;
}

colibri_status colibri_tokenizer_parse(const void *tables, size_t n_bytes, colibri_tokenizer **tokenizer, char *text,
                                       size_t text_bytes) {
  const clb_error error = {text, text_bytes};
  *tokenizer = NULL;
  colibri_tokenizer *t = calloc(1, sizeof *t);
  if (!t) return clb_fail(error, COLIBRI_ERROR_MEMORY, "no memory for a tokenizer");
  const colibri_status status = parse(tables, n_bytes, t, error);
  if (status == COLIBRI_OK) {
    *tokenizer = t;
  } else {
    colibri_tokenizer_close(t);
  }
  return status;
}

static colibri_status no_tables(const clb_container *c, clb_error error) {
  const char *why = "", *kind = "none";
  size_t n_why = 0, n_kind = 4;
  clb_spec_string(c, "tokenizer", &kind, &n_kind);
  if (!clb_spec_string(c, "tokenizer_lacks", &why, &n_why)) {
    const bool none = n_kind == 4 && memcmp(kind, "none", 4) == 0;
    why = none ? "it has no tokenizer" : "it was made before there were any; 'colibri respec' adds them";
    n_why = strlen(why);
  }
  return clb_fail(error, COLIBRI_ERROR_UNSUPPORTED, "no tokenizer tables: %.*s", (int)(n_why < 500 ? n_why : 500), why);
}

colibri_status colibri_tokenizer_open(const char *path, colibri_tokenizer **tokenizer, char *text, size_t text_bytes) {
  const clb_error error = {text, text_bytes};
  *tokenizer = NULL;
  char reason[512];
  clb_container *c = clb_container_open(path, reason, sizeof reason);
  if (!c) return clb_fail(error, COLIBRI_ERROR_FORMAT, "%s", reason);
  uint64_t n_bytes;
  const uint8_t *tables = clb_container_tokenizer(c, &n_bytes);
  const colibri_status status =
      tables ? colibri_tokenizer_parse(tables, (size_t)n_bytes, tokenizer, text, text_bytes) : no_tables(c, error);
  clb_container_close(c);
  return status;
}

void colibri_tokenizer_close(colibri_tokenizer *t) {
  if (!t) return;
  free(t->section);
  free(t->by_text);
  free(t->by_pair);
  free(t->by_first);
  free(t);
}

uint32_t colibri_tokenizer_n_tokens(const colibri_tokenizer *t) {
  return t->head->n_tokens;
}

// ---------------------------------------------------------------------------------------------------------------------
// Encoding: a work area with growing arrays, one per call

typedef struct {
  uint8_t *p;
  size_t n, capacity;
} byte_array;

typedef struct {
  uint32_t *p;
  size_t n, capacity;
} word_array;

typedef struct {
  size_t begin, end;
} span;

typedef struct {
  uint32_t id;
  int32_t previous, next;
  bool gone;
} symbol;

typedef struct {
  uint32_t rank, place, result;
} candidate;

typedef struct {
  const colibri_tokenizer *t;
  clb_matcher matcher;
  size_t growth_limit;  // of a normalized text
  byte_array text, other;
  word_array characters, composed, ids;
  span *pieces, *cut;
  size_t n_pieces, n_cut, pieces_capacity, cut_capacity;
  symbol *symbols;
  candidate *heap;
  size_t n_symbols, symbols_capacity, n_heap, heap_capacity;
} encoder;

static bool grow(void *array, size_t *capacity, size_t wanted, size_t item_bytes) {
  if (wanted <= *capacity) return true;
  size_t n = *capacity ? *capacity : 64;
  while (n < wanted) n *= 2;
  void *p = realloc(*(void **)array, n * item_bytes);
  if (!p) return false;
  *(void **)array = p;
  *capacity = n;
  return true;
}

static bool put_bytes(byte_array *a, const void *bytes, size_t n) {
  if (!grow(&a->p, &a->capacity, a->n + n, 1)) return false;
  if (n > 0) memcpy(a->p + a->n, bytes, n);
  a->n += n;
  return true;
}

static bool put_word(word_array *a, uint32_t word) {
  if (!grow(&a->p, &a->capacity, a->n + 1, sizeof *a->p)) return false;
  a->p[a->n++] = word;
  return true;
}

static colibri_status put_id(encoder *e, uint32_t id) {
  return put_word(&e->ids, id) ? COLIBRI_OK : COLIBRI_ERROR_MEMORY;
}

static bool put_span(span **spans, size_t *n, size_t *capacity, size_t begin, size_t end) {
  if (begin == end) return true;
  if (!grow(spans, capacity, *n + 1, sizeof **spans)) return false;
  (*spans)[(*n)++] = (span){begin, end};
  return true;
}

static void close_encoder(encoder *e) {
  free(e->matcher.stack);
  free(e->text.p);
  free(e->other.p);
  free(e->characters.p);
  free(e->composed.p);
  free(e->ids.p);
  free(e->pieces);
  free(e->cut);
  free(e->symbols);
  free(e->heap);
}

// The characters of UTF-8.
static bool get_characters(word_array *out, const uint8_t *p, size_t n) {
  out->n = 0;
  if (!grow(&out->p, &out->capacity, n + 1, sizeof *out->p)) return false;
  for (size_t i = 0; i < n;) i += clb_utf8_get(p + i, n - i, &out->p[out->n++]);
  return true;
}

static bool put_characters(byte_array *out, const uint32_t *c, size_t n) {
  if (!grow(&out->p, &out->capacity, out->n + 4 * n, 1)) return false;
  for (size_t i = 0; i < n; i++) out->n += clb_utf8_put(c[i], out->p + out->n);
  return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Merging

static bool is_before(candidate a, candidate b) {
  return a.rank != b.rank ? a.rank < b.rank : a.place < b.place;
}

static bool put_candidate(encoder *e, uint32_t place) {
  const int32_t next = e->symbols[place].next;
  if (next < 0) return true;
  const uint32_t rank = find_pair(e->t, e->symbols[place].id, e->symbols[next].id);
  if (rank == kNoId) return true;
  if (!grow(&e->heap, &e->heap_capacity, e->n_heap + 1, sizeof *e->heap)) return false;
  const candidate new = {rank, place, e->t->merges[rank].result};
  size_t i = e->n_heap++;
  for (; i > 0 && is_before(new, e->heap[(i - 1) / 2]); i = (i - 1) / 2) e->heap[i] = e->heap[(i - 1) / 2];
  e->heap[i] = new;
  return true;
}

static candidate take_candidate(encoder *e) {
  const candidate first = e->heap[0], last = e->heap[--e->n_heap];
  size_t i = 0;
  for (;;) {
    size_t child = 2 * i + 1;
    if (child >= e->n_heap) break;
    if (child + 1 < e->n_heap && is_before(e->heap[child + 1], e->heap[child])) child++;
    if (!is_before(e->heap[child], last)) break;
    e->heap[i] = e->heap[child];
    i = child;
  }
  e->heap[i] = last;
  return first;
}

static colibri_status merge_symbols(encoder *e) {
  e->n_heap = 0;
  for (size_t i = 0; i + 1 < e->n_symbols; i++) {
    if (!put_candidate(e, (uint32_t)i)) return COLIBRI_ERROR_MEMORY;
  }
  while (e->n_heap > 0) {
    const candidate best = take_candidate(e);
    symbol *left = &e->symbols[best.place];
    if (left->gone || left->next < 0) continue;
    symbol *right = &e->symbols[left->next];
    const uint32_t rank = find_pair(e->t, left->id, right->id);
    if (rank == kNoId || e->t->merges[rank].result != best.result) continue;  // one of them has changed
    left->id = best.result;
    right->gone = true;
    left->next = right->next;
    if (right->next >= 0) e->symbols[right->next].previous = (int32_t)best.place;
    if (left->previous >= 0 && !put_candidate(e, (uint32_t)left->previous)) return COLIBRI_ERROR_MEMORY;
    if (!put_candidate(e, best.place)) return COLIBRI_ERROR_MEMORY;
  }
  for (size_t i = 0; i < e->n_symbols; i++) {
    if (!e->symbols[i].gone) CLB_TRY(put_id(e, e->symbols[i].id));
  }
  return COLIBRI_OK;
}

static bool put_symbol(encoder *e, uint32_t id) {
  if (!grow(&e->symbols, &e->symbols_capacity, e->n_symbols + 1, sizeof *e->symbols)) return false;
  const int32_t i = (int32_t)e->n_symbols++;
  e->symbols[i] = (symbol){id, i - 1, -1, false};
  if (i > 0) e->symbols[i - 1].next = i;
  return true;
}

static bool put_byte_symbols(encoder *e, const uint8_t *p, size_t n) {
  for (size_t i = 0; i < n; i++) {
    const uint32_t id = e->t->byte_ids[p[i]];
    if (id != kNoId && !put_symbol(e, id)) return false;
  }
  return true;
}

static bool has_bytes(const colibri_tokenizer *t, const uint8_t *p, size_t n) {
  for (size_t i = 0; i < n; i++) {
    if (t->byte_ids[p[i]] == kNoId) return false;
  }
  return true;
}

// Each character is a token, its bytes, or unknown; unknown ones in a row may be one.
static bool put_character_symbols(encoder *e, const uint8_t *p, size_t n) {
  const colibri_tokenizer *t = e->t;
  bool unknown = false;
  for (size_t i = 0; i < n;) {
    bool whole;
    const size_t length = clb_utf8_scan(p + i, n - i, &whole);
    const uint32_t id = find_text(t, p + i, length);
    const bool as_bytes = id == kNoId && (t->head->flags & BYTE_FALLBACK) && has_bytes(t, p + i, length);
    const bool is_unknown = id == kNoId && !as_bytes && t->head->unknown_id != kNoId;
    if (id != kNoId && !put_symbol(e, id)) return false;
    if (as_bytes && !put_byte_symbols(e, p + i, length)) return false;
    const bool fused = unknown && (t->head->flags & FUSE_UNKNOWN);
    if (is_unknown && !fused && !put_symbol(e, t->head->unknown_id)) return false;
    unknown = is_unknown;
    i += length;
  }
  return true;
}

static colibri_status encode_piece(encoder *e, const uint8_t *p, size_t n) {
  const colibri_tokenizer *t = e->t;
  const uint32_t whole = t->head->flags & IGNORE_MERGES ? find_text(t, p, n) : kNoId;
  if (whole != kNoId) return put_id(e, whole);
  e->n_symbols = 0;
  const bool done = t->head->kind == KIND_BYTES ? put_byte_symbols(e, p, n) : put_character_symbols(e, p, n);
  return done ? merge_symbols(e) : COLIBRI_ERROR_MEMORY;
}

// ---------------------------------------------------------------------------------------------------------------------
// Cutting a text into pieces

// Cuts one piece: e->pieces[i] of the characters, into e->cut.
static colibri_status cut_piece(encoder *e, const cut_step *s, span piece) {
  size_t done = piece.begin, open = piece.begin;
  for (size_t at = piece.begin; at <= piece.end;) {
    size_t end = at;
    const clb_match found =
        clb_pattern_match(&e->t->patterns, &e->matcher, s->a, e->characters.p, piece.begin, at, piece.end, &end);
    if (found > CLB_MATCH_FOUND) return found == CLB_MATCH_MEMORY ? COLIBRI_ERROR_MEMORY : COLIBRI_ERROR_UNSUPPORTED;
    if (found == CLB_MATCH_NONE) {
      at++;
      continue;
    }
    bool kept = true;
    if (s->kind == STEP_MATCH_BEGINS) {
      kept = put_span(&e->cut, &e->n_cut, &e->cut_capacity, open, at);
      open = at;
    } else {
      if (s->kind != STEP_MATCHES) kept = put_span(&e->cut, &e->n_cut, &e->cut_capacity, done, at);
      if (kept && s->kind != STEP_BETWEEN) kept = put_span(&e->cut, &e->n_cut, &e->cut_capacity, at, end);
      open = end;
    }
    if (!kept) return COLIBRI_ERROR_MEMORY;
    done = end;
    at = end > at ? end : at + 1;
  }
  if (s->kind == STEP_MATCHES) return COLIBRI_OK;
  return put_span(&e->cut, &e->n_cut, &e->cut_capacity, open, piece.end) ? COLIBRI_OK : COLIBRI_ERROR_MEMORY;
}

static colibri_status cut_pieces(encoder *e, const cut_step *s) {
  e->n_cut = 0;
  for (size_t i = 0; i < e->n_pieces; i++) CLB_TRY(cut_piece(e, s, e->pieces[i]));
  span *pieces = e->pieces;
  const size_t capacity = e->pieces_capacity;
  e->pieces = e->cut;
  e->pieces_capacity = e->cut_capacity;
  e->n_pieces = e->n_cut;
  e->cut = pieces;
  e->cut_capacity = capacity;
  return COLIBRI_OK;
}

// Spaces become U+2581; one more comes in front unless there is one, as the scheme says.
static bool metaspace(word_array *c, uint32_t scheme, bool first) {
  enum { SPACE = 0x2581 };
  for (size_t i = 0; i < c->n; i++) c->p[i] = c->p[i] == ' ' ? SPACE : c->p[i];
  const bool wanted = scheme == SCHEME_ALWAYS || (scheme == SCHEME_FIRST && first);
  if (!wanted || c->n == 0 || c->p[0] == SPACE) return true;
  if (!grow(&c->p, &c->capacity, c->n + 1, sizeof *c->p)) return false;
  memmove(c->p + 1, c->p, c->n * sizeof *c->p);
  c->p[0] = SPACE;
  c->n++;
  return true;
}

// A text without added tokens. `first`: it is the beginning of everything.
static colibri_status encode_plain(encoder *e, const uint8_t *p, size_t n, bool first) {
  const colibri_tokenizer *t = e->t;
  if (n == 0) return COLIBRI_OK;
  if (!get_characters(&e->characters, p, n)) return COLIBRI_ERROR_MEMORY;
  e->n_pieces = 0;
  const cut_step *s = t->steps, *end = s + t->head->n_steps;
  if (s < end && s->kind == STEP_METASPACE && !metaspace(&e->characters, (s++)->a, first)) return COLIBRI_ERROR_MEMORY;
  if (!put_span(&e->pieces, &e->n_pieces, &e->pieces_capacity, 0, e->characters.n)) return COLIBRI_ERROR_MEMORY;
  for (; s < end; s++) CLB_TRY(cut_pieces(e, s));
  for (size_t i = 0; i < e->n_pieces; i++) {
    const span piece = e->pieces[i];
    e->other.n = 0;
    if (!put_characters(&e->other, e->characters.p + piece.begin, piece.end - piece.begin)) return COLIBRI_ERROR_MEMORY;
    CLB_TRY(encode_piece(e, e->other.p, e->other.n));
  }
  return COLIBRI_OK;
}

// ---------------------------------------------------------------------------------------------------------------------
// Normalizing, and added tokens around it

static bool compose_text(encoder *e, byte_array *text) {
  if (!get_characters(&e->characters, text->p, text->n)) return false;
  const size_t n = e->characters.n;
  if (!clb_needs_nfc(e->characters.p, n)) return true;
  word_array *work = &e->composed;
  if (!grow(&work->p, &work->capacity, 2 * CLB_NFC_WORK * n, sizeof *work->p)) return false;
  const size_t n_composed = clb_nfc(e->characters.p, n, work->p);
  text->n = 0;
  return put_characters(text, work->p, n_composed);
}

static bool replace_text(encoder *e, byte_array *text, const uint8_t *old, size_t n_old, const uint8_t *new,
                         size_t n_new) {
  e->other.n = 0;
  for (size_t i = 0; i < text->n;) {
    const bool found = n_old <= text->n - i && memcmp(text->p + i, old, n_old) == 0;
    if (!(found ? put_bytes(&e->other, new, n_new) : put_bytes(&e->other, text->p + i, 1))) return false;
    if (e->other.n > e->growth_limit) return true;
    i += found ? n_old : 1;
  }
  const byte_array done = e->other;
  e->other = *text;
  *text = done;
  return true;
}

static bool prepend_text(byte_array *text, const uint8_t *p, size_t n) {
  if (text->n == 0) return true;
  const size_t old = text->n;
  if (!put_bytes(text, p, n)) return false;
  memmove(text->p + n, text->p, old);
  memcpy(text->p, p, n);
  return true;
}

// Fills e->text.
static colibri_status normalize(encoder *e, const uint8_t *p, size_t n) {
  const colibri_tokenizer *t = e->t;
  byte_array *text = &e->text;
  text->n = 0;
  bool done = put_bytes(text, p, n);
  for (uint32_t i = 0; i < t->head->n_normalizers && done; i++) {
    const normalizer *s = &t->normalizers[i];
    const uint8_t *old = t->text + s->old_text, *new = t->text + s->new_text;
    if (s->op == NORMALIZE_NFC) done = compose_text(e, text);
    if (s->op == NORMALIZE_REPLACE) done = replace_text(e, text, old, s->old_bytes, new, s->new_bytes);
    if (s->op == NORMALIZE_PREPEND) done = prepend_text(text, old, s->old_bytes);
    if (text->n > e->growth_limit || e->other.n > e->growth_limit) return COLIBRI_ERROR_UNSUPPORTED;
  }
  return done ? COLIBRI_OK : COLIBRI_ERROR_MEMORY;
}

// The longest added token at p that is looked for now, or NULL.
static const added_token *find_added(const colibri_tokenizer *t, const uint8_t *p, size_t left, bool normalized) {
  const added_token *best = NULL;
  for (uint32_t i = t->first_place[p[0]]; i < t->first_place[p[0] + 1]; i++) {
    const added_token *a = &t->added[t->by_first[i]];
    if (((a->flags & ADDED_NORMALIZED) != 0) != normalized || a->n_bytes > left) continue;
    if (best && best->n_bytes >= a->n_bytes) continue;
    if (memcmp(t->text + a->text, p, a->n_bytes) == 0) best = a;
  }
  return best;
}

static size_t white_behind(const uint8_t *p, size_t at, size_t end) {
  while (at < end) {
    uint32_t c;
    const size_t n = clb_utf8_get(p + at, end - at, &c);
    if (!clb_is_white(c)) break;
    at += n;
  }
  return at;
}

static size_t white_before(const uint8_t *p, size_t at, size_t begin) {
  while (at > begin) {
    size_t start = at - 1;
    while (start > begin && (p[start] & 0xc0) == 0x80) start--;
    uint32_t c;
    clb_utf8_get(p + start, at - start, &c);
    if (!clb_is_white(c)) break;
    at = start;
  }
  return at;
}

typedef colibri_status encode_between(encoder *e, const uint8_t *p, size_t n, bool first);

// Encodes the added tokens of a text, and what lies between them with `between`.
static colibri_status encode_added(encoder *e, const uint8_t *p, size_t n, bool first, bool normalized,
                                   encode_between *between) {
  size_t done = 0;
  for (size_t at = 0; at < n;) {
    const added_token *a = find_added(e->t, p + at, n - at, normalized);
    if (!a) {
      at++;
      continue;
    }
    const size_t start = a->flags & ADDED_LSTRIP ? white_before(p, at, done) : at;
    at += a->n_bytes;
    if (a->flags & ADDED_RSTRIP) at = white_behind(p, at, n);
    CLB_TRY(between(e, p + done, start - done, first && done == 0));
    CLB_TRY(put_id(e, a->id));
    done = at;
  }
  return between(e, p + done, n - done, first && done == 0);
}

static colibri_status encode_normalized(encoder *e, const uint8_t *p, size_t n, bool first) {
  if (n == 0) return COLIBRI_OK;
  CLB_TRY(normalize(e, p, n));
  return encode_added(e, e->text.p, e->text.n, first, true, encode_plain);
}

static colibri_status encode_text(encoder *e, const uint8_t *p, size_t n, bool add_special) {
  const colibri_tokenizer *t = e->t;
  for (uint32_t i = 0; i < t->head->n_prefix && add_special; i++) CLB_TRY(put_id(e, t->prefix[i]));
  CLB_TRY(encode_added(e, p, n, true, false, encode_normalized));
  for (uint32_t i = 0; i < t->head->n_suffix && add_special; i++) CLB_TRY(put_id(e, t->suffix[i]));
  return COLIBRI_OK;
}

colibri_status colibri_tokenizer_encode(const colibri_tokenizer *t, const char *text, size_t n_bytes, bool add_special,
                                        uint32_t *ids, size_t capacity, size_t *n_ids) {
  *n_ids = 0;
  if (n_bytes > INT32_MAX / GROWTH) return COLIBRI_ERROR_UNSUPPORTED;
  encoder e = {.t = t, .growth_limit = GROWTH * (n_bytes + 64)};
  e.matcher.limit = 64 * (n_bytes + 1024);
  e.matcher.steps_left = STEPS_PER_CHARACTER * ((uint64_t)n_bytes + 64);
  byte_array clean = {0};
  bool fits = grow(&clean.p, &clean.capacity, 3 * n_bytes + 1, 1);
  const uint8_t *p = (const uint8_t *)text;
  for (size_t i = 0; i < n_bytes && fits;) {
    uint32_t c;
    i += clb_utf8_get(p + i, n_bytes - i, &c);
    clean.n += clb_utf8_put(c, clean.p + clean.n);
  }
  const colibri_status status = fits ? encode_text(&e, clean.p, clean.n, add_special) : COLIBRI_ERROR_MEMORY;
  if (status == COLIBRI_OK) {
    *n_ids = e.ids.n;
    const size_t n = e.ids.n < capacity ? e.ids.n : capacity;
    if (n > 0) memcpy(ids, e.ids.p, n * sizeof *ids);
  }
  free(clean.p);
  close_encoder(&e);
  return status;
}

// ---------------------------------------------------------------------------------------------------------------------
// Decoding

static const token *text_token(const colibri_tokenizer *t, uint32_t id) {
  if (id >= t->head->n_tokens) return NULL;
  const token *k = &t->tokens[id];
  return k->flags & (TOKEN_SPECIAL | TOKEN_ABSENT) ? NULL : k;
}

static unsigned hex_digit(uint8_t c) {
  return c <= '9' ? c - (unsigned)'0' : (c | 0x20u) - 'a' + 10u;
}

static uint8_t byte_of(const colibri_tokenizer *t, const token *k) {
  const uint8_t *name = t->text + k->text;  // <0xXX>
  return (uint8_t)(hex_digit(name[3]) << 4 | (hex_digit(name[4]) & 15));
}

// Writes as many of n bytes as there is room for behind *n_bytes, and counts all.
static void put_text(char *text, size_t capacity, size_t *n_bytes, const void *bytes, size_t n) {
  if (*n_bytes < capacity) memcpy(text + *n_bytes, bytes, n < capacity - *n_bytes ? n : capacity - *n_bytes);
  *n_bytes += n;
}

void colibri_tokenizer_piece(const colibri_tokenizer *t, uint32_t id, char *bytes, size_t capacity, size_t *n_bytes) {
  *n_bytes = 0;
  const token *k = text_token(t, id);
  if (!k) return;
  const uint8_t *p = t->text + k->text;
  if (k->flags & TOKEN_BYTE) {
    const uint8_t byte = byte_of(t, k);
    put_text(bytes, capacity, n_bytes, &byte, 1);
    return;
  }
  for (size_t i = 0; i < k->n_bytes;) {
    const bool space = t->head->kind == KIND_PIECES && k->n_bytes - i >= SPACE_BYTES && memcmp(p + i, kSpace, 3) == 0;
    put_text(bytes, capacity, n_bytes, space ? (const void *)" " : p + i, 1);
    i += space ? SPACE_BYTES : 1;
  }
}

// Bytes as UTF-8; each part that is none becomes U+FFFD.
static bool put_lossy(byte_array *out, const uint8_t *p, size_t n) {
  for (size_t i = 0; i < n;) {
    bool whole;
    const size_t length = clb_utf8_scan(p + i, n - i, &whole);
    if (!(whole ? put_bytes(out, p + i, length) : put_bytes(out, "\xef\xbf\xbd", 3))) return false;
    i += length;
  }
  return true;
}

// Byte tokens in a row: their text if they are one, else U+FFFD for each.
static bool put_byte_run(byte_array *out, const byte_array *run) {
  bool whole = true;
  for (size_t i = 0; i < run->n && whole;) i += clb_utf8_scan(run->p + i, run->n - i, &whole);
  if (whole) return put_bytes(out, run->p, run->n);
  for (size_t i = 0; i < run->n; i++) {
    if (!put_bytes(out, "\xef\xbf\xbd", 3)) return false;
  }
  return true;
}

static bool put_piece(const colibri_tokenizer *t, byte_array *out, uint32_t id) {
  const token *k = text_token(t, id);
  if (!k || k->n_bytes == 0) return true;
  if (!grow(&out->p, &out->capacity, out->n + k->n_bytes, 1)) return false;
  size_t n;
  colibri_tokenizer_piece(t, id, (char *)out->p + out->n, k->n_bytes, &n);
  out->n += n;
  return true;
}

static bool decode_pieces(const colibri_tokenizer *t, const uint32_t *ids, size_t n_ids, byte_array *out,
                          byte_array *run) {
  for (size_t i = 0; i < n_ids; i++) {
    const token *k = text_token(t, ids[i]);
    if (!k) continue;
    if (k->flags & TOKEN_BYTE) {
      if (!put_piece(t, run, ids[i])) return false;
      continue;
    }
    if (!put_byte_run(out, run) || !put_piece(t, out, ids[i])) return false;
    run->n = 0;
  }
  return put_byte_run(out, run);
}

static bool decode_bytes(const colibri_tokenizer *t, const uint32_t *ids, size_t n_ids, byte_array *out,
                         byte_array *run) {
  for (size_t i = 0; i < n_ids; i++) {
    if (!put_piece(t, run, ids[i])) return false;
  }
  return put_lossy(out, run->p, run->n);
}

colibri_status colibri_tokenizer_decode(const colibri_tokenizer *t, const uint32_t *ids, size_t n_ids, char *text,
                                        size_t capacity, size_t *n_bytes) {
  byte_array out = {0}, run = {0};
  const bool done =
      t->head->kind == KIND_BYTES ? decode_bytes(t, ids, n_ids, &out, &run) : decode_pieces(t, ids, n_ids, &out, &run);
  *n_bytes = 0;
  const size_t skipped = (t->head->flags & STRIP_SPACE) && out.n > 0 && out.p[0] == ' ';
  if (done && out.n > skipped) put_text(text, capacity, n_bytes, out.p + skipped, out.n - skipped);
  free(out.p);
  free(run.p);
  return done ? COLIBRI_OK : COLIBRI_ERROR_MEMORY;
}

// ---------------------------------------------------------------------------------------------------------------------
// Characters that come in pieces

size_t colibri_utf8_push(colibri_utf8 *state, const char *bytes, size_t n_bytes, char *out) {
  size_t n_out = 0;
  for (size_t i = 0; i < n_bytes || state->n_held > 0;) {
    while (state->n_held < sizeof state->held && i < n_bytes) state->held[state->n_held++] = (unsigned char)bytes[i++];
    bool whole;
    const size_t n = clb_utf8_scan(state->held, state->n_held, &whole);
    if (!whole && n == state->n_held && state->n_held < sizeof state->held) {
      // The beginning of a character, unless it is a byte that none begins with.
      if (state->held[0] >= 0xc2 && state->held[0] <= 0xf4) break;
    }
    memcpy(out + n_out, whole ? (const char *)state->held : "\xef\xbf\xbd", whole ? n : 3);
    n_out += whole ? n : 3;
    state->n_held -= n;
    memmove(state->held, state->held + n, state->n_held);
  }
  return n_out;
}

size_t colibri_utf8_finish(colibri_utf8 *state, char *out) {
  const size_t n = state->n_held > 0 ? 3 : 0;
  memcpy(out, "\xef\xbf\xbd", n);
  state->n_held = 0;
  return n;
}
