"""The documentation says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from oracle.cases import CASES

from colibri_tools.families.page import families_page
from colibri_tools.families.schema import Family
from colibri_tools.families.table import FAMILIES

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "fixtures").rglob("*.md")]
)


def test_the_families_page_is_generated_from_the_table() -> None:
    assert (ROOT / "docs" / "families.md").read_text() == families_page()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_cases_that_the_families_page_names_are_there(family: Family) -> None:
    """From each kind of source, with one expert per token, and with all of them."""
    assert f"`{family.name}-*` |\n" in families_page()
    named = {case.name: case for case in CASES.values() if case.name.startswith(family.name + "-")}
    assert named[f"{family.name}-f32"].gguf or family.gguf is None
    few = {case.spec.top_k for case in named.values()}
    every = any(case.spec.top_k == case.spec.experts for case in named.values())
    assert every and (1 in few or family.top_k is not None)


def test_the_readme_counts_the_families() -> None:
    found = re.search(r"families as data\*\*: (\d+) of them", (ROOT / "README.md").read_text())
    assert found and int(found[1]) == len(FAMILIES)


HEADERS = ["runtime/include/colibri.h", "runtime/include/colibri_tokenizer.h"]
HEADERS += ["runtime/src/store.h", "csrc/container.h"]


def test_the_guide_of_the_runtime_names_every_function_and_no_other() -> None:
    page = (ROOT / "docs" / "runtime.md").read_text()
    declared: set[str] = set()
    words: set[str] = set()
    for header in HEADERS:
        text = (ROOT / header).read_text()
        words |= set(re.findall(r"\b(?:colibri|clb)_\w+", text))
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
        declared |= set(re.findall(r"\b((?:colibri|clb)_\w+)\(", text))
    assert len(declared) > 70
    named = set(re.findall(r"\b(?:colibri|clb)_\w+", page))
    assert declared - named == set()
    assert named - words == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\(([^)#]+)\)", text)
    named = re.findall(r"`((?:docs|tests|fixtures|csrc|runtime|colibri_tools)/[\w./-]+)`", text)
    for link in links:
        if "://" not in link:
            assert (page.parent / link).exists(), link
    for name in named:
        assert (ROOT / name).exists(), name
