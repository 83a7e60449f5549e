"""`colibri profile`: merging, exchange with other tools, and reports as pages and pictures."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_models import EXPERTS, HIDDEN, VOCAB, WIDTH, make_model

from colibri_tools.cli import main
from colibri_tools.errors import ColibriError, FormatError, UsageError
from colibri_tools.profile.file import is_profile, load_profile
from colibri_tools.profile.files import export_profile, import_profile, merge_files
from colibri_tools.profile.orders import order_blocks
from colibri_tools.profile.profiling import profile_routing
from colibri_tools.profile.stats import hottest_first
from colibri_tools.rewrite import reorder

TOP_K, N_ROWS = 3, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and profiles `a` and `b` of it with traces and importance."""
    folder = tmp_path_factory.mktemp("files")
    make_model(folder / "model.colibri")
    random = np.random.default_rng(1)
    for name, n in (("a", 60), ("b", 25)):
        ids = folder / f"{name}.ids"
        ids.write_text(",".join(map(str, random.integers(0, VOCAB, n))))
        profile_routing(
            folder / "model.colibri",
            folder / name,
            token_files=[(name, ids), ("both", ids)],
            trace=True,
            importance=True,
        )
    return folder


def run(*args: Any) -> int:
    with pytest.raises(SystemExit) as done:
        main([str(arg) for arg in args])
    return int(done.value.code or 0)


# -- merging ---------------------------------------------------------------------------------------


def test_case_11_6_merging_is_addition(folder: Path, tmp_path: Path) -> None:
    merge_files([folder / "a", folder / "b"], tmp_path / "ab")
    merge_files([folder / "b", folder / "a"], tmp_path / "ba")
    a, b = load_profile(folder / "a"), load_profile(folder / "b")
    ab, ba = load_profile(tmp_path / "ab"), load_profile(tmp_path / "ba")
    assert ab.domains == ("a", "both", "b") and ba.domains == ("b", "both", "a")
    assert np.array_equal(ab.counts(), a.counts() + b.counts())
    assert ab.n_tokens == 2 * 60 + 2 * 25
    both = ab.counts(domain=1)
    assert np.array_equal(both, a.counts(domain=1) + b.counts(domain=1))
    for name in ("coselection", "transitions", "reuse", "early"):
        assert np.array_equal(getattr(ab, name), getattr(a, name) + getattr(b, name))
        assert np.array_equal(getattr(ab, name), getattr(ba, name))
    assert np.array_equal(ab.inputs["gate"], a.inputs["gate"] + b.inputs["gate"])
    assert ab.trace is not None and len(ab.trace.experts) == ab.n_tokens


def test_case_11_6_ties_go_by_layer_then_expert_and_few_counts_are_said(folder: Path) -> None:
    p = load_profile(folder / "b")
    order = order_blocks("hotness", p.n_experts, p)
    counts = p.counts()
    assert order == sorted(order, key=lambda cell: (-int(counts[cell]), *cell))
    assert order == [tuple(cell) for cell in hottest_first(counts, p.mask()).tolist()]
    assert len({int(counts[cell]) for cell in order}) < len(order)  # there are ties
    from colibri_tools.profile.report import ProfileReport

    data = ProfileReport(p).to_json()
    per_expert = 50 * TOP_K / EXPERTS
    assert any(f"{per_expert:.0f} selections per expert" in note for note in data["notes"])
    assert [row["selections"] for row in data["rows"]] == [50 * TOP_K] * N_ROWS


