"""Which estimate of a head's degrees of freedom is steady, and which says what linearizing the head costs?

    python benchmarks/quality/dof_estimators.py --model demo --source stories-val.txt.gz --out runs/dof-demo

Each estimate is made anew with several seeds, from the same number of samples: its spread, and its rank correlation
with what was measured of students of two kinds, positive random features alone, and a window, sinks and learned
features. Of each the mean KL of a head's rows of attention after a short fit, and the harm: the KL of the model's
answer when that head alone is linear. The measuring takes minutes and is kept in the folder --out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from transformers import PreTrainedModel

import dofla
from dofla.data import TokenWindows, as_windows
from dofla.distillation.fidelity import attention_fidelity
from dofla.distillation.trials import _effects
from dofla.evaluation.embeddings import spearman
from dofla.integration.converted import Converted
from dofla.integration.recorder import AttentionCall, recording, run_body
from dofla.integration.sites import attention_sites
from dofla.integration.surgery import even_plan
from dofla.plans.hybrid import TOKEN_SHARE
from dofla.profiles.spectrum import Spectrum, attention_spectrum, degrees_of_freedom, gram_spectrum
from dofla.runs.opening import open_original, windows_of
from dofla.runs.recipe import DataSpec

KINDS = {"features alone": ("prf", 0.0), "beside a window": ("mlp", TOKEN_SHARE)}
"""Feature map and share of exact tokens of the students."""
ROWS = 64


@dataclass(frozen=True)
class Head:
    """A KV head on some windows: its queries [N, G, L, d], keys [N, L, d], and the scaling of their scores."""

    query: Tensor
    key: Tensor
    scaling: float

    def vectors(self, count: int, generator: torch.Generator) -> Tensor:
        """Half keys and half queries, at random: [count, d]."""
        windows, groups, length, width = self.query.shape
        chosen = torch.randperm(2 * windows * length, generator=generator)[:count]
        keys = self.key.reshape(-1, width)
        member = torch.randint(groups, (len(keys),), generator=generator)
        queries = self.query.transpose(1, 2).reshape(-1, groups, width)[torch.arange(len(keys)), member]
        return torch.cat([keys, queries])[chosen].double()

    def rows(self, window: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows of causal attention in a window [R, L], and which tokens they are of."""
        _, groups, length, _ = self.query.shape
        rows = torch.randperm(length, generator=generator)[:ROWS]
        member = torch.randint(groups, (len(rows),), generator=generator)
        scores = self.scaling * self.query[window, member, rows].double() @ self.key[window].double().mT
        hidden = torch.arange(length) > rows[:, None]
        return scores.masked_fill(hidden, -torch.inf).softmax(-1), rows


Estimate = Callable[[Head, int, float, torch.Generator], float]
"""(head, samples, λ, generator) → degrees of freedom."""


def kernel(head: Head, samples: int, lam: float, generator: torch.Generator, *, power: float = 0.0) -> float:
    """The paper's; or of K(x, y) / (K(x, x) K(y, y))^(power / 2)."""
    vectors = head.vectors(samples, generator)
    if not power:
        return degrees_of_freedom(gram_spectrum(vectors, head.scaling), lam)
    logits = head.scaling * vectors @ vectors.mT
    logits = logits - power / 2 * (logits.diagonal()[:, None] + logits.diagonal())
    values = torch.linalg.eigvalsh((logits - logits.max()).exp()).clamp_min(0)
    return degrees_of_freedom(Spectrum(values, 0.0), lam)


def clipped(head: Head, samples: int, lam: float, generator: torch.Generator) -> float:
    """Of vectors no longer than nine tenths of them are."""
    vectors = head.vectors(samples, generator)
    norms = vectors.norm(dim=-1, keepdim=True)
    vectors = vectors * (norms.quantile(0.9) / norms).clamp_max(1)
    return degrees_of_freedom(gram_spectrum(vectors, head.scaling), lam)


