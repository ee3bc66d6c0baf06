"""The error of random features against their number, for one head: measured, and what theory says of it.

Measured, over several seeds, for features drawn in each of :data:`METHODS`:

- kernel: ‖K̂ − K‖ / ‖K‖ in L²(ρ⊗ρ), ρ the empirical distribution of all queries and keys together;
- kl: Kullback-Leibler divergence in nats between rows of softmax attention and of its estimate (queries against keys,
  no mask), mean over the queries. This is what attention sees: K enters it normalized.

Theory (`dofla.paper.theory`; arXiv 2507.03340, sections 2 and 3): the least error that any kernel of rank M has
(Eckart and Young), what Theorem 3 guarantees for M draws from q_λ at its best λ and t, and the M it asks for.

M independent draws with alpha = 1/q have the mean squared relative error V/M, V = E_q[(‖φ‖² / q)²] / ‖Σ‖_HS² − 1,
where ‖φ‖² = (1/J) Σ_j φ(x_j; z)². For q = 1 it is known: E_z[φ_i² φ_j²] = exp(2s|x_i + x_j|² − s|x_i|² − s|x_j|²).
For q_λ ‖φ‖² / q_λ ≤ N*_λ (‖Σ‖_op + λ), so V stays below N*_λ (‖Σ‖_op + λ) tr Σ / ‖Σ‖_HS² however long the vectors are.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dofla.attention import log_kernel
from dofla.distillation.losses import divergence
from dofla.errors import DoflaError, check_choice
from dofla.feature_maps.projections import orthogonal_gaussian
from dofla.paper import theory
from dofla.paper.sampling import leverage_features
from dofla.profiles.tolerance import DEFAULT_LAMBDA

SIZES = (8, 16, 32, 64, 128, 256, 512)
METHODS = ("iid", "orthogonal", "leverage", "leverage gaussian")
"""Draws from N(0, I); the same, orthogonal in blocks; draws from q_λ, by the proposal `data`; by `gaussian`."""
_DELTA = 0.1
"""The probability δ with which Theorem 3 may fail."""
_LAMBDAS = tuple(2.0**exponent for exponent in range(-16, 1))
"""Where the bound looks for its best λ, relative to tr Σ; beyond 1 the kernel is all remainder."""


def error_curve(
    queries: Tensor,
    keys: Tensor,
    scaling: float,
    *,
    sizes: Sequence[int] = SIZES,
    methods: Sequence[str] = METHODS,
    lam: float = DEFAULT_LAMBDA,
    seeds: int = 5,
    candidates: int = 4096,
    fit: Tensor | None = None,
) -> dict:
    """Errors of one head's features as plain data, ready for JSON.

    Args:
        queries, keys: [Q, d] and [T, d] of one KV head; together they are ρ.
        scaling: the factor of the kernel's exponent.
        sizes: M; within a seed the smaller draws are the beginnings of the largest.
        methods: of :data:`METHODS`.
        lam: λ of the leverage features and of the degrees of freedom, relative to tr Σ.
        seeds: how many draws, at least 2.
        candidates: of the leverage features.
        fit: [J, d] other vectors to draw the leverage features for: the error is then one on fresh vectors, of which
            Theorem 3 says nothing. Default: ρ itself, the setting of the theorem.

    Returns:
        ``degrees_of_freedom`` N*_λ; ``required_features`` of Theorem 3 at t = 1 and δ = .1; ``best_rank`` and ``bound``
        (at this δ), relative kernel errors, one per size (bound: None where no λ up to tr Σ meets the condition of
        Theorem 3; above 1 it promises less than K̂ = 0 has); ``measured``: for each method and each of kernel and kl the
        ``mean`` and ``spread`` (standard deviation over seeds), one number per size.

    Raises:
        DoflaError: a number out of range, an unknown method, vectors that are no finite matrices of one width.
    """
    if seeds < 2:
        raise DoflaError(f"seeds is {seeds}: a spread needs 2 or more")
    if not sizes or min(sizes) < 1:
        raise DoflaError(f"sizes is {list(sizes)}: give numbers of features, 1 or more each")
    head = _Head(queries, keys, scaling)
    measured = {}
    for method in methods:
        errors = []
        for seed in range(seeds):
            draw = _draw(method, head.vectors if fit is None else fit, scaling, max(sizes), lam, candidates, seed)
            errors.append([head.errors(draw[0][:size], draw[1][:size]) for size in sizes])
        table = torch.tensor(errors, dtype=torch.float64)  # [seeds, sizes, 2]
        measured[method] = {
            name: {"mean": table[..., n].mean(0).tolist(), "spread": table[..., n].std(0).tolist()}
            for n, name in enumerate(("kernel", "kl"))
        }
    dof = theory.degrees_of_freedom(head.gram, lam)
    return {
        "degrees_of_freedom": dof,
        "required_features": theory.required_features(dof, 1.0, _DELTA),
        "best_rank": best_rank_errors(head.gram, sizes),
        "bound": theorem_errors(head.gram, sizes, _DELTA),
        "measured": measured,
    }


def best_rank_errors(gram: Tensor, sizes: Sequence[int]) -> list[float]:
    """For each M in ``sizes`` the least ‖K̂ − K‖ / ‖K‖ of a kernel of rank M, from the [J, J] values of the kernel."""
    squares = torch.linalg.eigvalsh(gram.double()).square().sort(descending=True).values
    return [(squares[size:].sum() / squares.sum()).sqrt().item() for size in sizes]


def theorem_errors(gram: Tensor, sizes: Sequence[int], delta: float) -> list[float | None]:
    """For each M in ``sizes`` the least relative kernel error that Theorem 3 guarantees with probability 1 − δ, for
    draws from q_λ; ``gram`` are the [J, J] values of the kernel.

    √(`theory.kernel_error_bound`) / ‖Σ‖_HS, least over λ = 2⁻¹⁶ … 1 times tr Σ, each with the smallest t whose
    condition M meets; None where no λ meets it with t ≤ 3. The λ that is best differs with M; features drawn at another
    λ are not covered.
    """
    spectrum = torch.linalg.eigvalsh(gram.double() / len(gram)).clamp(min=0.0)
    spectrum = spectrum / spectrum.sum()
    squares = spectrum.square().sum().item()
    # The bound knows the kernel by its spectrum only, and a diagonal matrix is solved at once.
    diagonal = torch.diag(spectrum * len(gram))
    dofs = {lam: (spectrum / (spectrum + lam)).sum().item() for lam in _LAMBDAS}
    bounds: list[float | None] = []
    for size in sizes:
        least = math.inf
        for lam, dof in dofs.items():
            t = _smallest_tolerance(dof, size, delta)
            if t is not None and t * squares + 2 * lam * t < least:
                least = min(least, theory.kernel_error_bound(diagonal, lam, t, dof))
        bounds.append(None if least == math.inf else math.sqrt(least / squares))
    return bounds


def features_needed(
    vectors: Tensor,
    scaling: float,
    method: str,
    *,
    error: float = 0.5,
    lam: float = DEFAULT_LAMBDA,
    draws: int = 512,
    candidates: int = 4096,
) -> float:
    """The M at which independent draws have the root mean square ‖K̂ − K‖ / ‖K‖ = error: V / error² (module docstring).

    Args:
        vectors: [J, d], ρ.
        scaling: the factor of the kernel's exponent.
        method: "iid" (exact) or "leverage" (V is a mean over draws from q_λ, bounded, so it converges quickly).
        error: relative to ‖K‖.
        lam, draws, candidates: of the leverage features.

    Returns:
        M, not rounded; infinite where it exceeds float64, as it does for iid features at s|x|² near 180.

    Raises:
        DoflaError: another method, or a number out of range.
    """
    if not 0 < error < math.inf:
        raise DoflaError(f"error={error} is not a positive number: pass error > 0, for instance 0.5")
    if method not in ("iid", "leverage"):
        raise DoflaError(f"unknown method {method!r}: choose iid or leverage")
    vectors = vectors.double()
    log_scale = theory.prf_log_trace(vectors, scaling)
    log_norm = theory.prf_gram(vectors, scaling, log_scale).square().mean().log().item()
    if method == "iid":
        norms = scaling * vectors.square().sum(1)
        # 2|x + y|² − |x|² − |y|² = |x|² + |y|² + 4 x·y
        exponent = norms[:, None] + norms + 4 * scaling * vectors @ vectors.T - 2 * log_scale
        log_second = exponent.flatten().logsumexp(0).item() - 2 * math.log(len(vectors))
    else:
        z, log_alpha = _draw(method, vectors, scaling, draws, lam, candidates, seed=0)
        log_features = theory.prf_log_features(vectors, z, scaling, log_scale)
        log_squares = (2 * log_features).logsumexp(0) - math.log(len(vectors)) + log_alpha
        log_second = (2 * log_squares).logsumexp(0).item() - math.log(draws)
    excess = log_second - log_norm
    # V is never negative, its estimate is where one vector is the kernel.
    return max(math.expm1(excess), 0.0) / error**2 if excess < 700 else math.inf


class _Head:
    """A head's kernel, and what an estimate of it is compared with."""

    def __init__(self, queries: Tensor, keys: Tensor, scaling: float) -> None:
        queries, keys = queries.double(), keys.double()
        self.vectors, self.queries = torch.cat([queries, keys]), len(queries)
        self.scaling, self.log_scale = scaling, theory.prf_log_trace(self.vectors, scaling)
        self.gram = theory.prf_gram(self.vectors, scaling, self.log_scale)
        self.log_rows = (scaling * queries @ keys.T).log_softmax(-1)

    def errors(self, z: Tensor, log_alpha: Tensor) -> tuple[float, float]:
        """Relative kernel error and KL of the features z [M, d] with log alpha [M]."""
        log_features = theory.prf_log_features(self.vectors, z, self.scaling, self.log_scale)
        log_features = (log_features + (log_alpha - math.log(len(z))) / 2)[None, None]
        log_estimate = log_kernel(log_features, log_features)[0, 0]
        kernel = torch.linalg.matrix_norm(log_estimate.exp() - self.gram) / torch.linalg.matrix_norm(self.gram)
        estimated = log_estimate[: self.queries, self.queries :].log_softmax(-1)
        return kernel.item(), divergence(self.log_rows, estimated).mean().item()


def _draw(
    method: str, vectors: Tensor, scaling: float, count: int, lam: float, candidates: int, seed: int
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width = vectors.shape[-1]
    if method == "iid":
        return torch.randn(count, width, generator=generator, dtype=torch.float64), torch.zeros(count).double()
    if method == "orthogonal":
        return orthogonal_gaussian(1, count, width, generator)[0].double(), torch.zeros(count).double()
    check_choice("method", method, METHODS)
    proposal = "gaussian" if method == "leverage gaussian" else "data"
    return leverage_features(
        vectors, scaling, count, lam, candidates=candidates, proposal=proposal, generator=generator
    )


def _smallest_tolerance(dof: float, size: int, delta: float) -> float | None:
    if theory.required_features(dof, 3.0, delta) > size:
        return None
    low, high = 1e-9, 3.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if theory.required_features(dof, middle, delta) <= size else (middle, high)
    return high
