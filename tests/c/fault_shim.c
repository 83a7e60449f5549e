// LD_PRELOAD: makes the system calls of file I/O fail, stop short or end the process, for tests/test_faults.py.
//
// FAULT is a list "key=value,key=value,...", read at the start and by fault_reload():
//   op=read|write|sync|rename|unlink|allocate|open|any    which calls count (open: only those that may create)
//   path=TEXT     only files whose name contains it; of descriptors, the name they had when they were opened
//   dir=TEXT      only files in a folder whose name contains it
//   direct=1      only descriptors with O_DIRECT
//   nth=N         the first such call that is hit, from 1; times=M how many are (default 1, 0 = all from there on)
//   do=N          fail with errno N | do=short: half the bytes | do=kill: SIGKILL instead of the call
//                 | do=half: SIGKILL after half of the call
//   lose=SEED     a kill is a power cut: each page, size, name and removal that was not synced is lost or not, at
//   random
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { kPage = 4096, kMaxUndo = 1 << 16 };

typedef enum { DO_ERRNO, DO_SHORT, DO_KILL, DO_HALF } action;
typedef enum { GO_ON, FAIL, HALVE } verdict;

typedef struct {
  enum { PAGE, SIZE, CREATED, RENAMED, REMOVED } kind;
  dev_t device;  // of the file, or of the folder for names
  ino_t inode;
  int fd;  // a duplicate, so that it can be written to when the program has closed its own
  off_t offset;
  size_t n_bytes;
  char *data;         // the page before
  char *name, *from;  // RENAMED: it was `from`; REMOVED and replaced files wait under `from`
} undo;

static struct {
  char op[16], path[128], dir[128];
  bool direct;
  long nth, times, lose;
  action what;
  int error;
} fault;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long n_calls, n_saved;
static undo undos[kMaxUndo];
static int n_undos;
static uint64_t state;

#define REAL(name)               \
  static __typeof__(&name) real; \
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name)

static int real_unlink(const char *path) {
  REAL(unlink);
  return real(path);
}

static int real_rename(const char *from, const char *to) {
  REAL(rename);
  return real(from, to);
}

// ------------------------------------------------------------------ settings

static void set(char *item) {
  char *value = strchr(item, '=');
  if (!value) return;
  *value++ = 0;
  if (!strcmp(item, "op")) snprintf(fault.op, sizeof fault.op, "%s", value);
  if (!strcmp(item, "path")) snprintf(fault.path, sizeof fault.path, "%s", value);
  if (!strcmp(item, "dir")) snprintf(fault.dir, sizeof fault.dir, "%s", value);
  if (!strcmp(item, "direct")) fault.direct = atoi(value) != 0;
  if (!strcmp(item, "nth")) fault.nth = atol(value);
  if (!strcmp(item, "times")) fault.times = atol(value);
  if (!strcmp(item, "lose")) fault.lose = atol(value);
  if (strcmp(item, "do")) return;
  fault.error = atoi(value);
  fault.what = !strcmp(value, "short")  ? DO_SHORT
               : !strcmp(value, "kill") ? DO_KILL
               : !strcmp(value, "half") ? DO_HALF
                                        : DO_ERRNO;
}

__attribute__((constructor)) void fault_reload(void) {
  memset(&fault, 0, sizeof fault);
  fault.times = 1;
  char text[512], *rest = NULL;
  const char *given = getenv("FAULT");
  snprintf(text, sizeof text, "%s", given ? given : "");
  for (char *item = strtok_r(text, ",", &rest); item; item = strtok_r(NULL, ",", &rest)) set(item);
  n_calls = 0;
  state = (uint64_t)fault.lose * 0x9E3779B97F4A7C15u + 1;
}

long fault_calls(void) {
  return n_calls;
}

// ------------------------------------------------------------------ a power cut

static bool coin(void) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return state >> 63;
}

static undo *remember(int kind, const struct stat *status) {
  if (n_undos == kMaxUndo) abort();
  undo *u = &undos[n_undos++];
  *u = (undo){.kind = kind, .device = status->st_dev, .inode = status->st_ino, .fd = -1};
  return u;
}

static void forget(undo *u) {
  if (u->fd >= 0) close(u->fd);
  if (u->from && (u->kind == REMOVED)) real_unlink(u->from);
  free(u->data), free(u->name), free(u->from);
}

static void synced(int fd) {
  struct stat status;
  if (fstat(fd, &status)) return;
  int kept = 0;
  for (int i = 0; i < n_undos; i++) {
    if (undos[i].device == status.st_dev && undos[i].inode == status.st_ino) {
      forget(&undos[i]);
    } else {
      undos[kept++] = undos[i];
    }
  }
  n_undos = kept;
}

