// The target without libFuzzer, for any C compiler:
//   replay FILE...                 one line a file: "ok", or the refusal
//   replay -mutate SEED N FILE...  N changed inputs, each made from a FILE or an accepted input before; writes to
//   stdout,
//                                  each as u32 size, u8 accepted, bytes
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mutate.h"

enum { POOL = 64 };

typedef struct {
  size_t n;
  uint8_t bytes[FUZZ_MAX_BYTES];
} input;

// libFuzzer's mutations follow its coverage; without it, any change will do.
size_t LLVMFuzzerMutate(uint8_t *data, size_t n, size_t max) {
  if (n == 0 && max > 0) data[n++] = (uint8_t)rand();
  if (n > 0) data[(size_t)rand() % n] ^= (uint8_t)(1 << rand() % 8);
  return n;
}

static void require(bool ok) {
  if (!ok) {
    perror("replay");
    exit(2);
  }
}

static void load(input *in, const char *path) {
  FILE *f = fopen(path, "rb");
  require(f != NULL);
  in->n = fread(in->bytes, 1, sizeof in->bytes, f);
  fclose(f);
}

static int run_files(int n, char **paths) {
  static input in;
  for (int i = 0; i < n; i++) {
    char error[512];
    load(&in, paths[i]);
    printf("%s\n", fuzz_open(in.bytes, in.n, error, sizeof error) ? "ok" : error);
  }
  return 0;
}

static int run_mutate(unsigned seed, size_t n, int n_files, char **paths) {
  static input pool[POOL], now;
  size_t filled = 0;
  for (int i = 0; i < n_files && filled < POOL; i++) load(&pool[filled++], paths[i]);
  srand(seed);
  for (size_t i = 0; i < n; i++) {
    char error[512];
    now = pool[(size_t)rand() % filled];
    now.n = fuzz_mutate(now.bytes, now.n, sizeof now.bytes, (uint64_t)seed << 32 | i);
    uint8_t accepted = (uint8_t)fuzz_open(now.bytes, now.n, error, sizeof error);
    uint32_t n_bytes = (uint32_t)now.n;
    require(fwrite(&n_bytes, 4, 1, stdout) == 1 && fwrite(&accepted, 1, 1, stdout) == 1);
    require(fwrite(now.bytes, 1, now.n, stdout) == now.n);
    if (accepted && filled < POOL) pool[filled++] = now;
    if (accepted && filled == POOL) pool[(size_t)n_files + (size_t)rand() % (POOL - (size_t)n_files)] = now;
  }
  return fflush(stdout) == 0 ? 0 : 1;
}

int main(int argc, char **argv) {
  if (argc > 4 && strcmp(argv[1], "-mutate") == 0) {
    return run_mutate((unsigned)strtoul(argv[2], NULL, 0), (size_t)strtoull(argv[3], NULL, 0), argc - 4, argv + 4);
  }
  return run_files(argc - 1, argv + 1);
}
