"""compare: perplexity, divergence and agreement, against float64 numbers of the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
from engine_models import make_model
from quantize_util import encoding
from tiny_containers import logits

from colibri_tools.compare import command as compare_command
from colibri_tools.compare import compare
from colibri_tools.compare.texts import Text, windows
from colibri_tools.errors import ColibriError, UsageError
from colibri_tools.output import Output
from colibri_tools.repack import repack
from colibri_tools.rewrite import quantize

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "fixtures" / "tiny-moe"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The trained fixture in bf16, and in few bits."""
    folder = tmp_path_factory.mktemp("tiny")
    repack(TINY, folder / "a.colibri")
    quantize(folder / "a.colibri", folder / "b.colibri", encoding("q2_k"))
    return folder / "a.colibri", folder / "b.colibri"


def ids_file(path: Path, ids: list[int]) -> Path:
    path.write_text(" ".join(map(str, ids[:3])) + "\n" + ",".join(map(str, ids[3:])))
    return path


def log_softmax(x: Any) -> Any:
    x = x.astype(np.float64)
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def test_figures_are_those_of_the_logits(tmp_path: Path) -> None:
    a, b = make_model(tmp_path / "a", seed=1), make_model(tmp_path / "b", seed=2)
    ids = tm.prompt(19)
    found = compare(a, b, tokens=[ids_file(tmp_path / "t", ids)], ctx=8, threads=1)
    losses, kl, same = [], [], []
    for start in (0, 8):
        window = ids[start : start + 8]
        p, q = (log_softmax(logits(m, window)) for m in (a, b))
        for i in range(4, 7):
            losses.append((-p[i, window[i + 1]], -q[i, window[i + 1]]))
            kl.append((np.exp(p[i]) * (p[i] - q[i])).sum())
            same.append(p[i].argmax() == q[i].argmax())
    means = np.mean(losses, axis=0)
    w = found.whole
    assert w.n_scored == 6  # the last three tokens reach no second half
    # one engine, one set of logits: only the order of float64 sums differs
    assert (w.perplexity_a, w.perplexity_b) == pytest.approx(tuple(np.exp(means)), rel=1e-12)
    assert (w.kl_mean, w.kl_99) == pytest.approx((np.mean(kl), np.percentile(kl, 99)), rel=1e-9)
    assert w.top1_agreement == np.mean(same)
    assert w.loss_difference == pytest.approx(means[1] - means[0], rel=1e-9)


def test_a_model_is_no_distance_from_itself(tmp_path: Path) -> None:
    a = make_model(tmp_path / "a")
    path = ids_file(tmp_path / "t", tm.prompt(20))
    w = compare(a, a, tokens=[path], ctx=10).whole
    assert (w.kl_mean, w.kl_max, w.loss_difference, w.top1_agreement) == (0, 0, 0, 1)


def test_steps_and_threads_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = make_model(tmp_path / "a", seed=1), make_model(tmp_path / "b", seed=2)
    path = ids_file(tmp_path / "t", tm.prompt(40))
    one = compare(a, b, tokens=[path], ctx=20, threads=1)
    monkeypatch.setattr(compare_command, "_LOGIT_BYTES", 1)  # a position at a time
    assert compare(a, b, tokens=[path], ctx=20, threads=2, expert_cache=1 << 20).whole == one.whole


@pytest.mark.parametrize(
    ("n", "ctx", "bos", "expected"),
    [
        (16, 8, None, [(8, 4), (8, 4)]),
        (20, 8, None, [(8, 4), (8, 4)]),  # four left: no token to score in a second half
        (22, 8, None, [(8, 4), (8, 4), (6, 4)]),
        (6, 8, None, [(6, 3)]),
        (16, 8, 99, [(8, 4), (8, 4)]),
    ],
)
def test_windows(n: int, ctx: int, bos: int | None, expected: list[tuple[int, int]]) -> None:
    found = list(windows(Text("t", "", list(range(n))), ctx, bos))
    assert [(len(w.ids), w.first) for w in found] == expected
    assert [w.ids[0] for w in found] == [99 if bos else ctx * i for i in range(len(found))]
    assert [w.ids[1] for w in found] == [ctx * i + 1 for i in range(len(found))]