def test_profiles_of_different_models_are_not_added(folder: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other.colibri", seed=5)
    (tmp_path / "ids").write_text("1,2,3")
    profile_routing(other, tmp_path / "p", token_files=[("a", tmp_path / "ids")])
    with pytest.raises(UsageError, match="of different models"):
        merge_files([folder / "a", tmp_path / "p"], tmp_path / "sum")
    assert not (tmp_path / "sum").exists()


# -- exchange --------------------------------------------------------------------------------------


def test_usage_text_comes_back_as_the_same_counts(folder: Path, tmp_path: Path) -> None:
    export_profile(folder / "a", usage=tmp_path / "usage.txt")
    lines = (tmp_path / "usage.txt").read_text().splitlines()
    assert len(lines) == N_ROWS * EXPERTS and all(len(line.split()) == 3 for line in lines)
    import_profile(tmp_path / "usage.txt", folder / "model.colibri", tmp_path / "p", domain="x")
    back = load_profile(tmp_path / "p")
    assert back.domains == ("x",)
    assert np.array_equal(back.counts(), load_profile(folder / "a").counts())
    # and it is a profile of the model: it can order it
    reorder(folder / "model.colibri", tmp_path / "hot.colibri", routing=tmp_path / "p")


def test_a_trace_comes_back_with_its_tables(folder: Path, tmp_path: Path) -> None:
    export_profile(folder / "b", trace_csv=tmp_path / "trace.csv")
    import_profile(tmp_path / "trace.csv", folder / "model.colibri", tmp_path / "p")
    a, back = load_profile(folder / "b"), load_profile(tmp_path / "p")
    assert a.trace is not None and back.trace is not None
    assert np.array_equal(a.trace.experts, back.trace.experts)
    assert np.array_equal(a.trace.weights, back.trace.weights)
    for name in ("coselection", "transitions"):
        assert np.array_equal(getattr(a, name), getattr(back, name))


def write_imatrix(path: Path, counts: np.ndarray, squares: dict[str, np.ndarray]) -> Path:
    """As llama.cpp's imatrix tool stores it: sums of squares and counts of each matrix."""
    from gguf import GGUFWriter

    writer = GGUFWriter(str(path), "imatrix", use_temp_file=False)
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["text"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    for layer in range(N_ROWS):
        for part in ("gate", "up", "down"):
            name = f"blk.{layer}.ffn_{part}_exps.weight"
            writer.add_tensor(
                f"{name}.in_sum2", squares["down" if part == "down" else "gate"][layer]
            )
            writer.add_tensor(f"{name}.counts", counts[layer].astype(np.float32)[:, None])
        plain = f"blk.{layer}.attn_q.weight"
        writer.add_tensor(f"{plain}.in_sum2", np.ones((1, HIDDEN), np.float32))
        writer.add_tensor(f"{plain}.counts", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_case_11_1_an_expert_without_counts_leaves_the_others_usable(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = np.full((N_ROWS, EXPERTS), 9)
    counts[:, 5] = 0
    random = np.random.default_rng(0)
    squares = {
        "gate": random.random((N_ROWS, EXPERTS, HIDDEN), np.float32),
        "down": random.random((N_ROWS, EXPERTS, WIDTH), np.float32),
    }
    path = write_imatrix(tmp_path / "imatrix.gguf", counts, squares)
    result = import_profile(path, folder / "model.colibri", tmp_path / "p")
    assert result.notes == (f"{N_ROWS} of {N_ROWS * EXPERTS} experts have no counts",)
    p = load_profile(tmp_path / "p")
    assert np.array_equal(p.counts(), counts)
    assert p.n_tokens == 9 * (EXPERTS - 1) // TOP_K
    assert np.array_equal(p.inputs["gate"], squares["gate"])
    assert np.array_equal(p.inputs["down"], squares["down"])
    assert run("inspect", tmp_path / "p", "--json") == 0
    data = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert [row["never"] for row in data["rows"]] == [[5]] * N_ROWS
    assert all(math.isfinite(row["effective_experts"]) for row in data["rows"])


def test_an_imatrix_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    squares = {"gate": np.zeros((N_ROWS, 7, 8), np.float32)}
    squares["down"] = squares["gate"]
    path = write_imatrix(tmp_path / "i.gguf", np.full((N_ROWS, 7), 3), squares)
    with pytest.raises(FormatError, match="counts of layer 0: expected 12 numbers"):
        import_profile(path, folder / "model.colibri", tmp_path / "p")
    counts = np.full((N_ROWS, EXPERTS), 3)
    counts[1, 0] = 6
    path = write_imatrix(tmp_path / "j.gguf", counts, squares)
    with pytest.raises(FormatError, match="expected the same number of selections"):
        import_profile(path, folder / "model.colibri", tmp_path / "p")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 0\n", "line 1: expected 'layer expert count'"),
        ("0 99 1\n", "expert 99 of layer 0: it has 12"),
        ("token,layer,rank,expert,weight\n0,0,1,1,0.5\n", "must be in order"),
        ("token,layer,rank,expert,weight\n", "ends in the middle of a token"),
        ("", "found 0 to 0"),
    ],
)
def test_broken_text_names_its_line(folder: Path, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "in.txt"
    path.write_text(text)
    with pytest.raises(ColibriError, match=message):
        import_profile(path, folder / "model.colibri", tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_exports_do_not_overwrite(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "usage.txt"
    out.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        export_profile(folder / "a", usage=out)
    assert out.read_text() == "mine"
    with pytest.raises(UsageError, match="exactly one"):
        export_profile(folder / "a")
    export_profile(folder / "a", usage=out, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["usage.txt"]


# -- reports ---------------------------------------------------------------------------------------


def test_inspect_writes_a_page_that_stands_alone(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "p.html"
    assert run("inspect", folder / "a", "--html", page) == 0
    text = page.read_text()
    assert 'label("layer"' in text and 'label("expert"' in text
    assert text.startswith("<!DOCTYPE html>") and "://" not in text.replace(
        "http://www.w3.org/2000/svg", ""
    )


@pytest.mark.parametrize(
    ("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_inspect_draws_pictures(folder: Path, tmp_path: Path, suffix: str, start: bytes) -> None:
    pictures = [tmp_path / f"{name}.{suffix}" for name in ("p", "again")]
    for picture in pictures:
        assert run("inspect", folder / "a", "--plot", picture) == 0
    first, again = (picture.read_bytes() for picture in pictures)
    assert first.startswith(start)
    assert first == again  # neither dates nor random ids
    if suffix == "svg":
        for words in (b"expert", b"layer", b"hottest experts, % of all", b"no preference"):
            assert words in first


def test_pictures_without_matplotlib_say_what_to_install(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run("inspect", folder / "a", "--plot", tmp_path / "p.png") == 1
    assert "pip install colibri-tools[plot]" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_options_about_other_files_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert is_profile(folder / "a")
    assert run("inspect", folder / "a", "--map") == 2
    assert "--map does not apply to a routing profile" in capsys.readouterr().err
    assert run("inspect", folder / "model.colibri", "--html", tmp_path / "x") == 2
    assert "is no routing profile" in capsys.readouterr().err
    assert run("inspect", tmp_path / "gone", "--html", tmp_path / "x") != 0
    assert "no such file" in capsys.readouterr().err
    assert run("inspect", folder / "a", "--html", folder / "a") == 2
    assert "is the profile itself" in capsys.readouterr().err
