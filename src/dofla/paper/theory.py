"""The number of random features a kernel needs: leverage scores, the optimal density, Theorem 3 of arXiv 2507.03340.

Setting (Section 2 of the paper). A kernel is an average of features, K(x, y) = E_z[φ(x; z) φ(y; z)], with z drawn
from a base distribution: N(0, I) for positive random features. M draws from a density q relative to it give the
estimate K̂(x, y) = (1/M) Σ_m φ(x; z_m) φ(y; z_m) / q(z_m), with the operator Σ̂. Here ρ is always the empirical
distribution of J given vectors. Then

- a function f in L²(ρ) is its J values, and ⟨f, g⟩ = (1/J) Σ_j f_j g_j;
- the integral operator (Σf)(x) = ∫ K(x, y) f(y) dρ(y) acts on values as the matrix gram / J, gram_ij = K(x_i, x_j);
- the leverage score of z is l_λ(z) = ⟨φ(·; z), (Σ + λI)⁻¹ φ(·; z)⟩, whose inner product brings a factor 1/J of its own;
- E_z[l_λ(z)] = tr Σ(Σ + λI)⁻¹ = N*_λ, the degrees of freedom.

The functions take features as logarithms `log_features` [J, Z] (one column per z; -inf is a feature that is zero) and
the kernel as `gram` [J, J], so any positive feature map and any base distribution will do; `prf_*` supply both for
positive random features. Multiplying the kernel by c, the features by √c and λ by c changes no leverage score and no
degrees of freedom, so "λ relative to the trace" is `log_scale=prf_log_trace(x, scaling)` in both `prf_*` calls.

Arguments mean the same everywhere: `x` [J, d] are queries and keys, `z` [Z, d] directions, each N(0, I) under the base
distribution, `scaling` > 0 is the factor of the kernel's exponent, `log_scale` the log of what the kernel is divided by
(`prf_log_trace` makes the trace of Σ one); `log_features` [J, Z] are log φ(x_j; z) on the scale of `gram`, which is
symmetric and positive semi-definite; `lam` > 0 is λ in the unit of the kernel; `log_density` [Z] is log q(z), q
relative to the base distribution (zeros: that itself); `t` in (0, 3] is the tolerance, smaller is closer;
`max_leverage` is N_{q,λ} of the density that was drawn from, at least N*_λ; `values` [J] or [J, C] are v at the J
vectors; `delta` in (0, 1) is δ: the paper's statement fails with probability at most 2δ, the bounds here at most δ.
Anything else is a DoflaError.

`required_features` is the condition of Theorem 3. The bounds are not the paper's expressions: docs/api/theory.md proves
that with A = Σ + λI, D = A^-½ Σ A^-½ and E = A^-½ Σ̂ A^-½ − D the event ‖E‖_op ≤ √t, on which they hold, has probability
1 − δ at least.
"""

import math

import torch
from torch import Tensor

from dofla.errors import DoflaError


def prf_log_features(x: Tensor, z: Tensor, scaling: float, log_scale: float = 0.0) -> Tensor:
    """Log of the positive random features of the attention kernel exp(scaling · x·y), [J, Z] float64.

    log φ(x; z) = √scaling · z·x − scaling · |x|² / 2; with scaling = d^-½ the paper's features (Section 2).
    """
    _check_vectors("x", x)
    _check_vectors("z", z)
    _check_positive("scaling", scaling)
    if x.shape[1] != z.shape[1]:
        raise DoflaError(f"z has width {z.shape[1]} but x has width {x.shape[1]}: draw z with the width of x")
    x, z = x.double(), z.double()
    return math.sqrt(scaling) * (x @ z.T) - (scaling / 2) * x.square().sum(1, keepdim=True) - log_scale / 2


def prf_gram(x: Tensor, scaling: float, log_scale: float = 0.0) -> Tensor:
    """Gram matrix [J, J] of the attention kernel exp(scaling · x·y), divided by exp(log_scale); float64, symmetric."""
    _check_vectors("x", x)
    _check_positive("scaling", scaling)
    x = x.double()
    exponent = scaling * (x @ x.T) - log_scale
    gram = ((exponent + exponent.T) / 2).exp()
    if not gram.isfinite().all():
        raise DoflaError(
            f"the Gram matrix overflows, its largest exponent is {exponent.max().item():.4g}: pass "
            "log_scale=prf_log_trace(x, scaling)"
        )
    return gram


def prf_log_trace(x: Tensor, scaling: float) -> float:
    """Log of tr Σ for the attention kernel: the log of the mean of exp(scaling · |x|²) over the rows of x [J, d]."""
    _check_vectors("x", x)
    _check_positive("scaling", scaling)
    return ((scaling * x.double().square().sum(1)).logsumexp(0) - math.log(len(x))).item()


