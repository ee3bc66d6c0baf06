"""DiJiang: the paper's weighted quasi-Monte Carlo features, and the public code's softmax over a scaled DCT."""

import itertools
import math

import pytest
import torch
from making import SCALING, make, vectors
from torch.testing import assert_close

from dofla.feature_maps.dijiang import dct_matrix, sobol_gaussian


def test_only_the_weights_are_trained():
    assert [name for name, _ in make("dijiang").named_parameters()] == ["log_alpha"]
    assert not list(make("dijiang_code").parameters())


def test_in_every_coordinate_there_is_one_row_in_each_interval_of_equal_probability():
    z = sobol_gaussian(5, 32, 7, torch.Generator().manual_seed(0)).double()
    places = (torch.special.ndtr(z) * 32).long().sort(dim=1).values
    assert torch.equal(places, torch.arange(32)[None, :, None].expand_as(places))


def test_rows_of_heads_differ_and_are_finite_in_any_size():
    z = sobol_gaussian(50, 3, 256, torch.Generator().manual_seed(0))
    assert z.shape == (50, 3, 256)
    assert torch.isfinite(z).all()
    assert len(z[:, 0, 0].unique()) == 50


# The public code


@pytest.mark.parametrize("dim", [1, 5, 8])
def test_the_dct_matrix_is_its_definition_and_orthonormal(dim):
    matrix = dct_matrix(dim)
    for k, n in itertools.product(range(dim), repeat=2):
        scale = math.sqrt((1 if k == 0 else 2) / dim)
        assert matrix[k, n].item() == pytest.approx(scale * math.cos(math.pi * k * (2 * n + 1) / (2 * dim)))
    assert_close(matrix @ matrix.mT, torch.eye(dim, dtype=torch.float64))


@pytest.mark.parametrize("features", [1, 4, 6, 15])
def test_the_code_is_a_softmax_of_scaled_columns(features):
    """``softmax(x @ C @ T)``, with the columns of C gone through again where there are more features than those."""
    feature_map, x = make("dijiang_code", features=features), vectors(2, 3, 7, 6, dtype=torch.float64)
    columns = dct_matrix(6).repeat(1, 3)[:, :features]
    t = (feature_map.z.double() @ columns).diagonal(dim1=-2, dim2=-1)
    expected = torch.softmax(SCALING**0.5 * x @ columns * t[:, None], dim=-1)
    assert_close(feature_map.log_query(x, SCALING).exp(), expected, rtol=1e-6, atol=1e-6)
    assert_close(feature_map.log_key(x, SCALING).exp(), expected, rtol=1e-6, atol=1e-6)


def test_the_scales_of_the_code_are_standard_gaussian():
    z = make("dijiang_code", heads=5000, features=8).z.double()
    t = torch.einsum("hmd,md->hm", z, dct_matrix(6).mT[torch.arange(8) % 6])
    assert (t.mean(0) * math.sqrt(5000)).abs().max() < 4.5
    assert (torch.cov(t.T) - torch.eye(8)).abs().max() < 4.5 * math.sqrt(2 / 5000)
