"""Maps that start from data: their formulas, and what calibration makes of their inputs."""

import pytest
import torch
from making import SCALING, make, vectors
from torch.testing import assert_close

from dofla.feature_maps.exponential import START

standardized = pytest.mark.parametrize("name", ["exponential", "mlp"])


def randomized(name):
    """A map all of whose tensors hold something, the standard deviations something positive."""
    feature_map = make(name)
    with torch.no_grad():
        for seed, (key, tensor) in enumerate(feature_map.state_dict().items()):
            tensor.copy_(vectors(*tensor.shape, seed=seed))
            if key.endswith("_std"):
                tensor.abs_().add_(0.5)
    return feature_map


def by_hand(feature_map, x, side, head):
    """Log-features of one vector, in plain products."""
    part = {key: tensor.double()[head] for key, tensor in feature_map.state_dict().items()}
    x = (x - part[f"{side}_mean"]) / part[f"{side}_std"]
    y = part[side] @ x + part[f"{side}_bias"]
    if f"{side}_in" in part:
        hidden = part[f"{side}_in"] @ x + part[f"{side}_in_bias"]
        y = y + part[f"{side}_out"] @ (hidden * torch.sigmoid(hidden))
    return y + part["log_scale"] if side == "key" else y


@standardized
def test_log_features_are_their_formula(name):
    feature_map, x = randomized(name), vectors(2, 3, 4, 6, dtype=torch.float64)
    queries = vectors(2, 6, 4, 6, seed=5, dtype=torch.float64)
    found = feature_map.double().log_key(x, SCALING)
    of_queries = feature_map.log_query(queries, SCALING)
    for b, h, i in [(0, 0, 0), (1, 2, 3), (0, 1, 2)]:
        assert_close(found[b, h, i], by_hand(feature_map, x[b, h, i], "key", h))
    for b, h, i in [(0, 0, 1), (1, 5, 3), (0, 3, 2)]:
        assert_close(of_queries[b, h, i], by_hand(feature_map, queries[b, h, i], "query", h // 2))


@standardized
def test_calibrated_inputs_have_mean_0_and_deviation_1_in_every_coordinate(name):
    feature_map = make(name)
    query = vectors(3, 400, 6) * torch.tensor([0.1, 1.0, 2.0, 30.0, 5.0, 0.3]) + 7
    key = vectors(3, 200, 6, seed=1) * 3 - 1
    assert feature_map.wants_data
    feature_map.calibrate(query, key)
    assert not feature_map.wants_data
    for side, x in (("query", query), ("key", key)):
        y = feature_map.standardized(x.unsqueeze(0), side)[0]
        assert_close(y.mean(1), torch.zeros(3, 6), atol=1e-2, rtol=0)
        assert_close(y.std(1, correction=0), torch.ones(3, 6), atol=2e-2, rtol=0)
    log_features = feature_map.log_key(key.unsqueeze(0), SCALING)
    assert log_features.std() < 2 * START


@standardized
def test_a_coordinate_that_never_moves_gives_finite_features(name):
    feature_map, x = make(name), vectors(3, 50, 6)
    x[..., 2] = 4.0
    feature_map.calibrate(x, x)
    assert torch.isfinite(feature_map.log_key(x.unsqueeze(0), SCALING)).all()
    feature_map.calibrate(torch.zeros(3, 5, 6), torch.zeros(3, 5, 6))
    assert torch.isfinite(feature_map.log_query(x.unsqueeze(0), SCALING)).all()


@standardized
def test_a_shift_multiplies_the_kernel_of_each_head(name):
    feature_map, x = make(name), vectors(1, 3, 4, 6)
    before, level = feature_map.log_key(x, SCALING), torch.tensor([0.5, -1.0, 0.0])
    of_query = feature_map.log_query(x, SCALING)
    feature_map.shift(level)
    assert_close(feature_map.log_key(x, SCALING), before + level.view(3, 1, 1))
    assert torch.equal(feature_map.log_query(x, SCALING), of_query)
