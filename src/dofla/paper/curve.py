"""Error against the number of features: measured, what theory says, and whether degrees of freedom predict M."""

import math
import statistics
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dofla.evaluation.embeddings import spearman
from dofla.integration.recorder import AttentionCall, recording, run_body
from dofla.paper.bench import Bench
from dofla.paper.error_curve import METHODS, error_curve, features_needed
from dofla.paper.table import Figure, Table
from dofla.storage.files import plain

_NEEDED = ("iid", "leverage")
_TARGET = 0.5


def errors_against_size(bench: Bench) -> Table:
    """Theorem 3 in practice, on heads spread over the model's degrees of freedom."""
    bench.profiled()
    record = bench.measured(bench.folder / "curve.json", lambda: _curves(bench))
    curves, spec = list(record["heads"].values()), bench.study.curve
    rows = []
    for n, size in enumerate(spec.sizes):
        kernel = [_median(c["measured"][m]["kernel"]["mean"][n] for c in curves) for m in METHODS]
        kl = [statistics.fmean(c["measured"][m]["kl"]["mean"][n] for c in curves) for m in METHODS]
        best, bound = (_median(c[key][n] for c in curves) for key in ("best_rank", "bound"))
        figures = [_shown(x) for x in (*kernel, best, bound)]
        rows.append([str(size), *figures, *(Figure.of(x, 2) for x in kl)])
    dof = [c["degrees_of_freedom"] for c in curves]
    notes = [
        f"{len(curves)} heads, {spec.vectors} queries and as many keys each, λ = {bench.study.lam:.3g} of the trace, "
        f"{spec.draws} draws; kernel: ‖K̂ − K‖ / ‖K‖, median of heads; KL: of the rows of attention, nats, mean",
        "best rank: the least error of any kernel of rank M; Theorem 3: what it guarantees with probability .9 (it "
        "asks for more features than any of these sizes where nothing is shown); above 1 it promises less than K̂ = 0",
        f"required by Theorem 3 (t = 1, δ = .1): {_range([c['required_features'] for c in curves])} features; "
        f"degrees of freedom {_range(dof)}",
    ]
    for method in _NEEDED:
        needed = [math.inf if head[method] is None else head[method] for head in record["needed"].values()]
        correlation = spearman(dof, needed)
        notes.append(
            f"features that {method} draws need for a kernel error of {_TARGET}: {_range(needed)}; rank correlation "
            f"with the degrees of freedom over heads {correlation:.2f}"
        )
    return Table(
        "Error of untrained features against their number",
        ["M", *METHODS, "best rank", "Theorem 3", *(f"KL, {m}" for m in METHODS)],
        rows,
        notes=notes,
        data={"heads": record["heads"], "needed": record["needed"]},
    )


def _curves(bench: Bench) -> dict[str, Any]:
    spec, lam = bench.study.curve, bench.study.lam
    heads, needed = {}, {}
    chosen = _heads(bench)
    vectors = _vectors(bench, chosen)
    with bench.view.progress("error curves") as progress:
        for done, (name, (queries, keys, scaling)) in enumerate(vectors.items(), start=1):
            heads[name] = error_curve(queries, keys, scaling, sizes=spec.sizes, lam=lam, seeds=spec.draws)
            both = torch.cat([queries, keys])
            needed[name] = {m: features_needed(both, scaling, m, error=_TARGET, lam=lam) for m in _NEEDED}
            progress(done, len(vectors))
    return plain({"heads": heads, "needed": needed})


def _heads(bench: Bench) -> list[tuple[str, int]]:
    """Layer and KV head, evenly over the order of their degrees of freedom."""
    profile = bench.students.profile()
    dof = profile.dof(bench.study.lam)
    ranked = sorted(
        (value, layer.name, head)
        for layer, row in zip(profile.layers, dof, strict=True)
        for head, value in enumerate(row)
    )
    count = min(bench.study.curve.heads, len(ranked))
    places = [round(n * (len(ranked) - 1) / max(count - 1, 1)) for n in range(count)]
    return [ranked[place][1:] for place in places]


def _vectors(bench: Bench, chosen: list[tuple[str, int]]) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Queries and keys of the heads, at random places of a few windows."""
    model, count = bench.students.opened.model, bench.study.curve.vectors
    generator = torch.Generator().manual_seed(0)
    windows = bench.students.opened.training.take(8)
    found: dict[str, tuple[Tensor, Tensor, float]] = {}

    def look(call: AttentionCall) -> None:
        places = call.real_rows().cpu().nonzero()
        for name, head in chosen:
            if name == call.name:
                share = call.query.shape[1] // call.key.shape[1]
                drawn = [places[torch.randperm(len(places), generator=generator)[:count]] for _ in range(2)]
                member = torch.randint(share, (len(drawn[0]),), generator=generator) + head * share
                queries = call.query[drawn[0][:, 0], member, drawn[0][:, 1]].float().cpu()
                keys = call.key[drawn[1][:, 0], head, drawn[1][:, 1]].float().cpu()
                found[f"{name}, head {head + 1}"] = (queries, keys, call.scaling)

    with recording(model, {name for name, _ in chosen}, look), torch.inference_mode():
        run_body(model, windows.batch(range(len(windows))))
    return {f"{name}, head {head + 1}": found[f"{name}, head {head + 1}"] for name, head in chosen}


def _median(values: Iterable[float | None]) -> float:
    return statistics.median(math.inf if value is None else value for value in values)


def _shown(value: float) -> Figure | str | None:
    """Two digits; the order of magnitude where that is all there is to say."""
    if value == math.inf:
        return None
    return Figure.of(value, 2) if value < 1000 else f"10^{math.log10(value):.0f}"


def _range(values: list[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g} (median {statistics.median(values):.3g})"
