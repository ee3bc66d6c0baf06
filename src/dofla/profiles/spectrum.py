"""Spectra of what a head attends with, and their degrees of freedom (arXiv 2507.03340, section 3, Algorithm 1)."""

import math
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from dofla.errors import DoflaError, check_choice
from dofla.profiles.tolerance import check_lambda

NORMALIZATIONS = ("trace", "top", "mean", "none")
SUBSAMPLES = 8
"""Parts into which the paper's sample is divided to see how far it can be trusted."""


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of the Gram matrix of one head, on their true scale ``exp(log_scale) · eigenvalues``.

    Attributes:
        eigenvalues: float64, descending: [J], or [W, R] where W windows of text have a matrix each. The degrees of
            freedom are then their mean over the windows.
        log_scale: of all of them.
        retry: how the solver was helped, if it was.
        subsamples: [K, J / K], spectra of disjoint parts of the J vectors, by which one matrix is judged.
    """

    eigenvalues: Tensor
    log_scale: float
    retry: str | None = None
    subsamples: Tensor | None = None


def gram_spectrum(vectors: Tensor, scaling: float) -> Spectrum:
    """Spectrum of the Gram matrix of the attention kernel ``exp(scaling · x·y)``, the paper's.

    The matrix is formed as ``exp(· − max)`` in float64 and symmetrised. A solver that fails is retried with jitter on
    the diagonal, then by singular values; the retry is recorded.

    Args:
        vectors: [J, d], queries and keys of one head, in random order.
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
    each, parts = len(vectors) // SUBSAMPLES, None
    if each > 1:
        own = [gram[start : start + each, start : start + each] for start in range(0, each * SUBSAMPLES, each)]
        parts, _ = _eigenvalues(torch.stack([(part + part.mT) / 2 for part in own]))
    return Spectrum(eigenvalues, log_scale, retry, parts)


def attention_spectrum(attention: Tensor) -> tuple[Tensor, str | None]:
    """Eigenvalues [..., R] of ``A Aᵀ``, the inner products of rows of attention A [..., R, L], float64 and descending;
    and how the solver was helped, if it was."""
    attention = attention.double()
    return _eigenvalues(attention @ attention.mT)


def _eigenvalues(gram: Tensor) -> tuple[Tensor, str | None]:
    """The eigenvalues [..., J] of positive semi-definite matrices [..., J, J], descending, none below zero; and the
    second method that was needed, ``jitter`` or ``svd``, or None."""

    jitter = 1e-10 * gram.diagonal(dim1=-2, dim2=-1).mean()
    diagonal = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    for retry, added in ((None, 0), ("jitter", jitter)):
        with suppress(torch.linalg.LinAlgError):
            values = torch.linalg.eigvalsh(gram + added * diagonal)
            if torch.isfinite(values).all():
                return values.clamp_min(0).flip(-1), retry
    # For a symmetric positive semi-definite matrix singular values and eigenvalues are the same numbers.
    return torch.linalg.svdvals(gram), "svd"


def degrees_of_freedom(spectrum: Spectrum, lam: float, normalization: str = "trace") -> float:
    """``tr Σ(Σ + λI)⁻¹`` for the Gram matrix Σ brought to a scale; of several matrices, the mean.

    Args:
        spectrum: of one head.
        lam: λ > 0, relative to the scale.
        normalization: ``trace`` (unit trace), ``top`` (largest eigenvalue 1), ``mean`` (divided by J, the empirical
            integral operator), ``none`` (as printed in the paper's Algorithm 1).
    """
    return _degrees(spectrum.eigenvalues, spectrum.log_scale, lam, normalization).mean().item()


def standard_error(spectrum: Spectrum, lam: float, normalization: str = "trace") -> float:
    """The standard error of :func:`degrees_of_freedom`; NaN where it cannot be estimated.

    Where windows have matrices of their own, it is that of their mean. The paper's one matrix is judged by how far its
    ``subsamples`` differ, relative to their mean and not less for their number: with unit trace the estimate is ruled
    by the largest vectors of the sample, and a larger sample has larger ones.
    """
    values = _degrees(spectrum.eigenvalues, spectrum.log_scale, lam, normalization)
    if len(values) > 1:
        return (values.std() / len(values) ** 0.5).item()
    if spectrum.subsamples is None:
        return math.nan
    parts = _degrees(spectrum.subsamples, spectrum.log_scale, lam, normalization)
    return (values[0] * parts.std() / parts.mean()).item()


def _degrees(eigenvalues: Tensor, log_scale: float, lam: float, normalization: str) -> Tensor:
    """The degrees of freedom [W] of spectra [W, R], or of one [R]."""
    check_lambda(lam)
    check_choice("normalization", normalization, NORMALIZATIONS)
    values = torch.atleast_2d(eigenvalues)
    if normalization == "trace":
        log_unit = values.sum(-1, keepdim=True).log()
    elif normalization == "top":
        log_unit = values.amax(-1, keepdim=True).log()
    elif normalization == "mean":
        log_unit = values.new_tensor(math.log(values.shape[-1]) - log_scale)
    else:
        log_unit = values.new_tensor(-log_scale)
    # σ/(σ+λ) as a sigmoid of logs: the raw scale exp(log_scale) overflows on real heads.
    return torch.sigmoid(values.log() - log_unit - math.log(lam)).sum(-1)
