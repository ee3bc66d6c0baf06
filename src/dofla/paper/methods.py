"""The students that the tables compare: the paper's rows, the baselines, and what its reviewers asked for."""

from dataclasses import replace

from dofla.runs.distillation import Students
from dofla.runs.recipe import StudentSpec

STRATEGIES = {"Fix": "fixed", "DoF": "dof", "DoF + Clip": "dof_clip"}
LOSSES = ("direct", "softmax", "l2")
LEVERAGE = "leverage"
"""The start of students whose features are drawn by leverage."""


def trained(label: str, loss: str) -> StudentSpec:
    """A row of the paper: an allocation and a loss."""
    return StudentSpec(f"{label}, {loss}", STRATEGIES[label], loss=loss)


def paper_methods() -> list[StudentSpec]:
    """Fix, DoF and DoF + Clip, each with the three losses (tables 3 and 7)."""
    return [trained(label, loss) for label in STRATEGIES for loss in LOSSES]


def baselines() -> list[StudentSpec]:
    """The paper's: DiJiang, trained by the next-token loss, and Performer, untrained. DiJiang's paper and its public
    code describe two different maps; both are here."""
    return [
        StudentSpec("DiJiang (public code)", "fixed", "dijiang_code", trained=False),
        StudentSpec("DiJiang (paper)", "fixed", "dijiang", loss="direct"),
        StudentSpec("Performer", "fixed", "performer", trained=False),
    ]


def leverage() -> StudentSpec:
    """Theorem 3 in practice: features drawn from the optimal density, untrained."""
    return StudentSpec("Leverage-sampled", "fixed", trained=False, start=LEVERAGE)


def other_maps() -> list[StudentSpec]:
    """The even split with other feature maps, layerwise, where they learn."""
    return [
        StudentSpec("Hedgehog, softmax", "fixed", "hedgehog", loss="softmax"),
        StudentSpec("T2R, softmax", "fixed", "t2r", loss="softmax"),
        StudentSpec("ELU + 1", "fixed", "elu1", trained=False),
    ]


def wide(students: Students) -> StudentSpec:
    """A student with as many features in every layer as DoF gives to its widest: does more state help?"""
    features = max(max(layer.features_per_head) for layer in students.plan(trained("DoF", "softmax")).linear)
    return replace(trained("Fix", "softmax"), name=f"Wide ({features} everywhere), softmax", budget=features)


def over_heads() -> list[StudentSpec]:
    """DoF and DoF + Clip, with the layer's number from its heads' in several ways, and with a number per head."""
    students = []
    for label in ("DoF", "DoF + Clip"):
        student = trained(label, "softmax")
        students += [
            replace(student, name=f"{label}, mean over heads", over_heads="mean"),
            replace(student, name=f"{label}, 75 % quantile over heads", over_heads="q75"),
            replace(student, name=f"{label}, per head", per_head=True),
        ]
    return students


def scaled(normalization: str, exponent: int) -> StudentSpec:
    """DoF with another scale of the Gram matrix, and λ = 2^exponent."""
    name = f"DoF, softmax, {normalization} normalized, 2^{exponent}"
    return replace(trained("DoF", "softmax"), name=name, normalization=normalization, lam=2.0**exponent)
