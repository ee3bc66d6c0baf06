"""Tokens in int8: rounded once, however often they are packed, and shifted as they are."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.attention import LOG_ZERO, FeatureState, HybridState, PackedTokens, TokenBuffer, packed, rounded, unpacked
from dofla.attention.eight_bits import pack, unpack

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
quick = settings(max_examples=80, derandomize=True)
dtypes = st.sampled_from(FLOATS)


def vectors(seed, dtype, size=9, magnitude=0, count=40):
    """Vectors of about ``2 ** magnitude``, some numbers in them far smaller than others, one vector zero."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, size, generator=g, dtype=torch.float64)
    x = x * torch.exp2(torch.randint(-12, 1, (count, size), generator=g).double())
    x[0] = 0
    return (x * 2.0**magnitude).to(dtype)


def magnitudes(dtype):
    """Powers of two whose vectors neither overflow nor vanish, within what eight bits of exponent reach."""
    return st.integers(-13, 10) if dtype == torch.float16 else st.integers(-85, 110)


def buffer(seed, count, batch=2, heads=3, size=5, value_size=4, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(batch, heads, count, d, generator=g).to(dtype) for d in (size, value_size))
    return TokenBuffer(key, value, torch.rand(batch, count, generator=g).log())


def same(one, other):
    """Whether two bundles hold the same tensors, bit for bit."""
    return type(one) is type(other) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True)
    )


@quick
@given(data=st.data(), seed=st.integers(0, 2**31), dtype=dtypes, size=st.sampled_from([1, 2, 9, 64]))
def test_packing_what_was_unpacked_changes_nothing(data, seed, dtype, size):
    x = vectors(seed, dtype, size, data.draw(magnitudes(dtype)))
    integers, exponents = pack(x)
    assert (integers.dtype, exponents.dtype) == (torch.int8, torch.int8)
    assert (integers.shape, exponents.shape) == (x.shape, x.shape[:-1])
    back = unpack(integers, exponents, dtype)
    assert back.dtype == dtype
    assert not integers[0].any()  # zero stays zero
    again, exponents_again = pack(back)
    assert torch.equal(again, integers)
    assert torch.equal(exponents_again, exponents)
    assert torch.equal(rounded(rounded(x)), rounded(x))


@quick
@given(data=st.data(), seed=st.integers(0, 2**31), dtype=dtypes)
def test_a_number_is_off_by_half_a_step_or_a_whole_one_at_the_top(data, seed, dtype):
    x = vectors(seed, dtype, magnitude=data.draw(magnitudes(dtype)))
    step = torch.exp2(pack(x)[1].double())[:, None]
    error = (rounded(x).double() - x.double()).abs()
    clipped = x.double().abs() > 127.5 * step
    assert (error <= step / 2 * (1 + 1e-6) + step / 2 * clipped).all()
    # The step is as small as the largest number of the vector allows.
    top = x.double().abs().amax(-1, keepdim=True)
    assert ((step * 128 > top) & ((step * 64 <= top) | (top == 0))).all()


@quick
@given(
    integers=st.lists(st.integers(-127, 127), min_size=1, max_size=20), exponent=st.integers(-120, 120), dtype=dtypes
)
def test_seven_bits_times_a_power_of_two_are_exact_in_every_type(integers, exponent, dtype):
    if dtype == torch.float16:
        exponent = max(-24, min(exponent, 9))  # its smallest step, and what its largest number allows
    integers = torch.tensor(integers, dtype=torch.int8)
    got = unpack(integers, torch.tensor(exponent, dtype=torch.int8), dtype)
    assert torch.equal(got.double(), integers.double() * 2.0**exponent)
    assert torch.equal(rounded(got), got)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_ends_of_a_type_stay_finite_and_keep_their_signs(dtype):
    info = torch.finfo(dtype)
    x = torch.tensor([[info.max, -info.max, 0, 1], [info.tiny, -info.tiny, 0, 0], [1e-3, -1, 0, 1]], dtype=dtype)
    got = rounded(x)
    assert torch.isfinite(got).all()
    assert (got.sign() * x.sign() >= 0).all()
    assert torch.equal(rounded(got), got)
    assert got[0, 0] == -got[0, 1] > 0
    # Far below the smallest step, a vector is zero.
    assert (got[1] == (0 if dtype != torch.float16 else x[1])).all()


