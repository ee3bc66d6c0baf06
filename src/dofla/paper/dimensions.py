"""Tables 1 and 2: degrees of freedom, and the dimensions that follow; and what their scale does to both."""

import statistics

from dofla.evaluation.embeddings import spearman
from dofla.paper import published
from dofla.paper.bench import Bench, per_seed
from dofla.paper.methods import scaled, trained
from dofla.paper.table import Figure, Rows, Table
from dofla.profiles.spectrum import NORMALIZATIONS

HEAD_LAMBDA = 2.0**-8
"""The tolerance of the paper's table 2."""

_TRAINED = {("trace", -4), ("trace", -8), ("trace", -12), ("none", -8)}  # scales at which a student is trained


def selected_dimensions(bench: Bench) -> Table:
    """Table 1: features per layer."""
    profile = bench.profiled()
    plans = {label: bench.students.plan(trained(label, "softmax")) for label in ("DoF", "DoF + Clip")}
    counts = {label: [max(layer.features_per_head) for layer in plan.linear] for label, plan in plans.items()}
    largest = [max(row) for row in profile.dof(bench.study.lam)]
    columns = ["layer", "DoF, largest head", *counts]
    rows: Rows = [
        [layer.name, Figure.of(dof, 1), *(count[n] for count in counts.values())]
        for n, (layer, dof) in enumerate(zip(profile.layers, largest, strict=True))
    ]
    kind = f"λ = {bench.study.lam:.3g}, {profile.normalization} normalized, J = {profile.samples}"
    return Table(
        f"Table 1: selected dimensions, {bench.study.budget} on average",
        columns,
        rows,
        ["model", "features of layers 1, 2, …"],
        [[model, " ".join(map(str, row))] for model, row in published.DIMENSIONS.items()],
        [kind, f"largest layer {max(counts['DoF'])}, smallest {min(counts['DoF'])}"],
    )


def dof_per_head(bench: Bench) -> Table:
    """Table 2: degrees of freedom of every KV head at λ = 2⁻⁸."""
    profile = bench.profiled()
    dof = profile.dof(HEAD_LAMBDA)
    heads = max(map(len, dof))
    rows = []
    for layer, row in zip(profile.layers, dof, strict=True):
        shown = [Figure.of(value, 1) for value in row] + [None] * (heads - len(row))
        rows.append([layer.name, *shown, Figure.of(max(row) / statistics.median(row), 1)])
    columns = ["layer", *(f"head {n + 1}" for n in range(heads)), "largest / median"]
    return Table(
        "Table 2: degrees of freedom per head, λ = 2⁻⁸",
        columns,
        rows,
        ["GPT-2", "degrees of freedom of heads 1, 2, …"],
        [["layer 1", " ".join(map(str, published.DOF_LAYER_1))]],
        ["the paper's range over all heads is 1.1 to 173.8; a layer's largest is typically 3 to 20 × its median head"],
    )


def scale_of_dof(bench: Bench) -> Table:
    """Table of what λ and the Gram matrix's normalization, on which the paper is silent, do to degrees of freedom."""
    profile = bench.profiled()
    default = [max(row) for row in profile.dof(bench.study.lam)]
    section, key = bench.quality
    rows = []
    for normalization in NORMALIZATIONS:
        for exponent in (-4, -8, -12):
            dof = profile.dof(2.0**exponent, normalization)
            flat = sorted(value for row in dof for value in row)
            largest = [max(row) for row in dof]
            widest = Figure.of(max(largest) / statistics.fmean(largest) * bench.study.budget, 0)
            figures = [Figure.of(value, 1) for value in (flat[0], statistics.median(flat), flat[-1])]
            alike = Figure.of(spearman(largest, default), 2)
            quality = None
            if (normalization, exponent) in _TRAINED:
                student = scaled(normalization, exponent)
                if (student.normalization, student.lam) == (profile.normalization, bench.study.lam):
                    student = trained("DoF", "softmax")  # that of all tables
                quality = per_seed(bench.evaluations(student), section, key)
            rows.append([normalization, f"2^{exponent}", *figures, widest, alike, quality])
    return Table(
        "What the scale of the Gram matrix and λ do",
        ["normalization", "λ", "least DoF", "median", "largest", "widest layer", "rank agreement", bench.quality_title],
        rows,
        notes=[
            "normalization: unit trace; largest eigenvalue 1; divided by J; none, as printed in Algorithm 1",
            "widest layer: its features under DoF at this study's budget; rank agreement: Spearman's correlation over "
            f"layers with λ = {bench.study.lam:.3g}, {profile.normalization}; {bench.quality_title}: of students "
            "trained with the softmax loss under that allocation, at equal cost",
        ],
    )
