"""Comparing two containers of one model: the compare command."""

from colibri_tools.compare.command import CompareResult, compare

__all__ = ["CompareResult", "compare"]
