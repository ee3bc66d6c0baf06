"""Compressed caches against :mod:`dofla.attention.naive_cache`: what they hold bit for bit, outputs up to rounding."""

import pytest
import torch
from compressed_heads import HEADS, MOST, SIZE, assert_holds, error_of, heads_of, naive, padded, run, step, vectors
from forms import KernelCalls, needs_kernels, threads
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla import DoflaError
from dofla.attention import Coder, CompressedState, HeadSizes, compiled
from dofla.attention.constants import FREE, MOST_SCORE

WAYS = pytest.mark.parametrize("kernels", [pytest.param(True, marks=needs_kernels), False], ids=["kernels", "torch"])
OTHER = HeadSizes(window=7, sinks=0, newest=1, heavy_hitters=20)


@settings(max_examples=5)
@given(
    seed=st.integers(0, 2**31),
    shape=HEADS,
    groups=st.integers(1, 5),
    length=st.integers(2, 40),
    padding=st.sampled_from([None, [0, 9], [20, 1]]),
    cuts=st.lists(st.integers(1, 59), max_size=4),
    single=st.integers(0, 9),
    scale=st.sampled_from([0.0, 0.1, 1.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    count=st.sampled_from([1, 2]),
)
def test_caches_are_the_naive_ones_however_a_text_is_cut(
    seed, shape, groups, length, padding, cuts, single, scale, dtype, count
):
    heads = heads_of(seed, **shape)
    length += max(padding or [0])
    query, *others = vectors(seed, heads, 2, groups, length, dtype)
    inputs = [scale * query, *others]
    weight = None if padding is None else padded(padding, length)
    cuts = sorted({0, length, *(cut for cut in cuts if cut < length), *range(max(length - single, 0), length)})
    wanted, caches = naive(heads, inputs, padding)
    seen = torch.ones(2, length, dtype=torch.bool) if weight is None else weight > 0
    for kernels in (True, False) if compiled.obstacle() is None else (False,):
        with threads(count):
            out, states, calls = run(heads, inputs, cuts, weight, kernels)
        assert calls.alone if kernels else not calls.names
        assert_holds(heads, states[-1], caches)
        assert out.dtype == dtype
        assert ((out.double() - wanted).abs() * seen[:, None, :, None]).max() < error_of(heads, *inputs)


@needs_kernels
@pytest.mark.slow
def test_kernels_hold_what_plain_torch_holds_after_many_tokens():
    sizes = [MOST, MOST, SIZE]
    heads = heads_of(0, sizes, 64, 64)
    inputs, weight = vectors(1, heads, 2, 3, 1200), padded([0, 100], 1200)
    _, ours, _ = run(heads, inputs, [0, 1000, 1001, 1200], weight)
    _, plain, _ = run(heads, inputs, [0, 500, 1200], weight, kernels=False)
    assert torch.equal(ours[-1].rows, plain[-1].rows)


@WAYS
@pytest.mark.parametrize("length", [1, 70])
def test_heads_of_all_sizes_share_a_call_and_see_what_they_see_alone(kernels, length):
    heads, cuts = heads_of(0, [SIZE, OTHER, MOST, SIZE]), [0, 30, length + 30]
    inputs = vectors(1, heads, 2, 2, length + 30)
    out, states, _ = run(heads, inputs, cuts, kernels=kernels)
    together = zip(heads.layout.heads, heads.layout.sizes, heads.tiers, heads.layout.open(states[-1]), strict=True)
    for own, size, tier, contents in together:
        alone = heads_of(0, [size] * len(own))
        alone.tiers[0].load_state_dict(tier.state_dict())
        queries = [2 * head + n for head in own for n in (0, 1)]
        found, after, _ = run(alone, [x[:, pick] for x, pick in zip(inputs, (queries, own, own), strict=True)], cuts)
        assert torch.equal(out[:, queries], found) if kernels else torch.allclose(out[:, queries], found, atol=1e-4)
        assert torch.equal(alone.layout.close([contents]).rows, after[-1].rows)


@WAYS
@pytest.mark.parametrize("exact", [False, True], ids=["sequential", "exact"])
@pytest.mark.parametrize("length", [1, 5])
def test_a_token_enters_a_tier_in_front_of_all_others_which_keep_their_slots(kernels, exact, length):
    sizes, end = [HeadSizes(5, 2, 1, 0), HeadSizes(5, 2, 1, 60)], 40 + length  # one that grows, and one that does not
    heads = heads_of(0, sizes)
    inputs = vectors(1, heads, 1, 1, end)
    _, states, _ = run(heads, inputs, [0, 40, end], kernels=kernels, exact=exact, room=end)
    layout = heads.layouts.of(states[0].rows.shape[-1])
    for head, (tier, before, after) in enumerate(zip(heads.tiers, *map(layout.open, states), strict=True)):
        free = len(after.tier) - (end - 7)
        assert (after.tier.score[:, :, :free] == FREE).all()
        assert (after.tier.score[:, :, free:] >= 0).all()
        codes, _ = tier.key.encode(inputs[1][:, [head], 2 : end - 5].flip(2))
        assert torch.equal(after.tier.key[:, :, free:], codes)
        for one, other in list(zip(vars(before.tier).values(), vars(after.tier).values(), strict=True))[:4]:
            assert torch.equal(one[:, :, free + length :], other[:, :, free + length :])


def test_what_draws_attention_stays_and_what_does_not_goes():
    heads = heads_of(0, [HeadSizes(3, 2, 9, 9)], 16, 16)
    query, key, value = vectors(0, heads, 1, 1, 200)
    key[0, 0, 20], key[0, 0, 21] = 3 * query[0, 0, 0], -3 * query[0, 0, 0]
    query = query[:, :, :1] + 0.1 * query  # all ask for what the token in place 20 has
    _, states, _ = run(heads, (query, key, value), [0, 200])
    (contents,), coder = heads.layout.open(states[-1]), heads.tiers[0].key
    held = coder.unrotate(coder.decode(contents.tier.key, contents.tier.key_scale))[0, 0]
    # A key of three bits a number is off by a few tenths of its size.
    off = [(held - key[0, 0, place]).norm(dim=-1).min() / key[0, 0, place].norm() for place in (20, 21)]
    assert off[0] < 0.5 < off[1]
    assert contents.tier.score.max() == MOST_SCORE


@WAYS
@pytest.mark.parametrize("length", [1, 70])
def test_states_that_are_views_or_reordered_go_on_the_same(kernels, length, monkeypatch):
    heads = heads_of()
    state = run(heads, vectors(0, heads, 3, 2, 100), [0, 100])[1][0]
    inputs, before = vectors(1, heads, 3, 2, length), state.copy()
    if not kernels:
        monkeypatch.setattr(compiled, "usable", lambda *_: False)
    given_in = [x.clone() for x in inputs]
    out, after = step(heads, inputs, state)
    assert torch.equal(state.rows, before.rows)
    assert all(map(torch.equal, inputs, given_in))
    if kernels:
        strided = CompressedState(state.rows.repeat_interleave(2, 1)[:, ::2])
        assert torch.equal(step(heads, inputs, strided)[1].rows, after.rows)
    order = torch.tensor([2, 0, 0])
    reordered = step(heads, [x[order] for x in inputs], state.reorder(order))[0]
    assert torch.allclose(reordered, out[order], rtol=0, atol=0 if kernels else 1e-6)  # a product may sum as it lies
    assert torch.equal(step(heads, inputs, state, in_place=True)[0], out)


@needs_kernels
def test_threads_share_a_long_tier_and_any_number_of_them_gives_the_same_bits(monkeypatch):
    heads = heads_of(0, [HeadSizes(5, 2, 1, 0), SIZE])
    inputs = vectors(1, heads, 1, 2, 5000)
    inputs[0][:, 1] *= 0.1  # one query that sees all alike, and one that does not
    _, state = step(heads, [x[:, :, :-1] for x in inputs], room=5000)
    last, answers = [x[:, :, -1:] for x in inputs], []
    for count in (1, 2, 3):
        with threads(count):
            answers.append(step(heads, last, state))
    (out, after), *others = answers
    assert all(torch.equal(out, own) and torch.equal(after.rows, rows.rows) for own, rows in others)
    monkeypatch.setattr(compiled, "usable", lambda *_: False)
    wanted, plain = step(heads, last, state)
    assert torch.equal(after.rows, plain.rows)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5)


@needs_kernels
def test_what_kernels_do_not_take_goes_to_plain_torch(monkeypatch):
    heads = heads_of()
    state = run(heads, vectors(1, heads, 2, 2, 40), [0, 40])[1][0]
    query, key, value = vectors(2, heads, 2, 2, 1)

    def names(*inputs):
        with KernelCalls() as calls:
            step(heads, inputs, state)
        return calls.names

    assert names(query, key, value) == {"read_compressed"}
    assert not names(*(x.double() for x in (query, key, value)))
    assert names(*(x.half() for x in (query, key, value))) <= {"encode"}  # windows hold float32
    assert names(query.repeat_interleave(2, -1)[..., ::2], key, value) <= {"encode"}
    monkeypatch.setattr(compiled, "obstacle", lambda: "switched off")
    assert not names(query, key, value)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("which", "bad"), [(0, torch.nan), (1, torch.inf), (2, -torch.inf)])
