"""What eviction in each KV head costs the model, and head budgets that are measured by it."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from sizes import size_of

import dofla
from dofla.compression.calibrate import COPY_WEIGHT, _Costs, _repeated
from dofla.compression.head_budgets import LEAST
from dofla.compression.plan import compressed_plan
from dofla.compression.target import Target
from dofla.distillation.objective import Objective
from dofla.errors import DoflaError
from dofla.integration.converted import Converted
from dofla.integration.interface import dofla_attention, softmax_attention, visiting
from dofla.integration.placement import placed_over
from dofla.integration.surgery import convert


def windows(tiny, count=3, length=96):
    return dofla.TokenWindows.of(tiny.tokens(count, length))


@contextmanager
def moved(model, name, head, by):
    """Within the block a KV head of a layer answers ``by`` of the way from what it would to what softmax attention
    does."""
    module = model.get_submodule(name)

    def attention(asked, query, key, *args, **kwargs):
        out, _ = dofla_attention(asked, query, key, *args, **kwargs)
        if asked is module:
            smooth, _ = softmax_attention(asked, query, key, *args, **kwargs)
            share = query.shape[1] // key.shape[1]
            own = slice(head * share, (head + 1) * share)
            out = out.clone()
            out[:, :, own] += by * (smooth - out)[:, :, own]
        return out, None

    with visiting(model, None, attention):
        yield


def test_costs_are_slopes_of_the_loss(tiny):
    # Of the last layer, whose gradient passes through no other attention: that of softmax stands in for it.
    model = tiny.llama(num_hidden_layers=3).double()
    tokens, name, kept = windows(tiny), "model.layers.2.self_attn", ["model.layers.0.self_attn"]
    found = dofla.calibrate(model, tokens, keep_softmax=kept, context=96)
    assert name in found.costs
    assert not found.costs.keys() & set(kept)
    convert(model, compressed_plan(Target.of(model, 96, kept), size_of(model, 64, kept)))
    found.apply(Converted.of(model).layers)
    loss = Objective(model, lambda: dofla.original(model))
    texts = [list(placed_over(x, 3, 96)) for x in (tokens, _repeated(tokens, 48))]
    step = 1e-3
    for head, cost in enumerate(found.costs[name]):
        slope = 0.0
        for (batch,), weight in zip(texts, (1, COPY_WEIGHT), strict=True):
            ends = []
            with torch.no_grad():
                for by in (-step, step):
                    with moved(model, name, head, by):
                        ends.append(loss(batch, loss.count(batch), len(batch["input_ids"])).item())
            slope += weight * (ends[1] - ends[0]) / (2 * step)
        # The loss is computed from logits in float32; third derivatives are of the size of the effect.
        rounding = torch.finfo(torch.float32).eps * 4 / step
        assert cost == pytest.approx(-slope, rel=1e-3, abs=rounding)


def test_some_of_the_text_is_read_twice(tiny):
    tokens = windows(tiny, 4, 7)
    first, second = tokens.input_ids[:2]
    for most, whole in ((3, [first[:3], second[:3]]), (7, [first, second]), (13, [first, second])):
        expected = torch.stack([torch.cat([x, x]) for x in whole])
        assert torch.equal(_repeated(tokens, most).input_ids, expected)
    both = torch.cat([first, second])
    for most in (14, 15, 4096):  # as many side by side as there are
        assert torch.equal(_repeated(tokens, most).input_ids, torch.cat([both, both])[None])
    padded = dofla.TokenWindows.of(tiny.padded(4, 8, side="right"))
    assert torch.equal(_repeated(padded, 4).attention_mask, padded.attention_mask[:2, [0, 1, 2, 3] * 2])
    assert _repeated(windows(tiny, 1, 1), 1).input_ids.shape == (1, 2)


def test_repeated_text_stands_no_further_back_than_positions_go(tiny, monkeypatch):
    seen, real = [], _repeated
    monkeypatch.setattr("dofla.compression.calibrate._repeated", lambda *args: seen.append(real(*args)) or seen[-1])
    model = tiny.llama(max_position_embeddings=120)
    for context in (None, 100):
        dofla.calibrate(model, windows(tiny), context=context)
    assert [x.input_ids.shape[1] for x in seen] == [120, 100]


@pytest.mark.parametrize("batch_size", [1, 2])
def test_windows_are_read_one_by_one_or_together(tiny, batch_size):
    model, tokens, seen = tiny.llama().double(), windows(tiny), []
    found = dofla.calibrate(model, tokens, batch_size=batch_size, progress=lambda *report: seen.append(report))
    whole = dofla.calibrate(model, tokens, batch_size=3)
    for name, costs in found.costs.items():
        assert costs == pytest.approx(whole.costs[name], rel=1e-3, abs=1e-6)
    batches = -(-3 // batch_size)
    passes = batches + 1  # a third of the text repeated: a single batch of it, so nothing is held out
    directions = [("directions", n, batches) for n in range(1, batches + 1)]
    assert seen == directions + [("head budgets", n, passes) for n in range(1, passes + 1)]
    assert not hasattr(model, "_dofla_softmax_implementation")
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("head_budgets", ["measured", "even"])
def test_every_pass_is_reported(tiny, head_budgets):
    seen = []
    options = {"head_budgets": head_budgets, "progress": lambda *report: seen.append(report)}
    dofla.compress(tiny.llama(), windows(tiny, 6), **options)
    stages = list(dict.fromkeys(stage for stage, _, _ in seen))
    assert stages == (["directions", "head budgets"] if head_budgets == "measured" else ["directions"])
    for stage in stages:
        reports = [(done, total) for name, done, total in seen if name == stage]
        assert reports == [(n, len(reports)) for n in range(1, len(reports) + 1)]


def test_padding_plays_no_part(tiny, monkeypatch):
    monkeypatch.setattr("dofla.compression.calibrate.COPY_WEIGHT", 0.0)  # half of a longer window is another half
    model = tiny.llama().double()
    batch = tiny.padded(3, 96, side="right")
    longer = {name: torch.nn.functional.pad(x, (0, 8)) for name, x in batch.items()}
    one, two = (dofla.calibrate(model, x, context=x["input_ids"].shape[1]) for x in (batch, longer))
    for name, costs in one.costs.items():
        assert costs == pytest.approx(two.costs[name], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("losses", [(0.2, 0.1), (0.1, 0.2)])
def test_even_budgets_are_kept_where_they_are_better_on_held_out_windows(tiny, losses, monkeypatch, caplog):
    model, (measured, even), tokens = tiny.llama(), losses, windows(tiny, 6)

    def loss(self, compressed, halves, report):
        return sum((measured if "head_budgets" in compressed.plan.made_by else even) for _ in halves)

    monkeypatch.setattr(_Costs, "_loss", loss)
    found = dofla.calibrate(model, tokens, context=96)
    held_out = found.made_by["held_out"]
    assert held_out == pytest.approx({"measured": measured, "even": even})
    assert (found.shares == {name: [1.0, 1.0] for name in found.costs}) == (even < measured)
    assert ("even budgets are kept" in caplog.text) == (even < measured)
    assert f"{'even' if even < measured else 'measured'} budgets are kept" in str(found)
    plan = Converted.of(dofla.compress(model, size="3KB", calibration=found, context=96)).plan
    assert plan.made_by["held_out"] == held_out


def test_budgets_are_tried_on_windows_that_they_were_not_measured_on(tiny, monkeypatch):
    tokens, tried = windows(tiny, 6), {}

    def first(half):
        """Whether the half has the first window."""
        return any((tokens.input_ids[0] == row).all() for batch in half[0] for row in batch["input_ids"])

    def costs(self, compressed, half, report):
        own = torch.tensor([8.0, 1.0] if first(half) else [1.0, 8.0], dtype=torch.float64)
        return dict.fromkeys(compressed.layers, own)

    def loss(self, compressed, halves, report):
        if "head_budgets" in compressed.plan.made_by:
            (half,) = halves
            tried[first(half)] = compressed.plan.made_by["head_budgets"]
        return 0.0

    monkeypatch.setattr(_Costs, "_costs", costs)
    monkeypatch.setattr(_Costs, "_loss", loss)
    found = dofla.calibrate(tiny.llama(), tokens, context=96)
    assert sorted(tried) == [False, True]
    assert all(one < other for one, other in tried[True].values())  # what the other half wants
    assert all(one > other for one, other in tried[False].values())
    assert all(one == other for one, other in found.shares.values())


def test_small_sizes_leave_every_head_tokens_of_each_kind(tiny):
    model, tokens = tiny.llama(), windows(tiny)
    found = dofla.calibrate(model, tokens)
    assert min(map(min, found.shares.values())) >= LEAST - 1e-9
    for size in (1000, 2000):
        plan = Converted.of(dofla.compress(model, size=size, calibration=found)).plan
        assert plan.state_bytes(model.dtype) <= size
        dofla.restore(model)


def test_refusals(tiny):
    model, tokens = tiny.llama(), windows(tiny)
    with pytest.raises(DoflaError, match="head_budgets is 'odd': choose one of measured, even"):
        dofla.calibrate(model, tokens, head_budgets="odd")
    with torch.inference_mode():
        inference = tiny.llama()
    with pytest.raises(DoflaError, match=r"made within torch.inference_mode\(\).*head_budgets='even'"):
        dofla.calibrate(inference, tokens)
    assert dofla.calibrate(inference, tokens, head_budgets="even").shares == {}
