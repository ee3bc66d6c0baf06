"""The plan of a compressed cache, in bytes: what is given is never exceeded, and nearly all of it is used."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import size_of

import dofla
from dofla.attention import tier_bytes
from dofla.compression.head_budgets import HeadBudgets
from dofla.compression.plan import (
    BITS,
    LEAST_SINKS,
    MOST_SINKS,
    SINK_SHARE,
    TooSmall,
    _smallest_head,
    bytes_for,
    compressed_plan,
    head_sizes,
)
from dofla.compression.size import parse_size, size_or_ratio
from dofla.compression.target import Target
from dofla.errors import DoflaError
from dofla.feature_maps.cost import HeadCost
from dofla.integration.converted import Converted
from dofla.layers import layer_of
from dofla.plans.layers import SoftmaxLayer, head_bytes

FIRST, SECOND = "model.layers.0.self_attn", "model.layers.1.self_attn"
DIMS = st.integers(1, 32).map(lambda n: 8 * n)
READ = {"1.5MiB": 1_572_864, "1.5 mib": 1_572_864, "800KiB": 819_200, " 1GiB ": 2**30, "2MB": 2_000_000}
READ |= {"2.5 KB": 2_500, ".5GB": 500_000_000, "700": 700, "1.5": 2, "700B": 700, 1234: 1234}
quick = settings(max_examples=200, derandomize=True)


@pytest.mark.parametrize("text", READ)
def test_sizes_are_read(text):
    assert parse_size(text) == READ[text]


@pytest.mark.parametrize(
    "size", ["", "big", "-3MiB", "1.5.2MiB", "3 TiB", "MiB", 0, -1, "9" * 400, True, 1.5, None, "0KiB", 2**60]
)
def test_other_forms_are_refused(size):
    with pytest.raises(DoflaError, match=re.escape(f"size is {size!r}: give ")):
        parse_size(size)


def test_a_ratio_is_of_the_cache_at_the_context():
    assert size_or_ratio(None, None, 16_000, "It") == 1_000
    assert size_or_ratio(None, 10, 16_000, "It") == 1_600
    assert size_or_ratio("3KB", None, None, "It") == 3_000
    for size, ratio, cache, words in [
        ("3KB", 16, 16_000, "size is '3KB' and ratio is 16: give one of them"),
        (None, 1, 16_000, "ratio is 1: give softmax bytes per compressed byte, above 1"),
        (None, 16, None, "It states no number of positions: give context, or size instead of a ratio"),
    ]:
        with pytest.raises(DoflaError, match=words):
            size_or_ratio(size, ratio, cache, "It")


@quick
@given(total=st.integers(4_000, 400_000), head_dim=DIMS, value_dim=DIMS, most=st.none() | st.integers(5, 9_000))
def test_bytes_go_to_tokens_and_beyond_the_most_to_int8(total, head_dim, value_dim, most):
    token, coded = HeadCost.of(head_dim, value_dim, 0, "int8").token, tier_bytes(head_dim, value_dim, BITS)
    free = sum(head_sizes(total, head_dim, value_dim))
    size = head_sizes(total, head_dim, value_dim, most)
    spent = head_bytes(size, head_dim, value_dim, BITS)
    assert min(size) >= 1
    assert LEAST_SINKS <= size.sinks <= MOST_SINKS
    assert size.sinks <= max(LEAST_SINKS, SINK_SHARE * total / token + 1)
    assert sum(size) == (free if most is None else min(free, most))
    assert spent <= total
    # All in int8 but a token of each kind of the tier, or less than another token is left.
    assert spent == (sum(size) - 2) * token + 2 * coded or total - spent < token


@quick
@given(tokens=st.integers(200, 9_000), head_dim=DIMS, value_dim=DIMS)
def test_the_bytes_for_so_many_tokens_hold_them_and_no_more(tokens, head_dim, value_dim):
    held = sum(head_sizes(bytes_for(tokens, head_dim, value_dim), head_dim, value_dim))
    rounding = 1 + HeadCost.of(head_dim, value_dim, 0, "int8").token / tier_bytes(head_dim, value_dim, BITS)
    assert abs(held - tokens) <= rounding


@quick
@given(head_dim=DIMS, value_dim=DIMS, more=st.integers(0, 3_000))
def test_from_the_smallest_head_on_every_size_is_enough(head_dim, value_dim, more):
    least = _smallest_head(head_dim, value_dim)
    assert min(head_sizes(least + more, head_dim, value_dim)) >= 1
    with pytest.raises(TooSmall):
        head_sizes(least - 1, head_dim, value_dim)


@pytest.mark.parametrize(("total", "sinks"), [(4_000, 2), (17_476, 4), (67_720, 16), (400_000, 16)])
def test_attention_sinks_are_a_thirty_second_of_a_head_and_sixteen_at_most(total, sinks):
    assert head_sizes(total, 64, 64).sinks == sinks


def test_a_head_has_a_token_of_each_kind():
    assert head_sizes(9_000, 64, 64, most=1)[2:] == (1, 1)
    with pytest.raises(TooSmall, match="100 bytes are too few for a token of each kind"):
        head_sizes(100, 64, 64)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@settings(max_examples=30)
@given(size=st.integers(4_000, 200_000), seed=st.integers(0, 2**31), context=st.none() | st.integers(40, 3_000))
def test_a_plan_takes_no_more_than_its_size_and_nearly_all_of_it(tiny, family, size, seed, context):
    target = replace(_target(tiny, family), context=context)
    generator = torch.Generator().manual_seed(seed)
    shares = {x.name: (0.75 + torch.rand(x.kv_heads, generator=generator)).tolist() for x in target.compressed}
    total = sum(map(sum, shares.values())) / sum(map(len, shares.values()))
    budgets = HeadBudgets({name: [share / total for share in own] for name, own in shares.items()})
    token = HeadCost.of(8, 8, 0, "int8").token
    for head_budgets in (None, budgets):
        plan = compressed_plan(target, size, head_budgets=head_budgets)
        heads = sum(x.kv_heads for x in plan.layers)
        most = target.length
        slots = [n for x in plan.layers for n in x.slots]
        assert max(slots) <= most
        assert plan.state_bytes() <= size
        assert plan.state_bytes() >= size - (token + 1) * heads or min(slots) == most
        assert plan.state_bytes(torch.bfloat16) == plan.state_bytes()
        # A state in memory has log-weights and padding beside these bytes.
        assert all(layer_of(x).compressed.layout.bytes >= x.cache_bytes(0, 4) for x in plan.layers)
        assert plan.made_by["strategy"] == "compressed"
        assert plan.made_by["size"] == size


def _target(tiny, family, made={}):  # noqa: B006 one for all examples
    if family not in made:
        made[family] = Target.of(getattr(tiny, family)())
    return made[family]


def test_ratio_and_context_of_a_model(tiny):
    model = tiny.llama()  # 256 positions; 2 layers of 2 KV heads of 8
    cached = 2 * 2 * 2 * 8 * 2
    for options, size in [
        ({}, 256 * cached / 16),
        ({"ratio": 8}, 256 * cached / 8),
        ({"ratio": 4, "context": 100}, 25 * cached),
        ({"size": "3KB", "context": 100}, 3_000),
        ({"ratio": 8, "keep_softmax": [FIRST]}, 256 * cached / 2 / 8),
    ]:
        plan = Converted.of(dofla.compress(model, tiny.tokens(2, 32), head_budgets="even", **options)).plan
        assert plan.made_by["size"] == round(size)
        assert 0.9 * size < plan.state_bytes(model.dtype) <= size
        assert [isinstance(x, SoftmaxLayer) for x in plan.layers] == ["keep_softmax" in options, False]
        dofla.restore(model)


def test_no_head_gets_slots_for_more_tokens_than_there_are_positions(tiny):
    target = Target.of(tiny.llama(), 96)
    size, budgets = size_of(tiny.llama(), 100), HeadBudgets({FIRST: [0.5, 0.5], SECOND: [0.5, 2.5]})
    for positions in (128, 160):
        plan = compressed_plan(replace(target, context=positions), size, head_budgets=budgets)
        *others, most = [slots for layer in plan.layers for slots in layer.slots]
        assert most == positions == plan.context
        assert max(others) == min(others) < most
        assert 0.95 * size < plan.state_bytes() <= size
    even, uneven = (compressed_plan(target, 2 * size, head_budgets=x) for x in (None, budgets))
    assert uneven.layers == even.layers  # enough for all, with bytes to spare
    assert [slots for layer in even.layers for slots in layer.slots] == [96] * 4


@pytest.mark.parametrize("head_budgets", ["even", "measured"])
@pytest.mark.parametrize("shape", [{}, {"head_dim": 32}], ids=str)
def test_the_size_that_an_error_names_works(tiny, head_budgets, shape):
    model, tokens = tiny.llama(**shape), tiny.tokens(2, 64)
    with pytest.raises(DoflaError, match=r"is too small for a token of each kind") as refusal:
        dofla.compress(model, tokens, 300, head_budgets=head_budgets)
    (least,) = re.findall(r"give (\d+) bytes", str(refusal.value))
    assert str(refusal.value).startswith("size 300 bytes is too small")
    dofla.restore(dofla.compress(model, tokens, int(least), head_budgets=head_budgets))
    assert not hasattr(model, "_dofla_softmax_implementation")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": "16"}, "ratio is '16': give softmax bytes per compressed byte"),
        ({"context": "64"}, "context is '64': give an integer, 1 or more"),
        ({"context": 64.0}, "context is 64.0: give an integer, 1 or more"),
        ({"context": 0}, "context is 0: give 1 or more"),
        ({"retrieval_heads": "2"}, "retrieval_heads is '2': give how many"),
        ({"batch_size": 0}, "batch_size is 0: give 1 or more"),
        ({"keep_softmax": FIRST}, "keep_softmax is .*: give a list"),
    ],
)
def test_options_of_another_type_are_named(tiny, options, message):
    with pytest.raises(DoflaError, match=message):
        dofla.compress(tiny.llama(), tiny.tokens(2, 32), head_budgets="even", **options)


def test_no_layers_to_keep_may_be_none(tiny):
    assert dofla.compress(tiny.llama(), tiny.tokens(2, 32), head_budgets="even", keep_softmax=None)
