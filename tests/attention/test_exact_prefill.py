"""Exact prefill: outputs are those of softmax attention in float64, and the retained tokens those of highest score."""

from types import SimpleNamespace

import pytest
import torch
from arithmetic import sum_error
from compressed_heads import SCALING, assert_holds, heads_of, naive, padded, run, step, vectors
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import needs_kernels

from dofla.attention import LOG_ZERO, HeadSizes, compiled
from dofla.attention.constants import DECAY, GAIN, LATELY_WEIGHT, MOST_SCORE
from dofla.attention.drawn import LATELY, NEIGHBORS
from dofla.attention.prefill import LAST, LEAST_ON_CPU, _importance

DIM, GROUPS = 16, 2
SIZES = st.lists(
    st.builds(
        HeadSizes,
        window=st.sampled_from([1, 5, 40]),
        sinks=st.sampled_from([0, 2]),
        newest=st.sampled_from([1, 6]),
        heavy_hitters=st.sampled_from([3, 30, 200]),
    ),
    min_size=3,
    max_size=3,
)
"""Of three KV heads, which may differ in their windows too."""
GROWING = st.lists(st.sampled_from([HeadSizes(5, 2, 1, 0), HeadSizes(40, 0, 1, 0)]), min_size=1, max_size=3)
"""Of KV heads that hold every token."""
EVICTING = HeadSizes(5, 2, 1, 3)
"""Of one beside them that does not."""


PIECES = st.lists(st.one_of(st.just(1), st.integers(LEAST_ON_CPU, LEAST_ON_CPU + 36)), min_size=2, max_size=4)
"""Tokens of calls: on a CPU fewer that go on are read one after the other."""


def sample(seed, sizes, batch, length):
    heads = heads_of(0, sizes, DIM, DIM)
    return heads, [2 * x for x in vectors(seed, heads, batch, GROUPS, length)]


def softmax(query, key, value):
    """Causal attention in float64, and its weights [B, H, L, L]."""
    query, key, value = (x.double() for x in (query, key, value))
    key, value = (x.repeat_interleave(GROUPS, 1) for x in (key, value))
    hidden = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
    share = (query @ key.mT * SCALING).masked_fill(hidden, LOG_ZERO).softmax(-1)
    return share @ value, share


def drawn_in_all(share):
    """Attention that tokens [L] drew, by the weights of a KV head's queries [G, L, L]."""
    place = torch.arange(share.shape[-1])
    return (share * (place[:, None] - place >= NEIGHBORS)).square().sum((0, 1))


def drawn_lately(share, window, sinks, last):
    """Likewise from the last queries."""
    length = share.shape[-1]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    far = share * (distance >= window) * (torch.arange(length) >= sinks)
    far = far / far.sum(-1, keepdim=True).clamp_min(1e-300)
    decay = (1 - 1 / DECAY) ** torch.arange(length - 1, -1, -1, dtype=torch.float64)[:, None]
    return (far.square() * decay * (torch.arange(length) >= length - last)[:, None]).sum((0, 1))


def held_tokens(heads, state):
    """Of each sequence and KV head, the keys [n, d] and values [n, dv] that are held: sinks, tier and window."""
    found = {}
    layout = heads.layouts.of(state.rows.shape[-1])
    together = zip(layout.heads, heads.tiers, layout.open(state), strict=True)
    for own, tier, held in together:
        key, value = (
            coder.unrotate(coder.decode(*codes))
            for coder, codes in (
                (tier.key, (held.tier.key, held.tier.key_scale)),
                (tier.value, (held.tier.value, held.tier.value_scale)),
            )
        )
        exact = [x.unpacked(torch.float32) for x in (held.sinks, held.window) if x is not None]
        for n in range(len(key)):
            for place, head in enumerate(own):
                there = held.tier.score[n, place] >= 0
                parts = [(key[n, place, there], value[n, place, there])]
                for x in exact:
                    real = x.log_weight[n] > LOG_ZERO
                    parts.append((x.key[n, place, real], x.value[n, place, real]))
                found[n, head] = tuple(torch.cat(side) for side in zip(*parts, strict=True))
    return found


def held_positions(heads, state, key):
    """Likewise the positions of the tokens, which are known by their keys."""
    return {own: torch.cdist(k, key[own]).argmin(-1).tolist() for own, (k, _) in held_tokens(heads, state).items()}


