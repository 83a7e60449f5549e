"""The shape of a family description: what a row of the family table can say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from colibri_tools.container.format import Group, PartRole, Role

__all__ = [
    "BIASES",
    "HEAD_ROLES",
    "REQUIRED",
    "DropRule",
    "ExpertRule",
    "Family",
    "Form",
    "Key",
    "KeyKind",
    "Prefix",
    "RefuseRule",
    "TensorRule",
    "Where",
]

REQUIRED: Final = object()
"""The default of a hyper-parameter that has none: a source without it is refused."""

BIASES: Final = (PartRole.GATE_BIAS, PartRole.UP_BIAS, PartRole.DOWN_BIAS)
"""The parts of an expert that are vectors: all of a model's experts have one, or none."""

HEAD_ROLES: Final = (Role.OUTPUT, Role.OUTPUT_BIAS)
"""The roles of tensors that take the head prefix, not the body's."""

Where = Literal["model", "layer", "moe", "dense"]
"""How often a tensor occurs: once, in every layer, in every MoE layer, in every dense layer."""

KeyKind = Literal["int", "last", "float", "bool", "flag", "str", "ints", "flags", "strs", "pattern"]
"""`last` is a whole number from -1, `pattern` a whole number, a string of letters, or a list of
true and false, `flag` true or false, which may be written as a number."""

Windows = Literal["all", "layer_types", "pattern", "tail", "none"]
"""Which layers the sliding window applies to where `layer_types` do not say: every one; every
second below `window_layers`; those a pattern marks; those from `window_layers` on; none."""


@dataclass(frozen=True, slots=True)
class Key:
    """Where one hyper-parameter is written: `names` are tried in order, null counts as absent.

    Names of a GGUF form may hold `{arch}`.
    """

    kind: KeyKind
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One tensor outside the experts.

    `pattern` is a dotted name with `{layer}` where a number stands. `shape` names dimensions, outer
    first: the names of `checks.DIM_TEXT`. A tensor with a `feature` is there in all its layers or
    in none, and its presence turns that switch on; one with `unless` is there where that is off,
    one with `needs` can only be there where that is on. With `below`, matrices of those roles and
    the same shape follow the first one in the tensor.
    """

    pattern: str
    role: Role
    where: Where
    shape: tuple[str, ...]
    feature: str | None = None
    unless: str | None = None
    needs: str | None = None
    group: Group = Group.EVERY_TOKEN
    optional: bool = False
    below: tuple[Role, ...] = ()

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that the tensor fills, in the order in which they lie in it."""
        return (self.role, *self.below)


@dataclass(frozen=True, slots=True)
class ExpertRule:
    """One written form of expert weights, as [outputs, inputs], inputs contiguous.

    With `{expert}` in the pattern the tensor belongs to one expert, without it is a stack
    [experts, outputs, inputs]. Several `parts` lie below each other on the output axis. A bias has
    no inputs: [outputs], or [experts, outputs].

    `transposed`: a stack is stored as [experts, inputs, outputs]; `interleaved`: of `n` parts,
    output o is row o // n of part o % n. Both are put right without changing a number. The two
    tensors of an MXFP4 stack are one tensor here, of GGML's type mxfp4, [experts, outputs, inputs],
    under the name that ends in `_blocks`. gpt-oss, with at = "layers.{layer}.mlp.experts.":

        ExpertRule(at + "gate_up_proj", GATE_UP, transposed=True, interleaved=True)
        ExpertRule(at + "gate_up_proj_blocks", GATE_UP, interleaved=True)
        ExpertRule(at + "gate_up_proj_bias", GATE_UP_BIAS, interleaved=True)
        ExpertRule(at + "down_proj", DOWN, transposed=True)
        ExpertRule(at + "down_proj_blocks", DOWN)
        ExpertRule(at + "down_proj_bias", DOWN_BIAS)

    A form should also have a rule with `{expert}` for every part: respec names a container's
    experts by them.
    """

    pattern: str
    parts: tuple[PartRole, ...]
    transposed: bool = False
    interleaved: bool = False

    @property
    def stacked(self) -> bool:
        """True if one tensor holds all experts of its layer."""
        return "{expert}" not in self.pattern

    @property
    def is_bias(self) -> bool:
        """True for vectors."""
        return self.parts[0] in BIASES


@dataclass(frozen=True, slots=True)
class DropRule:
    """Source tensors that are left out on purpose: a name, a regular expression, and why."""

    name: str
    regex: str
    why: str


@dataclass(frozen=True, slots=True)
class RefuseRule:
    """Source tensors whose presence means a storage scheme that cannot be carried."""

    regex: str
    scheme: str


@dataclass(frozen=True, slots=True)
class Prefix:
    """A way the same names are nested: a prefix for the body, and those of the output matrix."""

    body: str
    heads: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """How a family is written in one kind of source.

    `ids` are model types (Hugging Face) or architectures (GGUF), `architectures` class names for
    configs without a model type. `tensors` of `HEAD_ROLES` take the head prefix.
    `defaults` give the value of a hyper-parameter whose key is absent, as the reference
    implementation of that source kind resolves it. `layer_kinds` is False where metadata does not
    tell dense from MoE layers.
    `rope_alpha`: dynamic rope with an `alpha` stretches the base once and for all. `rope_mscales`:
    longrope states what multiplies cos and sin. `rope_default` is the rope of a config that says
    nothing about it. `local_rope` is for GGUF: layers with a window or chunks have the base
    `rope_theta_local`, if there is one, and the scaling of the others ("scaled") or none
    ("unscaled"). A default may be a function of the other values.
    """

    ids: tuple[str, ...]
    tensors: tuple[TensorRule, ...]
    experts: tuple[ExpertRule, ...]
    keys: Mapping[str, Key]
    defaults: Mapping[str, Any]
    rope_pairing: Literal["half", "adjacent"]
    architectures: tuple[str, ...] = ()
    prefixes: tuple[Prefix, ...] = (Prefix("", ("",)),)
    drops: tuple[DropRule, ...] = ()
    windows: Windows = "all"
    layer_kinds: bool = True
    rope_alpha: bool = False
    rope_mscales: bool = False
    rope_default: Mapping[str, Any] | None = None
    local_rope: Literal["scaled", "unscaled"] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table: how a family is written, and the switches its graph needs.

    `graph` holds spec keys (without `graph.`) that are constants of the family. `gguf` is None
    where no GGUF architecture is mapped by this row. `rope_layers` says which layers rotate: all,
    or those with a sliding window. `top_k` is the only number of experts per token that the router
    is defined for. `limits` are sentences on what cannot be told or run.
    """

    name: str
    hf: Form
    gguf: Form | None
    graph: Mapping[str, Any] = field(default_factory=dict)
    rope_layers: Literal["all", "sliding"] = "all"
    top_k: int | None = None
    limits: tuple[str, ...] = ()

    def form(self, source_kind: str) -> Form:
        """Return the description for "safetensors" or "gguf", which must be there."""
        form = self.gguf if source_kind == "gguf" else self.hf
        assert form is not None
        return form

    @property
    def forms(self) -> tuple[tuple[str, Form], ...]:
        """The written forms there are, with the name of their kind."""
        named = (("Hugging Face", self.hf), ("GGUF", self.gguf))
        return tuple((kind, form) for kind, form in named if form is not None)
