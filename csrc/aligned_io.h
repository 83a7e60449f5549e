/* Reading payload past the page cache.
 *
 * A clb_file reads a container's data with O_DIRECT where a probing read works, and buffered elsewhere. Which of the
 * two is decided once, at open, and never changes. O_DIRECT has three requirements: the file offset, the length and the
 * buffer's address are all multiples of CLB_IO_UNIT. They are enforced for buffered files too, so that a misaligned
 * read fails on every file system and not only on those that care.
 *
 * A clb_file is immutable after open: any number of threads may read from it.
 */
#ifndef COLIBRI_ALIGNED_IO_H
#define COLIBRI_ALIGNED_IO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

enum { CLB_IO_UNIT = 4096 };

typedef struct {
  int fd;
  bool direct;
  char reason[128];  // why the file is read buffered; empty when direct
} clb_file;

/* Opens the file behind `fd` once more (the same inode, whatever its path holds now); `fd` stays the caller's.
 * False, and a one-line `error`, when it cannot be read at all. */
bool clb_file_open(clb_file *file, int fd, char *error, size_t error_bytes);

/* The same through the page cache, whatever the file system can do; `reason` says that it was wanted so. */
bool clb_file_open_buffered(clb_file *file, int fd, const char *reason, char *error, size_t error_bytes);

void clb_file_close(clb_file *file);  // a closed or zeroed clb_file with fd -1 is left alone

/* Reads exactly `n_bytes` at `offset` into `buffer`, all three multiples of CLB_IO_UNIT. Interrupted and short reads go
 * on where they stopped. Returns 0, or a positive errno: EINVAL for a misaligned request, ENODATA when the file ends
 * before the range does. */
int clb_file_read(const clb_file *file, uint64_t offset, void *buffer, size_t n_bytes);

/* The same into several buffers, one after the other; all addresses and lengths are multiples of CLB_IO_UNIT. `parts`
 * is used up. */
int clb_file_readv(const clb_file *file, uint64_t offset, struct iovec *parts, size_t n_parts);

/* Takes n_bytes off the front of `parts`; returns how many parts are left, moved to the front. */
size_t clb_parts_skip(struct iovec *parts, size_t n_parts, size_t n_bytes);

/* "Input/output error (errno 5)" */
void clb_describe_errno(int error_number, char *text, size_t text_bytes);

/* One line about a failed clb_file_read: "reading 8192 bytes at offset 12288: Input/output error". */
void clb_file_describe(int error_number, uint64_t offset, size_t n_bytes, char *text, size_t text_bytes);

/* Zeroed memory at a multiple of the system's page size and of CLB_IO_UNIT, NULL when there is none. */
void *clb_pages_alloc(size_t n_bytes);
void clb_pages_free(void *pages, size_t n_bytes);

#endif
