# make demo    own venv, install, then repack -> inspect -> verify -> run on the shipped checkpoint
# make test    the fast tests (no torch)
# make oracle  recompute the oracles with torch and transformers
# make lint    ruff, mypy, clang-format, C warnings as errors
# make fuzz    libFuzzer on the C reader, then the Python readers, SECONDS=60 each (needs clang)
# make sanitize  the C tests and the whole engine under AddressSanitizer and UndefinedBehaviorSanitizer, then ThreadSanitizer,
#                with FLIPS=4000 damaged containers and COMBINATIONS=60 of settings
# make valgrind  the same programs under valgrind
# make static  build/static/colibri-run, which needs no file beside it; CC=musl-gcc links it with musl
# make wheel   build the wheel, install it into an empty environment and use it there
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt csrc/binding.py $(wildcard colibri_tools/_cdef*.h csrc/*.[ch] runtime/src/*.[ch] runtime/include/*.h runtime/tools/*.[ch])
DEMO := build/demo

.PHONY: demo demo-chat dev test oracle lint format sanitize valgrind fuzz static wheel clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check 'scikit-build-core>=0.10,<2' 'cffi>=1.16,<3' 'cmake>=3.26' ninja

# An editable install: from this folder a wheel would be shadowed by the source tree.
$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation -e .
	@touch $@

$(VENV)/.test: $(VENV)/.installed
	$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation -e '.[test]'
	@touch $@

dev: $(VENV)/.test

demo: $(VENV)/.installed
	@mkdir -p $(DEMO)
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh fixtures/demo.sh $(DEMO)

demo-chat: $(VENV)/.installed
	@mkdir -p $(DEMO)
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh fixtures/demo_chat.sh $(DEMO)

test: $(VENV)/.test
	$(BIN)/python -m pytest -q --ignore=tests/oracle $(PYTEST_ARGS)

$(VENV)/.oracle: $(VENV)/.test
	$(BIN)/pip install -q --disable-pip-version-check 'torch==2.13.0' 'transformers>=5.5,<6'
	$(BIN)/pip install -q --disable-pip-version-check --no-deps 'mistral-common>=1.8,<2'
	$(BIN)/pip install -q --disable-pip-version-check 'bitsandbytes>=0.45,<1' 'accelerate>=1.1,<2'
	@touch $@

oracle: $(VENV)/.oracle
	$(BIN)/python tests/oracle/make_oracle.py --check
	$(BIN)/python -m pytest -q tests/oracle $(PYTEST_ARGS)
	$(BIN)/python -m pytest -q -m oracle --ignore=tests/oracle $(PYTEST_ARGS)

$(VENV)/.lint: $(VENV)/.test
	$(BIN)/pip install -q --disable-pip-version-check 'ruff>=0.9,<1' 'mypy>=1.14,<3' 'clang-format>=18,<24'
	@touch $@

C_FILES = $(wildcard csrc/*.[ch] runtime/src/*.[ch] runtime/include/*.h runtime/tools/*.c tests/c/*.[ch] runtime/examples/*.c tests/bench/*.c tests/fuzz/*.[ch])

lint: $(VENV)/.lint
	@mkdir -p build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(C_FILES)
	$(CC) -std=c11 -D_GNU_SOURCE -O2 -ffp-contract=off -Wall -Wextra -Wshadow -Wconversion -Werror -Icsrc -Iruntime/include -Iruntime/src \
	  -o build/lint-colibri-run csrc/*.c runtime/src/*.c runtime/tools/*.c -lpthread -lm

format: $(VENV)/.lint
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format -q .
	$(BIN)/clang-format -i $(C_FILES)

C_TESTS = tests/test_creader.py tests/test_blocks.py tests/test_fast_kernels.py tests/test_rot.py

sanitize: $(VENV)/.test
	COLIBRI_TEST_FLIPS=$(or $(FLIPS),4000) COLIBRI_TEST_COMBINATIONS=$(or $(COMBINATIONS),60) \
	  $(BIN)/python -m pytest -q --timeout 3600 $(C_TESTS) tests/test_sanitized_engine.py $(PYTEST_ARGS)

valgrind: $(VENV)/.test
	@command -v valgrind >/dev/null || { echo "valgrind is not installed" >&2; exit 1; }
	COLIBRI_VALGRIND=1 COLIBRI_TEST_FLIPS=$(or $(FLIPS),100) $(BIN)/python -m pytest -q --timeout 3600 $(C_TESTS) $(PYTEST_ARGS)

# musl-gcc looks for no headers but musl's; the kernel's are needed for io_uring.
KERNEL_HEADERS = $(if $(findstring musl,$(CC)),-idirafter /usr/include -idirafter /usr/include/$(shell uname -m)-linux-gnu)
STATIC_OUT = build/static/colibri-run
STATIC_OPT = -O3

static:
	@mkdir -p $(dir $(STATIC_OUT))
	$(CC) $(STATIC_OPT) -std=c11 -D_GNU_SOURCE -ffp-contract=off -static $(KERNEL_HEADERS) -Icsrc -Iruntime/include -Iruntime/src \
	  csrc/*.c runtime/src/*.c runtime/tools/*.c -o $(STATIC_OUT) -lpthread -lm

wheel: $(VENV)/.installed
	sh tests/wheel.sh $(BIN)/python

clean:
	rm -rf $(VENV) build dist

include tests/fuzz/fuzz.mk
