"""CASES.md is true: the tests it names exist, and no case of its sections is left out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
TEXT = (TESTS / "CASES.md").read_text(encoding="utf-8")

# Numbers that are not here are not in the case table.
REQUIRED = """
1.1 1.2 1.4 1.5 1.7 1.8 1.9 1.11
2.1 2.3 2.4 2.6 2.7 2.8
3.1 3.2 3.3 3.6 3.7 3.9 3.10
4.1 4.2 4.3 4.5 4.10 4.11 4.12
5.1 5.2 5.3 5.4 5.5 5.7 5.9 5.11
6.1 6.3 6.4 6.6 6.7 6.9
7.1 7.2 7.3 7.4
8.2 8.3 8.5
9.1 9.3 9.4 9.5 9.6
10.1 10.4 10.5 10.7
11.1 11.2 11.4 11.6
12.2 12.4 12.5
13.1 13.2 13.3 13.5
"""


def rows() -> dict[str, str]:
    found = re.findall(r"^\| (\d+\.\d+) \| [^|]+ \| (.+) \|$", TEXT, re.MULTILINE)
    assert len(found) == len(dict(found)), "a case has two rows"
    return dict(found)


def functions_of(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_case_has_a_row_with_a_test_or_the_word_later() -> None:
    table = rows()
    assert [case for case in REQUIRED.split() if case not in table] == []
    for case, text in table.items():
        assert "::test_" in text or text.startswith("later ("), case


def test_every_test_named_in_the_list_exists() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", TEXT)
    assert len(named) > 60
    known = {file: functions_of(file) for file in {file for file, _ in named}}
    assert [f"{file}::{test}" for file, test in named if test not in known[file]] == []


def test_every_case_test_of_these_sections_is_in_a_row() -> None:
    """A test called test_case_1_2_.. says which case it holds; that case has a row here."""
    table = rows()
    for path in TESTS.glob("test_*.py"):
        for test in functions_of(path.name):
            match = re.match(r"test_case_(\d+)_(\d+)_", test)
            if match:
                assert f"{match[1]}.{match[2]}" in table, f"{path.name}::{test}"