def keys_alone(head: Head, samples: int, lam: float, generator: torch.Generator) -> float:
    keys = head.key.flatten(0, 1)
    chosen = keys[torch.randperm(len(keys), generator=generator)[:samples]]
    return degrees_of_freedom(gram_spectrum(chosen, head.scaling), lam)


def subsamples(head: Head, samples: int, lam: float, generator: torch.Generator, *, how: str) -> float:
    """Mean or median over eight disjoint parts of the sample."""
    parts = head.vectors(samples, generator).chunk(8)
    each = torch.tensor([degrees_of_freedom(gram_spectrum(part, head.scaling), lam) for part in parts])
    return getattr(each, how)().item()


def across_text(head: Head, samples: int, lam: float, generator: torch.Generator) -> float:
    """Rows of attention of queries to keys, both from anywhere in the text."""
    keys, queries = head.key.flatten(0, 1), head.query.transpose(1, 2).flatten(0, 2)
    keys = keys[torch.randperm(len(keys), generator=generator)[: samples // 2]].double()
    queries = queries[torch.randperm(len(queries), generator=generator)[: samples // 2]].double()
    values, _ = attention_spectrum((head.scaling * queries @ keys.mT).softmax(-1))
    return degrees_of_freedom(Spectrum(values, 0.0), lam, "mean")


def in_windows(
    head: Head,
    samples: int,
    lam: float,
    generator: torch.Generator,
    *,
    power: float = 1.0,
    root: bool = False,
    near: int = 0,
    normalization: str = "mean",
    more: int = 1,
) -> float:
    """Rows of attention of windows, the default; of their Gram matrix to a ``power``; of the ``root`` of the weights,
    which gives all rows the same length; without the ``near`` last tokens and two first."""
    found = []
    for window in torch.randperm(len(head.key), generator=generator)[: more * samples // ROWS].tolist():
        attention, rows = head.rows(window, generator)
        if near:
            columns = torch.arange(attention.shape[1])
            attention = attention * ((columns <= rows[:, None] - near) & (columns > 1))
        values, _ = attention_spectrum(attention.sqrt() if root else attention)
        found.append(values**power)
    return degrees_of_freedom(Spectrum(torch.stack(found), 0.0), lam, normalization)


ESTIMATES: dict[str, Estimate] = {
    "kernel (paper)": kernel,
    "kernel, mean of 8 subsamples": partial(subsamples, how="mean"),
    "kernel, median of 8 subsamples": partial(subsamples, how="median"),
    "kernel, norms clipped at .9": clipped,
    "kernel, half tempered": partial(kernel, power=0.5),
    "kernel, unit diagonal": partial(kernel, power=1.0),
    "kernel, keys alone": keys_alone,
    "rows of attention across the text": across_text,
    "rows of attention": in_windows,
    "the same, 8 times the rows (default)": partial(in_windows, more=8),
    "rows of attention, unit trace": partial(in_windows, normalization="trace"),
    "its square root, unit trace": partial(in_windows, power=0.5, normalization="trace"),
    "roots of the weights": partial(in_windows, root=True),
    "beyond 32 last, 2 first, 8 times": partial(in_windows, near=32, more=8),
}


def measure(
    model: PreTrainedModel, windows: TokenWindows, kind: str, budget: int, steps: int, batch: int, held: int
) -> dict:
    """Of each KV head, by layer: KL of its attention after a short fit, and harm when it alone is linear."""
    feature_map, share = KINDS[kind]
    border = len(windows) - held
    training, judging = (as_windows(windows.batch(range(a, b))) for a, b in ((0, border), (border, len(windows))))
    student = dofla.linear.linearize(model, even_plan(model, budget, share=share, feature_map=feature_map), seed=0)
    try:
        dofla.linear.distill(student, training, loss="softmax", steps=steps, batch_size=batch, rows=64, seed=0)
        errors = {
            n: e.head_kl
            for n, e in attention_fidelity(Converted.of(student), judging, batch_size=batch, seed=0).items()
        }
        effects = _effects(student, judging, errors, None)
    finally:
        dofla.restore(model)
    harm = {n: [effect * max(e, 1e-9) for effect, e in zip(effects[n], own, strict=True)] for n, own in errors.items()}
    return {"attention_kl": errors, "harm": harm}


def heads_of(model: PreTrainedModel, windows: TokenWindows) -> list[Head]:
    """Of all layers, in order."""
    sites = attention_sites(model)
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in sites}

    def look(call: AttentionCall) -> None:
        seen[call.name].append((call.query.float().unflatten(1, (call.key.shape[1], -1)), call.key.float()))

    with recording(model, sites, look), torch.inference_mode():
        for n in range(len(windows)):
            run_body(model, windows.batch([n]))
    layers = ((name, *(torch.cat(x) for x in zip(*pairs, strict=True))) for name, pairs in seen.items())
    return [Head(q[:, h], k[:, h], sites[name].scaling) for name, q, k in layers for h in range(k.shape[1])]


def main(
    model: Annotated[str, typer.Option(help="Folder, hub name or demo.")] = "demo",
    source: Annotated[str, typer.Option(help="Text that is profiled, as data.source of a recipe.")] = "demo",
    train: Annotated[str, typer.Option(help="Text of the short fits.")] = "demo",
    out: Annotated[Path, typer.Option(help="Folder in which what students cost is kept.")] = Path("runs/dof"),
    windows: int = 48,
    samples: int = 512,
    seeds: int = 5,
    lam: float = 2.0**-8,
    budget: int = 32,
    steps: int = 60,
    batch_size: int = 4,
    fit: Annotated[int, typer.Option(help="Windows of the short fits.")] = 128,
    held: Annotated[int, typer.Option(help="Windows on which harm is measured.")] = 8,
    dtype: str | None = None,
    only: Annotated[list[str] | None, typer.Option(help="Estimates by name; default all.")] = None,
) -> None:
    teacher, tokenizer = open_original(model, dtype)
    costs = {}
    for kind, (feature_map, _) in KINDS.items():
        kept = out / f"{feature_map}.json"
        if not kept.exists():
            text = windows_of(DataSpec(train, 512, fit + held), teacher, tokenizer, seed=0)
            out.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(measure(teacher, text, kind, budget, steps, batch_size, held)), encoding="utf-8")
        costs[kind] = {key: list(chain(*of.values())) for key, of in json.loads(kept.read_text("utf-8")).items()}
    heads = heads_of(teacher, windows_of(DataSpec(source, 512, windows), teacher, tokenizer, seed=0))
    print(f"{'':36s} {'DoF, 5/50/95 %':>17s} {'spread':>7s} {'worst':>6s}" + "".join(f"{k:>17s}" for k in costs))
    record = {}
    for name, estimate in ((name, ESTIMATES[name]) for name in only or ESTIMATES):
        found = torch.tensor(
            [[estimate(head, samples, lam, torch.Generator().manual_seed(s)) for s in range(seeds)] for head in heads]
        )
        spread = found.std(1) / found.mean(1)
        # What a user has is one draw, so the correlation is that of single draws, on average.
        pairs = {
            kind: [sum(spearman(x, of) for x in found.T) / seeds for of in cost.values()]
            for kind, cost in costs.items()
        }
        levels = found.mean(1).quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
        record[name] = {"dof": levels, "spread": spread.median().item(), "worst": spread.max().item(), **pairs}
        shown = "/".join(f"{level:.1f}" for level in levels)
        correlations = "".join(f"{kl:10.2f} {harm:6.2f}" for kl, harm in pairs.values())
        print(f"{name:36s} {shown:>17s} {spread.median():7.3f} {spread.max():6.2f}{correlations}", flush=True)
    print("spread: relative standard deviation over seeds, median and worst head")
    print("rank correlation over KV heads with attention KL and with harm, of features alone and beside a window")
    (out / "estimators.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
