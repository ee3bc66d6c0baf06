"""Spectra of the attention kernel and their degrees of freedom (arXiv 2507.03340, section 3, Algorithm 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dofla.errors import DoflaError
from dofla.profiles.tolerance import check_lambda

NORMALIZATIONS = ("trace", "top", "mean", "none")


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of the Gram matrix of one head, on their true scale ``exp(log_scale) · eigenvalues``."""

    eigenvalues: Tensor  # [J] float64, descending
    log_scale: float
    retry: str | None = None  # how the solver was helped, if it was


def gram_spectrum(vectors: Tensor, scaling: float) -> Spectrum:
    """Spectrum of the Gram matrix of the attention kernel ``exp(scaling · x·y)``.

    The matrix is formed as ``exp(· − max)`` in float64 and symmetrised. A solver that fails is retried with jitter on
    the diagonal, then by singular values; the retry is recorded.

    Args:
        vectors: [J, d], queries and keys of one head.
        scaling: of the scores.

    Raises:
        DoflaError: if the vectors are not all finite.
    """
    vectors = vectors.double()
    if not torch.isfinite(vectors).all():
        raise DoflaError("queries or keys are not finite: the model produces NaN or infinity on this text")
    logits = scaling * (vectors @ vectors.mT)
    log_scale = logits.max().item()
    gram = torch.exp(logits - log_scale)
    eigenvalues, retry = _eigenvalues((gram + gram.mT) / 2)
    return Spectrum(eigenvalues.clamp_min(0).flip(0), log_scale, retry)


def _eigenvalues(gram: Tensor) -> tuple[Tensor, str | None]:
    def solved(values: Tensor) -> bool:
        return bool(torch.isfinite(values).all())

    try:
        values = torch.linalg.eigvalsh(gram)
        if solved(values):
            return values, None
    except torch.linalg.LinAlgError:
        pass
    try:
        jitter = 1e-10 * gram.diagonal().mean()
        values = torch.linalg.eigvalsh(gram + jitter * torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
        if solved(values):
            return values, "jitter"
    except torch.linalg.LinAlgError:
        pass
    # For a symmetric positive semi-definite matrix singular values and eigenvalues are the same numbers.
    return torch.linalg.svdvals(gram).flip(0), "svd"


def degrees_of_freedom(spectrum: Spectrum, lam: float, normalization: str = "trace") -> float:
    """``tr Σ(Σ + λI)⁻¹`` for the Gram matrix Σ brought to a scale.

    Args:
        spectrum: of one head.
        lam: λ > 0, relative to the scale.
        normalization: ``trace`` (unit trace), ``top`` (largest eigenvalue 1), ``mean`` (divided by J, the empirical
            integral operator), ``none`` (as printed in the paper's Algorithm 1).
    """
    check_lambda(lam)
    values = spectrum.eigenvalues
    if normalization == "trace":
        log_unit = values.sum().log()
    elif normalization == "top":
        log_unit = values.max().log()
    elif normalization == "mean":
        log_unit = torch.tensor(math.log(len(values)) - spectrum.log_scale, dtype=values.dtype)
    elif normalization == "none":
        log_unit = torch.tensor(-spectrum.log_scale, dtype=values.dtype)
    else:
        raise DoflaError(f"unknown normalization {normalization!r}: choose one of {', '.join(NORMALIZATIONS)}")
    # σ/(σ+λ) as a sigmoid of logs: the raw scale exp(log_scale) overflows on real heads.
    return torch.sigmoid(values.log() - log_unit - math.log(lam)).sum().item()
