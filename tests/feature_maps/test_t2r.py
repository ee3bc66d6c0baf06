"""T2R: rectified affine features over a floor."""

from __future__ import annotations

import torch
from making import SCALING, make, rows, vectors
from torch.testing import assert_close

from dofla.attention import naive_attention
from dofla.feature_maps.t2r import FLOOR


def test_t2r_is_its_formula_for_each_side():
    feature_map, x = make("t2r"), vectors(2, 3, 7, 6, dtype=torch.float64)
    with torch.no_grad():
        for seed, parameter in enumerate(feature_map.parameters()):
            parameter.copy_(vectors(*parameter.shape, seed=seed))
    sides = (
        (feature_map.query, feature_map.query_bias, feature_map.log_query),
        (feature_map.key, feature_map.key_bias, feature_map.log_key),
    )
    for weight, bias, log_features in sides:
        exponents = rows(feature_map, x, weight.double()) + bias.double()[:, None]
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
    feature_map = make("t2r", features=32)
    x = vectors(1, 3, 50, 6)
    strongest = feature_map.log_key(x, SCALING).exp().amax(dim=-1)
    assert (strongest > 1e4 * FLOOR).all()