def assert_alike(heads, one, other):
    """Two states hold the same tokens, bit for bit, and the same scores but for rounding, of sums in another order."""
    layout = heads.layouts.of(one.rows.shape[-1])
    for mine, theirs in zip(layout.open(one), layout.open(other), strict=True):
        for name in ("window", "sinks"):
            assert all(map(torch.equal, vars(getattr(mine, name)).values(), vars(getattr(theirs, name)).values()))
        there = mine.tier.score >= 0
        *codes, scores = zip(*(vars(x.tier).values() for x in (mine, theirs)), strict=True)
        assert all(torch.equal(x[there], y[there]) for x, y in codes)
        assert ((scores[0].int() - scores[1]).abs() <= there).all()


@given(SIZES, st.integers(2, 180), st.booleans(), st.integers(0, 100))
@settings(max_examples=50)
def test_output_is_exact_and_the_tokens_of_highest_score_are_retained(sizes, length, important, seed):
    heads, inputs = sample(seed, sizes, 2, length)
    importance = torch.rand(2, len(sizes), length, generator=torch.Generator().manual_seed(seed)).square()
    out, state = step(heads, inputs, exact=True, importance=importance if important else None)
    right, share = softmax(*inputs)
    assert (out - right).abs().max() <= 8 * sum_error(length + DIM, float(inputs[2].abs().max()) * 20)
    for (n, head), positions in held_positions(heads, state, inputs[1]).items():
        size, held = sizes[head], set(positions)
        assert len(held) == len(positions)
        must = {*range(min(size.sinks, length)), *range(max(0, length - size.window - size.newest), length)}
        assert must <= held
        assert len(held) == min(length, len(must) + size.heavy_hitters)
        own = share[n, GROUPS * head : GROUPS * (head + 1)]
        lately = drawn_lately(own, size.window, size.sinks, LAST if important else LATELY)
        score = importance[n, head] + LATELY_WEIGHT * lately if important else drawn_in_all(own) + lately
        free = [x for x in range(length) if x not in must]
        chosen, left = [x for x in free if x in held], [x for x in free if x not in held]
        if chosen and left:
            margin = 1e-4 * float(score.max() + 1e-9)
            assert score[chosen].min() >= score[left].max() - margin


@needs_kernels
@given(
    st.one_of(SIZES, GROWING.map(lambda sizes: [*sizes, EVICTING])),
    st.integers(2, 400),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 100),
)
@settings(max_examples=40)
def test_kernels_retain_what_plain_torch_does(sizes, length, asks, dtype, seed):
    """Codes bit for bit; scores up to rounding."""
    heads, inputs = sample(seed, sizes, 2, length)
    inputs, importance = [x.to(dtype) for x in inputs], torch.rand(2, len(sizes), length).square()
    importance[:, :, ::7] = 0  # among tokens that drew nothing, too, the newest are retained
    inputs[0] = inputs[0] if asks else inputs[0][:, :, :0]
    states = []
    for usable in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not usable:
                patch.setattr(compiled, "usable", lambda *_: False)
            states.append(step(heads, inputs, exact=True, importance=importance)[1])
    assert_alike(heads, *states)


@given(SIZES, st.integers(60, 180), st.integers(0, 100))
@settings(max_examples=10)
def test_important_tokens_are_retained_and_decode_goes_on_with_their_scores(sizes, length, seed):
    heads, (_, *tokens) = sample(seed, sizes, 2, length)
    importance = torch.rand(2, len(sizes), length, generator=torch.Generator().manual_seed(seed)).square() * 4
    out, state = step(heads, [tokens[0][:, :, :0], *tokens], exact=True, importance=importance)
    assert out.shape[2] == 0
    there = held_positions(heads, state, tokens[0])
    for (n, head), positions in there.items():
        size = sizes[head]
        must = {*range(min(size.sinks, length)), *range(max(0, length - size.window - size.newest), length)}
        score = importance[n, head]
        free = [x for x in range(length) if x not in must]
        chosen, left = [x for x in free if x in positions], [x for x in free if x not in positions]
        if chosen and left:
            assert score[chosen].min() >= score[left].max()
    for own, held in zip(heads.layout.heads, heads.layout.open(state), strict=True):
        for place, head in enumerate(own):
            for n in range(2):
                score = held.tier.score[n, place]
                kept = [x for x in sorted(there[n, head]) if sizes[head].sinks <= x < length - sizes[head].window]
                wanted = (GAIN * importance[n, head, kept].flip(0)).round().clamp(max=MOST_SCORE)  # the newest first
                assert torch.equal(score[score >= 0].float(), wanted)