def test_what_is_not_finite_reaches_those_that_see_it_and_is_kept_as_zeros(which, bad, dtype):
    heads = heads_of()
    inputs = vectors(1, heads, 2, 2, 70, dtype)
    wanted, _, _ = run(heads, inputs, [0, 40, 41, 70])
    inputs[which] = inputs[which].clone()
    inputs[which][0, 1, 40, 3] = bad  # of a query, the second of the first KV head; of the second head's key or value
    seen = torch.zeros(2, 4, 70, dtype=torch.bool)
    seen[0, [1] if which == 0 else [2, 3], 40] = True
    split, states, calls = run(heads, inputs, [0, 40, 41, 70])
    whole, (at_once,), _ = run(heads, inputs, [0, 70])
    assert calls.alone
    assert torch.equal(split.isnan().all(-1), seen)
    assert torch.equal(split.isnan().any(-1), seen)
    if which > 0:  # those that come later in the call see it as well
        seen[0, 2:, 40:] = True
    assert torch.equal(whole.isnan().all(-1), seen)
    assert torch.equal(whole.isnan().any(-1), seen)
    assert torch.equal(states[-1].rows, at_once.rows)
    assert torch.equal(split[1], wanted[1])
    if which > 0:
        window = heads.layout.open(states[1])[0].window
        assert not getattr(window, ("key", "value")[which - 1])[0, 1, -1].any()


