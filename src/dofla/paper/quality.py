"""Table 7 (next-token loss), table 11 (kernel error per layer), and the comparison of ways to treat heads."""

import statistics
from collections.abc import Sequence
from typing import Any

from dofla.evaluation.embeddings import spearman
from dofla.paper import published
from dofla.paper.bench import Bench, per_seed
from dofla.paper.methods import baselines, leverage, other_maps, over_heads, paper_methods, trained, wide
from dofla.paper.table import Cell, Figure, Table
from dofla.runs.run import layer_mean


def next_token_loss(bench: Bench) -> Table:
    """Table 7: the loss of the distilled models; of an encoder, how well its embeddings are kept."""
    specs = [*baselines(), leverage(), *paper_methods(), wide(bench.students), *other_maps()]
    runs = {spec.name: bench.evaluations(spec) for spec in bench.lineup(specs)}
    if not bench.is_language_model:
        return _embeddings(runs)
    first = next(iter(runs.values()))[0]
    teacher = [Figure.of(first["language"]["original_loss"]), *map(Figure.of, (0.0, 0.0, 1.0, 0.0))]
    rows: list[list] = [["Original", *teacher, f"{first['softmax_bytes'] / 1024:.0f} KiB"]]
    for name, several in runs.items():
        figures = [per_seed(several, "language", key) for key in ("loss", "loss_increase", "kl", "top1_agreement")]
        rows.append([name, *figures, _layer_mean(several, "kl"), _state(several)])
    return Table(
        "Table 7: next-token loss of the distilled models",
        ["model", "loss", "loss increase", "KL", "top-1", "attention KL", "state"],
        rows,
        ["GPT-2", "loss"],
        [list(row) for row in published.LOSSES.items()],
        [
            f"nats per token, on {first['language']['tokens']} tokens in windows of {first['length']}; "
            "loss increase over the original; KL of the next-token distributions; top-1: how often both find the same "
            "token likeliest; attention KL: of the rows of attention on the original's own inputs, mean of layers",
            "± half the range over seeds, which move the features' start, the order of text, and the rows sampled",
            f"state per sequence; the original's is its key-value cache at {first['length']} tokens",
        ],
    )


def _embeddings(runs: dict[str, list[dict[str, Any]]]) -> Table:
    rows: list[list[Cell]] = []
    for name, several in runs.items():
        figures = [per_seed(several, "embeddings", key) for key in ("cosine", "spearman")]
        rows.append([name, *figures, _layer_mean(several, "kl"), _state(several)])
    return Table(
        "Table 7 for an encoder: how well embeddings are kept",
        ["model", "cosine", "Spearman", "attention KL", "state"],
        rows,
        notes=[
            "cosine: mean similarity of the teacher's and the student's embedding of a text; Spearman: rank "
            "correlation of the similarities of all pairs of texts"
        ],
    )


def kernel_error(bench: Bench) -> Table:
    """Table 11: L2 error of the kernel per layer, and whether it, or the attention's KL, goes with the loss."""
    shown = [trained(label, loss) for loss in ("l2", "softmax") for label in ("Fix", "DoF")]
    runs = {spec.name: bench.evaluations(spec) for spec in shown}
    layers = list(next(iter(runs.values()))[0]["layers"])
    rows: list[list] = [
        [layer, *(per_seed(several, "layers", layer, "kernel_error") for several in runs.values())] for layer in layers
    ]
    rows.append(["mean", *(_layer_mean(several, "kernel_error") for several in runs.values())])
    # Does a figure of the layers rank students as their loss does? Over the students that were trained.
    chosen = bench.lineup(paper_methods())
    several = [bench.evaluations(spec) for spec in chosen]
    section, key = bench.quality
    quality = [statistics.fmean(run[section][key] for run in own) for own in several]
    titles = {"kernel_error": "L2 error of the kernel", "kl": "attention KL", "output_error": "attention output error"}
    values = {name: spearman([_layer_mean(own, name).mean for own in several], quality) for name in titles}
    correlations = ", ".join(f"{titles[name]} {value:.2f}" for name, value in values.items())
    return Table(
        "Table 11: relative L2 error of the kernel, per layer",
        ["layer", *runs],
        rows,
        ["GPT-2, L2 error ×10⁻³", "layers 1, 2, …", "total"],
        [[name, " ".join(map(str, values)), total] for name, (values, total) in published.L2_ERRORS.items()],
        [
            "√(Σ (K − K̂)² / Σ K²) over visible pairs of query and key, geometric mean of a layer's heads; the paper's "
            "absolute error says nothing where K passes exp(100)",
            f"rank correlation with the {bench.quality_title} over the {len(chosen)} trained students: {correlations}",
        ],
        data={"correlations": values},
    )


def heads(bench: Bench) -> Table:
    """Table of ways to choose features per layer: by the largest, the mean or a quantile of its heads; and per head."""
    students = {"Fix": trained("Fix", "softmax")}
    students |= {f"{label}, largest head (paper)": trained(label, "softmax") for label in ("DoF", "DoF + Clip")}
    students |= {spec.name: spec for spec in over_heads()}
    rows: list[list[Cell]] = []
    for title, spec in students.items():
        several = bench.evaluations(spec)
        rows.append([title, per_seed(several, *bench.quality), _layer_mean(several, "kl"), _state(several)])
    return Table(
        "Features per layer by the largest, the mean, a quantile of its heads; and per head",
        ["model", bench.quality_title, "attention KL", "state"],
        rows,
        notes=["softmax loss; the reviewers asked for the mean and for numbers per head, the paper has the largest"],
    )


def _layer_mean(runs: Sequence[dict[str, Any]], name: str) -> Figure:
    return Figure.of([layer_mean(run, name) for run in runs])


def _state(runs: Sequence[dict[str, Any]]) -> str:
    return f"{runs[0]['state_bytes'] / 1024:.0f} KiB"
