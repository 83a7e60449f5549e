"""profile-routing: what it counts, against transformers and a model in numpy, and how it goes on.

Counts are exact. Early choices and sums of squares are compared with float64 computation.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
from engine_models import EXPERTS, HIDDEN, VOCAB, WIDTH, make_model
from oracle.cases import CASES, GAP_TOLERANCE, load
from reference_model import ReferenceModel, softmax
from tiny_containers import Containers, logits

import colibri_tools
from colibri_tools.cli import main
from colibri_tools.container import PartRole, Role
from colibri_tools.engine import Engine
from colibri_tools.errors import JobError, UsageError
from colibri_tools.profile import profiling
from colibri_tools.profile.collect import HALF_TOKENS, Totals
from colibri_tools.profile.file import DECODE, PREFILL, load_profile, to_bytes
from colibri_tools.profile.profiling import ProfilingResult, profile_routing
from colibri_tools.profile.stats import domain_distances, held_out
from colibri_tools.repack import repack
from colibri_tools.rewrite import reorder

TINY_MOE = Path(__file__).parent.parent / "fixtures" / "tiny-moe"
TOP_K = 3  # of engine_models


def write_ids(path: Path, prompts: list[list[int]]) -> Path:
    path.write_text("\n".join(",".join(map(str, prompt)) for prompt in prompts) + "\n")
    return path


def profile(
    model: Path, folder: Path, prompts: list[list[int]], name: str = "p", **options: Any
) -> ProfilingResult:
    """Profile prompts of ids, with a trace."""
    ids = write_ids(folder / f"{name}.ids", prompts)
    options = {"trace": True, "threads": 1} | options
    return profile_routing(
        model, folder / f"{name}.profile", token_files=[("text", ids)], **options
    )


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCAB, n).tolist() for n in lengths]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("profiling") / "model.colibri")


# -- what is counted -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tm.ALL_FAMILIES)
def test_choices_are_those_of_transformers_token_by_token(
    containers: Containers, tmp_path: Path, family: str
) -> None:
    case = CASES[f"{family}-f32"]
    oracles = load(case)
    path = containers.hf(family, case.spec)
    result = profile(path, tmp_path, [oracle.tokens for oracle in oracles])
    p = result.report.profile
    assert p.trace is not None
    chosen = np.concatenate([o.choices for o in oracles], axis=1)  # [rows, tokens, k]
    gaps = np.concatenate([o.gaps for o in oracles], axis=1)
    assert (gaps > GAP_TOLERANCE).all()  # so every choice is decided
    found = p.trace.experts.transpose(1, 0, 2)
    assert np.array_equal(np.sort(found, axis=-1), np.sort(chosen, axis=-1))
    counts = np.stack([np.bincount(row.reshape(-1), minlength=p.max_experts) for row in chosen])
    assert np.array_equal(p.counts(), counts)
    assert counts.sum() == p.n_tokens * p.top_k * p.n_rows
    weights = np.concatenate([o.weights for o in oracles], axis=1)
    mass = p.gate_mass.sum(axis=(0, 1, 2))
    assert np.allclose(mass.sum(axis=1), weights.sum(axis=(1, 2)), rtol=1e-5)


def test_requests_of_the_engine_are_the_distinct_experts_of_the_trace(
    model: Path, tmp_path: Path
) -> None:
    result = profile(model, tmp_path, prompts_of([33, 20, 7]), batch_size=16, ctx=16)
    trace = result.report.profile.trace
    assert trace is not None
    # Windows of 33, 20 and 7 ids are 16, 16, 1, 16, 4 and 7 long, and each is a batch here.
    starts = [*np.nonzero(trace.start)[0], len(trace.start)]
    assert np.diff(starts).tolist() == [16, 16, 1, 16, 4, 7]
    assert result.n_sequences == 1
    distinct = sum(
        len(np.unique(trace.experts[a:b, row])) for a, b in pairwise(starts) for row in range(3)
    )
    assert result.io["requests"] == distinct


def test_tables_agree_with_counting_one_by_one(model: Path, tmp_path: Path) -> None:
    p = profile(model, tmp_path, prompts_of([50, 3, 21])).report.profile
    assert p.trace is not None
    together = np.zeros_like(p.coselection)
    following = np.zeros_like(p.transitions)
    reuse = np.zeros_like(p.reuse)
    last: dict[tuple[int, int], int] = {}
    for token, rows in enumerate(p.trace.experts.tolist()):
        if p.trace.start[token]:
            last = {}
        for row, experts in enumerate(rows):
            for a in experts:
                for b in experts:
                    together[row, a, b] += a != b
                if row > 0:
                    for b in rows[row - 1]:
                        following[row - 1, b, a] += 1
                if (row, a) in last:
                    reuse[row, (token - last[row, a]).bit_length() - 1] += 1
                last[row, a] = token
    assert np.array_equal(p.coselection, together)
    assert np.array_equal(p.transitions, following)
    assert np.array_equal(p.reuse, reuse)


class Watched(ReferenceModel):
    """Notes early choices, and the squares of what experts multiply."""

    def forward(self, tokens: list[int]) -> np.ndarray:
        self.early: list[np.ndarray] = []
        self.squares = {
            "gate": np.zeros((3, EXPERTS, HIDDEN)),
            "down": np.zeros((3, EXPERTS, WIDTH)),
        }
        return super().forward(tokens)

    def attention(self, x: np.ndarray, layer: int) -> np.ndarray:
        self.attended = super().attention(x, layer)
        return self.attended

    def norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        self.before = x
        return super().norm(x, weight)

    def moe(self, x: np.ndarray, layer: int) -> np.ndarray:
        stream = self.before  # after this layer's attention
        out = super().moe(x, layer)
        for t, experts in enumerate(self.choices[-1]):
            for expert in experts:
                gate, up = (self.part(layer, expert, r) for r in (PartRole.GATE, PartRole.UP))
                g = gate @ x[t]
                self.squares["gate"][layer, expert] += x[t] ** 2
                self.squares["down"][layer, expert] += (g / (1 + np.exp(-g)) * (up @ x[t])) ** 2
        if layer < 2:
            normed = super().norm(stream, self.tensor(Role.FFN_NORM, layer + 1))
            p = softmax(normed @ self.tensor(Role.ROUTER, layer + 1).T)
            self.early.append(np.argsort(-p, axis=-1, kind="stable")[:, :TOP_K])
        return out


@pytest.mark.parametrize("n", [1, 70])  # a token by itself takes another way through the engine
def test_early_choices_and_squares_are_those_of_a_model_in_numpy(
    model: Path, tmp_path: Path, n: int
) -> None:
    prompts = prompts_of([n], seed=3)
    p = profile(model, tmp_path, prompts, importance=True).report.profile
    with colibri_tools.open(model) as container:
        reference = Watched(container)
        reference.forward(prompts[0])
    right = [
        sum(len(set(a) & set(b)) for a, b in zip(early, chosen, strict=True))
        for early, chosen in zip(reference.early, reference.choices[1:], strict=True)
    ]
    assert p.early.tolist() == [[0, 0], *([n * TOP_K, r] for r in right)]
    for name, squares in reference.squares.items():
        # float32 activations, with rounding of about 1e-6 in each layer
        assert np.abs(p.inputs[name] - squares).max() <= 1e-4 * squares.max()


def test_squares_are_of_scaled_inputs_where_the_router_scales_them(
    containers: Containers, tmp_path: Path
) -> None:
    """Llama 4 multiplies an expert's input by the router's weight, which is below 1.

    An input is a normed vector times the norm's weights: without these its mean square is 1. What
    float32 and the norm's epsilon change is about 1e-5.
    """
    path = containers.hf("llama4", tm.default_spec("llama4", top_k=2))
    for name, prompts in (("alone", [[5]]), ("batch", [[5], [7], [11, 3]])):
        p = profile(path, tmp_path, prompts, name, importance=True).report.profile
        assert p.trace is not None
        with colibri_tools.open(path) as container:
            for row, layer in enumerate(p.layers):
                norm = container.dequantize(f"layers.{layer}.ffn_norm").astype(np.float64)
                squares = (p.inputs["gate"][row] / norm**2).mean(axis=1)
                expected = np.zeros(p.max_experts)
                weights = p.trace.weights[:, row].astype(np.float64) ** 2
                np.add.at(expected, p.trace.experts[:, row], weights)
                assert np.allclose(squares, expected, rtol=1e-3)
                # Scaled and unscaled inputs can be told apart.
                n = np.bincount(p.trace.experts[:, row].reshape(-1), minlength=p.max_experts)
                assert not np.allclose(squares, n, rtol=1e-2)


def test_squares_do_not_depend_on_batches_or_threads(model: Path, tmp_path: Path) -> None:
    prompts = prompts_of([40, 30, 5])
    one = profile(model, tmp_path, prompts, "one", importance=True)
    other = profile(model, tmp_path, prompts, "other", importance=True, batch_size=7, threads=2)
    for name, squares in one.report.profile.inputs.items():
        assert np.array_equal(squares, other.report.profile.inputs[name])


def test_case_11_4_a_batch_counts_what_its_prompts_count_alone(model: Path, tmp_path: Path) -> None:
    five, eleven = prompts_of([5, 11])
    both = profile(model, tmp_path, [five, eleven], "both")
    assert both.n_sequences == 2 and both.n_batches == 1
    alone = [profile(model, tmp_path, [ids], str(len(ids))) for ids in (five, eleven)]
    counts = sum(result.report.profile.counts() for result in alone)
    assert np.array_equal(both.report.profile.counts(), counts)
    assert both.report.profile.n_tokens == 16


def test_case_11_2_experts_that_never_work_are_counted_as_such(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m.colibri", zero=Role.ROUTER)  # ties: the lowest ids
    report = profile(path, tmp_path, prompts_of([9]), importance=True).report
    assert all(row.never == tuple(range(TOP_K, EXPERTS)) for row in report.rows())
    data = report.to_json()
    json.dumps(data, allow_nan=False)
    assert f"{3 * (EXPERTS - TOP_K)} of {3 * EXPERTS} experts were never selected" in str(
        data["notes"]
    )
    out = tmp_path / "hot.colibri"
    reorder(path, out, routing=tmp_path / "p.profile")
    with colibri_tools.open(out) as container:
        layouts = {container.layout_of(row, e) for row in range(3) for e in range(EXPERTS)}
        assert len(layouts) == 1  # all experts keep one format
        first = sorted(range(EXPERTS), key=lambda e: int(container.cell(0, e)["rank"]))
    assert first == list(range(EXPERTS))


def test_generated_tokens_are_decode(model: Path, tmp_path: Path) -> None:
    result = profile(model, tmp_path, prompts_of([20, 6]), generate=5, ctx=16)
    p = result.report.profile
    assert p.tokens[:, PREFILL].sum() == 26 and p.tokens[:, DECODE].sum() == 10
    assert p.trace is not None
    # 11 + 9, and 5 drawn behind the 9; 6, and 5 drawn
    assert np.nonzero(p.trace.start)[0].tolist() == [0, 11, 25]
    assert p.trace.phase.tolist() == [0] * 20 + [1] * 5 + [0] * 6 + [1] * 5
    again = profile(model, tmp_path, prompts_of([20, 6]), "again", generate=5, ctx=16)
    assert np.array_equal(again.report.profile.trace.experts, p.trace.experts)  # type: ignore[union-attr]


def test_halves_alternate_within_a_domain(model: Path, tmp_path: Path) -> None:
    lengths = [200, 200, 300]
    p = profile(model, tmp_path, prompts_of(lengths), batch_size=64).report.profile
    assert p.tokens[0, PREFILL].tolist() == [HALF_TOKENS + 700 - 2 * HALF_TOKENS, HALF_TOKENS]


# -- tiny-moe and its domains ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def domains(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("domains")
    container = folder / "tiny.colibri"
    repack(TINY_MOE, container)
    texts = []
    for name in ("c", "man-de", "man-fr", "prose"):
        text = (TINY_MOE / "heldout" / f"{name}.txt").read_text(encoding="utf-8")[:2500]
        path = folder / f"{name}.txt"
        path.write_text(text, encoding="utf-8")
        texts.append((name, path))
    result = profile_routing(container, folder / "tiny.profile", domains=texts, ctx=512, trace=True)
    return container, folder / "tiny.profile", result


def test_domains_of_tiny_moe_route_apart_and_held_out_coverage_is_reported(domains: Any) -> None:
    data = domains[2].report.to_json()
    p = domains[2].report.profile
    assert [d["name"] for d in data["domains"]] == ["c", "man-de", "man-fr", "prose"]
    distances = domain_distances(p)
    assert np.array_equal(data["domain_distances"], distances)
    # Trained on documents of one domain at a time, it sends them to other experts. Halves of all
    # texts, which mix domains alike, are much closer to each other.
    between = distances[np.triu_indices(4, 1)]
    assert between.min() > 0.2
    held = {item["name"]: item for item in data["held_out"]}
    assert {"half 1", "half 2", "c", "prose"} <= held.keys()
    for name in ("c", "man-de"):
        at = 2  # the hottest fifth
        assert held[name]["held_out"][at] < held[name]["in_sample"][at]
    assert len(held_out(p)) == len(held)


def test_the_json_report_has_what_scripts_need(domains: Any, capsys: Any) -> None:
    data = run(capsys, "inspect", domains[1], "--json")
    assert data["family"] == "qwen3_moe"
    assert (data["n_moe_layers"], data["n_experts"], data["top_k"]) == (4, 16, 2)
    assert data["tokens"] == sum(d["tokens"] for d in data["domains"])
    selections = np.array(data["selections"])
    assert selections.shape == (4, 16)
    assert (selections.sum(axis=1) == 2 * data["tokens"]).all()


def run(capsys: Any, *args: Any) -> Any:
    """Run a command in this process; return its JSON document."""
    with pytest.raises(SystemExit) as done:
        main([str(arg) for arg in args])
    out = capsys.readouterr()
    assert done.value.code == 0, out.err
    return json.loads(out.out)


def test_orders_leave_logits_identical_and_twice_is_as_once(domains: Any, tmp_path: Path) -> None:
    container, path, _ = domains
    tokens = list(range(5, 45))
    expected = logits(container, tokens)
    for order in ("hotness", "layer-hotness", "coactivation"):
        once, twice = tmp_path / f"{order}-1.colibri", tmp_path / f"{order}-2.colibri"
        reorder(container, once, routing=path, order=order)
        assert np.array_equal(logits(once, tokens), expected)
        reorder(once, twice, routing=path, order=order)
        assert once.read_bytes() == twice.read_bytes() != container.read_bytes()


# -- going on --------------------------------------------------------------------------------------


class Stop:
    """A progress callback that interrupts before a batch."""

    def __init__(self, batch: int) -> None:
        self.left = batch

    def __call__(self, done: int, total: int) -> None:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1


@pytest.mark.parametrize("importance", [False, True])
def test_an_interrupted_job_goes_on_to_the_same_bytes(
    model: Path, tmp_path: Path, importance: bool
) -> None:
    prompts = prompts_of([30, 40, 50, 60])
    options = {"ctx": 20, "batch_size": 20, "importance": importance, "generate": 3}
    whole = profile(model, tmp_path, prompts, "whole", **options)
    with pytest.raises(KeyboardInterrupt) as stopped:
        profile(model, tmp_path, prompts, progress=Stop(4), checkpoint_seconds=0.0, **options)
    n = 17 + 13 + 17 + 17  # 30 and 40 in windows of 20 less 3
    assert f"{n} of 180 tokens are kept in p.profile.partial" in str(stopped.value)
    assert (tmp_path / "p.profile.partial").exists()
    assert not (tmp_path / "p.profile").exists()
    result = profile(model, tmp_path, prompts, **options)
    assert result.n_kept == 4
    assert result.tokens < whole.tokens  # what was kept is not done again
    assert names_in(tmp_path) == ["p.ids", "p.profile", "whole.ids", "whole.profile"]
    a, b = (load_profile(tmp_path / f"{name}.profile") for name in ("whole", "p"))
    for name, array in a.arrays().items():
        assert np.array_equal(array, b.arrays()[name]), name


@pytest.mark.parametrize(("copied", "kept"), [(1 << 20, 30), (0, 20)])
def test_a_batch_that_fails_half_way_is_in_no_sum(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: int, kept: int
) -> None:
    """Of two whole batches both are kept; where sums are too large to copy, what was saved."""
    monkeypatch.setattr(profiling, "_MAX_COPY_BYTES", copied)
    prompts = prompts_of([30, 40, 50])
    options = {"ctx": 20, "batch_size": 20, "importance": True}
    whole = profile(model, tmp_path, prompts, "whole", **options).report.profile
    evaluate, calls = Engine.eval_many, []

    def fail_once(self: Engine, *args: Any) -> Any:
        calls.append(1)
        rows = evaluate(self, *args)
        if len(calls) == 3:
            raise JobError("the drive is gone")
        return rows

    monkeypatch.setattr(Engine, "eval_many", fail_once)
    with pytest.raises(JobError, match=f"the drive is gone; {kept} of 120 tokens are kept"):
        profile(model, tmp_path, prompts, checkpoint_seconds=0.0, **options)
    again = profile(model, tmp_path, prompts, **options).report.profile
    for name, array in whole.arrays().items():
        assert np.array_equal(array, again.arrays()[name]), name


def test_a_job_interrupted_while_it_counts_keeps_what_was_saved(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, options = prompts_of([30, 40, 50]), {"ctx": 20, "batch_size": 20}
    whole = profile(model, tmp_path, prompts, "whole", **options).report.profile
    add_row, calls = Totals._add_row, []

    def interrupted(self: Totals, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 3 * 2 + 2:  # the second row of the third batch
            raise KeyboardInterrupt
        add_row(self, *args)

    monkeypatch.setattr(Totals, "_add_row", interrupted)
    with pytest.raises(KeyboardInterrupt, match="20 of 120 tokens are kept"):
        profile(model, tmp_path, prompts, checkpoint_seconds=0.0, **options)
    again = profile(model, tmp_path, prompts, **options).report.profile
    for name, array in whole.arrays().items():
        assert np.array_equal(array, again.arrays()[name]), name


def test_nothing_is_left_of_a_job_that_counted_nothing(model: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        profile(model, tmp_path, prompts_of([30]), progress=Stop(0))
    assert names_in(tmp_path) == ["p.ids"]


def test_another_job_does_not_go_on_with_what_was_left(model: Path, tmp_path: Path) -> None:
    prompts, options = prompts_of([30, 40]), {"ctx": 20, "batch_size": 20}
    with pytest.raises(KeyboardInterrupt):
        profile(model, tmp_path, prompts, progress=Stop(2), **options)
    with pytest.raises(UsageError, match=r"another 'seed'.*--restart"):
        profile(model, tmp_path, prompts, seed=1, **options)
    with pytest.raises(UsageError, match="another 'texts'"):
        profile(model, tmp_path, prompts_of([30, 41]), **options)
    assert profile(model, tmp_path, prompts, seed=1, restart=True, **options).n_kept == 0


def test_a_partial_file_is_no_profile(model: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        profile(model, tmp_path, prompts_of([30, 40]), progress=Stop(2), ctx=20, batch_size=20)
    with pytest.raises(colibri_tools.FormatError, match="not complete"):
        load_profile(tmp_path / "p.profile.partial")


# -- what is refused -------------------------------------------------------------------------------


def test_texts_that_cannot_be_used_are_named(model: Path, domains: Any, tmp_path: Path) -> None:
    out, text = tmp_path / "p", tmp_path / "t.txt"
    cases: list[tuple[bytes, str]] = [
        (b"", "t.txt: the text is empty"),
        (b" \n", "t.txt: the text is empty"),
        (b"a\xff", "not UTF-8 at byte 1"),
    ]
    for data, message in cases:
        text.write_bytes(data)
        with pytest.raises(UsageError, match=message):
            profile_routing(domains[0], out, texts=[text])
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        profile_routing(domains[0], out, texts=[tmp_path / "none.txt"])
    with pytest.raises(UsageError, match="no text to profile"):
        profile_routing(domains[0], out)
    text.write_text("hello")
    with pytest.raises(UsageError, match=r"no tokenizer.*--tokens-file"):
        profile_routing(model, out, texts=[text])
    text.write_text("1,2\n3,x\n")
    with pytest.raises(UsageError, match=r"t.txt, line 2: expected ids from 0 to 130, found 'x'"):
        profile_routing(model, out, token_files=[("a", text)])
    assert names_in(tmp_path) == ["t.txt"]


def test_models_that_cannot_run_are_refused(tmp_path: Path) -> None:
    ids = write_ids(tmp_path / "i", [[1, 2]])
    cannot = make_model(
        tmp_path / "m", executable=False, executable_lacks="nobody knows its attention"
    )
    with pytest.raises(UsageError, match="cannot run: nobody knows its attention"):
        profile_routing(cannot, tmp_path / "p", token_files=[("a", ids)])
    with pytest.raises(UsageError, match=r"is no container.*colibri repack"):
        profile_routing(TINY_MOE, tmp_path / "p", token_files=[("a", ids)])
    with pytest.raises(UsageError, match="leaves no room for text"):
        profile_routing(
            make_model(tmp_path / "n"), tmp_path / "p", token_files=[("a", ids)], ctx=8, generate=8
        )


def test_outputs_are_not_overwritten_unasked(model: Path, tmp_path: Path) -> None:
    result = profile(model, tmp_path, prompts_of([5]))
    with pytest.raises(UsageError, match="exists already"):
        profile(model, tmp_path, prompts_of([5]))
    with pytest.raises(UsageError, match="is an input"):
        profile_routing(
            model,
            tmp_path / "p.ids",
            token_files=[("a", tmp_path / "p.ids")],
            force=True,
        )
    again = profile(model, tmp_path, prompts_of([5]), force=True)
    assert to_bytes(again.report.profile) == to_bytes(result.report.profile)


def test_a_profile_of_another_model_is_refused(domains: Any, model: Path, tmp_path: Path) -> None:
    profile(model, tmp_path, prompts_of([5]))
    with pytest.raises(UsageError, match="is a profile of another model"):
        reorder(domains[0], tmp_path / "o.colibri", routing=tmp_path / "p.profile")


def test_the_fingerprint_is_that_of_every_form_of_the_model(
    containers: Containers, tmp_path: Path
) -> None:
    tokens = tm.prompt(20)
    fingerprints = set()
    for i, path in enumerate((containers.hf("qwen3_moe"), containers.gguf("qwen3_moe"))):
        fingerprints.add(profile(path, tmp_path, [tokens], str(i)).report.profile.fingerprint)
    assert len(fingerprints) == 1


def test_options_take_several_files(domains: Any, tmp_path: Path, capsys: Any) -> None:
    a, b, c = (tmp_path / name for name in ("a.txt", "b.txt", "c.txt"))
    for path in (a, b, c):
        path.write_text(f"def {path.stem}(): return 1\n")
    out = tmp_path / "p"
    data = run(
        capsys,
        *("profile-routing", domains[0], "--domain", f"x={a}", b, "--text", c, "-o", out),
        "--json",
    )
    assert [(t["domain"], t["name"]) for t in data["texts"]] == [
        ("text", "c.txt"),
        ("x", "a.txt"),
        ("x", "b.txt"),
    ]
    assert data["run"]["tokens"] == data["tokens"]


def test_observation_checks_what_it_is_given(model: Path) -> None:
    with Engine(model, threads=1) as engine:
        from colibri_tools.engine import Observation

        with pytest.raises(UsageError, match="width is 39, the widest expert has 40"):
            engine.observe(Observation.make(engine.info, 8, widest=WIDTH - 1))
