// Some of the blocks once more, on another drive: which of them, and what happens when they cannot be read there.
//
// What a file has is decided by the blocks themselves: each must have the bytes and the SHA-256 that the container's
// index says, so a block of the mirror is the container's whatever happened to either file's metadata since. Checks of
// what is read are as ever.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "store_internal.h"

// The container's row for a row of the mirror.
static bool find_row(const clb_container *c, const clb_row *wanted, size_t *row) {
  for (*row = 0; *row < clb_container_n_rows(c); (*row)++) {
    const clb_row *x = clb_container_row(c, *row);
    if (x->stream == wanted->stream && x->layer == wanted->layer) return true;
  }
  return false;
}

static bool refuse(clb_store *s, const clb_container *mirror, const clb_row *row, uint64_t expert) {
  return clb_fail_store(s,
                        "mirror %s: layer %" PRId32 ", expert %" PRIu64
                        ": it is not the block of this container, so it is of another one; make it anew with "
                        "'colibri export'",
                        clb_container_path(mirror), row->layer, expert);
}

// Experts are named by the spec where the file has some of them, and are the columns where it has all.
static bool take_rows(clb_store *s, const clb_container *mirror) {
  const uint64_t *experts = NULL;
  size_t n_named = 0, at = 0;
  const bool named = clb_spec_u64_array(mirror, "part.experts", &experts, &n_named);
  for (size_t r = 0; r < clb_container_n_rows(mirror); r++) {
    const clb_row *row = clb_container_row(mirror, r);
    size_t own_row;
    const bool found = find_row(s->container, row, &own_row);
    for (size_t column = 0; column < row->n_experts; column++, at++) {
      if (named && at >= n_named)
        return clb_fail_store(s, "mirror %s: part.experts ends early", clb_container_path(mirror));
      const uint64_t expert = named ? experts[at] : column;
      clb_block there, here;
      if (!found || expert > UINT32_MAX || !clb_container_block(mirror, r, column, &there) ||
          !clb_container_block(s->container, own_row, (size_t)expert, &here) || there.bytes != here.bytes ||
          memcmp(there.sha256, here.sha256, 32) != 0 || there.crc32c != here.crc32c) {
        return refuse(s, mirror, row, expert);
      }
      s->blocks[s->rows[own_row].first_block + expert].mirrored = there.offset;
    }
  }
  return true;
}

bool clb_mirror_open(clb_store *s, const clb_container *mirror, bool buffered) {
  if (s->map != NULL) return clb_fail_store(s, "mirror: the container is mapped; choose another way of reading");
  if (clb_container_fd(mirror) < 0) return clb_fail_store(s, "mirror: it is in memory: it has no blocks to read");
  char text[ERROR_BYTES / 2];
  const int fd = clb_container_fd(mirror);
  const bool opened = buffered ? clb_file_open_buffered(&s->mirror, fd, "as asked", text, sizeof text)
                               : clb_file_open(&s->mirror, fd, text, sizeof text);
  if (!opened) return clb_fail_store(s, "mirror %s: %s", clb_container_path(mirror), text);
  return take_rows(s, mirror);
}

void clb_mirror_lost(clb_store *s, const slot *x) {
  block_state *b = &s->blocks[x->block];
  if (s->metrics.mirror_failures++ == 0) {
    char cause[160];
    if (x->status != 0) {
      clb_describe_errno(x->status, cause, sizeof cause);
    } else {
      snprintf(cause, sizeof cause, "CRC-32C %08" PRIx32 ", expected %08" PRIx32, x->found_crc, x->crc32c);
    }
    const size_t n = strlen(s->reason);
    snprintf(s->reason + n, sizeof s->reason - n,
             "%sblocks of the mirror are read from the container instead, the first one layer %" PRId32
             ", expert %" PRIu64 " at offset %" PRIu64 ": %s",
             n > 0 ? "; " : "", clb_container_row(s->container, b->row)->layer, x->block - s->rows[b->row].first_block,
             b->mirrored, cause);
  }
  b->mirrored = 0;
  b->checked = false;  // what was checked is the other copy
}
