"""A budget of bytes, split into exact tokens and features."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.feature_maps.cost import HeadCost
from dofla.plans.hybrid import SINKS, TOKEN_SHARE, split


@settings(max_examples=60, derandomize=True)
@given(
    size=st.integers(0, 1_000_000),
    head_dim=st.integers(1, 256),
    value_dim=st.integers(1, 256),
    itemsize=st.sampled_from([2, 4, 8]),
    share=st.floats(0, 1),
)
def test_a_split_stays_within_its_bytes_and_wastes_less_than_its_parts(size, head_dim, value_dim, itemsize, share):
    cost = HeadCost.of(head_dim, value_dim, itemsize)
    features, window, sinks = split(size, cost, share)
    spent = cost.total(features, window, sinks)
    assert features >= 1
    assert window >= 0 <= sinks <= SINKS
    assert spent <= max(size, cost.feature)
    assert size - spent < max(cost.token, cost.feature)


def test_most_bytes_go_to_tokens():
    cost = HeadCost.of(64, 64, 2)
    features, window, sinks = split(64 * cost.feature, cost)
    assert (features, window, sinks) == (17, 46, 2)
    assert abs((window + sinks) * cost.token / (64 * cost.feature) - TOKEN_SHARE) < 0.02
    # Tokens in float32 cost twice as much, so there are half as many.
    assert split(64 * cost.feature, HeadCost.of(64, 64, 4)) == (17, 22, 2)


def test_the_smallest_budget_is_one_feature():
    cost = HeadCost.of(64, 64, 2)
    assert split(0, cost) == split(cost.feature, cost) == (1, 0, 0)
