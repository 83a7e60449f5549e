"""Run llama.cpp's converter on a tiny checkpoint: LLAMA_CPP HF_DIR OUT.gguf.

The converter is used as it is, but for the vocabulary: it knows tokenizers by a hash, and tiny
models have none, so every row of the embedding gets a made-up token.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

N_SPECIAL = 3


def write_vocabulary(model: Any) -> None:
    """Stands in for `set_vocab` of the converter's model classes."""
    n = model.hparams["vocab_size"]
    writer = model.gguf_writer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<unk>", "<s>", "</s>"] + [f"t{i}" for i in range(N_SPECIAL, n)])
    writer.add_token_types([2, 3, 3] + [1] * (n - N_SPECIAL))
    writer.add_token_merges(["t 3", "t 4"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def main(llama_cpp: str, source: str, out: str) -> None:
    """Convert one directory to a float32 GGUF file."""
    root = Path(llama_cpp)
    sys.path[:0] = [str(root), str(root / "gguf-py")]
    converter = importlib.import_module("convert_hf_to_gguf")
    find = converter.get_model_class

    def found(*args: Any, **kwargs: Any) -> Any:
        model_class = find(*args, **kwargs)
        model_class.set_vocab = write_vocabulary
        return model_class

    converter.get_model_class = found
    sys.argv = ["convert_hf_to_gguf.py", source, "--outfile", out, "--outtype", "f32"]
    converter.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
