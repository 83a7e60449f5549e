// Characters: UTF-8, general categories, canonical composition.
#ifndef CLB_UNICODE_H
#define CLB_UNICODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CLB_REPLACEMENT = 0xFFFD, CLB_LAST_CHARACTER = 0x10FFFF };

// Bytes of the well-formed sequence at p, or of the longest beginning of one (at least 1). left >= 1.
size_t clb_utf8_scan(const uint8_t *p, size_t left, bool *whole);
// The character at p; a byte that is no part of one is U+FFFD. Returns the bytes it takes.
size_t clb_utf8_get(const uint8_t *p, size_t left, uint32_t *c);
size_t clb_utf8_put(uint32_t c, uint8_t *p);  // 1 ... 4 bytes

unsigned clb_category(uint32_t c);  // in the order of unicode_tables.h
bool clb_is_white(uint32_t c);      // White_Space

// Composes (NFC). `work` has room for 2 * CLB_NFC_WORK * n characters; the result is in its beginning, at most
// CLB_NFC_WORK * n of them.
enum { CLB_NFC_WORK = 4 };
bool clb_needs_nfc(const uint32_t *c, size_t n);
size_t clb_nfc(const uint32_t *c, size_t n, uint32_t *work);  // returns how many

#endif
