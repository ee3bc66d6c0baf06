"""Random features: their formula, their distribution, and the package performer-pytorch; and those of DiJiang: the
paper's weighted quasi-Monte Carlo features, and the public code's softmax over a scaled DCT."""

import itertools
import math

import pytest
import torch
from making import SCALING, assert_unbiased, estimates, make, rows, vectors
from torch.testing import assert_close

from dofla.attention import naive_attention
from dofla.feature_maps.dijiang import dct_matrix, sobol_gaussian


@pytest.mark.parametrize("name", ["prf", "dijiang"])
def test_random_features_are_their_formula_and_start_with_equal_weights(name):
    feature_map, x = make(name), vectors(2, 3, 7, 6, dtype=torch.float64)
    assert (feature_map.log_alpha == torch.zeros(3, 5)).all()
    with torch.no_grad():
        feature_map.log_alpha.copy_(vectors(3, 5, seed=1))
    exponents = rows(feature_map, x, feature_map.z.double()) - SCALING * x.square().sum(-1, keepdim=True) / 2
    phi = (feature_map.log_alpha.double().exp() / 5).sqrt()[:, None] * exponents.exp()
    assert_close(feature_map.log_query(x, SCALING).exp(), phi)
    assert_close(feature_map.log_key(x, SCALING).exp(), phi)


def test_a_performer_is_an_untrained_prf():
    x, prf, performer = vectors(2, 3, 7, 6), *(make(name, features=9, seed=4) for name in ("prf", "performer"))
    assert_close(performer.log_key(x, SCALING), prf.log_key(x, SCALING), rtol=0, atol=0)
    assert_close(performer.log_query(x, SCALING), prf.log_query(x, SCALING), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "draws", "features"),
    [*(("prf", 20000, features) for features in (1, 6, 7, 16)), ("dijiang", 5000, 1), ("dijiang", 1000, 16)],
)
def test_the_kernel_is_estimated_without_bias(name, draws, features):
    assert_unbiased(*estimates(name, draws, features))


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


def test_only_the_weights_of_dijiang_are_trained():
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


@pytest.mark.parametrize("dim", [1, 5, 8])
def test_the_dct_matrix_is_its_definition_and_orthonormal(dim):
    matrix = dct_matrix(dim)
    for k, n in itertools.product(range(dim), repeat=2):
        scale = math.sqrt((1 if k == 0 else 2) / dim)
        assert matrix[k, n].item() == pytest.approx(scale * math.cos(math.pi * k * (2 * n + 1) / (2 * dim)))
    assert_close(matrix @ matrix.mT, torch.eye(dim, dtype=torch.float64))


@pytest.mark.parametrize("features", [1, 4, 6, 15])
def test_the_public_code_of_dijiang_is_a_softmax_of_scaled_columns(features):
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
