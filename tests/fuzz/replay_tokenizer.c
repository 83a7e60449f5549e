// The target of tokenizer tables without libFuzzer: replay_tokenizer SEED N FILE... tries each FILE, then N changed
// ones, in which some numbers are others, and prints how many were accepted.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz_tokenizer.h"

enum { MAX_FILES = 16, MAX_BYTES = 1 << 16 };

static uint32_t g_state;

static uint32_t draw(uint32_t n) {
  g_state ^= g_state << 13;
  g_state ^= g_state >> 17;
  g_state ^= g_state << 5;
  return g_state % n;
}

static void change(uint8_t *data, size_t n) {
  static const uint32_t odd[] = {0, 1, 2, 255, 0x7fffffff, 0x80000000, 0xffffffff, 0x10ffff, 0xd800};
  for (uint32_t i = 0, times = 1 + draw(4); i < times; i++) {
    const size_t at = draw((uint32_t)n);
    uint32_t word;
    switch (draw(4)) {
      case 0:
        data[at] ^= (uint8_t)(1u << draw(8));
        break;
      case 1:
        data[at] = (uint8_t)draw(256);
        break;
      case 2:
        data[at] = (uint8_t)(data[at] + draw(5) - 2);
        break;
      default:
        word = odd[draw(sizeof odd / sizeof *odd)];
        if (at + sizeof word <= n) memcpy(data + at, &word, sizeof word);
    }
  }
}

int main(int argc, char **argv) {
  static uint8_t files[MAX_FILES][MAX_BYTES], now[MAX_BYTES];
  size_t sizes[MAX_FILES], n_files = 0, accepted = 0;
  char error[1024];
  if (argc < 4) return 2;
  g_state = (uint32_t)strtoul(argv[1], NULL, 10) * 2654435761u + 1;
  for (int i = 3; i < argc && n_files < MAX_FILES; i++) {
    FILE *file = fopen(argv[i], "rb");
    if (!file) return 2;
    sizes[n_files] = fread(files[n_files], 1, MAX_BYTES, file);
    fclose(file);
    if (!fuzz_tokenizer(files[n_files], sizes[n_files], error, sizeof error)) {
      fprintf(stderr, "%s: %s\n", argv[i], error);
      return 1;
    }
    n_files++;
  }
  for (unsigned long i = strtoul(argv[2], NULL, 10); i > 0; i--) {
    const size_t which = draw((uint32_t)n_files);
    memcpy(now, files[which], sizes[which]);
    change(now, sizes[which]);
    accepted += fuzz_tokenizer(now, sizes[which], error, sizeof error);
  }
  printf("%zu\n", accepted);
  return 0;
}