static void before_write(int fd, off_t offset, size_t n_bytes) {
  struct stat status;
  if (!fault.lose || fstat(fd, &status) || !S_ISREG(status.st_mode)) return;
  while (n_bytes) {
    size_t room = (size_t)(kPage - offset % kPage), n = n_bytes < room ? n_bytes : room;
    undo *u = remember(PAGE, &status);
    u->fd = fcntl(fd, F_DUPFD_CLOEXEC, 900), u->offset = offset, u->data = calloc(1, n);
    struct iovec piece = {u->data, n};
    REAL(preadv);
    ssize_t got = real(fd, &piece, 1, offset);
    u->n_bytes = got > 0 ? (size_t)got : 0;
    if (offset + (off_t)n > status.st_size) {
      undo *size = remember(SIZE, &status);
      size->fd = fcntl(fd, F_DUPFD_CLOEXEC, 900), size->offset = status.st_size;
    }
    offset += (off_t)n, n_bytes -= n;
  }
}

static void before_resize(int fd) {
  struct stat status;
  if (!fault.lose || fstat(fd, &status)) return;
  undo *u = remember(SIZE, &status);
  u->fd = fcntl(fd, F_DUPFD_CLOEXEC, 900), u->offset = status.st_size;
}

static bool folder_of(const char *path, struct stat *status) {
  char folder[PATH_MAX];
  snprintf(folder, sizeof folder, "%s", path);
  char *slash = strrchr(folder, '/');
  if (!slash) return !stat(".", status);
  slash[slash == folder] = 0;
  return !stat(folder, status);
}

// Keeps a file that is about to lose its name under another one.
static void save_name(const char *path) {
  struct stat status, folder;
  char saved[PATH_MAX];
  if (!fault.lose || lstat(path, &status) || !S_ISREG(status.st_mode) || !folder_of(path, &folder)) return;
  if ((size_t)snprintf(saved, sizeof saved, "%s.lost%ld", path, n_saved++) >= sizeof saved) return;
  if (link(path, saved)) return;
  undo *u = remember(REMOVED, &folder);
  u->name = strdup(path), u->from = strdup(saved);
}

static void revert(undo *u) {
  bool lost = coin();
  if (u->kind == PAGE && lost) {
    REAL(pwrite);
    if (u->n_bytes && real(u->fd, u->data, u->n_bytes, u->offset) < 0) abort();
  }
  if (u->kind == SIZE && lost && ftruncate(u->fd, u->offset)) abort();
  if (u->kind == CREATED && lost) real_unlink(u->name);
  if (u->kind == RENAMED && lost) real_rename(u->name, u->from);
  if (u->kind == REMOVED) {
    if (lost && access(u->name, F_OK)) {
      real_rename(u->from, u->name);
    } else {
      real_unlink(u->from);
    }
  }
}

static void end(void) {
  for (int i = n_undos; i > 0; i--) revert(&undos[i - 1]);
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

// A process that ends well: nothing is lost.
__attribute__((destructor)) void fault_tidy(void) {
  for (int i = 0; i < n_undos; i++) forget(&undos[i]);
  n_undos = 0;
}

// ------------------------------------------------------------------ which calls

static bool matches(const char *op, const char *path, int fd) {
  if (!fault.nth && !fault.lose) return false;
  if (strcmp(fault.op, "any") ? strcmp(fault.op, op) : (!strcmp(op, "read") || !strcmp(op, "open"))) return false;
  const char *base = strrchr(path, '/');
  base = base ? base + 1 : path;
  if (!strstr(base, fault.path) || (fault.dir[0] && !strstr(path, fault.dir))) return false;
  return !fault.direct || (fd >= 0 && fcntl(fd, F_GETFL) & O_DIRECT);
}

// Called with the lock. HALVE also stands for "half of it, then end".
static verdict judge(const char *op, const char *path, int fd) {
  char name[PATH_MAX] = "", link[64];
  if (!path) {
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, name, sizeof name - 1);
    name[n > 0 ? n : 0] = 0;
    path = name;
  }
  if (!matches(op, path, fd)) return GO_ON;
  n_calls++;
  if (!fault.nth || n_calls < fault.nth || (fault.times && n_calls >= fault.nth + fault.times)) return GO_ON;
  if (fault.what == DO_KILL) end();
  errno = fault.error;
  return fault.what == DO_ERRNO ? FAIL : HALVE;
}

static size_t total(const struct iovec *pieces, int n) {
  size_t sum = 0;
  for (int i = 0; i < n; i++) sum += pieces[i].iov_len;
  return sum;
}

// Half of the bytes: of a single piece the first half, else the first piece. Direct I/O ends at a page.
static int halve(int fd, const struct iovec *pieces, int n, struct iovec *half) {
  *half = pieces[0];
  if (n > 1) return 1;
  half->iov_len -= half->iov_len / 2;
  if (fcntl(fd, F_GETFL) & O_DIRECT) half->iov_len = (half->iov_len + kPage - 1) / kPage * kPage;
  return 1;
}

// ------------------------------------------------------------------ the calls

static ssize_t read_at(int fd, const struct iovec *pieces, int n, off_t offset) {
  REAL(preadv);
  pthread_mutex_lock(&lock);
  verdict v = judge("read", NULL, fd);
  int error = errno;
  pthread_mutex_unlock(&lock);  // reads need not wait for each other
  if (v == FAIL) return errno = error, -1;
  struct iovec half;
  if (v == HALVE) n = halve(fd, pieces, n, &half), pieces = &half;
  return real(fd, pieces, n, offset);
}

