// Page 0, the section table and the bytes of sections: rules 1 to 10, and 14 as far as it is about page 0.
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "container_internal.h"
#include "crc32c.h"
#include "sha256.h"

enum {
  SECTION_TABLE = 128,  // offset in page 0
  SECTION_ENTRY = 64,
  PAGE0_CRC = 4092,
  MIN_SECTIONS = 7,
  MAX_SECTIONS = 61,
};

static const uint8_t kMagic[8] = {'C', 'O', 'L', 'I', 'B', 'R', 'I', 0};
static const uint64_t kMaxMetadata = (uint64_t)128 << 20;

const char *const clb_section_names[N_KNOWN_SECTIONS] = {
    "", "spec", "blobs", "provenance", "resident directory", "row table", "expert index", "layout table"};

static bool read_at(loader *r, uint64_t offset, void *buffer, uint64_t n_bytes) {
  uint8_t *p = buffer;
  if (r->fd < 0) {
    if (offset > r->memory_bytes || n_bytes > r->memory_bytes - offset) {
      return clb_refuse(r, "the bytes at hand end at %" PRIu64 ", expected %" PRIu64 " more at offset %" PRIu64,
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
      return clb_refuse(r, "reading %" PRIu64 " bytes of metadata at offset %" PRIu64 " failed with errno %d%s",
                        n_bytes, offset, number, number == EIO ? " (EIO, input/output error)" : "");
    }
    if (got == 0)
      return clb_refuse(r, "rule 5: the file ends at %" PRIu64 ", expected %" PRIu64 " bytes more", offset, n_bytes);
    p += got;
    offset += (uint64_t)got;
    n_bytes -= (uint64_t)got;
  }
  return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Page 0

static bool check_identity(loader *r, const uint8_t *page) {
  if (memcmp(page, kMagic, sizeof kMagic) != 0) {
    if (is_zero(page, CLB_PAGE0_BYTES)) {
      return clb_refuse(r, "rule 4: page 0 is empty, so this container was never finished; make it again");
    }
    quoted q = clb_quote(page, sizeof kMagic);
    return clb_refuse(
        r, "rule 1: the file starts with %s, expected \"COLIBRI\" and a zero byte: this is not a container", q.s);
  }
  if (get_u32(page + 8) != 1) {
    return clb_refuse(r, "rule 1: page 0: version is %" PRIu32 ", expected 1; a newer tool may read it",
                      get_u32(page + 8));
  }
  if (get_u32(page + 12) != CLB_PAGE0_BYTES) {
    return clb_refuse(r, "rule 1: page 0: page0_bytes is %" PRIu32 ", expected 4096", get_u32(page + 12));
  }
  uint32_t crc = clb_crc32c(0, page, PAGE0_CRC);
  if (get_u32(page + PAGE0_CRC) != crc) {
    return clb_refuse(r,
                      "rule 4: page 0: its CRC is %08" PRIx32 ", expected %08" PRIx32 " as stored: page 0 is damaged",
                      crc, get_u32(page + PAGE0_CRC));
  }
  uint64_t required = get_u64(page + 16);
  for (unsigned bit = 0; bit < 64; bit++) {
    if ((required >> bit & 1) != 0) {
      return clb_refuse(
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
    return clb_refuse(r, "rule 10: page 0: byte %" PRIu32 " is %u, expected 0", at, page[at]);
  }
  return true;
}

static bool check_page0(loader *r, const uint8_t *page) {
  clb_container *c = r->c;
  if (!check_identity(r, page)) return false;
  c->alignment = get_u64(page + 32);
  bool power_of_two = c->alignment != 0 && (c->alignment & (c->alignment - 1)) == 0;
  if (!power_of_two || c->alignment < 4096 || c->alignment > CLB_MAX_ALIGNMENT) {
    return clb_refuse(r, "rule 3: page 0: alignment is %" PRIu64 ", expected a power of two, 4096 ... 2097152",
                      c->alignment);
  }
  if (get_u64(page + 40) != c->file_size) {
    return clb_refuse(r, "rule 5: the file has %" PRIu64 " bytes, expected %" PRIu64 " (page 0): it was cut or grown",
                      c->file_size, get_u64(page + 40));
  }
  c->n_sections = get_u32(page + 48);
  if (c->n_sections < MIN_SECTIONS || c->n_sections > MAX_SECTIONS) {
    return clb_refuse(r, "rule 6: page 0: n_sections is %" PRIu32 ", expected 7 ... 61", c->n_sections);
  }
  if (!check_page0_zeros(r, page)) return false;
  uint64_t metadata_bytes = get_u64(page + 56);
  if (metadata_bytes > kMaxMetadata || metadata_bytes > c->file_size - CLB_PAGE0_BYTES) {
    return clb_refuse(r,
                      "rule 7: page 0: metadata_bytes is %" PRIu64 ", expected at most 128 MiB and what the file holds",
                      metadata_bytes);
  }
  c->metadata_end = CLB_PAGE0_BYTES + metadata_bytes;
  c->data_offset = get_u64(page + 64);
  c->expert_offset = get_u64(page + 72);
  uint64_t latest = CLB_PAGE0_BYTES + 2 * (metadata_bytes + ((uint64_t)8 << 20));
  if (c->data_offset < c->metadata_end || c->data_offset > latest || c->data_offset > c->file_size ||
      c->data_offset % c->alignment != 0) {
    return clb_refuse(r,
                      "rule 8: page 0: data_offset is %" PRIu64 ", expected a multiple of %" PRIu64 " between %" PRIu64
                      " and %" PRIu64,
                      c->data_offset, c->alignment, c->metadata_end, latest);
  }
  if (c->expert_offset < c->data_offset || c->expert_offset > c->file_size || c->expert_offset % c->alignment != 0) {
    return clb_refuse(r,
                      "rule 14: page 0: expert_offset is %" PRIu64 ", expected a multiple of %" PRIu64
                      " between %" PRIu64 " and %" PRIu64,
                      c->expert_offset, c->alignment, c->data_offset, c->file_size);
  }
  clb_sha256(page + SECTION_TABLE, (size_t)c->n_sections * SECTION_ENTRY, c->id);
  if (memcmp(c->id, page + 88, sizeof c->id) != 0) {
    return clb_refuse(r, "rule 9: page 0: id is not the SHA-256 of the section table");
  }
  return true;
}

bool clb_load_page0(loader *r, uint8_t *page) {
  return read_at(r, 0, page, CLB_PAGE0_BYTES) && check_page0(r, page);
}

// ---------------------------------------------------------------------------------------------------------------------
// Sections

// A section's entry, given the kind of the one before and the end of the bytes before.
static bool check_section_entry(loader *r, const uint8_t *e, uint32_t i, uint32_t last_kind, uint64_t end) {
  uint32_t kind = get_u32(e), flags = get_u32(e + 4);
  uint64_t offset = get_u64(e + 8), bytes = get_u64(e + 16);
  if (kind <= last_kind) {
    return clb_refuse(r,
                      "rule 6: section %" PRIu32 ": kind is %" PRIu32 ", expected more than the %" PRIu32 " before it",
                      i, kind, last_kind);
  }
  if (flags > 1 || get_u32(e + 28) != 0) {
    return clb_refuse(r, "rule 10: section %" PRIu32 " (kind %" PRIu32 "): undescribed bytes are not zero", i, kind);
  }
  bool known = kind < N_KNOWN_SECTIONS;
  if (known && flags != 1) {
    return clb_refuse(r, "rule 6: section %" PRIu32 " (%s): flags are 0, expected 1", i, clb_section_names[kind]);
  }
  if (!known && flags == 1) {
    return clb_refuse(
        r, "rule 6: section %" PRIu32 ": kind %" PRIu32 " is required and unknown; a newer tool may read it", i, kind);
  }
  uint64_t expected = align_up(end, 64);
  if (offset != expected) {
    return clb_refuse(r, "rule 7: section %" PRIu32 " (kind %" PRIu32 "): offset is %" PRIu64 ", expected %" PRIu64, i,
                      kind, offset, expected);
  }
  uint64_t metadata_end = r->c->metadata_end;
  if (offset > metadata_end || bytes > metadata_end - offset) {  // an empty one may start behind the end, too
    return clb_refuse(r,
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
    return clb_refuse(r, "rule 7: the gap before section %" PRIu32 " (kind %" PRIu32 ") is not zero", i, kind);
  }
  uint32_t crc = clb_crc32c(0, base + offset, (size_t)bytes);
  if (crc != get_u32(e + 24)) {
    return clb_refuse(r,
                      "rule 9: section %" PRIu32 " (kind %" PRIu32 "): its CRC is %08" PRIx32 ", expected %08" PRIx32
                      " as stored: it is damaged",
                      i, kind, crc, get_u32(e + 24));
  }
  uint8_t digest[32];
  clb_sha256(base + offset, (size_t)bytes, digest);
  if (memcmp(digest, e + 32, sizeof digest) != 0) {
    return clb_refuse(
        r, "rule 9: section %" PRIu32 " (kind %" PRIu32 "): its SHA-256 is not the one stored: it is damaged", i, kind);
  }
  return true;
}

bool clb_load_sections(loader *r, const uint8_t *page) {
  clb_container *c = r->c;
  uint64_t n_bytes = c->metadata_end - CLB_PAGE0_BYTES;
  c->metadata = malloc(n_bytes > 0 ? (size_t)n_bytes : 1);
  if (c->metadata == NULL) return clb_refuse_memory(r, "metadata");
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
    return clb_refuse(r, "rule 7: the last section ends at %" PRIu64 ", expected the end of the metadata, %" PRIu64,
                      end, c->metadata_end);
  }
  for (size_t kind = 1; kind < N_KNOWN_SECTIONS; kind++) {
    if (c->sections[kind].p == NULL)
      return clb_refuse(r, "rule 6: there is no %s section (kind %zu)", clb_section_names[kind], kind);
  }
  return true;
}

bool clb_check_reserve(loader *r) {
  uint8_t chunk[16384];
  for (uint64_t at = r->c->metadata_end; at < r->c->data_offset;) {
    uint64_t left = r->c->data_offset - at;
    uint64_t n = left < sizeof chunk ? left : sizeof chunk;
    if (!read_at(r, at, chunk, n)) return false;
    if (!is_zero(chunk, n)) {
      return clb_refuse(r, "rule 8: the reserve has a byte that is not zero at or behind offset %" PRIu64, at);
    }
    at += n;
  }
  return true;
}
