"""What tells in advance which layers a linear student will miss? Rank correlations with what was measured.

    python benchmarks/method/predictors.py --run runs/quality-demo --model demo

Takes the error curves (curves-mlp.json) of a run, and of the model, on a few windows and without training: the degrees
of freedom of the kernel (arXiv 2507.03340), those of the normalised attention, and those of the normalised attention
that is left once a window and sinks are taken out; the mass left; the entropy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

import dofla
from dofla.feature_maps.layer import LinearAttention
from dofla.integration.recorder import AttentionCall, recording, run_body
from dofla.integration.sites import evaluation_mode
from dofla.plans.curves import Curves
from dofla.plans.hybrid import TOKEN_SHARE
from dofla.profiles.error_curve import rank_correlation
from dofla.profiles.tolerance import DEFAULT_LAMBDA
from dofla.runs.recipe import DataSpec
from dofla.runs.teacher import load_teacher, windows_of


def degrees_of_freedom(matrix: torch.Tensor, lam: float) -> torch.Tensor:
    """Σ σ² / (σ² + λ Σ σ²) over the singular values of matrices [..., L, L]: [...]."""
    squares = torch.linalg.eigvalsh(matrix @ matrix.mT).clamp_min(0)
    return (squares / (squares + lam * squares.sum(-1, keepdim=True).clamp_min(1e-30))).sum(-1)


def main(
    run: Annotated[Path, typer.Option(help="Run folder that holds curves-mlp.json.")],
    model: Annotated[str, typer.Option(help="Folder, hub name or demo.")] = "demo",
    source: Annotated[str, typer.Option(help="Text, as data.source of a recipe.")] = "demo",
    length: int = 512,
    windows: int = 4,
    window: Annotated[int, typer.Option(help="Taken out of the attention, with --sinks.")] = 32,
    sinks: int = 2,
    dtype: str | None = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    curves = Curves.load(run / "curves-mlp.json")
    teacher, tokenizer = load_teacher(model, dtype)
    text = windows_of(DataSpec(source, length, windows), teacher, tokenizer, seed=0)
    profile = dofla.profile(teacher, text, samples=min(512, length), batch_size=1, estimator="paper")
    names = [layer.name for layer in profile.layers]
    found = {"degrees of freedom of the kernel": dict(zip(names, map(torch.tensor, profile.dof()), strict=True))}
    found["entropy of attention"] = {
        layer.name: torch.tensor([head.entropy for head in layer.statistics]) for layer in profile.layers
    }
    whole, rest, mass = (dict.fromkeys(names, 0.0) for _ in range(3))
    exact = LinearAttention("none", [1], 1, window, sinks)

    def look(call: AttentionCall) -> None:
        attention = call.log_weights().exp()
        rows = torch.arange(call.query.shape[-2])
        near = exact.seen_exactly(rows, len(rows), share=1, weight=call.weight, causal=call.causal)
        far = attention.masked_fill(near, 0)

        def of_kv_heads(values: torch.Tensor) -> torch.Tensor:
            return values.mean(0).unflatten(0, (call.key.shape[1], -1)).mean(1) / windows

        whole[call.name] += of_kv_heads(degrees_of_freedom(attention, DEFAULT_LAMBDA))
        rest[call.name] += of_kv_heads(degrees_of_freedom(far, DEFAULT_LAMBDA))
        mass[call.name] += of_kv_heads(far.sum(-1).mean(-1))

    with evaluation_mode(teacher), recording(teacher, names, look), torch.inference_mode():
        for n in range(windows):
            run_body(teacher, text.batch([n]))
    found["degrees of freedom of attention"] = whole
    found[f"the same, without {window} last and {sinks} first tokens"] = rest
    found[f"mass beyond {window} last and {sinks} first tokens"] = mass
    found["both multiplied"] = {name: rest[name] * mass[name] for name in names}

    size = sorted({p.bytes for p in curves.layers[0].points if p.share == TOKEN_SHARE})[2]
    error = {
        x.name: torch.tensor([x.error(n, TOKEN_SHARE, size) for n in range(len(x.effects))]) for x in curves.layers
    }
    harm = {layer.name: torch.tensor(layer.effects) * error[layer.name] for layer in curves.layers}
    found["attention KL after a short fit"] = error
    print(f"{'known beforehand':52s} {'attention KL':>13s} {'harm':>7s}")
    record = {}
    for title, values in found.items():
        of_heads, *others = (torch.cat([x[name] for name in names]).tolist() for x in (values, error, harm))
        pair = [rank_correlation(of_heads, other) for other in others]
        record[title] = {"attention_kl": pair[0], "harm": pair[1]}
        print(f"{title:52s} {pair[0]:13.2f} {pair[1]:7.2f}")
    print("rank correlations over all KV heads; harm: KL of the model's answer when that head alone is linear")
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