static ssize_t write_at(int fd, const struct iovec *pieces, int n, off_t offset) {
  REAL(pwritev);
  pthread_mutex_lock(&lock);
  struct iovec half;
  verdict v = judge("write", NULL, fd);
  if (v == HALVE) n = halve(fd, pieces, n, &half), pieces = &half;
  ssize_t done = -1;
  if (v != FAIL) {
    before_write(fd, offset, total(pieces, n));
    done = real(fd, pieces, n, offset);
  }
  if (v == HALVE && fault.what == DO_HALF) end();
  int error = errno;
  pthread_mutex_unlock(&lock);
  return errno = error, done;
}

#define WITH_LOCK(result, op, path, fd, before, call, after) \
  pthread_mutex_lock(&lock);                                 \
  result = -1;                                               \
  verdict v = judge(op, path, fd);                           \
  if (v != FAIL) {                                           \
    before;                                                  \
    result = call;                                           \
    if (result >= 0) {                                       \
      after;                                                 \
    }                                                        \
  }                                                          \
  if (v == HALVE && fault.what == DO_HALF) end();            \
  int error = errno;                                         \
  pthread_mutex_unlock(&lock);                               \
  errno = error

int fsync(int fd) {
  REAL(fsync);
  int result;
  WITH_LOCK(result, "sync", NULL, fd, (void)0, real(fd), synced(fd));
  return result;
}

int fdatasync(int fd) {
  REAL(fdatasync);
  int result;
  WITH_LOCK(result, "sync", NULL, fd, (void)0, real(fd), synced(fd));
  return result;
}

int ftruncate64(int fd, off_t n_bytes) {
  REAL(ftruncate);
  int result;
  WITH_LOCK(result, "allocate", NULL, fd, before_resize(fd), real(fd, n_bytes), (void)0);
  return result;
}

int fallocate64(int fd, int mode, off_t offset, off_t n_bytes) {
  REAL(fallocate);
  int result;
  WITH_LOCK(result, "allocate", NULL, fd, before_resize(fd), real(fd, mode, offset, n_bytes), (void)0);
  return result;
}

static void renamed(const char *from, const char *to) {
  struct stat folder;
  if (!fault.lose || !folder_of(to, &folder)) return;
  undo *u = remember(RENAMED, &folder);
  u->name = strdup(to), u->from = strdup(from);
}

int rename(const char *from, const char *to) {
  int result;
  WITH_LOCK(result, "rename", to, -1, save_name(to), real_rename(from, to), renamed(from, to));
  return result;
}

int renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags) {
  REAL(renameat2);
  int result;
  WITH_LOCK(result, "rename", to, -1, (void)0, real(from_fd, from, to_fd, to, flags), renamed(from, to));
  return result;
}

int unlink(const char *path) {
  int result;
  WITH_LOCK(result, "unlink", path, -1, save_name(path), real_unlink(path), (void)0);
  return result;
}

static void created(const char *path, bool existed) {
  struct stat folder;
  if (!fault.lose || existed || !folder_of(path, &folder)) return;
  undo *u = remember(CREATED, &folder);
  u->name = strdup(path);
}

int open64(const char *path, int flags, ...) {
  REAL(open);
  mode_t mode = 0;
  if (flags & (O_CREAT | O_TMPFILE)) {
    va_list rest;
    va_start(rest, flags);
    mode = va_arg(rest, mode_t);
    va_end(rest);
  }
  if (!(flags & O_CREAT)) return real(path, flags, mode);
  int result;
  bool existed = !access(path, F_OK);
  WITH_LOCK(result, "open", path, -1, (void)0, real(path, flags, mode), created(path, existed));
  return result;
}

ssize_t pread64(int fd, void *buffer, size_t n, off_t offset) {
  struct iovec piece = {buffer, n};
  return read_at(fd, &piece, 1, offset);
}

ssize_t pwrite64(int fd, const void *buffer, size_t n, off_t offset) {
  struct iovec piece = {(void *)(uintptr_t)buffer, n};
  return write_at(fd, &piece, 1, offset);
}

ssize_t preadv64v2(int fd, const struct iovec *pieces, int n, off_t offset, int flags) {
  (void)flags;
  return read_at(fd, pieces, n, offset);
}

ssize_t pwritev64v2(int fd, const struct iovec *pieces, int n, off_t offset, int flags) {
  (void)flags;
  return write_at(fd, pieces, n, offset);
}

// A Python without the *v2 calls uses these; the C extension uses pread.
ssize_t preadv64(int fd, const struct iovec *pieces, int n, off_t offset) {
  return read_at(fd, pieces, n, offset);
}
ssize_t pwritev64(int fd, const struct iovec *pieces, int n, off_t offset) {
  return write_at(fd, pieces, n, offset);
}
ssize_t pread(int fd, void *buffer, size_t n, off_t offset) {
  return pread64(fd, buffer, n, offset);
}
