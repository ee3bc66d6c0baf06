"""What every feature map promises."""

import pytest
import torch
from making import SCALING, make, vectors
from torch.testing import assert_close

from dofla.attention import exact_scores, log_kernel
from dofla.feature_maps import FEATURE_MAPS, feature_map_class

every_map = pytest.mark.parametrize("name", sorted(FEATURE_MAPS))


@every_map
def test_a_head_of_queries_gets_the_features_of_its_kv_head(name):
    feature_map, x = make(name), vectors(2, 12, 7, 6)
    grouped = feature_map.log_query(x, SCALING)
    assert grouped.shape == (2, 12, 7, 5)
    for member in range(4):
        alone = feature_map.log_query(x[:, member::4], SCALING)
        assert_close(grouped[:, member::4], alone)


@every_map
def test_log_features_do_not_depend_on_batch_and_length(name):
    feature_map, x = make(name), vectors(2, 3, 7, 6)
    for log_features in (feature_map.log_query, feature_map.log_key):
        whole = log_features(x, SCALING)
        assert whole.shape == (2, 3, 7, 5)
        assert_close(log_features(x[1:, :, 4:5], SCALING), whole[1:, :, 4:5])


@every_map
@pytest.mark.parametrize("features", [1, 4, 6, 7, 12, 15])
def test_any_number_of_features_is_possible(name, features):
    feature_map, x = make(name, features=features), vectors(1, 3, 4, 6)
    for log_features in (feature_map.log_query(x, SCALING), feature_map.log_key(x, SCALING)):
        assert log_features.shape == (1, 3, 4, features)
        assert torch.isfinite(log_features).all()


@every_map
@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_log_features_are_float64_for_float64_and_else_float32(name, given):
    feature_map, x = make(name), vectors(1, 3, 4, 6, dtype=given)
    for log_features in (feature_map.log_query, feature_map.log_key):
        got = log_features(x, SCALING)
        assert got.dtype == (torch.float64 if given == torch.float64 else torch.float32)
        assert_close(got.double(), log_features(x.double(), SCALING), rtol=1e-4, atol=1e-4)


@every_map
def test_parameters_and_buffers_are_drawn_from_the_generator_alone(name):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        one = make(name, seed=3)
        torch.manual_seed(2)
        other = make(name, seed=3)
    assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)
    assert all(torch.isfinite(tensor).all() for tensor in one.state_dict().values())


@every_map
def test_all_a_map_is_made_of_is_float32_in_its_state_dict(name):
    feature_map, x = make(name), vectors(2, 3, 7, 6)
    tensors = feature_map.state_dict()
    assert {tensor.dtype for tensor in tensors.values()} <= {torch.float32}
    with torch.device("meta"):
        other = feature_map_class(name)(3, 6, 5)
    other.to_empty(device="cpu").load_state_dict(tensors)
    assert_close(other.log_query(x, SCALING), feature_map.log_query(x, SCALING), rtol=0, atol=0)
    assert_close(other.log_key(x, SCALING), feature_map.log_key(x, SCALING), rtol=0, atol=0)


def attention_loss(feature_map, query, key):
    """KL divergence from softmax attention, mean over rows."""
    approximate = log_kernel(feature_map.log_query(query, SCALING), feature_map.log_key(key, SCALING))
    exact = torch.log_softmax(exact_scores(query, key, SCALING), dim=-1)
    return (exact.exp() * (exact - torch.log_softmax(approximate, dim=-1))).sum(-1).mean()


@every_map
def test_every_parameter_can_be_trained_and_has_a_rate(name):
    feature_map = make(name)
    parameters = dict(feature_map.named_parameters())
    assert "heads=3, head_dim=6, features=5" in repr(feature_map)
    assert feature_map.learning_rates.keys() == parameters.keys()
    if parameters:
        attention_loss(feature_map, vectors(2, 3, 7, 6), vectors(2, 3, 7, 6, seed=1)).backward()
    for key, parameter in parameters.items():
        assert feature_map.learning_rates[key] > 0
        assert torch.isfinite(parameter.grad).all(), key
        assert parameter.grad.abs().max() > 0, key


@pytest.mark.parametrize("name", [name for name in sorted(FEATURE_MAPS) if FEATURE_MAPS[name].learning_rates])
def test_training_at_the_default_rates_brings_attention_nearer(name):
    feature_map = make(name, heads=2, head_dim=8, features=16)
    mixing = vectors(8, 8, seed=9) * 0.4
    batches = [[vectors(2, 2, 32, 8, seed=2 * n + side) @ mixing for side in (0, 1)] for n in range(41)]
    groups = [{"params": [p], "lr": feature_map.learning_rates[key]} for key, p in feature_map.named_parameters()]
    optimizer = torch.optim.Adam(groups)
    before = attention_loss(feature_map, *batches[-1]).item()
    for query, key in batches[:-1]:
        optimizer.zero_grad()
        attention_loss(feature_map, query, key).backward()
        optimizer.step()
    assert attention_loss(feature_map, *batches[-1]).item() < 0.98 * before


@every_map
def test_long_vectors_give_finite_log_features(name):
    directions = torch.nn.functional.normalize(vectors(1, 3, 20, 64), dim=-1)
    x = directions * (torch.linspace(120, 200, 20) / 0.125).sqrt()[:, None]
    feature_map = make(name, head_dim=64, features=32)
    for log_features in (feature_map.log_query(x, 0.125), feature_map.log_key(x, 0.125)):
        assert torch.isfinite(log_features).all()
