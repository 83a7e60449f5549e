"""The documentation says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from colibri_tools.families.page import families_page

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "fixtures").rglob("*.md")]
)


def test_the_families_page_is_generated_from_the_table() -> None:
    assert (ROOT / "docs" / "families.md").read_text() == families_page()


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
