"""Sources: anything that lists tensors and reads a byte range.

`open_source(path)` takes what people have: a Hugging Face directory, one .safetensors file, an
index file, a Hub cache snapshot or repository, a .gguf file (any member of a split set) or a
directory with one. What a file is, its content decides, never the suffix of a resolved name.
"""

from colibri_tools.sources.catalog import Source, SourceFile, SourceKind, SourceTensor
from colibri_tools.sources.detect import FileKind
from colibri_tools.sources.gguf_header import GgufArray, parse_gguf_metadata
from colibri_tools.sources.opening import open_source, sniff

__all__ = [
    "FileKind",
    "GgufArray",
    "Source",
    "SourceFile",
    "SourceKind",
    "SourceTensor",
    "open_source",
    "parse_gguf_metadata",
    "sniff",
]
