"""How far right results may be apart: bounds for sums in any order, and models that compute in float64.

Floating-point sums depend on their order, and that on the processor, its number of threads and the libraries. A test
compares what is exact by construction bit for bit, and everything else with one of these bounds, or in float64, where
the bounds are so small that the smallest real fault is far above them.
"""

from typing import TypeVar

import torch
import torch.nn.functional as F

from dofla.integration.converted import Converted

_Model = TypeVar("_Model", bound=torch.nn.Module)

ADAM_EPSILON = 1e-8
"""What Adam adds to the root of the second moment, in torch and here."""


def sum_error(terms: int, size: float = 1.0, dtype: torch.dtype = torch.float32) -> float:
    """How far two sums of the same numbers, added in any two orders, with or without fused products, can be apart.

    Each is off by at most ``terms · eps/2 · size`` (Higham, Accuracy and Stability of Numerical Algorithms, 4.2).

    Args:
        terms: how many numbers are added.
        size: the sum of their absolute values.
        dtype: in which they are added.
    """
    return terms * torch.finfo(dtype).eps * size


LOGITS = {"rtol": sum_error(1000), "atol": sum_error(1000)}
"""For :func:`torch.testing.assert_close`: answers of the tiny models, of order 1 to 10, computed in two ways. In a row
come two layers of products of at most 48 terms (some 250 together), their attention over at most 100 tokens and the
output layer, some 750 terms; normalization keeps all in between of order 1."""


def adam_error(steps: int, rate: float, gradient_error: float) -> float:
    """How far weights can be apart after Adam, if their gradients were apart by ``gradient_error``.

    A step is ``rate · m / (√v + ADAM_EPSILON)``: where gradients are near 0 it changes by ``rate / ADAM_EPSILON`` times
    what they change by. In float32 that says nothing, since an element may well go the other way; so trained weights
    are compared in float64 (:func:`in_float64`).
    """
    return steps * rate / ADAM_EPSILON * gradient_error


def in_float64(student: _Model) -> _Model:
    """The same linearized model, in place, with its feature maps, which else stay float32, and with its loss of next
    tokens, which transformers takes in float32, in float64."""
    student.double()
    if student.can_generate():
        student.loss_function = lambda logits, labels, vocab_size, **_: F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        )
    return with_maps_in_float64(student)


def with_maps_in_float64(student: _Model) -> _Model:
    """The same linearized model, in place, of which the rest is in float64 already."""
    for layer in Converted.of(student).layers.values():
        for feature_map in layer.maps:
            feature_map.double()
    return student
