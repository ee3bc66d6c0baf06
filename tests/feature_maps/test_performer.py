"""Performers: their distribution, when they are drawn anew, and the package performer-pytorch."""

from __future__ import annotations

import math

import pytest
import torch
from making import SCALING, assert_unbiased, estimates, make, rows, vectors
from torch.testing import assert_close

from dofla.attention import naive_attention
from dofla.feature_maps.layer import LinearAttention

PERFORMERS = ["performer", "performer_iid", "performer_redrawn"]


@pytest.mark.parametrize("name", PERFORMERS)
def test_a_performer_is_its_formula(name):
    feature_map, x = make(name), vectors(2, 3, 7, 6, dtype=torch.float64)
    phi = torch.exp(rows(feature_map, x, feature_map.z.double()) - SCALING * x.square().sum(-1, keepdim=True) / 2)
    assert_close(feature_map.log_query(x, SCALING).exp(), phi / math.sqrt(5))
    assert_close(feature_map.log_key(x, SCALING).exp(), phi / math.sqrt(5))


def test_a_performer_is_an_untrained_prf():
    x, prf = vectors(2, 3, 7, 6), make("prf", features=9, seed=4)
    for name in ("performer", "performer_redrawn"):
        assert_close(make(name, features=9, seed=4).log_key(x, SCALING), prf.log_key(x, SCALING), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["performer", "performer_iid"])
@pytest.mark.parametrize("features", [1, 7])
def test_the_kernel_is_estimated_without_bias(name, features):
    assert_unbiased(*estimates(name, 20000, features))


def test_independent_rows_are_standard_gaussian():
    z = make("performer_iid", 20000, 6, 6).z.double()
    second = torch.einsum("hri,hsj->rsij", z, z) / 20000
    expected = torch.eye(6)[:, :, None, None] * torch.eye(6)
    assert (second - expected).abs().max() < 5.5 * math.sqrt(2 / 20000)


def test_a_mean_over_orthogonal_rows_scatters_less_than_over_independent_ones():
    """The mean of ``exp(z·x)`` is the estimate of a kernel, up to a factor."""
    x = 0.3 * vectors(6)
    independent, orthogonal = (torch.exp(make(name, 20000, 6, 6).z @ x).mean(-1).var() for name in PERFORMERS[1::-1])
    assert orthogonal < 0.95 * independent


# Drawing anew


def redrawn(training=True, name="performer_redrawn"):
    """A layer whose maps draw every three training passes, if they do."""
    layer = LinearAttention(name, [4, 2], 6).train(training)
    layer.reset_parameters(torch.Generator().manual_seed(0))
    for feature_map in layer.maps:
        feature_map.redraw_interval = 3
    return layer


def whole_pass(layer, states=None):
    query, key, value = vectors(1, 4, 5, 6), vectors(1, 2, 5, 6, seed=1), vectors(1, 2, 5, 3, seed=2)
    return layer(query, key, value, scaling=SCALING, states=states)


def drawn(layer, passes, **options):
    """The projections after each of so many passes, as numbers: the same for the same projections."""
    found = []
    for _ in range(passes):
        whole_pass(layer, **options)
        found.append([feature_map.z.sum().item() for feature_map in layer.maps])
    return found


def test_rows_are_drawn_anew_after_so_many_training_passes():
    first, *_, last = found = drawn(redrawn(), 8)
    assert found == [first] * 3 + [found[3]] * 3 + [last] * 2
    for group in (0, 1):
        assert len({first[group], found[3][group], last[group]}) == 3


def test_rows_stay_in_evaluation_and_while_a_state_is_carried():
    layer = redrawn(training=False)
    states = whole_pass(layer)[1]
    before = drawn(layer, 1)[0]
    assert drawn(layer, 8) == [before] * 8
    assert drawn(layer.train(), 8, states=states) == [before] * 8


@pytest.mark.parametrize("name", ["performer", "performer_iid"])
def test_other_performers_stay_in_training(name):
    layer = redrawn(name=name)
    before = drawn(layer, 1)[0]
    assert drawn(layer, 5) == [before] * 5


def test_a_redraw_follows_the_global_seed_and_keeps_the_distribution():
    found = []
    for _ in range(2):
        feature_map = make("performer_redrawn", 4, 6, 6)
        torch.manual_seed(7)
        for _ in range(feature_map.redraw_interval + 1):
            feature_map.new_training_pass()
        found.append(feature_map.z)
    assert torch.equal(*found)
    directions = torch.nn.functional.normalize(found[0], dim=-1)
    assert_close(directions @ directions.mT, torch.eye(6).expand(4, -1, -1), rtol=0, atol=1e-5)
    assert torch.equal(feature_map.state_dict()["z"], feature_map.z)


def test_gradients_of_a_pass_before_a_redraw_are_those_of_its_own_rows():
    layer, gradients = redrawn(), []
    for redraw in (False, True):
        layer.reset_parameters(torch.Generator().manual_seed(0))
        query = vectors(1, 4, 5, 6).requires_grad_()
        out, _ = layer(query, vectors(1, 2, 5, 6, seed=1), vectors(1, 2, 5, 3, seed=2), scaling=SCALING)
        if redraw:
            drawn(layer, 4)
        out.square().sum().backward()
        gradients.append(query.grad)
    assert_close(*gradients, rtol=0, atol=0)


# The package


@pytest.fixture
def package():
    return pytest.importorskip("performer_pytorch.performer_pytorch")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_features_are_those_of_performer_pytorch(package, eps):
    """Its features are ours, measured from their largest projection, plus ``eps``; its scaling is d ** -0.5."""
    feature_map, x = make("performer", heads=1, head_dim=8, features=12), vectors(2, 1, 9, 8, dtype=torch.float64)
    z = feature_map.z[0].double()
    projected = x @ z.mT * 8**-0.25
    for is_query, log_features in ((True, feature_map.log_query), (False, feature_map.log_key)):
        theirs = package.softmax_kernel(x, projection_matrix=z, is_query=is_query, eps=eps)
        largest = projected.amax(dim=-1 if is_query else (-1, -2), keepdim=True)
        assert_close(theirs, torch.exp(log_features(x, 8**-0.5) - largest) + eps / math.sqrt(12))


@pytest.mark.filterwarnings("ignore")
def test_attention_is_that_of_performer_pytorch_without_its_epsilon(package):
    feature_map = make("performer", heads=1, head_dim=8, features=12)
    q, k, v = (vectors(2, 1, 9, 8, seed=seed, dtype=torch.float64) for seed in range(3))
    options = {"projection_matrix": feature_map.z[0].double(), "eps": 0.0}
    features = [package.softmax_kernel(x, is_query=x is q, **options) for x in (q, k)]
    a, b = feature_map.log_query(q, 8**-0.5), feature_map.log_key(k, 8**-0.5)
    assert_close(naive_attention(a, b, v, causal=False), package.linear_attention(*features, v))
    assert_close(naive_attention(a, b, v), package.causal_linear_attention_noncuda(*features, v, eps=0.0))