def degrees_of_freedom(gram: Tensor, lam: float) -> float:
    """N*_λ = tr Σ(Σ + λI)⁻¹ with Σ = gram / J, a number in (0, J] (paper, Section 2; Bach 2017)."""
    _check_positive("lam", lam)
    eigenvalues, _ = _spectrum(gram)
    return (eigenvalues / (eigenvalues + lam)).sum().item()


def log_leverage(log_features: Tensor, gram: Tensor, lam: float) -> Tensor:
    """Log of the leverage score l_λ(z) = ⟨φ(·; z), (Σ + λI)⁻¹ φ(·; z)⟩ in L²(ρ) (paper, Section 2), [Z] float64.

    Not normalized: its mean over the base distribution is `degrees_of_freedom(gram, lam)`, exactly. -inf where a
    feature is zero at every vector.
    """
    _check_positive("lam", lam)
    eigenvalues, eigenvectors = _spectrum(gram)
    if log_features.ndim != 2 or log_features.shape[0] != len(gram) or log_features.shape[1] == 0:
        expected = f"[{len(gram)}, Z], Z ≥ 1: one row per row of gram"
        raise DoflaError(f"log_features has shape {list(log_features.shape)}, expected {expected}")
    if log_features.isnan().any() or (log_features == math.inf).any():
        raise DoflaError("log_features holds nan or inf: features are finite; -inf alone means a feature of zero")
    log_features = log_features.double()
    # Each column at its own scale: φ ranges over hundreds of orders of magnitude, (Σ + λI)⁻¹ need not see it.
    peak = log_features.amax(0)
    peak = peak.masked_fill(peak == -math.inf, 0.0)
    coordinates = eigenvectors.T @ (log_features - peak).exp()
    scores = (coordinates.square() / (eigenvalues + lam)[:, None]).sum(0) / len(gram)
    return 2 * peak + scores.log()


def max_leverage(log_features: Tensor, gram: Tensor, lam: float, log_density: Tensor) -> float:
    """N_{q,λ} = sup_z l_λ(z) / q(z), over the z that are given; infinite if q leaves out one of them whose score is not
    zero (paper, Section 2).

    A finite supremum: exact if these are all the z that q can draw, otherwise only a lower bound. For positive random
    features over all of R^d it says nothing of q = 1, where the true supremum is infinite unless every vector is zero:
    φ(x; z) grows without bound as z goes along x. Under `optimal_log_density` it is N*_λ whatever z are given.
    """
    score = log_leverage(log_features, gram, lam)
    if log_density.shape != score.shape:
        raise DoflaError(
            f"log_density has shape {list(log_density.shape)}, expected [{len(score)}]: one number per candidate z"
        )
    log_density = log_density.double()
    if log_density.isnan().any() or (log_density == math.inf).any():
        raise DoflaError("log_density holds nan or inf: a density is finite; -inf alone means that q is zero there")
    # A feature that is zero everywhere adds nothing to the kernel, so q may be zero there too.
    log_ratio = (score - log_density).masked_fill(score == -math.inf, -math.inf)
    return log_ratio.max().exp().item()


def optimal_log_density(log_features: Tensor, gram: Tensor, lam: float) -> Tensor:
    """Log [Z] of q_λ(z) = l_λ(z) / N*_λ, relative to the base distribution, of the least N_{q,λ}; float64.

    Dividing by N*_λ normalizes it exactly, because E_z[l_λ(z)] = N*_λ; and since N_{q,λ} ≥ E_q[l_λ / q] = N*_λ for
    every q, with equality for this one, no other density needs fewer features in Theorem 3 (paper, Section 2; Bach
    2017).
    """
    dof = degrees_of_freedom(gram, lam)
    if dof == 0.0:
        raise DoflaError("gram is zero: a kernel that vanishes has no optimal density; pass the kernel's own values")
    return log_leverage(log_features, gram, lam) - math.log(dof)


def required_features(max_leverage: float, t: float, delta: float) -> int:
    """The smallest M ≥ 1 with M ≥ (4N/t) log(64N / (δt)): the features of one head that Theorem 3 asks for."""
    _check_positive("max_leverage", max_leverage)
    _check_tolerance(t)
    if not 0 < delta < 1:
        raise DoflaError(f"delta={delta} is outside (0, 1): it bounds a probability of failure, try 0.05")
    return max(1, math.ceil(4 * max_leverage / t * math.log(64 * max_leverage / (delta * t))))


