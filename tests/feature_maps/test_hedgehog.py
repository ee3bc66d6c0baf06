"""Hedgehog: a softmax over the features of each sign."""

from __future__ import annotations

import pytest
import torch
from making import SCALING, make, rows, vectors
from torch.testing import assert_close


@pytest.mark.parametrize("features", [3, 4, 12, 15])
def test_hedgehog_is_its_formula_for_each_side(features):
    feature_map, x = make("hedgehog", features=features), vectors(2, 3, 7, 6, dtype=torch.float64)
    with torch.no_grad():
        feature_map.query.copy_(vectors(*feature_map.query.shape, seed=1))
        feature_map.key.copy_(vectors(*feature_map.key.shape, seed=2))
    for weight, log_features in ((feature_map.query, feature_map.log_query), (feature_map.key, feature_map.log_key)):
        exponents = rows(feature_map, x, weight.double())
        positive, negative = exponents.exp(), (-exponents[..., : features // 2]).exp()
        signs = [phi / phi.sum(-1, keepdim=True) for phi in (positive, negative)]
        assert_close(log_features(x, SCALING).exp(), torch.cat(signs, dim=-1))


@pytest.mark.parametrize("features", [3, 8, 9])
def test_features_of_each_sign_sum_to_one(features):
    phi = make("hedgehog", features=features).log_key(vectors(2, 3, 7, 6), SCALING).exp()
    for sign in (phi[..., : (features + 1) // 2], phi[..., (features + 1) // 2 :]):
        assert_close(sign.sum(-1), torch.ones(2, 3, 7))


@pytest.mark.parametrize("features", [1, 2])
def test_one_feature_of_a_sign_weighs_all_keys_alike(features):
    feature_map = make("hedgehog", features=features)
    assert (feature_map.log_key(vectors(2, 3, 7, 6), SCALING) == 0).all()


def test_the_projection_starts_with_the_identity_and_the_sides_part_in_training():
    feature_map = make("hedgehog", features=15)
    assert torch.equal(feature_map.query[:, :6], torch.eye(6).expand(3, -1, -1))
    assert torch.equal(feature_map.query, feature_map.key)
    assert {name for name, _ in feature_map.named_parameters()} == {"query", "key"}