def test_the_largest_number_is_not_rounded_beyond_eight_bits():
    assert pack(torch.tensor([0.999]))[0].item() == 127
    assert pack(torch.tensor([-0.999]))[0].item() == -127
    assert rounded(torch.tensor([0.999])).item() == 127 / 128


def test_gradients_pass_as_if_nothing_were_rounded():
    x = vectors(0, torch.float64).requires_grad_()
    weight = torch.randn_like(x)
    (weight * rounded(x)).sum().backward()
    assert torch.equal(x.grad, weight)
    assert torch.equal(rounded(x).detach(), rounded(x.detach()))


@pytest.mark.parametrize("dtype", FLOATS)
def test_packed_tokens_come_back_rounded(dtype):
    tokens = buffer(0, 6, dtype=dtype)
    back = PackedTokens.of(tokens).unpacked(dtype)
    assert same(back, TokenBuffer(rounded(tokens.key), rounded(tokens.value), tokens.log_weight))


@pytest.mark.parametrize(("size", "value_size"), [(5, 4), (64, 64), (1, 128)])
def test_a_token_takes_a_byte_per_number_and_two_for_the_exponents(size, value_size):
    batch, heads, count = 2, 3, 7
    tokens = PackedTokens.of(buffer(1, count, batch, heads, size, value_size))
    log_weights = batch * count * 4
    assert tokens.bytes == batch * heads * count * (size + value_size + 2) + log_weights


@quick
@given(seed=st.integers(0, 2**31), count=st.integers(1, 8), new=st.integers(0, 8))
def test_shifted_tokens_are_the_last_of_both(seed, count, new):
    new = min(new, count)
    old, later = PackedTokens.of(buffer(seed, count)), PackedTokens.of(buffer(seed + 1, new))
    got = old.shifted(later)
    both = buffer(seed, count).then(buffer(seed + 1, new))
    assert same(got, PackedTokens.of(both[-count:]))


def state(window, sinks):
    return HybridState(FeatureState.empty(2, 3, 5, 4), window, sinks)


@quick
@given(seed=st.integers(0, 2**31), count=st.integers(1, 6), new=st.integers(1, 9))
def test_a_state_is_kept_as_if_all_its_tokens_had_been_packed(seed, count, new):
    before = packed(state(buffer(seed, count), buffer(seed + 2, 2)), None, count)
    line = unpacked(before, torch.float32).window.then(buffer(seed + 1, new))
    after = packed(state(line[-count:], unpacked(before, torch.float32).sinks), before, new)
    assert same(after.window, PackedTokens.of(line[-count:]))
    assert same(after.sinks, before.sinks)


@pytest.mark.parametrize("free", [0, 1, 2])
def test_sinks_that_are_not_full_yet_are_packed_again(free):
    early, late = buffer(3, 2), buffer(4, 2)
    early.log_weight[:, 2 - free :] = LOG_ZERO
    before = packed(state(None, early), None, 1)
    after = packed(state(None, late), before, 1)
    assert after.window is None
    # Full sinks never change, and are not looked at.
    assert same(after.sinks, PackedTokens.of(late) if free else before.sinks)


def test_a_state_without_tokens_stays_as_it_is():
    plain = state(None, None)
    assert packed(plain, None, 3) == plain
    assert unpacked(plain, torch.float32) == plain


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_does_not_come_back_as_a_number(bad):
    x = torch.tensor([[1.0, bad], [1.0, 2.0]])
    out = rounded(x)
    assert out[0, 1].isnan()
    assert torch.equal(out[1], x[1])