def kernel_error_bound(gram: Tensor, lam: float, t: float, max_leverage: float) -> float:
    """Bound on the squared error of K̂ in L²(ρ⊗ρ), (1/J²) Σ_ij (K̂_ij − K_ij)², with M of `required_features`.

        t·‖Σ‖_HS² + 2λt·tr Σ + λ²·min(√t (N + N*_λ), tJ),        with probability at least 1 − δ.

    Ours, not the paper's expression (which has the constants 5·tr Σ and tr Σ·‖Σ‖_op). Proof: the squared error is
    ‖A^½ E A^½‖_HS² = tr EAEA, and A = Σ + λI splits it into tr EΣEΣ ≤ ‖E‖_op² ‖Σ‖_HS²,
    2λ tr E²Σ ≤ 2λ ‖E‖_op² tr Σ and λ² ‖E‖_HS², where ‖E‖_op² ≤ t; and ‖E‖_HS² is at most J ‖E‖_op² and at most
    ‖E‖_op ‖E‖_1, ‖E‖_1 ≤ (1/M) Σ_m l_λ(z_m) / q(z_m) + tr D ≤ N + N*_λ.
    As λN*_λ ≤ tr Σ, the optimal density gives at most tr Σ · (t‖Σ‖_op + 2λ(t + √t)).
    """
    _check_positive("lam", lam)
    _check_tolerance(t)
    _check_positive("max_leverage", max_leverage)
    eigenvalues, _ = _spectrum(gram)
    dof = (eigenvalues / (eigenvalues + lam)).sum().item()
    # No density has less; the slack is for the rounding of a caller who computed N*_λ elsewhere.
    if max_leverage < dof * (1 - 1e-6):
        raise DoflaError(
            f"max_leverage={max_leverage} is below the degrees of freedom {dof:.6g}, which no density can be: "
            "pass max_leverage() of this gram and lam"
        )
    remainder = min(math.sqrt(t) * (max_leverage + dof), t * len(gram))
    squares, trace = eigenvalues.square().sum().item(), eigenvalues.sum().item()
    return t * squares + 2 * lam * t * trace + lam**2 * remainder


def integral_error_bound(gram: Tensor, lam: float, t: float, values: Tensor) -> float:
    """Bound on the squared error of the attention-weighted integral in L²(ρ), with M of `required_features`.

    The integral is x ↦ ∫ K(x, y) v(y) dρ(y), attention before it is normalized; its squared error is
    (1/J) Σ_i |(1/J) Σ_j (K̂_ij − K_ij) v_j|², and

        t·(‖Σ‖_op + λ)·Σ_c ⟨v_c, (Σ + λI) v_c⟩,        c over the columns of v, with probability at least 1 − δ.

    Theorem 3 (ii) is about this integral; the bound is ours, not the paper's expression. Proof: for each column
    ‖(Σ̂ − Σ)v‖ = ‖A^½ E A^½ v‖ ≤ ‖A^½‖_op ‖E‖_op ‖A^½ v‖, and ‖E‖_op² ≤ t.
    """
    _check_positive("lam", lam)
    _check_tolerance(t)
    eigenvalues, eigenvectors = _spectrum(gram)
    if values.ndim not in (1, 2) or len(values) != len(gram):
        raise DoflaError(
            f"values has shape {list(values.shape)}, expected [{len(gram)}] or [{len(gram)}, C] as gram has"
        )
    coordinates = eigenvectors.T @ values.double().reshape(len(gram), -1)
    energy = ((eigenvalues + lam)[:, None] * coordinates.square()).sum() / len(gram)
    return (t * (eigenvalues.max() + lam) * energy).item()


def _spectrum(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [J] (never negative) and orthonormal eigenvectors [J, J] (columns) of Σ = gram / J, in float64."""
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or len(gram) == 0:
        raise DoflaError(f"gram has shape {list(gram.shape)}, expected [J, J] with J ≥ 1: pass the kernel's values")
    gram = gram.double()
    size = gram.abs().max().item()
    if not math.isfinite(size):
        raise DoflaError(f"gram holds {size}: divide the kernel by its trace first (log_scale in prf_gram)")
    asymmetry = (gram - gram.T).abs().max().item()
    if asymmetry > 1e-6 * size:
        raise DoflaError(
            f"gram differs from its transpose by {asymmetry:.3g}: pass (gram + gram.T) / 2 if that is meant"
        )
    try:
        eigenvalues, eigenvectors = torch.linalg.eigh((gram + gram.T) / (2 * len(gram)))
    except torch.linalg.LinAlgError as error:
        raise DoflaError(
            f"the eigenvalues of gram (largest entry {size:.3g}) did not converge: use fewer vectors"
        ) from error
    lowest, highest = eigenvalues[0].item(), eigenvalues[-1].item()
    if lowest < -1e-6 * max(highest, size / len(gram)):
        raise DoflaError(f"gram has the eigenvalue {lowest * len(gram):.3g}: a Gram matrix has none below zero")
    return eigenvalues.clamp(min=0.0), eigenvectors


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise DoflaError(f"{name}={value} is not a positive number: pass {name} > 0")


def _check_tolerance(t: float) -> None:
    if not 0 < t <= 3:
        raise DoflaError(f"t={t} is outside (0, 3]: Theorem 3 covers no other tolerance, try 1.0")


def _check_vectors(name: str, vectors: Tensor) -> None:
    if vectors.ndim != 2 or vectors.numel() == 0:
        raise DoflaError(f"{name} has shape {list(vectors.shape)}, expected [count, width]: pass at least one vector")
    if not vectors.isfinite().all():
        raise DoflaError(f"{name} holds nan or inf: drop these rows")