def test_important_tokens_stay_however_much_is_read_after_them(monkeypatch):
    for module in ("prefill", "compressed"):
        monkeypatch.setattr(f"dofla.attention.{module}.MOST_TOKENS", 60)  # at once, of a call
    sizes = [HeadSizes(5, 2, 4, 6), HeadSizes(5, 2, 4, 20), HeadSizes(9, 2, 4, 6)]
    heads, inputs = sample(0, sizes, 2, 660)
    inputs[0] *= 0.05  # they attend to all alike
    importance, marked = torch.rand(2, 3, 660, generator=torch.Generator().manual_seed(0)) * 1e-3, [10, 33, 57, 70, 71]
    importance[:, :, marked] = 7.0  # none is in a window as a call ends
    state = None
    for part in (slice(100), slice(100, 101), slice(101, 380), slice(380, 660)):  # the last parts are of 40, 39 and 40
        own = [x[:, :, part] for x in inputs]
        out, state = step(heads, own, state, exact=True, importance=importance[:, :, part])
        assert out.isfinite().all()
    for positions in held_positions(heads, state, inputs[1]).values():
        assert {*marked} <= {*positions}


def test_a_few_tokens_that_go_on_are_read_as_without_importance():
    heads, inputs = sample(0, [HeadSizes(5, 2, 4, 6)] * 3, 2, 100 + LEAST_ON_CPU)
    importance = torch.rand(2, 3, 100 + LEAST_ON_CPU, generator=torch.Generator().manual_seed(0)) * 4
    first = [x[:, :, :100] for x in inputs]
    for count, same in ((LEAST_ON_CPU, False), (LEAST_ON_CPU - 1, True)):
        more, own = [x[:, :, -count:] for x in inputs], importance[:, :, -count:]
        begun = step(heads, first, exact=True)[1]
        states = [step(heads, more, begun, exact=True, importance=x)[1] for x in (own, None)]
        assert torch.equal(*(state.rows for state in states)) == same


def test_tokens_in_the_window_have_the_mean_importance_where_theirs_is_not_known():
    known, past = torch.tensor([[[1.0, 2.0, 6.0, 7.0]]]), SimpleNamespace(window=range(2))
    for part, held, right in (
        (slice(0, 3), past, [0, 0, 3, 3, 1, 2, 6]),
        (slice(1, 4), past, [0, 0, 4, 1, 2, 6, 7]),
        (slice(3, 4), past, [0, 0, 0, 0, 2, 6, 7]),
        (slice(0, 4), None, [0, 0, 0, 1, 2, 6, 7]),
    ):
        assert _importance(known, part, held, 7)[0, 0].tolist() == right


@given(SIZES, st.integers(2, 60), st.integers(0, 100))
@settings(max_examples=20)
def test_with_room_for_all_the_state_is_that_of_reading_token_by_token(sizes, length, seed):
    heads, inputs = sample(seed, [size._replace(heavy_hitters=150 + size.newest) for size in sizes], 2, length)
    opened = [heads.layout.open(step(heads, inputs, exact=exact)[1]) for exact in (True, False)]
    for exact, streamed in zip(*opened, strict=True):
        for name in ("window", "sinks"):
            one, other = getattr(exact, name), getattr(streamed, name)
            assert one is other is None or all(map(torch.equal, vars(one).values(), vars(other).values()))
        free = exact.tier.score < 0
        assert torch.equal(free, streamed.tier.score < 0)
        for name in ("key", "key_scale", "value", "value_scale"):
            one, other = (getattr(x.tier, name).masked_fill(free[..., None], 0) for x in (exact, streamed))
            assert torch.equal(one, other)


