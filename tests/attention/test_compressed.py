"""A compressed cache by the kernels: codes bit for bit those of plain torch, outputs those of float64."""

from __future__ import annotations

import pytest
import torch
from coded_layers import LAYERS, SCALING, TIERS, WIDE, assert_same_codes, error_of, layer_of, run, vectors
from dofla.feature_maps.layer import LinearAttention
from forms import KernelCalls, everything, needs_kernels, padding, threads
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dofla.attention import compiled


# A number next to the middle between two whole ones: it is the rounding of a root that says to which it goes.
@example(
    seed=7546823,
    sizes={**WIDE, "features": 4, "heavy_hitters": 20},
    batch=2,
    groups=5,
    length=82,
    cuts=[],
    single=2,
    kind="fractional",
    dtype=torch.bfloat16,
    count=1,
)
@needs_kernels
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    sizes=LAYERS,
    batch=st.integers(1, 3),
    groups=st.integers(1, 6),
    length=st.integers(2, 90),
    cuts=st.lists(st.integers(1, 89), max_size=4),
    single=st.integers(1, 12),
    kind=st.sampled_from(["none", "left", "any", "fractional"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    count=st.sampled_from([1, 2]),
)
def test_kernels_keep_the_codes_of_plain_torch_and_see_what_float64_sees(
    seed, sizes, batch, groups, length, cuts, single, kind, dtype, count
):
    layer = layer_of(seed, **sizes)
    query, key, value = inputs = vectors(seed, layer, batch, groups, length, dtype)
    weight = padding(kind, batch, length, torch.Generator().manual_seed(seed))
    cuts = sorted({0, length, *(cut for cut in cuts if cut < length), *range(max(length - single, 1), length)})
    with threads(count):
        out, states, calls = run(layer, inputs, weight, cuts)
    _, plain, by_torch = run(layer, inputs, weight, cuts, kernels=False)
    assert not by_torch.names
    layer.maps.double()  # codes are float32 whatever the rest is
    wanted, _, _ = run(layer, [x.double() for x in inputs], weight, cuts, kernels=False)
    assert "attend_and_code" in calls.names
    assert sizes["features"] or calls.alone
    assert_same_codes(states, plain)
    seen = torch.ones(batch, length, dtype=torch.bool) if weight is None else weight > 0
    bound = error_of(layer, query, key, value)
    assert out.dtype == dtype
    assert ((out.double() - wanted).abs() * seen[:, None, :, None]).max() < bound


def of_head(layer, head):
    """A layer of that KV head alone."""
    group = next(n for n, heads in enumerate(layer.groups) if head in heads)
    coded_tiers, (features, window, sinks) = layer.coded_tiers_of(group), layer.sizes[group]
    tiers = list(zip(coded_tiers.counts, coded_tiers.key.tiers, strict=True)) if coded_tiers else ()
    heavy_hitters = [coded_tiers.heavy_hitters] if coded_tiers else ()
    alone = LinearAttention("prf", [features], 16, window, sinks, "int8", [tiers], heavy_hitters, 24)
    alone.maps[0].load_state_dict(layer.maps[group].state_dict())
    if coded_tiers:
        alone.coded_tiers["0"].load_state_dict(coded_tiers.state_dict())
    return alone.requires_grad_(False)


@needs_kernels
@pytest.mark.parametrize("length", [1, 70])
def test_heads_of_all_kinds_share_a_call_and_see_what_they_see_alone(length):
    sizes = {"features": [0, 4, 3, 4], "window": [5, 7, 5, 5], "tiers": [TIERS[1], TIERS[3], (), TIERS[0]]}
    layer = LinearAttention(
        "prf", **sizes, head_dim=16, sinks=2, token_dtype="int8", heavy_hitters=[9, 0, 0, 20], value_dim=24
    )
    layer.reset_parameters(torch.Generator().manual_seed(0))
    query, key, value = inputs = vectors(1, layer.requires_grad_(False), 2, 2, length + 30)
    with threads(2):
        out, states, calls = run(layer, inputs, None, [0, 30, length + 30])
    assert "attend_and_code" in calls.names
    for head in range(4):
        own = query[:, 2 * head : 2 * head + 2], key[:, head : head + 1], value[:, head : head + 1]
        alone, (_, after), _ = run(of_head(layer, head), own, None, [0, 30, length + 30])
        assert torch.equal(out[:, 2 * head : 2 * head + 2], alone)
        found, wanted = everything(states[1][head]), everything(after[0])
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def layer_and_state(batch=2, **other):
    sizes = {"head_dim": 16, "value_dim": 24, "window": 5, "sinks": 2, "tiers": [TIERS[1]] * 2, "features": 0}
    layer = layer_of(0, **{**sizes, **other})
    inputs = vectors(1, layer, batch, 2, 40)
    with torch.no_grad():
        _, states = layer(*inputs, scaling=SCALING)
    return layer, states


def names(layer, inputs, states, **options):
    with KernelCalls() as calls:
        layer(*inputs, scaling=SCALING, states=states, **options)
    return calls.names


@needs_kernels
def test_states_and_inputs_are_not_changed():
    layer, states = layer_and_state()
    inputs = vectors(2, layer, 2, 2, 1)
    given_in = [*inputs, states[0].tokens]
    before = [t.clone() for t in given_in]
    assert names(layer, inputs, states) == {"attend_and_code"}
    assert all(torch.equal(a, b) for a, b in zip(given_in, before, strict=True))


@pytest.mark.parametrize("kernels", [True, False])
def test_a_sequence_begins_as_if_there_had_been_no_other(kernels):
    layer, _ = layer_and_state(batch=1, heavy_hitters=4)
    inputs = vectors(3, layer, 1, 2, 40)
    first, again = (run(layer, inputs, None, [0, 1, 40], kernels) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(a[0].tokens, b[0].tokens) for a, b in zip(first[1], again[1], strict=True))


@needs_kernels
def test_states_that_are_views_or_reordered_go_on_the_same():
    layer, states = layer_and_state(batch=3)
    inputs = vectors(2, layer, 3, 2, 1)
    out, _ = layer(*inputs, scaling=SCALING, states=states)
    strided = [state.map(lambda t: t.repeat_interleave(2, 1)[:, ::2]) for state in states]
    assert torch.equal(layer(*inputs, scaling=SCALING, states=strided)[0], out)
    order = torch.tensor([2, 0, 0])
    rotated = [state.reorder(order) for state in states]
    assert torch.equal(layer(*(x[order] for x in inputs), scaling=SCALING, states=rotated)[0], out[order])


@needs_kernels
def test_who_asks_for_gradients_or_other_precisions_gets_plain_torch(monkeypatch):
    layer, states = layer_and_state()
    query, key, value = vectors(2, layer, 2, 2, 1)
    assert names(layer, (query.requires_grad_(), key, value), states) <= {"encode"}  # codes have no gradients
    query = query.detach()
    assert not names(layer, [x.double() for x in (query, key, value)], states)
    assert names(layer, [x.half() for x in (query, key, value)], states) <= {"encode"}  # windows hold float32
    assert names(layer, (query.repeat_interleave(2, -1)[..., ::2], key, value), states) <= {"encode"}
    monkeypatch.setattr(compiled, "obstacle", lambda: "switched off")
    assert not names(layer, (query, key, value), states)


@needs_kernels
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_infinity_pass_as_in_plain_torch(which, bad):
    layer, states = layer_and_state()
    inputs = vectors(2, layer, 2, 2, 1)
    inputs[which][0, 0, 0, 3] = bad
    out, _ = layer(*inputs, scaling=SCALING, states=states)
    assert not out[0, 0].isfinite().all()
    assert out[1].isfinite().all()


@needs_kernels
@pytest.mark.parametrize("features", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_reaches_those_that_see_it_and_is_kept_as_zeros(features, dtype):
    layer = layer_of(0, 16, 24, 5, 2, [TIERS[1]] * 2, features, 9)
    clean = vectors(1, layer, 2, 2, 70, dtype)
    wanted, _, _ = run(layer, clean, None, [0, 40, 41, 70])
    for which, bad in ((0, torch.nan), (1, torch.inf), (2, -torch.inf)):
        inputs = [x.clone() for x in clean]
        inputs[which][0, 1, 40, 3] = (
            bad  # of a query, the second of the first KV head; of the second head's key or value
        )
        seen = torch.zeros(2, 4, 70, dtype=torch.bool)
        seen[0, [1] if which == 0 else [2, 3], 40] = True
        split, states, calls = run(layer, inputs, None, [0, 40, 41, 70])
        whole, (at_once,), _ = run(layer, inputs, None, [0, 70])
        assert "attend_and_code" in calls.names
        assert torch.equal(split.isnan().all(-1), seen)
        assert torch.equal(split.isnan().any(-1), seen)
        if which > 0:  # those that come later in the call see it as well
            seen[0, 2:, 40:] = True
        assert torch.equal(whole.isnan().all(-1), seen)
        assert torch.equal(whole.isnan().any(-1), seen)
        assert_same_codes([states[-1]], [at_once])
        assert torch.equal(split[1], wanted[1])
        if which > 0:
            window = layer.layout_of(0).opened(states[1][0]).window
            assert not getattr(window, ("key", "value")[which - 1])[0, 1, -1].any()


@needs_kernels
def test_constants_may_change_between_calls():
    layer, states = layer_and_state()
    inputs = vectors(2, layer, 2, 2, 1)
    before, _ = layer(*inputs, scaling=SCALING, states=states)
    coder = layer.coded_tiers["0"].value
    with torch.no_grad():
        coder.mean.add_(1.0)
    after, _ = layer(*inputs, scaling=SCALING, states=states)
    assert (after - before).abs().min() > 0.1


@needs_kernels
def test_a_state_of_another_layer_is_refused():
    layer, _ = layer_and_state()
    _, other = layer_and_state(head_dim=32)
    with pytest.raises(RuntimeError, match="the state is another layer's"):
        layer(*vectors(2, layer, 2, 2, 1), scaling=SCALING, states=other)
