"""Positive random features are their formula, and estimate the kernel without bias before they are trained."""

from __future__ import annotations

import math

import pytest
import torch
from making import SCALING, assert_unbiased, estimates, make, vectors

from dofla.feature_maps import PRF


def test_prf_is_its_formula():
    feature_map, x = make("prf").double(), vectors(2, 3, 7, 6, dtype=torch.float64)
    with torch.no_grad():
        feature_map.log_alpha.copy_(vectors(3, 5, seed=1))
    projections = torch.einsum("bhld,hmd->bhlm", x, feature_map.z) * math.sqrt(SCALING)
    half_squares = SCALING * x.square().sum(-1, keepdim=True) / 2
    phi = (feature_map.log_alpha.exp() / 5).sqrt()[:, None] * torch.exp(projections - half_squares)
    torch.testing.assert_close(feature_map.log_key(x, SCALING).exp(), phi)
    torch.testing.assert_close(feature_map.log_query(x, SCALING).exp(), phi)


@pytest.mark.parametrize("features", [1, 3, 6, 7, 12, 16])
def test_prf_estimates_the_kernel_without_bias(features):
    assert_unbiased(*estimates("prf", 20000, features))


def test_an_untrained_prf_weighs_all_features_alike():
    assert (PRF(2, 4, 7).log_alpha.shape) == (2, 7)
    assert (make("prf").log_alpha == 0).all()
