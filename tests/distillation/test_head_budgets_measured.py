"""What the forgetting of each KV head does to the model."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from dofla.distillation.compressor import COPY_WEIGHT, Compressor, _repeated
from dofla.integration.compressed import compressed_plan
from dofla.integration.directions import measure_directions
from dofla.plans.head_budgets import HeadBudgets
from sizes import compress, measure_head_budgets

import dofla
from dofla.distillation.objective import Objective
from dofla.errors import DoflaError
from dofla.integration.interface import linear_attention, softmax_attention, visiting
from dofla.integration.placement import placed_over
from dofla.integration.student import Student
from dofla.plans.hybrid import HeadCost

BUDGET = 16
MOST = BUDGET * HeadCost.of(8, 8, 4).feature * 4
"""Bytes of two layers of two KV heads."""


def windows(tiny, count=3, length=96):
    return dofla.TokenWindows.of(tiny.tokens(count, length))


@contextmanager
def moved(student, layer, head, by):
    """Within the block a KV head of ``layer`` answers ``by`` of the way from what it would to what softmax attention
    does."""
    module = student.get_submodule(layer.name)

    def attention(asked, query, key, *args, **kwargs):
        out, _ = linear_attention(asked, query, key, *args, **kwargs)
        if asked is module:
            smooth, _ = softmax_attention(asked, query, key, *args, **kwargs)
            share = query.shape[1] // key.shape[1]
            own = slice(head * share, (head + 1) * share)
            out = out.clone()
            out[:, :, own] += by * (smooth - out)[:, :, own]
        return out, None

    with visiting(student, None, attention):
        yield


@pytest.mark.parametrize("place", [1, 2])
def test_costs_are_slopes_of_the_loss_of_the_student(tiny, place):
    # Of the last layer, whose gradient passes through no other attention: that of softmax stands in for it.
    model = tiny.llama(num_hidden_layers=3).double()
    tokens, name = windows(tiny), "model.layers.2.self_attn"
    kept = ["model.layers.0.self_attn"] if place == 1 else []
    found = measure_head_budgets(model, tokens, BUDGET, keep_softmax=kept, context=96)
    assert name in found.costs
    assert not found.costs.keys() & set(kept)
    student = dofla.linearize(model, compressed_plan(model, BUDGET, keep_softmax=kept))
    measure_directions(Student.of(student), tokens, context=96)
    layer, loss = Student.of(student).layers[name], Objective(student, lambda: dofla.softmax(student))
    texts = [placed_over(tokens, 3, 96), placed_over(_repeated(tokens, 48), 3, 96)]
    texts, step = [list(x) for x in texts], 1e-3
    for head, cost in enumerate(found.costs[name]):
        slope = 0.0
        for (batch,), weight in zip(texts, (1, COPY_WEIGHT), strict=True):
            ends = []
            with torch.no_grad():
                for by in (-step, step):
                    with moved(student, layer, head, by):
                        ends.append(loss(batch, loss.count(batch), len(batch["input_ids"])).item())
            slope += weight * (ends[1] - ends[0]) / (2 * step)
        # The loss is reckoned from logits in float32; third derivatives are of the size of the effect.
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


def test_text_that_stands_twice_stands_no_further_back_than_positions_go(tiny, monkeypatch):
    seen, real = [], _repeated
    monkeypatch.setattr("dofla.distillation.compressor._repeated", lambda *args: seen.append(real(*args)) or seen[-1])
    model = tiny.llama(max_position_embeddings=120)
    for context in (None, 100):
        measure_head_budgets(model, windows(tiny), BUDGET, context=context)
    assert [x.input_ids.shape[1] for x in seen] == [120, 100]


@pytest.mark.parametrize("batch_size", [1, 2])
def test_windows_are_read_one_by_one_or_together(tiny, batch_size):
    model, tokens, seen = tiny.llama().double(), windows(tiny), []
    found = measure_head_budgets(
        model, tokens, BUDGET, batch_size=batch_size, progress=lambda *report: seen.append(report)
    )
    whole = measure_head_budgets(model, tokens, BUDGET, batch_size=3)
    for name, costs in found.costs.items():
        assert costs == pytest.approx(whole.costs[name], rel=1e-3, abs=1e-6)
    passes = -(-3 // batch_size) + 1  # a third of the text twice: a single batch of it, so nothing is held out
    batches = -(-3 // batch_size)
    directions = [("directions", n, batches) for n in range(1, batches + 1)]
    assert seen == directions + [("head budgets", n, passes) for n in range(1, passes + 1)]
    assert not hasattr(model, "_dofla_softmax_implementation")
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("head_budgets", ["measured", "even"])
def test_every_pass_is_reported(tiny, head_budgets):
    seen = []
    options = {"budget": BUDGET, "head_budgets": head_budgets, "progress": lambda *report: seen.append(report)}
    compress(tiny.llama(), windows(tiny), **options)
    stages = list(dict.fromkeys(stage for stage, _, _ in seen))
    assert stages == (["directions", "head budgets"] if head_budgets == "measured" else ["directions"])
    for stage in stages:
        reports = [(done, total) for name, done, total in seen if name == stage]
        assert reports == [(n, len(reports)) for n in range(1, len(reports) + 1)]


def test_padding_plays_no_part(tiny, monkeypatch):
    monkeypatch.setattr("dofla.distillation.compressor.COPY_WEIGHT", 0.0)  # half of a longer window is another half
    model = tiny.llama().double()
    batch = tiny.padded(3, 96, side="right")
    longer = {name: torch.nn.functional.pad(x, (0, 8)) for name, x in batch.items()}
    one, two = (measure_head_budgets(model, x, BUDGET, context=x["input_ids"].shape[1]) for x in (batch, longer))
    for name, costs in one.costs.items():
        assert costs == pytest.approx(two.costs[name], rel=1e-3, abs=1e-6)


def test_a_student_spends_its_bytes_as_measured(tiny):
    model, tokens = tiny.llama(), windows(tiny)
    head_budgets = HeadBudgets({"model.layers.0.self_attn": [0.5, 0.5], "model.layers.1.self_attn": [0.5, 2.5]})
    plan = Student.of(compress(model, tokens, budget=BUDGET, head_budgets=head_budgets)).plan
    small, large = (compressed_plan(tiny.llama(), budget).layers[0].state_bytes(4) // 2 for budget in (8, 40))
    assert [x.state_bytes(4) for x in plan.layers] == [2 * small, small + large]
    assert plan.layers[0] == compressed_plan(tiny.llama(), 8).layers[0]  # one number for all where heads are alike
    assert plan.state_bytes(model.dtype) <= MOST
    assert plan.made_by == {"strategy": "compressed", "size": MOST, "head_budgets": head_budgets.layers}


def test_no_head_gets_places_for_more_tokens_than_there_are_positions(tiny):
    model, tokens = tiny.llama(), windows(tiny)
    head_budgets = HeadBudgets({"model.layers.0.self_attn": [0.5, 0.5], "model.layers.1.self_attn": [0.5, 2.5]})

    def places(plan):
        heads = [own for layer in plan.layers for own in zip(layer.sizes, layer.coded_per_head, strict=True)]
        return [window + sinks + sum(count for count, _ in tiers) for (_, window, sinks), tiers in heads]

    for positions in (128, 160):
        plan = Student.of(compress(model, tokens, budget=2 * BUDGET, head_budgets=head_budgets, context=positions)).plan
        *others, most = places(plan)
        assert most == positions == plan.context
        assert max(others) == min(others) < most
        assert 0.95 * 2 * MOST < plan.state_bytes(model.dtype) <= 2 * MOST
        dofla.restore(model)
    even = compressed_plan(model, 2.5 * BUDGET, context=96)  # enough for all, with bytes to spare
    assert compressed_plan(model, 2.5 * BUDGET, head_budgets=head_budgets, context=96).layers == even.layers
    assert places(even) == [96] * 4
    assert 0.98 * 2.5 * MOST < even.state_bytes(model.dtype) <= 2.5 * MOST
    with pytest.raises(DoflaError, match="size 0 bytes is too small"):
        compressed_plan(model, 0, head_budgets=head_budgets)


def test_by_default_it_measures(tiny):
    model, tokens = tiny.llama(), windows(tiny)
    plan, found = Student.of(compress(model, tokens, budget=BUDGET)).plan, model(tokens.input_ids).logits
    head_budgets = measure_head_budgets(dofla.restore(model), tokens, BUDGET)
    assert plan == compressed_plan(model, BUDGET, head_budgets=head_budgets)
    assert torch.equal(
        found, compress(model, tokens, budget=BUDGET, head_budgets=head_budgets)(tokens.input_ids).logits
    )
    assert plan.state_bytes(model.dtype) <= MOST


def test_refusals(tiny):
    model, tokens = tiny.llama(), windows(tiny)
    with pytest.raises(DoflaError, match="head_budgets is 'odd': give measured, even, or the result"):
        compress(model, tokens, head_budgets="odd")
    with pytest.raises(
        DoflaError, match=r"too small for measured head budgets, .*: give \d+ bytes .* or more, or head_budgets='even'"
    ):
        measure_head_budgets(tiny.llama(head_dim=32), tokens, 3)


def test_small_budgets_leave_every_head_tokens_of_each_kind(tiny):
    model, tokens = tiny.llama(), windows(tiny)
    for budget in (8, 16):
        plan = Student.of(compress(model, tokens, budget=budget)).plan
        assert plan.state_bytes(model.dtype) <= MOST * budget // BUDGET
        dofla.restore(model)


def test_a_memory_that_would_hold_the_windows_is_not_what_shares_are_measured_with(tiny):
    model, tokens = tiny.llama(max_position_embeddings=1024), windows(tiny, 1, 256)
    held = [compressed_plan(model, budget).layers[0] for budget in (16, 64)]
    held = [layer.window + layer.sinks + layer.tiers[0][0] + layer.heavy_hitters for layer in held]
    assert held[0] < 64 < held[1]
    small, large = (measure_head_budgets(model, tokens, budget) for budget in (16, 64))
    assert small.made_by["size"] == MOST
    assert large.made_by["size"] == 64 * 64 // held[1] * MOST // BUDGET
    assert Student.of(compress(model, tokens, tokens=128)).plan.made_by == {
        "strategy": "compressed",
        "size": 4 * MOST,
        "head_budgets": large.layers,
    }


@pytest.mark.parametrize("losses", [(0.2, 0.1), (0.1, 0.2)])
def test_even_shares_are_kept_where_they_are_better_on_held_out_windows(tiny, losses, monkeypatch, caplog):
    model, (measured, even) = tiny.llama(), losses
    tokens = windows(tiny, 6)

    def loss(self, student, halves, report):
        return sum((even if "head_budgets" not in Student.of(student).plan.made_by else measured) for _ in halves)

    monkeypatch.setattr(Compressor, "_loss", loss)
    head_budgets = measure_head_budgets(model, tokens, BUDGET, context=96)
    held_out = head_budgets.made_by["held_out"]
    assert held_out == pytest.approx({"measured": measured, "even": even})
    assert (head_budgets.layers == {name: [1.0, 1.0] for name in head_budgets.costs}) == (even < measured)
    assert ("even budgets are kept" in caplog.text) == (even < measured)
    assert f"{'even' if even < measured else 'measured'} budgets are kept" in str(head_budgets)
    again = compress(model, tokens, budget=BUDGET, head_budgets=head_budgets, context=96)
    assert Student.of(again).plan.made_by["held_out"] == held_out


def test_shares_are_tried_on_windows_that_they_were_not_measured_on(tiny, monkeypatch):
    tokens, tried = windows(tiny, 6), {}

    def first(half):
        """Whether the half has the first window."""
        return any((tokens.input_ids[0] == row).all() for batch in half[0] for row in batch["input_ids"])

    def costs(self, student, half, report):
        own = torch.tensor([8.0, 1.0] if first(half) else [1.0, 8.0], dtype=torch.float64)
        return dict.fromkeys(student.layers, own)

    def held_out(self, budget, layers, half, report):
        tried[first(half)] = layers
        return 0.0

    monkeypatch.setattr(Compressor, "_costs", costs)
    monkeypatch.setattr(Compressor, "_held_out", held_out)
    head_budgets = measure_head_budgets(tiny.llama(), tokens, BUDGET, context=96)
    assert sorted(tried) == [False, True]
    assert all(one < other for one, other in tried[True].values())  # what the other half wants
    assert all(one > other for one, other in tried[False].values())
    assert head_budgets.made_by["held_out"]["even"] > 0
    assert all(one == other for one, other in head_budgets.layers.values())
