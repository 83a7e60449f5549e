// Reading payload past the page cache.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // O_DIRECT, preadv
#endif

#include "aligned_io.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

_Static_assert(sizeof(off_t) >= 8, "build with -D_FILE_OFFSET_BITS=64");

// Kernels read at most 2^31 - 4096 bytes at once; this is a multiple of every unit.
static const size_t kMaxRead = (size_t)1 << 30;

// ---------------------------------------------------------------------------------------------------------------------
// Errors

// strerror_r is one of two functions, by the C library; both results are looked at here.
static const char *text_of_int(int result, const char *buffer) {
  return result == 0 ? buffer : "unknown error";
}

static const char *text_of_pointer(const char *result, const char *buffer) {
  (void)buffer;
  return result;
}

void clb_describe_errno(int number, char *text, size_t text_bytes) {
  char buffer[96] = "";
  const char *s = _Generic(strerror_r(number, buffer, sizeof buffer), int: text_of_int, char *: text_of_pointer)(
      strerror_r(number, buffer, sizeof buffer), buffer);
  snprintf(text, text_bytes, "%s (errno %d)", s, number);
}

void clb_file_describe(int error_number, uint64_t offset, size_t n_bytes, char *text, size_t text_bytes) {
  char reason[128];
  if (error_number == ENODATA) {
    snprintf(reason, sizeof reason, "the file ends before that; it was cut since it was opened");
  } else {
    clb_describe_errno(error_number, reason, sizeof reason);
  }
  snprintf(text, text_bytes, "reading %zu bytes at offset %" PRIu64 ": %s", n_bytes, offset, reason);
}

// ---------------------------------------------------------------------------------------------------------------------
// Reading

// What a direct read returned is kept up to a whole unit only, so that what follows is aligned again.
static int read_rest(const clb_file *file, uint64_t offset, char *p, size_t n_bytes) {
  while (n_bytes > 0) {
    ssize_t got = pread(file->fd, p, n_bytes < kMaxRead ? n_bytes : kMaxRead, (off_t)offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    size_t kept = file->direct ? (size_t)got / CLB_IO_UNIT * CLB_IO_UNIT : (size_t)got;
    if (kept == 0) return ENODATA;
    p += kept;
    offset += kept;
    n_bytes -= kept;
  }
  return 0;
}

int clb_file_read(const clb_file *file, uint64_t offset, void *buffer, size_t n_bytes) {
  if (offset % CLB_IO_UNIT != 0 || n_bytes % CLB_IO_UNIT != 0 || (uintptr_t)buffer % CLB_IO_UNIT != 0) return EINVAL;
  if (offset > INT64_MAX - n_bytes) return EINVAL;
  return read_rest(file, offset, buffer, n_bytes);
}

size_t clb_parts_skip(struct iovec *parts, size_t n_parts, size_t n_bytes) {
  size_t first = 0;
  while (first < n_parts && n_bytes >= parts[first].iov_len) n_bytes -= parts[first++].iov_len;
  memmove(parts, parts + first, (n_parts - first) * sizeof *parts);
  if (first == n_parts) return 0;
  parts[0].iov_base = (uint8_t *)parts[0].iov_base + n_bytes;
  parts[0].iov_len -= n_bytes;
  return n_parts - first;
}

int clb_file_readv(const clb_file *file, uint64_t offset, struct iovec *parts, size_t n_parts) {
  uint64_t left = 0;
  for (size_t i = 0; i < n_parts; i++) {
    if (((uintptr_t)parts[i].iov_base | parts[i].iov_len) % CLB_IO_UNIT != 0) return EINVAL;
    left += parts[i].iov_len;
  }
  if (offset % CLB_IO_UNIT != 0 || left > kMaxRead || offset > INT64_MAX - left) return EINVAL;
  while (n_parts > 1) {
    ssize_t got = preadv(file->fd, parts, (int)n_parts, (off_t)offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    size_t kept = file->direct ? (size_t)got / CLB_IO_UNIT * CLB_IO_UNIT : (size_t)got;
    if (kept == 0) return ENODATA;
    offset += kept;
    n_parts = clb_parts_skip(parts, n_parts, kept);
  }
  return n_parts == 0 ? 0 : read_rest(file, offset, parts[0].iov_base, parts[0].iov_len);
}

// ---------------------------------------------------------------------------------------------------------------------
// Opening

// A second open file description of fd's inode, so that O_DIRECT does not become a property of fd. -1 and errno.
static int reopen(int fd, int flags) {
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  return open(path, O_RDONLY | O_CLOEXEC | flags);
}

// Opens with O_DIRECT and reads one unit: some file systems refuse only the read. -1 and file->reason when it fails.
static int open_direct(clb_file *file, int fd) {
#ifdef O_DIRECT
  void *unit = clb_pages_alloc(CLB_IO_UNIT);
  if (unit == NULL) {
    snprintf(file->reason, sizeof file->reason, "no memory to probe direct reads");
    return -1;
  }
  const char *step = "open";
  clb_file probe = {.fd = reopen(fd, O_DIRECT), .direct = true};
  int number = probe.fd < 0 ? errno : 0;
  if (number == 0) {
    step = "read";
    number = clb_file_read(&probe, 0, unit, CLB_IO_UNIT);
  }
  clb_pages_free(unit, CLB_IO_UNIT);
  if (number == 0) return probe.fd;
  if (probe.fd >= 0) close(probe.fd);
  char reason[100];
  clb_describe_errno(number, reason, sizeof reason);
  snprintf(file->reason, sizeof file->reason, "direct %s failed: %s", step, reason);
#else
  (void)fd;
  snprintf(file->reason, sizeof file->reason, "this system has no O_DIRECT");
#endif
  return -1;
}

static bool open_buffered(clb_file *file, int fd, char *error, size_t error_bytes) {
  file->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (file->fd >= 0) return true;
  char reason[128];
  clb_describe_errno(errno, reason, sizeof reason);
  snprintf(error, error_bytes, "cannot open the container's data: %s", reason);
  return false;
}

bool clb_file_open(clb_file *file, int fd, char *error, size_t error_bytes) {
  *file = (clb_file){.fd = -1};
  if (error_bytes > 0) error[0] = 0;
  file->fd = open_direct(file, fd);
  file->direct = file->fd >= 0;
  return file->direct || open_buffered(file, fd, error, error_bytes);
}

bool clb_file_open_buffered(clb_file *file, int fd, const char *reason, char *error, size_t error_bytes) {
  *file = (clb_file){.fd = -1};
  if (error_bytes > 0) error[0] = 0;
  snprintf(file->reason, sizeof file->reason, "%s", reason);
  return open_buffered(file, fd, error, error_bytes);
}

void clb_file_close(clb_file *file) {
  if (file->fd >= 0) close(file->fd);
  file->fd = -1;
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory

static size_t round_to_pages(size_t n_bytes) {
  long page = sysconf(_SC_PAGESIZE);
  size_t unit = page > CLB_IO_UNIT ? (size_t)page : CLB_IO_UNIT;
  return n_bytes > SIZE_MAX - unit ? 0 : (n_bytes + unit - 1) / unit * unit;
}

void *clb_pages_alloc(size_t n_bytes) {
  size_t size = round_to_pages(n_bytes);
  if (size == 0) return NULL;
  void *pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return pages == MAP_FAILED ? NULL : pages;
}

void clb_pages_free(void *pages, size_t n_bytes) {
  if (pages != NULL) munmap(pages, round_to_pages(n_bytes));
}
