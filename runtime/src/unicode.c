#include "unicode.h"

#include <stdlib.h>

#include "unicode_tables.h"

enum {
  HANGUL_FIRST = 0xAC00,
  HANGUL_L = 0x1100,
  HANGUL_V = 0x1161,
  HANGUL_T = 0x11A7,
  HANGUL_N_L = 19,
  HANGUL_N_V = 21,
  HANGUL_N_T = 28,
  HANGUL_COUNT = HANGUL_N_L * HANGUL_N_V * HANGUL_N_T,
};

#define COUNT(array) (sizeof(array) / sizeof *(array))

size_t clb_utf8_scan(const uint8_t *p, size_t left, bool *whole) {
  const uint8_t lead = p[0];
  *whole = lead < 0x80;
  if (lead < 0xc2 || lead > 0xf4) return 1;
  const size_t wanted = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  const uint8_t low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const uint8_t high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  size_t n = 1;
  if (left > 1 && p[1] >= low && p[1] <= high) {
    for (n = 2; n < wanted && n < left && (p[n] & 0xc0) == 0x80; n++) continue;
  }
  *whole = n == wanted;
  return n;
}

size_t clb_utf8_get(const uint8_t *p, size_t left, uint32_t *c) {
  bool whole;
  const size_t n = clb_utf8_scan(p, left, &whole);
  *c = CLB_REPLACEMENT;
  if (!whole) return 1;
  static const uint8_t masks[] = {0, 0x7f, 0x1f, 0x0f, 0x07};
  *c = p[0] & masks[n];
  for (size_t i = 1; i < n; i++) *c = *c << 6 | (p[i] & 0x3fu);
  return n;
}

size_t clb_utf8_put(uint32_t c, uint8_t *p) {
  if (c < 0x80) {
    p[0] = (uint8_t)c;
    return 1;
  }
  const size_t n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
  static const uint8_t leads[] = {0, 0, 0xc0, 0xe0, 0xf0};
  for (size_t i = n - 1; i > 0; i--, c >>= 6) p[i] = (uint8_t)(0x80 | (c & 0x3f));
  p[0] = (uint8_t)(leads[n] | c);
  return n;
}

// The last entry whose first character, above `shift` bits, is at most c. The first entry is of character 0.
static uint32_t find_run(const uint32_t *runs, size_t n, unsigned shift, uint32_t c) {
  size_t low = 0, high = n;
  while (high - low > 1) {
    const size_t middle = (low + high) / 2;
    if (runs[middle] >> shift <= c) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return runs[low] & ((1u << shift) - 1);
}

unsigned clb_category(uint32_t c) {
  return find_run(kUnicodeCategories, COUNT(kUnicodeCategories), 5, c);
}

bool clb_is_white(uint32_t c) {
  if (c < 0x80) return c == ' ' || (c >= '\t' && c <= '\r');
  return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
         c == 0x202f || c == 0x205f || c == 0x3000;
}

static unsigned combining_class(uint32_t c) {
  return c < 0x300 ? 0 : find_run(kUnicodeCombining, COUNT(kUnicodeCombining), 8, c);
}

// ---------------------------------------------------------------------------------------------------------------------
// Composition

static int compare_first(const void *key, const void *row) {
  const uint32_t a = *(const uint32_t *)key, b = *(const uint32_t *)row;
  return (a > b) - (a < b);
}

static int compare_pair(const void *key, const void *row) {
  const int first = compare_first(key, row);
  return first ? first : compare_first((const uint32_t *)key + 1, (const uint32_t *)row + 1);
}

// Writes what c decomposes into, 1 ... CLB_NFC_WORK characters.
static size_t decompose(uint32_t c, uint32_t *out) {
  if (c >= HANGUL_FIRST && c < HANGUL_FIRST + HANGUL_COUNT) {
    const uint32_t i = c - HANGUL_FIRST;
    out[0] = HANGUL_L + i / (HANGUL_N_V * HANGUL_N_T);
    out[1] = HANGUL_V + i / HANGUL_N_T % HANGUL_N_V;
    out[2] = HANGUL_T + i % HANGUL_N_T;
    return out[2] == HANGUL_T ? 2 : 3;
  }
  const uint32_t *row = c < 0xc0 ? NULL
                                 : bsearch(&c, kUnicodeDecompositions, COUNT(kUnicodeDecompositions),
                                           sizeof *kUnicodeDecompositions, compare_first);
  if (!row) {
    out[0] = c;
    return 1;
  }
  // Only the first of two decomposes further, and a whole chain has at most four characters.
  const size_t n = decompose(row[1], out);
  if (row[2] == 0) return n;
  out[n] = row[2];
  return n + 1;
}

// The composite, or 0.
static uint32_t compose(uint32_t a, uint32_t b) {
  if (a - HANGUL_L < HANGUL_N_L && b - HANGUL_V < HANGUL_N_V) {
    return HANGUL_FIRST + ((a - HANGUL_L) * HANGUL_N_V + (b - HANGUL_V)) * HANGUL_N_T;
  }
  const bool is_lv = a - HANGUL_FIRST < HANGUL_COUNT && (a - HANGUL_FIRST) % HANGUL_N_T == 0;
  if (is_lv && b - HANGUL_T - 1 < HANGUL_N_T - 1) return a + (b - HANGUL_T);
  const uint32_t key[2] = {a, b};
  const uint32_t *row =
      bsearch(key, kUnicodeCompositions, COUNT(kUnicodeCompositions), sizeof *kUnicodeCompositions, compare_pair);
  return row ? row[2] : 0;
}

// Marks by their class, those of one class in the order they came. A run may be long, so it is merged, not inserted.
static void sort_marks(uint32_t *marks, size_t n, uint32_t *spare) {
  if (n < 2) return;
  const size_t half = n / 2;
  sort_marks(marks, half, spare);
  sort_marks(marks + half, n - half, spare);
  size_t a = 0, b = half;
  for (size_t i = 0; i < n; i++) {
    const bool first = b == n || (a < half && combining_class(marks[a]) <= combining_class(marks[b]));
    spare[i] = marks[first ? a++ : b++];
  }
  for (size_t i = 0; i < n; i++) marks[i] = spare[i];
}

bool clb_needs_nfc(const uint32_t *c, size_t n) {
  for (size_t i = 0; i < n; i++) {
    if (c[i] >= 0x300) return true;
  }
  return false;
}

size_t clb_nfc(const uint32_t *c, size_t n, uint32_t *work) {
  size_t n_work = 0;
  for (size_t i = 0; i < n; i++) n_work += decompose(c[i], work + n_work);
  uint32_t *spare = work + CLB_NFC_WORK * n;
  for (size_t i = 0; i < n_work; i++) {
    const size_t start = i;
    while (i < n_work && combining_class(work[i]) != 0) i++;
    sort_marks(work + start, i - start, spare);
  }
  size_t out = 0, starter = SIZE_MAX;
  unsigned last = 0;
  for (size_t i = 0; i < n_work; i++) {
    const unsigned mark = combining_class(work[i]);
    const bool near = starter != SIZE_MAX && (out == starter + 1 || last < mark);
    const uint32_t composed = near ? compose(work[starter], work[i]) : 0;
    if (composed) {
      work[starter] = composed;
      continue;
    }
    if (mark == 0) starter = out;
    last = mark;
    work[out++] = work[i];
  }
  return out;
}
