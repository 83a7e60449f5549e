"""What a file is, judged by its first bytes, and what to tell people who have the wrong one."""

from __future__ import annotations

from typing import Literal

from colibri_tools.sources.files import RangeFile

__all__ = ["COLIBRI_MAGIC", "GGUF_MAGIC", "FileKind", "kind_of", "wrong_kind"]

COLIBRI_MAGIC = b"COLIBRI\0"
GGUF_MAGIC = b"GGUF"

FileKind = Literal[
    "directory",
    "safetensors",
    "gguf",
    "colibri",
    "json",
    "empty",
    "zeros",
    "ones",
    "lfs-pointer",
    "html",
    "zip",
    "pickle",
    "gzip",
    "hdf5",
    "numpy",
    "ggml",
    "unknown",
]

_PEEK_BYTES = 512
_MAGICS: tuple[tuple[bytes, FileKind], ...] = (
    (COLIBRI_MAGIC, "colibri"),
    (GGUF_MAGIC, "gguf"),
    (b"FUGG", "gguf"),  # the magic of a byte-swapped file, refused by name later
    (b"version https://git-lfs", "lfs-pointer"),
    (b"version https://hawser", "lfs-pointer"),
    (b"PK\x03\x04", "zip"),
    (b"PK\x05\x06", "zip"),
    (b"\x1f\x8b", "gzip"),
    (b"\x89HDF\r\n\x1a\n", "hdf5"),
    (b"\x93NUMPY", "numpy"),
    (b"lmgg", "ggml"),
    (b"fmgg", "ggml"),
    (b"tjgg", "ggml"),
    (b"algg", "ggml"),
)
_HTML_STARTS = (b"<!doctype", b"<html", b"<?xml", b"<head", b"<error")

_ADVICE: dict[FileKind, str] = {
    "colibri": "this is already a colibri container; give the checkpoint it was made from",
    "json": "this is a JSON text, not tensors; if it is a download error, fetch the file again",
    "empty": "the file is empty; fetch it again",
    "zeros": "the file starts with zeros: reserved space that was never written; fetch it again",
    "ones": "the first 8 bytes are all 0xFF: erased or damaged storage; fetch it again",
    "lfs-pointer": "this is a Git LFS pointer; fetch the real file (git lfs pull)",
    "html": "this is a web page, not a model file; fetch the file again (log in, or accept the "
    "model's terms first)",
    "zip": "this is a zip archive (PyTorch writes those), never opened here; convert it to "
    "safetensors first",
    "pickle": "this is a Python pickle, never opened here because it can run code; convert it "
    "to safetensors first",
    "gzip": "this is a gzip archive; unpack it first",
    "hdf5": "this is an HDF5 file; convert it to safetensors first",
    "numpy": "this is a numpy array; convert it to safetensors first",
    "ggml": "this is a GGML file from before GGUF; convert the original model again",
    "gguf": "this is a GGUF file under another name; name the file itself to use it",
    "safetensors": "this is a safetensors file under another name; name the file itself to use it",
    "unknown": "this is neither safetensors nor GGUF; fetch the file again",
    "directory": "this is a directory",
}


def kind_of(file: RangeFile) -> FileKind:
    """Return what an opened file is, from its first bytes."""
    head = bytearray(min(file.size, _PEEK_BYTES))
    file.read_into(0, memoryview(head), "first bytes")
    return _kind_of_bytes(bytes(head), file.size)


def wrong_kind(kind: FileKind) -> str:
    """Return the sentence that tells what such a file is and what to do."""
    return _ADVICE[kind]


def _kind_of_bytes(head: bytes, size: int) -> FileKind:
    if size == 0:
        return "empty"
    for magic, kind in _MAGICS:
        if head.startswith(magic):
            return kind
    if _looks_like_safetensors(head):
        return "safetensors"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(_HTML_STARTS):
        return "html"
    if text[:1] in (b"{", b"["):
        return "json"
    if head[:1] == b"\x80" and head[1:2] <= b"\x05":
        return "pickle"
    if not head.strip(b"\0"):
        return "zeros"
    if head[:8] == b"\xff" * 8:
        return "ones"
    return "unknown"


def _looks_like_safetensors(head: bytes) -> bool:
    # The format has no magic, only a brace after the 8-byte length. A length beyond the file's
    # end still counts, so that the message says how many bytes are missing.
    length = head[:8]
    is_text = length.isascii() and b"\0" not in length
    return head[8:9] == b"{" and length != b"\xff" * 8 and not is_text
