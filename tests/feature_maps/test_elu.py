"""elu(x) + 1."""

from __future__ import annotations

import pytest
import torch
from making import SCALING, make, rows, vectors
from torch.testing import assert_close


@pytest.mark.parametrize("features", [1, 4, 6, 15])
def test_elu1_is_its_formula(features):
    feature_map, x = make("elu1", features=features), 3 * vectors(2, 3, 7, 6, dtype=torch.float64)
    phi = torch.nn.functional.elu(rows(feature_map, x, feature_map.z.double())) + 1
    assert_close(feature_map.log_query(x, SCALING).exp(), phi)
    assert_close(feature_map.log_key(x, SCALING).exp(), phi)


def test_with_as_many_features_as_coordinates_there_is_no_projection():
    assert torch.equal(make("elu1", features=6).z, torch.eye(6).expand(3, -1, -1))
    assert not list(make("elu1").parameters())


def test_far_below_zero_the_logarithm_is_the_coordinate_itself():
    x = torch.full((1, 3, 1, 6), -500.0)
    assert_close(make("elu1", features=6).log_key(x, 1.0), x)
