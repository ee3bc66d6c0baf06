"""The error of eviction in each KV head, and head budgets that are measured by it."""

import math

import pytest
import torch
from sizes import size_of
from tiny_families import teacher, tokens

import dofla
from dofla.compression import calibrate
from dofla.compression.eviction_error import BLOCKS, EVERY, FRACTIONS, SINKS, WINDOW, EvictionErrors, streams
from dofla.compression.head_budgets import LEAST_OF_ALL
from dofla.distillation import objective
from dofla.distillation.objective import Objective
from dofla.errors import DoflaError
from dofla.integration.converted import Converted
from dofla.integration.recorder import recording, run_body
from dofla.integration.sites import attention_sites


def windows(tiny, count=3, length=96):
    return dofla.TokenWindows.of(tiny.tokens(count, length))


def naive_errors(call, length):
    """Σ δ δᵀ by KV head of the first ``length`` tokens of one row, query by query."""
    attention = call.log_weights().exp().double()[0].unflatten(0, (call.key.shape[1], -1))[..., :length, :length]
    value, (heads, _, _, _) = call.value[0].double(), attention.shape
    found = torch.zeros(heads, value.shape[-1], value.shape[-1], dtype=torch.float64)
    asked = {row for first in range(0, length, length // BLOCKS) for row in range(first + 2, first - 1, -EVERY)}
    for head in range(heads):
        for part in FRACTIONS:
            count, kept = math.floor(part * length), set()
            for row in sorted(asked):
                first = row // (length // BLOCKS) * (length // BLOCKS)
                if first < count:
                    continue
                score = attention[head, :, [r for r in asked if r < first]].sum((0, 1))[:first]
                score[:SINKS] = score[first - round(WINDOW * count) :] = math.inf
                kept = {*score.topk(count).indices.tolist(), *range(first, row + 1)}
                for weights in attention[head, :, row]:
                    own = torch.zeros_like(weights).index_fill(0, torch.tensor(sorted(kept)), 1.0) * weights
                    error = (own / own.sum() - weights) @ value[head, :length]
                    found[head] += torch.outer(error, error) / (length - count)
    return found


@pytest.mark.parametrize("padding", [0, 24])
def test_errors_are_those_of_answers_without_the_evicted(tiny, padding):
    model, length = tiny.llama().double(), 96
    batch = {"input_ids": tiny.tokens(1, length + padding)}
    if padding:  # at the end, where it plays no part but for the sizes of caches and blocks
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    calls, found = [], EvictionErrors()
    with torch.no_grad(), recording(model, ["model.layers.1.self_attn"], calls.append):
        run_body(model, {name: x[:, :length] for name, x in batch.items()})
    for call in calls:
        found(call)
    torch.testing.assert_close(found.errors["model.layers.1.self_attn"], naive_errors(calls[0], length))
    twice = EvictionErrors()
    for call in 2 * calls:
        twice(call)
    torch.testing.assert_close(*(x.errors["model.layers.1.self_attn"] * n for x, n in ((twice, 1), (found, 2))))


def test_padding_adds_no_error(tiny):
    model, seen = tiny.llama().double(), []
    batch = {"input_ids": tiny.tokens(2, 96), "attention_mask": torch.ones(2, 96, dtype=torch.int64)}
    batch["attention_mask"][1] = 0
    batch["attention_mask"][1, :2] = 1  # too few to evict any
    with torch.no_grad(), recording(model, ["model.layers.0.self_attn"], seen.append):
        run_body(model, batch)
        run_body(model, {"input_ids": batch["input_ids"][:1]})
    both, one = EvictionErrors(), EvictionErrors()
    both(seen[0])
    one(seen[1])
    torch.testing.assert_close(*(x.errors["model.layers.0.self_attn"] for x in (both, one)))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma3"])
def test_errors_count_relative_to_the_residual_stream(family):
    model, batch = teacher(family), {"input_ids": tokens(2, 48)}
    names, seen = list(attention_sites(model)), {}
    for name in names:
        layer = model.get_submodule(name.rpartition(".")[0])
        layer.register_forward_hook(
            lambda _, x, out, name=name: seen.update({name: out[0] if isinstance(out, tuple) else out})
        )
    with torch.no_grad(), streams(model, names) as found:
        run_body(model, batch)
        run_body(model, batch)
    for name, stream in found.items():
        size = seen[name].square().sum(-1).median().item()
        assert stream.square == pytest.approx(2 * size)
        assert stream.batches == 2
        if family == "gemma3":  # another norm stands between attention and the stream
            assert stream.after != pytest.approx(stream.before, rel=0.01)
        else:
            assert stream.weight == pytest.approx(1 / size)
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    assert hooks == len(names)  # those of this test


def test_where_nothing_is_evicted_nothing_costs(tiny):
    found = dofla.calibrate(tiny.llama(), windows(tiny, 2, 3))  # twelve tokens, read twice in a row
    assert all(cost == 0 for own in found.costs.values() for cost in own)
    assert len({*found.made_by["held_out"].values()}) == 1


def test_every_pass_is_reported(tiny, tokenizer):
    model, seen = tiny.llama(vocab_size=2048), []
    found = dofla.calibrate(model, windows(tiny, 8), tokenizer=tokenizer, progress=lambda *x: seen.append(x))
    stages = [stage for stage, _, _ in seen]  # after each layer of each window, or after each window
    later = 7 * ["head budgets"] + 9 * ["importance"] + 2 * ["retrieval heads"]
    assert stages == 16 * ["directions"] + ["copies"] + later
    assert [0] < [x[1] for x in seen] == sorted({x[1] for x in seen})
    assert {x[2] for x in seen} == {seen[-1][1]}
    assert not hasattr(model, "_dofla_softmax_implementation")
    together = dofla.calibrate(model, windows(tiny, 8), batch_size=8)
    assert "held_out" in found.made_by
    assert "held_out" not in together.made_by  # a single batch
    seen.clear()
    dofla.calibrate(model, windows(tiny, 8), head_budgets="even", progress=lambda *x: seen.append(x))
    assert {x[0] for x in seen} == {"directions", "importance"}


@pytest.mark.parametrize("losses", [(0.2, 0.1, 0.3), (0.1, 0.2, 0.3), (0.3, 0.2, 0.1), (0.1, 0.1, 0.1)])
def test_the_head_budgets_that_are_best_on_held_out_windows_are_kept(tiny, losses, monkeypatch, caplog):
    model, read = tiny.llama(), []
    shares = {"even": [1.0, 1.0], "eviction": [1.25, 0.75], "reading": [1.5, 0.5]}
    wanted = dict(zip(shares, losses, strict=True))

    def loss(self, batch, tokens, rows, theirs):
        read.append(batch["input_ids"])
        own, *_ = self.student.config.quantization_config.plan.made_by["head_budgets"].values()
        return torch.tensor(next(wanted[way] for way, x in shares.items() if x == own))

    monkeypatch.setattr(Objective, "__call__", loss)
    monkeypatch.setattr(calibrate, "HELD_OUT_TOKENS", 64)
    monkeypatch.setattr(calibrate, "divide", lambda sizes, costs: dict.fromkeys(costs, shares["eviction"]))
    monkeypatch.setattr(calibrate, "with_reading", lambda sizes, own, _: dict.fromkeys(own, shares["reading"]))
    text = windows(tiny, 6)
    found = dofla.calibrate(model, text, context=96)
    assert all(torch.equal(ids, text.input_ids[1:2, :64]) for ids in read)
    held_out, best = found.made_by["held_out"], min(losses)
    assert held_out == pytest.approx(wanted)
    kept = [way for way, loss in wanted.items() if loss == best][-1]
    assert found.shares == dict.fromkeys(found.costs, shares[kept])
    assert ("even (kept)" in caplog.text) == (kept == "even")
    assert f"{best} {kept} (kept)" in str(found)
    plan = Converted.of(dofla.compress(model, size="3KB", calibration=found, context=96)).plan
    assert plan.made_by["held_out"] == held_out


def test_the_original_is_read_once_for_all_head_budgets_unless_its_head_is_more_than_a_layer(tiny, monkeypatch):
    read, calls, text = Objective.read_teacher, [], windows(tiny, 6)
    monkeypatch.setattr(Objective, "read_teacher", lambda self, batch: calls.append(batch) or read(self, batch))
    found = dofla.calibrate(tiny.llama(), text, context=96)
    assert len(calls) == 1
    monkeypatch.setattr(objective, "_head_stands_apart", lambda _: False)
    again = dofla.calibrate(tiny.llama(), text, context=96)
    assert len(calls) == 1 + 3
    assert again.made_by["held_out"] == pytest.approx(found.made_by["held_out"], rel=1e-3)


def test_errors_are_not_measured_on_what_is_held_out(tiny):
    text = tiny.tokens(6, 96)
    other = torch.cat([text[:1], tiny.tokens(1, 96, seed=5), text[2:]])
    costs = [dofla.calibrate(tiny.llama(), x, context=96).costs for x in (text, other, text.flip(0))]
    for name, own in costs[0].items():
        assert own == pytest.approx(costs[1][name], rel=0.05)  # the stream's size is of all
        assert own != pytest.approx(costs[2][name], rel=1e-3)


def test_small_sizes_leave_every_head_tokens_of_each_kind(tiny):
    model, tokens = tiny.llama(), windows(tiny)
    found = dofla.calibrate(model, tokens)
    assert min(map(min, found.shares.values())) >= LEAST_OF_ALL - 1e-9
    for size in (1000, 2000):
        plan = Converted.of(dofla.compress(model, size=size, calibration=found)).plan
        assert plan.state_bytes(model.dtype) <= size
        dofla.restore(model)


def test_no_gradients_are_needed(tiny):
    with torch.inference_mode():
        model = tiny.llama()
    assert dofla.calibrate(model, windows(tiny)).shares
    dofla.compress(model, windows(tiny), size_of(model, 40))
    with pytest.raises(DoflaError, match="unknown head_budgets 'odd': choose one of measured, even"):
        dofla.calibrate(dofla.restore(model), windows(tiny), head_budgets="odd")