def test_fewer_bits_are_worse_and_texts_add_up(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    text = (TINY / "heldout" / "man-en.txt").read_text()
    parts = []
    for i in range(2):
        parts.append(tmp_path / f"{i}.txt")
        parts[i].write_text(text[i * 1500 : (i + 1) * 1500])
    found = compare(*tiny, text=parts, ctx=128)
    assert found.whole.n_scored == sum(t.figures.n_scored for t in found.texts)
    assert found.whole.perplexity_b > found.whole.perplexity_a
    assert 0.02 < found.whole.kl_mean < found.whole.kl_99 < found.whole.kl_max
    assert 0.5 < found.whole.top1_agreement < 1
    assert len(found.a.text) == len(found.b.text) == 200
    assert found.b.bits_per_weight < 3.5 < found.a.bits_per_weight


def test_a_saved_comparison_shows_the_change(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = tiny
    better = tmp_path / "c.colibri"
    quantize(a, better, encoding("q6_k"))
    text, saved = tmp_path / "t.txt", tmp_path / "b.json"
    text.write_text((TINY / "heldout" / "c.txt").read_text()[:2000])
    first = compare(a, b, text=[text], ctx=128, save=saved)
    assert json.loads(saved.read_text()) == json.loads(json.dumps(first.to_json()))
    found = compare(a, better, text=[text], ctx=128, baseline=saved)
    assert found.baseline is not None and found.prompt == first.prompt
    old, new = found.baseline.figures["kl_mean"]
    assert (old, new) == (first.whole.kl_mean, found.whole.kl_mean) and new < old
    same = found.baseline.same_characters
    assert first.b.text[:same] == found.b.text[:same]
    assert same == 200 or first.b.text[same] != found.b.text[same]
    for changed, what in (({"ctx": 64}, "ctx"), ({}, "model A")):
        with pytest.raises(UsageError, match=f"another {what}"):
            compare(better if not changed else a, b, text=[text], baseline=saved,
                    **({"ctx": 128} | changed))  # fmt: skip
    text.write_text(text.read_text() + "more and more")
    with pytest.raises(UsageError, match="another texts"):
        compare(a, b, text=[text], ctx=128, baseline=saved)
    with pytest.raises(UsageError, match="exists already"):
        compare(a, b, text=[text], ctx=128, save=saved)


def test_the_report_prints(tiny: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    text = tmp_path / "t.txt"
    text.write_text((TINY / "heldout" / "c.txt").read_text()[:800])
    Output().result(compare(*tiny, text=[text, text], ctx=64))
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("ppl A", "KL 99 %", "top-1", "goes on", "all"))


def test_what_cannot_be_compared_is_refused(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    a = make_model(tmp_path / "a")
    ids = ids_file(tmp_path / "t", tm.prompt(20))
    text = tmp_path / "t.txt"
    text.write_text("some words")

    def refused(what: str, *models: Path, **options: Any) -> None:
        with pytest.raises(ColibriError, match=what) as caught:
            compare(*models, **options)
        assert "\n" not in caught.value.message

    refused("same vocabulary", a, tiny[0], tokens=[ids])
    refused("neither model has a tokenizer", a, a, text=[text])
    refused("give texts with --text", a, a)
    refused("give texts with --text", a, a, text=[text], tokens=[ids])
    refused("expected 4 to 4096", a, a, tokens=[ids], ctx=5000)
    refused("cannot be read", a, a, tokens=[tmp_path / "none"])
    refused("item 0 is 'some'", a, a, tokens=[text])
    refused("item 3 is '131'", a, a, tokens=[ids_file(tmp_path / "u", [1, 2, 3, 131])])
    refused("2 tokens, expected 4", a, a, tokens=[ids_file(tmp_path / "v", [1, 2])])
    text.write_bytes(b"ab\xff")
    refused("not UTF-8 at byte 2", *tiny, text=[text])
    text.write_text('{"format": "else"}')
    refused("no saved comparison", a, a, tokens=[ids], baseline=text)