@given(GROWING, st.integers(2, 80), st.integers(0, 40), st.booleans(), st.booleans(), st.integers(0, 100))
@settings(max_examples=25)
def test_where_nothing_is_evicted_a_prompt_is_read_as_by_softmax_attention(sizes, length, more, pad, kernels, seed):
    heads, inputs = sample(seed, sizes, 2, length + more)
    padding = [0, seed % length if pad else 0]
    weight = padded(padding, length + more) if pad else None
    cuts = [0, length, length + more] if more else [0, length]
    out, states, _ = run(heads, inputs, cuts, weight, kernels, exact=True)
    assert_holds(heads, states[-1], naive(heads, inputs, padding)[1])
    for n, first in enumerate(padding):
        right, _ = softmax(*(x[n : n + 1, :, first:length] for x in inputs))
        bound = 8 * sum_error(length + DIM, float(inputs[2].abs().max()) * 20)
        assert (out[n : n + 1, :, first:length] - right).abs().max() <= bound
        assert (out[n, :, :first] == 0).all()


@given(GROWING, st.integers(2, 80), st.booleans(), st.integers(0, 100))
@settings(max_examples=15)
def test_where_nothing_is_evicted_all_tokens_enter_without_queries(sizes, length, pad, seed):
    heads, inputs = sample(seed, sizes, 2, length)
    padding = [0, seed % length if pad else 0]
    weight = padded(padding, length) if pad else None
    importance = torch.rand(2, len(sizes), length, generator=torch.Generator().manual_seed(seed))
    _, state = step(heads, [inputs[1][:, :, :0], *inputs[1:]], weight=weight, exact=True, importance=importance)
    assert_holds(heads, state, naive(heads, inputs, padding)[1])


@given(st.one_of(SIZES, GROWING), PIECES, st.integers(0, 100))
@settings(max_examples=40)
def test_later_calls_attend_to_what_is_held_and_to_themselves(sizes, parts, seed):
    """Against float64 attention to the keys and values that the state decodes to."""
    heads, (query, key, value) = sample(seed, sizes, 1, sum(parts))
    state, start = None, 0
    for part in parts:
        new, before = slice(start, start + part), state
        start += part
        out, state = step(heads, [x[:, :, new] for x in (query, key, value)], state, exact=True, room=start)
        if before is None or part == 1:
            continue
        for (_, head), (keys, values) in held_tokens(heads, before).items():
            k, v = torch.cat([keys, key[0, head, new]]).double(), torch.cat([values, value[0, head, new]]).double()
            own = slice(GROUPS * head, GROUPS * (head + 1))
            hidden = torch.ones(part, len(k), dtype=torch.bool).triu(len(k) - part + 1)
            right = (query[0, own, new].double() @ k.mT * SCALING).masked_fill(hidden, LOG_ZERO).softmax(-1) @ v
            assert (out[0, own] - right).abs().max() <= 1e-4 * v.abs().max()
    for (_, head), held in held_positions(heads, state, key).items():
        assert set(range(max(0, start - sizes[head].window), start)) <= set(held)


@pytest.mark.parametrize("important", [False, True])
@pytest.mark.parametrize("padding", [[0, 7], [30, 1]])
def test_padding_takes_no_slot(padding, important):
    sizes, length = [HeadSizes(5, 2, 6, 3), HeadSizes(5, 2, 1, 30), HeadSizes(9, 2, 1, 30)], 60
    heads, inputs = sample(1, sizes, 2, length)
    importance = torch.rand(2, 3, length, generator=torch.Generator().manual_seed(0)) if important else None
    inputs = [inputs[0][:, :3, :0], *inputs[1:]] if important else inputs
    out, state = step(heads, inputs, weight=padded(padding, length), exact=True, importance=importance)
    for n, first in enumerate(padding):
        own, there = [x[n : n + 1, :, first:] for x in inputs], slice(n, n + 1)
        most = importance[there, :, first:] if important else None
        right, after = step(heads, own, exact=True, importance=most)
        assert ((out[there, :, first:] - right).abs() <= 1e-5 * inputs[2].abs().max()).all()
        assert (out[n, :, :first] == 0).all()
        assert_alike(heads, state.map(lambda x, n=n: x[n : n + 1]), after)


def test_a_single_token_is_read_as_in_decoding():
    heads, inputs = sample(0, [HeadSizes(5, 2, 6, 3)], 1, 40)
    _, state = step(heads, [x[:, :, :39] for x in inputs])
    last = [x[:, :, 39:] for x in inputs]
    (out, after), (wanted, rows) = (step(heads, last, state, exact=exact) for exact in (True, False))
    assert torch.equal(out, wanted)
    assert torch.equal(after.rows, rows.rows)
