"""Losses of a layer against loops over pairs, in float64."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla.attention import rounded
from dofla.distillation import LOSSES
from dofla.distillation.losses import attention_kl, l2_loss, output_loss, softmax_loss
from dofla.integration.recorder import AttentionCall
from dofla.layers import layer_of
from dofla.plans.layers import FeatureLayer

HEAD_DIM, SHARE, SCALING = 4, 2, 0.7

every_loss = pytest.mark.parametrize("name", sorted(LOSSES))
options = {
    "seed": st.integers(0, 2**31 - 1),
    "features": st.sampled_from([[3], [3, 3], [3, 2], [2, 3, 2]]),
    "length": st.integers(1, 6),
    "window": st.sampled_from([0, 0, 1, 2, [2, 0, 1]]),
    "sinks": st.sampled_from([0, 0, 1, [0, 1, 1]]),
    "token_dtype": st.sampled_from(["model", "int8"]),
    "causal": st.booleans(),
    "padding": st.sampled_from(["none", "left", "right", "any"]),
}
quick = settings(max_examples=30, derandomize=True)


def padding_weight(kind, seed, batch, length):
    if kind == "none":
        return None
    weight = torch.ones(batch, length, dtype=torch.int64)
    if kind == "any":
        weight = (torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) > 0.4).long()
        weight[0, length // 2] = 1
    for row in range(batch):
        if kind == "left":
            weight[row, : row * length // 2] = 0
        if kind == "right":
            weight[row, length - row * length // 2 :] = 0
    return weight


def make_call(
    seed, kv_heads, length, *, causal=True, weight=None, batch=2, dtype=torch.float64, spread=1.0, dim=HEAD_DIM
):
    generator = torch.Generator().manual_seed(seed)
    sizes = (kv_heads * SHARE, kv_heads, kv_heads)
    query, key, value = (
        spread * torch.randn(batch, heads, length, dim, generator=generator, dtype=torch.float64) for heads in sizes
    )
    return AttentionCall("a", query.to(dtype), key.to(dtype), value.to(dtype), weight, SCALING, causal)


def make_layer(features, seed=0, dim=HEAD_DIM, window=0, sinks=0, token_dtype="model"):
    """``window`` and ``sinks`` of all heads, or the first of a list for each."""
    window, sinks = (x[: len(features)] if isinstance(x, list) else x for x in (window, sinks))
    options = {"features": features, "window": window, "sinks": sinks, "token_dtype": token_dtype}
    layer = layer_of(FeatureLayer("", len(features), dim, dim, **options)).double()
    layer.reset_parameters(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for feature_map in layer.maps:
            feature_map.log_alpha.normal_(generator=torch.Generator().manual_seed(seed))
    return layer


def all_rows(call):
    return torch.arange(call.query.shape[-2])


def pairs_by_loops(call, layer, rows):
    """(batch, query head, row) → [(teacher's score, student's score) of each visible key], real rows only."""
    length = call.query.shape[-2]
    place = {head: (group, group.heads.index(head)) for group in layer.groups for head in group.heads}
    result = {}
    for b, h, i in itertools.product(range(len(call.query)), range(call.query.shape[1]), rows.tolist()):
        real = [True] * length if call.weight is None else call.weight[b].bool().tolist()
        if not real[i]:
            continue
        kv_head = h // SHARE
        group, m = place[kv_head]
        scores = []
        for j in range(length):
            if not real[j] or (call.causal and j > i):
                continue
            q, k = call.query[b, h, i], call.key[b, kv_head, j]
            exact, k = call.scaling * torch.dot(q, k).item(), rounded(k) if group.int8 else k
            z, alpha = group.map.z[m].detach(), group.map.log_alpha[m].detach().exp()
            root = math.sqrt(call.scaling)
            kernel = sum(
                alpha[f] / len(z) * torch.exp(root * z[f] @ (q + k) - call.scaling * (q @ q + k @ k) / 2)
                for f in range(len(z))
            )
            near = (sum(real[j:i]) if call.causal else abs(i - j)) < group.window  # padding between takes no place
            sink = sum(real[:j]) < group.sinks
            scores.append((exact, call.scaling * torch.dot(q, k).item() if near or sink else kernel.log().item()))
        result[b, h, i] = scores
    return result


def kl_by_loops(scores):
    totals = [sum(math.exp(pair[side]) for pair in scores) for side in (0, 1)]
    shares = [[math.exp(pair[side]) / totals[side] for side in (0, 1)] for pair in scores]
    return sum(p * (math.log(p) - math.log(q)) for p, q in shares)


def squared_errors(scores, heads):
    """Of the kernel: by query head, the sum of squared differences, and that of the teacher's squares."""
    error, square = [0.0] * heads, [0.0] * heads
    for (_, h, _), pairs in scores.items():
        error[h] += sum((math.exp(exact) - math.exp(approximate)) ** 2 for exact, approximate in pairs)
        square[h] += sum(math.exp(exact) ** 2 for exact, _ in pairs)
    return error, square


