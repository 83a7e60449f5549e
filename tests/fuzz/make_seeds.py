"""Write the seeds of the container target: `make_seeds.py FOLDER`.

Each is a container without its zero reserve and its data, a few kilobytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "c"))

import make_container as mc


def bare() -> mc.Model:
    """One expert, one layout, nothing optional."""
    model = mc.streaming(1, 1, mixed=False)
    model.spec = with_top_k_of_one(model)
    return model


def with_top_k_of_one(model: mc.Model) -> list[mc.Kv]:
    """The spec, without the key that nobody knows."""
    known = [item for item in model.spec if item[0] != "x.words"]
    return [(key, kind, 1 if key == "top_k" else value) for key, kind, value in known]


def aligned() -> mc.Model:
    """Blocks of two layouts, on 16 KiB."""
    model = mc.streaming(2, 2, mixed=True, alignment=16384)
    model.spec = with_top_k_of_one(model)
    return model


def without_switches() -> mc.Model:
    """A model that is not executable: routers may be missing."""
    model = mc.small()
    model.spec = mc.spec(executable=(4, 0), executable_lacks=(5, "a reason"))
    model.tensors = model.tensors[-2:]
    return model


MODELS: dict[str, Callable[[], mc.Model]] = {
    "small": mc.small,
    "bare": bare,
    "without_switches": without_switches,
    "rows": lambda: mc.streaming(3, 4, mixed=True),
    "aligned": aligned,
}


def seeds() -> dict[str, bytes]:
    """The seeds by name."""
    made = {}
    for name, build in MODELS.items():
        image = mc.build(build())
        raw = image.to_bytes()
        metadata_bytes = int.from_bytes(raw[56:64], "little")
        made[name] = raw[: 4096 + metadata_bytes]
    return made


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in seeds().items():
        (folder / name).write_bytes(raw)


if __name__ == "__main__":
    main()
