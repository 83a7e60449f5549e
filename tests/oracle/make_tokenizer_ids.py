"""Ids of the hand-picked strings as llama.cpp gives them, for each pre-tokenizer and for
SentencePiece: `make_tokenizer_ids.py LLAMA_TOKENIZE` writes values/tokenizer-ids.json.

LLAMA_TOKENIZE is the program of that name of a llama.cpp build. The ids are in the file once for
all pre-tokenizers; a pre-tokenizer lists those strings that it cuts otherwise.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from text_strings import HAND_PICKED
from text_vocab import SEPARATOR, bpe_metadata, spm_metadata, write_vocab

from colibri_tools.text.pretokenizers import PRE_TOKENIZERS

OUT = Path(__file__).parent / "values" / "tokenizer-ids.json"


def llama_ids(program: str, vocab: Path, texts: Sequence[str], separator: str) -> list[list[int]]:
    """Tokenize texts in one call: a special token between two of them cuts them apart."""
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        file.write(separator.join(["", *texts]).encode())
        file.flush()
        command = [program, "-m", vocab, "-f", file.name, "--ids", "--no-bos"]
        command += ["--no-escape", "--log-disable"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    ids = json.loads(done.stdout[done.stdout.index("[") : done.stdout.rindex("]") + 1])
    cut: list[list[int]] = []
    for number in ids:
        if number == ids[0]:
            cut.append([])
        else:
            cut[-1].append(number)
    assert len(cut) == len(texts)
    return cut


def main() -> None:
    program = sys.argv[1]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        vocab = Path(folder) / "vocab.gguf"
        for name in PRE_TOKENIZERS:
            ids = llama_ids(program, write_vocab(vocab, bpe_metadata(name)), HAND_PICKED, SEPARATOR)
            base = found.setdefault("base", ids)
            pairs = enumerate(zip(ids, base, strict=True))
            found[name] = {str(i): own for i, (own, other) in pairs if own != other}
        for name, prefix in (("spm", True), ("spm-bare", False)):
            path = write_vocab(vocab, spm_metadata(prefix=prefix))
            found[name] = llama_ids(program, path, HAND_PICKED, SEPARATOR)
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items()]
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
