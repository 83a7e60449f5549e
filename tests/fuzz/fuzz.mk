# make fuzz SECONDS=60: the container reader under libFuzzer, then the Python readers. Needs clang with libFuzzer.
SECONDS ?= 60
CLANG ?= clang
FUZZ := build/fuzz
FUZZ_CFLAGS := -std=c11 -D_GNU_SOURCE -g -Wall -Wextra -Wshadow -Wconversion -Werror -Icsrc -Itests/c -Itests/fuzz
FUZZ_RUNTIME := -Iruntime/src -Iruntime/include
FUZZ_SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
FUZZ_HEADERS := $(wildcard csrc/*.h runtime/src/*.h runtime/include/*.h tests/c/*.h tests/fuzz/*.h)

# Only the reader is instrumented for coverage; checksums and type tables, which are not what is tested, are just fast.
FUZZ_READER := $(patsubst csrc/%.c,$(FUZZ)/%.o,$(wildcard csrc/container*.c))
FUZZ_FAST := $(patsubst csrc/%.c,$(FUZZ)/%.o,csrc/crc32c.c csrc/sha256.c $(wildcard csrc/blocks*.c))

.PHONY: fuzz fuzz-tools
fuzz-tools:
	@command -v $(CLANG) >/dev/null || { echo "make fuzz needs clang with libFuzzer (Debian: clang and libclang-rt-dev); CLANG=... names another" >&2; exit 1; }
	@mkdir -p $(FUZZ)

$(FUZZ_FAST): $(FUZZ)/%.o: csrc/%.c $(FUZZ_HEADERS) | fuzz-tools
	$(CLANG) $(FUZZ_CFLAGS) -O2 -c $< -o $@

$(FUZZ_READER): $(FUZZ)/%.o: csrc/%.c $(FUZZ_HEADERS) | fuzz-tools
	$(CLANG) $(FUZZ_CFLAGS) -O2 $(FUZZ_SANITIZE) -fsanitize=fuzzer-no-link -c $< -o $@

$(FUZZ)/mutate.o $(FUZZ)/fuzz_container.o $(FUZZ)/replay.o: $(FUZZ)/%.o: tests/fuzz/%.c $(FUZZ_HEADERS) | fuzz-tools
	$(CLANG) $(FUZZ_CFLAGS) -O2 $(FUZZ_SANITIZE) -c $< -o $@

$(FUZZ)/fuzz_container: $(FUZZ)/fuzz_container.o $(FUZZ)/mutate.o $(FUZZ_READER) $(FUZZ_FAST)
	$(CLANG) $(FUZZ_SANITIZE) -fsanitize=fuzzer $^ -lm -o $@

$(FUZZ)/replay: $(FUZZ)/replay.o $(FUZZ)/mutate.o $(FUZZ_READER) $(FUZZ_FAST)
	$(CLANG) $(FUZZ_SANITIZE) $^ -lm -o $@

# The tokenizer: all of it is instrumented, but for the checksums of the container that it can be opened from.
TOKENIZER := $(patsubst runtime/src/%.c,$(FUZZ)/%.o,$(addprefix runtime/src/,tokenizer.c pattern.c unicode.c errors.c))

$(TOKENIZER): $(FUZZ)/%.o: runtime/src/%.c $(FUZZ_HEADERS) | fuzz-tools
	$(CLANG) $(FUZZ_CFLAGS) $(FUZZ_RUNTIME) -O2 $(FUZZ_SANITIZE) -fsanitize=fuzzer-no-link -c $< -o $@

$(FUZZ)/fuzz_tokenizer: tests/fuzz/fuzz_tokenizer.c $(TOKENIZER) $(FUZZ_READER) $(FUZZ_FAST)
	$(CLANG) $(FUZZ_CFLAGS) $(FUZZ_RUNTIME) -DFUZZ_TARGET -O2 $(FUZZ_SANITIZE) -fsanitize=fuzzer $^ -lm -o $@

fuzz: $(FUZZ)/fuzz_container $(FUZZ)/fuzz_tokenizer $(FUZZ)/replay $(VENV)/.test
	$(BIN)/python tests/fuzz/make_seeds.py $(FUZZ)/seeds
	@mkdir -p $(FUZZ)/corpus
	cd $(FUZZ) && ASAN_OPTIONS=quarantine_size_mb=16 ./fuzz_container -max_len=12288 -max_total_time=$(SECONDS) -timeout=25 \
	  -rss_limit_mb=1024 -print_final_stats=1 -verbosity=0 corpus seeds $(CURDIR)/tests/fuzz/crashers
	$(BIN)/python tests/fuzz/make_tokenizer_seeds.py $(FUZZ)/tokenizer-seeds
	@mkdir -p $(FUZZ)/tokenizer-corpus
	cd $(FUZZ) && ASAN_OPTIONS=quarantine_size_mb=16 ./fuzz_tokenizer -max_len=16384 -max_total_time=$(SECONDS) -timeout=25 \
	  -rss_limit_mb=1024 -print_final_stats=1 -verbosity=0 tokenizer-corpus tokenizer-seeds
	$(BIN)/python tests/fuzz/python_readers.py --seconds $(SECONDS) --folder $(FUZZ)
