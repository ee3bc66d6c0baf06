"""What every feature map promises, and what positive random features promise beyond it."""

from __future__ import annotations

import math

import pytest
import torch

from dofla.errors import DoflaError
from dofla.feature_maps import FEATURE_MAPS, PRF, feature_map_class
from dofla.feature_maps.prf import orthogonal_gaussian

every_map = pytest.mark.parametrize("name", sorted(FEATURE_MAPS))
SCALING = 0.3


def make(name, heads=3, head_dim=6, features=5, seed=0):
    feature_map = feature_map_class(name)(heads, head_dim, features)
    feature_map.reset_parameters(torch.Generator().manual_seed(seed))
    return feature_map


def vectors(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@every_map
def test_a_head_of_queries_gets_the_features_of_its_kv_head(name):
    feature_map, x = make(name), vectors(2, 12, 7, 6)
    grouped = feature_map.log_query(x, SCALING)
    assert grouped.shape == (2, 12, 7, 5)
    for member in range(4):
        alone = feature_map.log_query(x[:, member::4], SCALING)
        torch.testing.assert_close(grouped[:, member::4], alone)


@every_map
def test_log_features_do_not_depend_on_batch_and_length(name):
    feature_map, x = make(name), vectors(2, 3, 7, 6)
    for log_features in (feature_map.log_query, feature_map.log_key):
        whole = log_features(x, SCALING)
        assert whole.shape == (2, 3, 7, 5)
        torch.testing.assert_close(log_features(x[1:, :, 4:5], SCALING), whole[1:, :, 4:5])


@every_map
@pytest.mark.parametrize("features", [1, 4, 6, 7, 12, 15])
def test_any_number_of_features_is_possible(name, features):
    feature_map, x = make(name, features=features), vectors(1, 3, 4, 6)
    for log_features in (feature_map.log_query(x, SCALING), feature_map.log_key(x, SCALING)):
        assert log_features.shape == (1, 3, 4, features)
        assert torch.isfinite(log_features).all()


@every_map
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_log_features_are_float64_for_float64_and_else_float32(name, given, expected):
    feature_map, x = make(name), vectors(1, 3, 4, 6, dtype=given)
    for log_features in (feature_map.log_query, feature_map.log_key):
        got = log_features(x, SCALING)
        assert got.dtype == expected
        torch.testing.assert_close(got.double(), log_features(x.double(), SCALING), rtol=1e-4, atol=1e-4)


@every_map
def test_parameters_are_drawn_from_the_generator_alone(name):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        one = make(name, seed=3)
        torch.manual_seed(2)
        other = make(name, seed=3)
    assert one.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert all(torch.isfinite(p).all() for p in one.parameters())


@every_map
def test_every_parameter_can_be_trained_and_has_a_rate(name):
    feature_map, x = make(name), vectors(2, 3, 7, 6)
    # Not the plain sum, to which a constant per row, which attention does not see, would add.
    pairs = feature_map.log_query(x, SCALING).unsqueeze(-2) + feature_map.log_key(x, SCALING).unsqueeze(-3)
    rows = torch.log_softmax(torch.logsumexp(pairs, dim=-1), dim=-1)
    rows.diagonal(dim1=-2, dim2=-1).sum().backward()
    parameters = dict(feature_map.named_parameters())
    assert feature_map.learning_rates.keys() == parameters.keys()
    for key, parameter in parameters.items():
        assert feature_map.learning_rates[key] > 0
        assert torch.isfinite(parameter.grad).all(), key
        assert parameter.grad.abs().max() > 0, key


@every_map
def test_long_vectors_give_finite_log_features(name):
    directions = torch.nn.functional.normalize(vectors(1, 3, 20, 64), dim=-1)
    x = directions * (torch.linspace(120, 200, 20) / 0.125).sqrt()[:, None]
    feature_map = make(name, head_dim=64, features=32)
    for log_features in (feature_map.log_query(x, 0.125), feature_map.log_key(x, 0.125)):
        assert torch.isfinite(log_features).all()


@every_map
def test_a_feature_map_says_what_it_is(name):
    feature_map = make(name)
    assert (feature_map.heads, feature_map.head_dim, feature_map.features) == (3, 6, 5)
    assert "heads=3, head_dim=6, features=5" in repr(feature_map)


def test_an_unknown_feature_map_lists_the_known_ones():
    with pytest.raises(DoflaError, match=r"unknown feature map 'magic': choose one of .*prf"):
        feature_map_class("magic")


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
    draws, head_dim = 20000, 6
    # Every head is an independent draw of the features.
    feature_map = make("prf", draws, head_dim, features, seed=features)
    q, k = (vectors(1, 1, 4, head_dim, seed=seed).expand(1, draws, 4, head_dim) for seed in (1, 2))
    with torch.no_grad():
        a, b = feature_map.log_query(q, SCALING).double(), feature_map.log_key(k, SCALING).double()
    estimates = (a.exp() @ b.exp().mT)[0]
    kernel = torch.exp(SCALING * q[0, 0].double() @ k[0, 0].double().mT)
    error = (estimates.mean(0) - kernel) / (estimates.std(0) / math.sqrt(draws))
    assert error.abs().max() < 4.5
    # The test above could pass if the estimates scattered wildly.
    assert (estimates.std(0) / math.sqrt(draws) < 0.1 * kernel).all()


@pytest.mark.parametrize(("rows", "dim"), [(3, 8), (8, 8), (11, 8), (24, 8), (5, 1)])
def test_directions_are_orthogonal_in_blocks(rows, dim):
    z = orthogonal_gaussian(4, rows, dim, torch.Generator().manual_seed(0))
    assert z.shape == (4, rows, dim)
    for start in range(0, rows, dim):
        block = torch.nn.functional.normalize(z[:, start : start + dim], dim=-1)
        torch.testing.assert_close(block @ block.mT, torch.eye(block.shape[1]).expand(4, -1, -1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("rows", "dim"), [(3, 8), (8, 8), (11, 8)])
def test_each_row_is_a_standard_gaussian(rows, dim):
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


def test_lengths_of_different_rows_are_independent():
    squares = orthogonal_gaussian(20000, 6, 6, torch.Generator().manual_seed(2)).double().square().sum(-1)
    correlation = torch.corrcoef(squares.T) - torch.eye(6)
    assert correlation.abs().max() < 5 / math.sqrt(20000)


def test_an_untrained_prf_weighs_all_features_alike():
    assert (PRF(2, 4, 7).log_alpha.shape) == (2, 7)
    assert (make("prf").log_alpha == 0).all()
