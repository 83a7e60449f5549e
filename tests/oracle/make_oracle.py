"""Compute the oracle values with torch and transformers.

    python tests/oracle/make_oracle.py                # write tests/oracle/values/*.npz
    python tests/oracle/make_oracle.py --check        # compare with what is committed
    python tests/oracle/make_oracle.py mixtral-f32 tiny-moe

Models are loaded in float32, with eager attention and experts. A check allows 1e-5 of the range of
a position's logits, because another BLAS sums in another order (about 1e-6 is seen).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
from transformers.models.gemma2.modeling_gemma2 import repeat_kv

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny_models as tm

from oracle import cases
from oracle.cases import CASES, Case, Oracle

torch.set_num_threads(1)  # tiny models; threads would only wait for each other

CHECK_TOLERANCE = 1e-5
SHIPPED = "tiny-moe"
ROUTERS = ("TopKRouter", "TopkRouter", "TokenChoiceRouter", "V1Gate", "Llama4Router")
SAME_MODEL = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers knows under another name."""


def load_model(path: Path) -> Any:
    """A model in float32, after checking that each of its tensors came from the checkpoint."""
    model, info = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    wrong = {k: v for k, v in info.items() if v}
    if wrong:
        raise SystemExit(f"{path}: transformers reports {wrong}")
    return model.eval()


def load_deepseek(path: Path, spec: tm.TinySpec) -> Any:
    """The first DeepSeek-MoE, which transformers lacks: Llama with the experts of DeepSeek-V2."""
    config = json.loads((path / "config.json").read_text())
    for name in ("model_type", "architectures"):
        del config[name]
    llama = LlamaConfig(**config)
    moe = DeepseekV2Config(**config, topk_method="greedy")
    llama._attn_implementation = moe._experts_implementation = "eager"
    model = LlamaForCausalLM(llama)
    for i, layer in enumerate(model.model.layers):
        if i not in spec.dense_layers:
            layer.mlp = DeepseekV2Moe(moe)
    weights = tm.fuse("deepseek", tm.read_hf(path))
    model.load_state_dict({k: torch.tensor(v) for k, v in weights.items()}, strict=not spec.tied)
    return model.eval()


def prune(model: Any, case: Case) -> None:
    """Give the layers of a loaded model their own expert counts, which no config can express."""
    weights = tm.tensors(case.family, case.spec)
    for i, layer in enumerate(model.model.layers):
        n, mlp = case.spec.n_experts(i), layer.mlp
        router = torch.from_numpy(weights[f"model.layers.{i}.mlp.gate.weight"])
        mlp.gate.weight = torch.nn.Parameter(router)
        mlp.gate.num_experts = mlp.experts.num_experts = n
        for name in ("gate_up_proj", "down_proj"):
            setattr(mlp.experts, name, torch.nn.Parameter(getattr(mlp.experts, name)[:n]))


def use_long_factors(model: Any) -> None:
    """Let Phi-3.5-MoE rotate by the long factors beyond the original context.

    The published code does; transformers 5.24 computes the frequencies without the length of the
    text, so that only the factor on cos and sin changes there.
    """
    rotary = model.model.rotary_emb
    short, original = rotary.rope_init_fn, model.config.rope_parameters
    length = original["original_max_position_embeddings"] + 1
    rotary.rope_init_fn = lambda config: short(config, seq_len=length)


