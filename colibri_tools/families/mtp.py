"""Layers behind the model's own: multi-token prediction (next-n), announced or recognised.

They are numbered on from the last layer (DeepSeek, GLM), or have a name of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from colibri_tools.families.common import MTP_DROP
from colibri_tools.families.hyper import Hyper

__all__ = ["MtpLayers", "announced_layers", "without_gguf_mtp"]

_CONFIG_NAMES = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_layers",
    "num_mtp_modules",
)
_GGUF_NAME = "{arch}.nextn_predict_layers"
_MARKS = ("eh_proj.", "nextn.")
_MAX_ANNOUNCED = 64


def announced_layers(levels: Sequence[Mapping[str, Any]], arch: str) -> int:
    """Return how many MTP layers the metadata announce, 0 for none or nonsense."""
    names = (_GGUF_NAME.format(arch=arch),) if arch else _CONFIG_NAMES
    for level in levels:
        for name in names:
            value = level.get(name)
            if type(value) is int and 0 < value <= _MAX_ANNOUNCED:
                return value
    return 0


def without_gguf_mtp(hyper: Hyper, n_announced: int) -> None:
    """GGUF counts MTP layers among its blocks; leave the model's own in `hyper`."""
    if hyper["n_layers"] > n_announced:
        hyper.values["n_layers"] -= n_announced


class MtpLayers:
    """Tells which tensors belong to MTP layers."""

    def __init__(self, body: str, n_layers: int, n_announced: int, names: Iterable[str]) -> None:
        self._layer = re.compile(re.escape(body) + r"(?:layers|blk)\.(\d{1,6})\.(.+)")
        self._own_name = re.compile(MTP_DROP.regex)
        self._layers = set(range(n_layers, n_layers + n_announced))
        for name in names:
            match = self._layer.fullmatch(name)
            if match and match[2].startswith(_MARKS) and int(match[1]) >= n_layers:
                self._layers.add(int(match[1]))

    def owns(self, name: str) -> bool:
        """True for a tensor of an MTP layer."""
        match = self._layer.fullmatch(name)
        if match is not None:
            return int(match[1]) in self._layers
        return self._own_name.fullmatch(name) is not None
