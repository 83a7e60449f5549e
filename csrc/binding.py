"""Writes the C source of the `_native` extension: usage `binding.py OUT.c CDEF.h...`.

Run by CMake. The declarations are plain files so that they can be read beside the headers.
"""

import sys
from pathlib import Path

from cffi import FFI

INCLUDES = """
#include "blocks.h"
#include "crc32c.h"
#include "colibri.h"
#include "colibri_tokenizer.h"
#include "quantize.h"
#include "simulate.h"
"""


def main() -> None:
    out, *cdefs = (Path(arg) for arg in sys.argv[1:])
    ffi = FFI()
    for path in cdefs:
        ffi.cdef(path.read_text())
    ffi.set_source("colibri_tools._native", INCLUDES)
    ffi.emit_c_code(str(out))


if __name__ == "__main__":
    main()