@needs_kernels
def test_constants_may_change_between_calls():
    heads = heads_of()
    state = run(heads, vectors(1, heads, 2, 2, 40), [0, 40])[1][0]
    inputs = vectors(2, heads, 2, 2, 1)
    before, _ = step(heads, inputs, state)
    heads.tiers[0].value.mean.add_(1.0)
    assert (step(heads, inputs, state)[0] - before).abs().min() > 0.1


@pytest.mark.parametrize("inference", [False, True])
def test_queries_are_rotated_by_what_back_is_now(inference):
    with torch.inference_mode(inference):
        coder = Coder(2, 16, 3.0)
        coder.reset()
        query = torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(0))
        numbers, unit = coder.rotate_query_integer(query)
        coder.back.mul_(2)
        again, twice = coder.rotate_query_integer(query)
        assert torch.equal(again, numbers)
        assert torch.equal(twice, 2 * unit)
        coder.constants = coder.constants.clone()
        coder.back.mul_(4)
        assert torch.equal(coder.rotate_query_integer(query)[1], 8 * unit)


@needs_kernels
@pytest.mark.parametrize("other", [{"head_dim": 32}, {"sizes": [SIZE._replace(heavy_hitters=8)] * 2}], ids=str)
def test_the_state_of_a_larger_layer_is_refused(other):
    heads, smaller = heads_of(), heads_of(**other)
    larger, smaller = sorted((heads, smaller), key=lambda x: -x.layout.bytes)
    state = smaller.layout.empty(2, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"no state of this layer has \d+ bytes"):
        step(larger, vectors(2, larger, 2, 2, 1), state)


def test_a_call_that_is_not_causal_is_refused():
    heads = heads_of()
    with pytest.raises(DoflaError, match="not causal: keep the layer softmax"):
        step(heads, vectors(0, heads, 1, 1, 3), causal=False)