def cap_scores(model: Any, cap: float) -> None:
    """Cap the scores of a model's attention by Gemma 2's function, which no family here has.

    Gemma 2 has no sinks. A model with sinks gets its own function, whose keys are then the unit
    vectors and whose queries the capped scores.
    """
    own = sys.modules[type(model.model.layers[0].self_attn).__module__].eager_attention_forward

    def attend(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any
    ) -> Any:
        if getattr(module, "sinks", None) is None:
            return gemma2_attention(module, query, key, value, mask, scaling=scaling, softcap=cap)
        keys = repeat_kv(key, module.num_key_value_groups)
        scores = cap * torch.tanh(query @ keys.transpose(2, 3) * scaling / cap)
        unit = torch.eye(key.shape[2]).expand(1, key.shape[1], -1, -1)
        return own(module, scores, unit, value, mask, 1.0)

    name = f"capped-{cap}"
    ALL_ATTENTION_FUNCTIONS.register(name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model.config._attn_implementation = name


def cap_logits(model: Any, cap: float) -> None:
    """Cap the logits, behind everything that a model does to them."""

    def hook(_: Any, __: Any, out: Any) -> None:
        out.logits = cap * torch.tanh(out.logits / cap)

    model.register_forward_hook(hook)


def build(case: Case, path: Path) -> Any:
    """Write the checkpoint of a case and load it."""
    spec = case.spec.replace(experts_of_layer=None)
    overrides = {"auto_map": tm.DELETE, **case.overrides}
    if overrides.get("model_type") in SAME_MODEL:
        overrides["model_type"] = SAME_MODEL[overrides["model_type"]]
    tm.write_hf(path, case.family, spec, dtype=case.dtype, overrides=overrides)
    model = load_deepseek(path, spec) if case.family == "deepseek" else load_model(path)
    if case.spec.experts_of_layer:
        prune(model, case)
    longrope = (case.spec.rope or {}).get("rope_type") == "longrope"
    if case.family == "phimoe" and longrope and case.ctx is None:
        use_long_factors(model)
    if spec.attention_softcap is not None:
        cap_scores(model, spec.attention_softcap)
    if spec.logit_softcap is not None:
        cap_logits(model, spec.logit_softcap)
    return model


def gap_after(values: np.ndarray, k: int) -> np.ndarray:
    """k-th minus next largest of each row as a share of the row's range; 2 where there is none."""
    ranked = -np.sort(-values, axis=-1)
    ranked[~np.isfinite(ranked)] = ranked[np.isfinite(ranked)].min()
    if k >= ranked.shape[1]:
        return np.full(len(values), 2.0)
    return (ranked[:, k - 1] - ranked[:, k]) / (ranked[:, 0] - ranked[:, -1])


def choice_gap(module: Any, args: Any, logits: np.ndarray, k: int) -> np.ndarray:
    """How clearly a router chose: the smaller of the gaps of its groups and of its experts."""
    statics = getattr(module, "moe_statics", module)
    bias = getattr(statics, "e_score_correction_bias", args[1] if len(args) > 1 else None)
    groups = getattr(module, "num_group", None) or 1
    if bias is None and groups == 1:
        return gap_after(logits, k)
    scores = torch.from_numpy(logits)
    softmax = type(module).__name__.startswith(("DeepseekV2", "Ernie"))
    scores = scores.softmax(-1) if softmax else scores.sigmoid()
    values = (scores if bias is None else scores + bias.detach().reshape(-1)).numpy()
    if groups == 1:
        return gap_after(values, k)
    split = -np.sort(-values.reshape(len(values), groups, -1), axis=-1)
    rated = split[:, :, 0] if softmax else split[:, :, :2].sum(-1)
    alive = np.argsort(np.argsort(-rated)) < module.topk_group
    values = np.where(np.repeat(alive, split.shape[2], axis=1), values, -np.inf)
    return np.minimum(gap_after(rated, module.topk_group), gap_after(values, k))


def run(model: Any, tokens: list[int], positions: list[int]) -> Oracle:
    """One forward pass over a prompt, with the routers watched."""
    seen: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def watch(module: Any, args: Any, out: Any) -> None:
        if type(module).__name__ == "Llama4Router":  # scores of all, 0 but for the chosen
            chosen = torch.topk(out[1], module.top_k).indices
            out = out[1], out[0].gather(1, chosen), chosen
        logits, weights, chosen = (t.detach().numpy() for t in out)
        seen.append((chosen, weights, choice_gap(module, args, logits, chosen.shape[1])))

    routers = [m for m in model.modules() if type(m).__name__.endswith(ROUTERS)]
    handles = [m.register_forward_hook(watch) for m in routers]
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    for handle in handles:
        handle.remove()
    if len(seen) != len(routers) or not np.isfinite(logits).all():
        raise SystemExit("a router did not run, or a logit is not finite")
    choices, weights, gaps = (np.stack(part) for part in zip(*seen, strict=True))
    return Oracle(tokens, np.array(positions), logits[positions], choices, weights, gaps)


def compute(name: str) -> tuple[str, list[Oracle]]:
    """Fingerprint and values of a case, or of the shipped checkpoint."""
    if name == SHIPPED:
        return compute_shipped(cases.TINY_MOE)
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        model = build(case, Path(folder))
        lengths = range(len(case.prompts))
        values = [run(model, case.tokens(i), case.stored_positions(i)) for i in lengths]
    return case.fingerprint(), values


def compute_shipped(path: Path) -> tuple[str, list[Oracle]]:
    """48 tokens of held-out Python through fixtures/tiny-moe."""
    from tokenizers import Tokenizer

    text = (path / "heldout" / "python.txt").read_text(encoding="utf-8")
    tokens = Tokenizer.from_file(str(path / "tokenizer.json")).encode(text[:4000]).ids[:48]
    values = [run(load_model(path), tokens, list(range(48)))]
    return cases.tiny_moe_fingerprint(path), values


def compare(name: str, new: list[Oracle], fingerprint: str) -> list[str]:
    """What differs from the committed values beyond the tolerance."""
    if not (cases.VALUES / f"{name}.npz").exists():
        return ["no committed values"]
    old_fingerprint, old = cases.read(name)
    if old_fingerprint != fingerprint:
        return ["the model or the prompts changed (fingerprint)"]
    faults = []
    for a, b in zip(old, new, strict=True):
        if (off := cases.error(b.logits, a.logits)) > CHECK_TOLERANCE:
            faults.append(f"logits differ by {off:.2e} of their range")
        clear = a.gaps > cases.GAP_TOLERANCE
        if not np.array_equal(np.sort(a.choices)[clear], np.sort(b.choices)[clear]):
            faults.append("router choices differ")
        if np.abs(a.weights - b.weights).max() > 1e-4:
            faults.append("router weights differ")
    return faults


def main() -> int:
    """Write or check the values of all or some cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases; default: all")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    args = parser.parse_args()
    failed = 0
    for name in args.names or [*CASES, SHIPPED]:
        fingerprint, values = compute(name)
        gap = min(float(v.gaps.min()) for v in values)
        if gap < cases.GAP_TOLERANCE and name != SHIPPED:
            raise SystemExit(
                f"{name}: a choice hangs on a gap of {gap:.1e}; choose another prompt seed"
            )
        if args.check:
            faults = compare(name, values, fingerprint)
            failed += bool(faults)
            print(f"{name}: {'; '.join(faults) or 'equal'}")
            continue
        cases.VALUES.mkdir(exist_ok=True)
        file = cases.VALUES / f"{name}.npz"
        np.savez_compressed(file, **cases.pack(values, fingerprint))
        print(f"{name}: {file.stat().st_size / 1000:.0f} kB, smallest gap {gap:.1e}")
    return 1 if failed else 0


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
