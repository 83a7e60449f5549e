"""Families of models, each one row of data: names, written forms, keys, defaults, switches."""

from colibri_tools.families.schema import (
    DropRule,
    ExpertRule,
    Family,
    Form,
    Key,
    Prefix,
    RefuseRule,
    TensorRule,
)
from colibri_tools.families.table import FAMILIES

__all__ = [
    "FAMILIES",
    "DropRule",
    "ExpertRule",
    "Family",
    "Form",
    "Key",
    "Prefix",
    "RefuseRule",
    "TensorRule",
]