@quick
@given(**options)
def test_divergences_are_those_of_each_row_and_the_l2_loss_is_the_relative_error_of_the_kernel(
    seed, features, length, causal, padding, **sizes
):
    layer = make_layer(features, seed, **sizes)
    weight = padding_weight(padding, seed, 2, length)
    call = make_call(seed, len(features), length, causal=causal, weight=weight)
    rows, heads = all_rows(call), call.query.shape[1]
    scores = pairs_by_loops(call, layer, rows)
    divergences = {at: kl_by_loops(pairs) for at, pairs in scores.items()}
    some = rows[seed % min(2, length) :: 2]
    for chosen in (rows, some):
        found = attention_kl(call, layer, chosen)
        for n, i in enumerate(chosen.tolist()):
            for b, h in itertools.product(range(2), range(heads)):
                if (b, h, i) in divergences:
                    assert found[b, h, n].item() == pytest.approx(divergences[b, h, i], rel=1e-9, abs=1e-12)
    expected = sum(divergences.values()) / len(divergences)
    assert softmax_loss(call, layer, rows).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)

    error, square = squared_errors(scores, heads)
    found = l2_loss(call, layer, rows).item()
    if min(error) < 1e-20:  # every pair of some head is near
        assert found < -40 / heads
        return
    expected = sum(math.log(e / s) for e, s in zip(error, square, strict=True)) / heads
    assert found == pytest.approx(expected, rel=1e-8, abs=1e-8)


def visible(call, b, i):
    """The keys of the pairs of :func:`pairs_by_loops`."""
    length = call.query.shape[-2]
    return [j for j in range(length) if (call.weight is None or call.weight[b, j]) and (j <= i or not call.causal)]


@quick
@given(**options)
def test_the_output_loss_is_the_relative_squared_error_of_each_heads_output_and_the_divergence(
    seed, features, length, causal, padding, **sizes
):
    layer = make_layer(features, seed, **sizes)
    weight = padding_weight(padding, seed, 2, length)
    call = make_call(seed, len(features), length, causal=causal, weight=weight)
    for rows in (all_rows(call), torch.arange(length)[seed % min(2, length) :: 2]):
        heads = call.query.shape[1]
        error, square, divergences = [0.0] * heads, [0.0] * heads, []
        for (b, h, i), scores in pairs_by_loops(call, layer, rows).items():
            outputs, values = [], call.value[b, h // SHARE]
            for side in (0, 1):
                shares = [math.exp(pair[side]) for pair in scores]
                terms = [share * values[j] for share, j in zip(shares, visible(call, b, i), strict=True)]
                outputs.append(torch.stack(terms).sum(0) / sum(shares))
            error[h] += (outputs[1] - outputs[0]).square().sum().item()
            square[h] += outputs[0].square().sum().item()
            divergences.append(kl_by_loops(scores))
        if not divergences:  # all of these rows are padding
            assert output_loss(call, layer, rows).item() == 0
            continue
        # The divergence is divided by the real rows that a draw of as many is expected to hold, counted in float32.
        real = 2 * length if weight is None else weight.sum().item()
        expected = sum(e / s for e, s in zip(error, square, strict=True)) / heads
        expected += sum(divergences) / (real * heads * len(rows) / length)
        assert output_loss(call, layer, rows).item() == pytest.approx(expected, rel=1e-7, abs=1e-12)


@pytest.mark.parametrize("padding", ["none", "left", "right", "any"])
@pytest.mark.parametrize("causal", [True, False])
def test_the_softmax_loss_of_a_draw_of_rows_is_an_unbiased_estimate(padding, causal):
    layer = make_layer([3, 2], window=1)
    call = make_call(4, 2, 6, causal=causal, weight=padding_weight(padding, 1, 2, 6))
    draws = [softmax_loss(call, layer, torch.tensor(rows)) for rows in itertools.combinations(range(6), 2)]
    torch.testing.assert_close(torch.stack(draws).mean(), softmax_loss(call, layer, all_rows(call)))


@every_loss
@pytest.mark.parametrize(("window", "sinks", "rows"), [(9, 0, None), (0, 9, None), (20, 3, None), (0, 0, [6, 8])])
@pytest.mark.parametrize("causal", [True, False])
def test_a_student_that_is_its_teacher_and_rows_of_padding_have_no_loss_and_no_gradient(
    name, window, sinks, rows, causal
):
    layer = make_layer([3, 2], window=window, sinks=sinks).float()
    weight = torch.tensor([[1] * 6 + [0] * 3] * 2) if rows else padding_weight("left", 0, 2, 9)
    call = make_call(5, 2, 9, causal=causal, weight=weight, dtype=torch.float32)
    loss = LOSSES[name](call, layer, torch.tensor(rows) if rows else all_rows(call))
    assert torch.isfinite(loss)
    if name == "softmax":
        assert loss.item() == 0
    loss.backward()
    assert all((parameter.grad == 0).all() for parameter in layer.parameters())


@every_loss
@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_of_real_length_give_finite_losses_and_gradients(name, window, dtype):
    layer = make_layer([32, 16], dim=64, window=window, sinks=window // 2).float()
    call = make_call(9, 2, 40, dtype=torch.float64, dim=64)
    lengths = torch.linspace(100, 140, 40).double().div(SCALING).sqrt()[:, None]
    query, key = (torch.nn.functional.normalize(x, dim=-1) * lengths for x in (call.query, call.key))
    call = AttentionCall("a", query.to(dtype), key.to(dtype), call.value.to(dtype), None, SCALING, True)
    loss = LOSSES[name](call, layer, all_rows(call))
    assert loss.dtype == torch.float32
    assert torch.isfinite(loss)
    loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in layer.parameters())
    # The squared error of a kernel that is missed by many orders of magnitude hardly depends on the features.
    if name == "softmax":
        assert all(parameter.grad.abs().max() > 0 for parameter in layer.parameters())


@every_loss
def test_gradients_are_those_of_finite_differences(name):
    layer = make_layer([3, 2], window=1)
    call = make_call(10, 2, 5, weight=padding_weight("right", 0, 2, 5))
    parameters = list(layer.parameters())
    assert torch.autograd.gradcheck(lambda *_: LOSSES[name](call, layer, all_rows(call)), parameters)
