"""Maps without an estimator of their own are their formulas, and what they do at the ends of their range."""

import pytest
import torch
from making import SCALING, make, rows, vectors
from torch.testing import assert_close

from dofla.attention import naive_attention
from dofla.feature_maps.t2r import FLOOR

# elu(x) + 1


@pytest.mark.parametrize("features", [1, 4, 6, 15])
def test_elu1_is_its_formula(features):
    feature_map, x = make("elu1", features=features), 3 * vectors(2, 3, 7, 6, dtype=torch.float64)
    phi = torch.nn.functional.elu(rows(feature_map, x, feature_map.z.double())) + 1
    assert_close(feature_map.log_query(x, SCALING).exp(), phi)
    assert_close(feature_map.log_key(x, SCALING).exp(), phi)
    assert not list(feature_map.parameters())


def test_with_as_many_features_as_coordinates_elu1_is_no_projection_and_far_below_zero_the_coordinate_itself():
    feature_map, x = make("elu1", features=6), torch.full((1, 3, 1, 6), -500.0)
    assert torch.equal(feature_map.z, torch.eye(6).expand(3, -1, -1))
    assert_close(feature_map.log_key(x, 1.0), x)


# Hedgehog: a softmax over the features of each sign


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


@pytest.mark.parametrize("features", [1, 2])
def test_one_feature_of_a_sign_weighs_all_keys_alike(features):
    feature_map = make("hedgehog", features=features)
    assert (feature_map.log_key(vectors(2, 3, 7, 6), SCALING) == 0).all()


def test_the_projection_starts_with_the_identity_and_the_sides_part_in_training():
    feature_map = make("hedgehog", features=15)
    assert torch.equal(feature_map.query[:, :6], torch.eye(6).expand(3, -1, -1))
    assert torch.equal(feature_map.query, feature_map.key)
    assert {name for name, _ in feature_map.named_parameters()} == {"query", "key"}


# T2R: rectified affine features over a floor


def test_t2r_is_its_formula_for_each_side():
    feature_map, x = make("t2r"), vectors(2, 3, 7, 6, dtype=torch.float64)
    with torch.no_grad():
        for seed, parameter in enumerate(feature_map.parameters()):
            parameter.copy_(vectors(*parameter.shape, seed=seed))
    for side, log_features in (("query", feature_map.log_query), ("key", feature_map.log_key)):
        weight, bias = (getattr(feature_map, name).double() for name in (side, f"{side}_bias"))
        exponents = rows(feature_map, x, weight) + bias[:, None]
        assert_close(log_features(x, SCALING).exp(), torch.maximum(exponents, torch.zeros(())) + FLOOR)


def test_a_query_whose_features_are_all_off_weighs_the_features_of_keys_alike():
    feature_map = make("t2r")
    with torch.no_grad():
        feature_map.query_bias.fill_(-100.0)
    q, k, v = (vectors(1, 3, 7, 6, seed=seed) for seed in range(3))
    b = feature_map.log_key(k, SCALING)
    out = naive_attention(feature_map.log_query(q, SCALING), b, v, causal=False)
    mass = b.exp().sum(-1, keepdim=True)
    assert_close(out, ((mass * v).sum(-2, keepdim=True) / mass.sum(-2, keepdim=True)).expand_as(out))


def test_the_floor_weighs_nothing_beside_a_feature_that_is_on():
    strongest = make("t2r", features=32).log_key(vectors(1, 3, 50, 6), SCALING).exp().amax(dim=-1)
    assert (strongest > 1e4 * FLOOR).all()
