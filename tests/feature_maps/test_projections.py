"""The directions that maps start from: orthogonal, and each of the distribution it should have."""

import math

import pytest
import torch

from dofla.feature_maps.projections import identity_first, orthogonal_gaussian, orthonormal


@pytest.mark.parametrize(("rows", "dim"), [(3, 8), (8, 8), (11, 8), (24, 8), (5, 1)])
def test_directions_are_orthogonal_in_blocks(rows, dim):
    z = orthogonal_gaussian(4, rows, dim, torch.Generator().manual_seed(0))
    assert z.shape == (4, rows, dim)
    for start in range(0, rows, dim):
        block = torch.nn.functional.normalize(z[:, start : start + dim], dim=-1)
        torch.testing.assert_close(block @ block.mT, torch.eye(block.shape[1]).expand(4, -1, -1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("rows", "dim"), [(3, 8), (8, 8), (11, 8)])
def test_each_row_is_a_standard_gaussian_of_a_length_of_its_own(rows, dim):
    heads = 20000
    z = orthogonal_gaussian(heads, rows, dim, torch.Generator().manual_seed(1)).double()
    sigma = 1 / math.sqrt(heads)
    assert (z.mean(0) / sigma).abs().max() < 5
    second = torch.einsum("hri,hrj->rij", z, z) / heads
    assert ((second - torch.eye(dim)) / (math.sqrt(2) * sigma)).abs().max() < 5
    fourth = (z**4).mean(0)
    assert ((fourth - 3) / (math.sqrt(96) * sigma)).abs().max() < 5
    squares = z.square().sum(-1)  # chi-squared with dim degrees of freedom
    assert ((squares.mean(0) - dim) / (math.sqrt(2 * dim) * sigma)).abs().max() < 5
    assert (squares.var(0) / (2 * dim) - 1).abs().max() < 0.1
    correlation = torch.corrcoef(squares.T) - torch.eye(rows)
    assert correlation.abs().max() < 5 * sigma


@pytest.mark.parametrize(("rows", "dim"), [(3, 8), (8, 8), (11, 8), (24, 8), (5, 1)])
def test_the_identity_comes_first_where_it_has_room(rows, dim):
    found = identity_first(4, rows, dim, torch.Generator().manual_seed(0))
    random = orthonormal(4, rows, dim, torch.Generator().manual_seed(0))
    start = dim if rows >= dim else 0
    torch.testing.assert_close(found[:, :start], torch.eye(dim)[:start].expand(4, -1, -1), rtol=0, atol=0)
    torch.testing.assert_close(found[:, start:], random[:, start:], rtol=0, atol=0)
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(4, rows))
