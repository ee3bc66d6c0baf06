"""What more or fewer bytes of a memory that fades do to the model."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import dofla
from dofla.distillation.fading import STEPS, _resized
from dofla.distillation.objective import Objective
from dofla.errors import DoflaError
from dofla.integration.fading import fading_plan, measure_directions
from dofla.integration.interface import RECORDING, linear_attention, visiting
from dofla.integration.sites import attention_implementation
from dofla.integration.surgery import linear_layers, plan_of
from dofla.plans.hybrid import HeadCost
from dofla.plans.shares import FACTORS, Shares

BUDGET = 16
MOST = BUDGET * HeadCost.of(8, 8, 4).feature * 4
"""Bytes of two layers of two KV heads."""


def windows(tiny, count=3, length=96):
    return dofla.TokenWindows.of(tiny.tokens(count, length))


@contextmanager
def moved(student, layer, other, by):
    """Within the block ``layer`` answers ``by`` of the way from what it would towards what ``other`` does."""
    module = student.get_submodule(layer.name)

    def attention(asked, *args, **kwargs):
        out, _ = linear_attention(asked, *args, **kwargs)
        if asked is module:
            module.dofla = other
            out = out + by * (linear_attention(asked, *args, **kwargs)[0] - out)
            module.dofla = layer
        return out, None

    with attention_implementation(student, RECORDING), visiting(None, attention):
        yield


@pytest.mark.parametrize("place", [1, 2])
def test_effects_are_slopes_of_the_loss_of_the_student(tiny, place, monkeypatch):
    monkeypatch.setattr("dofla.distillation.fading.STEPS", 1)  # whose effects are those of an even split
    # Of the last layer, whose gradient passes through no other attention: that of softmax stands in for it.
    model = tiny.llama(num_hidden_layers=3).double()
    tokens, name = windows(tiny), "model.layers.2.self_attn"
    kept = ["model.layers.0.self_attn"] if place == 1 else []
    found = dofla.measure_shares(model, tokens, BUDGET, keep_softmax=kept, reach=96)
    assert found.effects[name][0] == 0
    student = dofla.linearize(model, fading_plan(model, BUDGET, keep_softmax=kept))
    measure_directions(student, tokens, reach=96)
    layer = linear_layers(student)[name]
    loss, batch = Objective(student, lambda: dofla.softmax(student)), tokens.batch(range(len(tokens)))
    step = 1e-3
    for factor, effect in list(zip(FACTORS, found.effects[name], strict=True))[1:]:
        other = _resized(layer, fading_plan(model, int(factor * BUDGET))[name])  # layers get whole features' worth
        ends = []
        with torch.no_grad():
            for by in (-step, step):
                with moved(student, layer, other, by):
                    ends.append(loss(batch, loss.count(batch), len(tokens)))
        # The loss is reckoned from logits in float32; third derivatives are of the size of the effect.
        rounding = torch.finfo(torch.float32).eps * 4 / step
        assert effect == pytest.approx(((ends[1] - ends[0]) / (2 * step)).item(), rel=1e-3, abs=rounding)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_windows_are_read_one_by_one_or_together(tiny, batch_size):
    model, tokens, seen = tiny.llama().double(), windows(tiny), []
    found = dofla.measure_shares(
        model, tokens, BUDGET, batch_size=batch_size, progress=lambda *report: seen.append(report)
    )
    whole = dofla.measure_shares(model, tokens, BUDGET, batch_size=3)
    for name, effects in found.effects.items():
        assert effects == pytest.approx(whole.effects[name], rel=1e-3, abs=1e-6)
    assert seen[-1] == ("passes", *(STEPS * -(-3 // batch_size),) * 2)
    assert not hasattr(model, "_dofla_softmax_implementation")
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_padding_plays_no_part(tiny):
    model = tiny.llama().double()
    batch = tiny.padded(3, 96, side="right")
    longer = {name: torch.nn.functional.pad(x, (0, 8)) for name, x in batch.items()}
    one, two = (dofla.measure_shares(model, x, BUDGET, reach=x["input_ids"].shape[1]) for x in (batch, longer))
    for name, effects in one.effects.items():
        assert effects == pytest.approx(two.effects[name], rel=1e-3, abs=1e-6)


def test_a_student_spends_its_bytes_as_measured(tiny):
    model, tokens = tiny.llama(), windows(tiny)
    shares = Shares({"model.layers.0.self_attn": 0.5, "model.layers.1.self_attn": 1.5})
    plan = plan_of(dofla.fade(model, tokens, budget=BUDGET, shares=shares))
    alone = [fading_plan(tiny.llama(), budget).layers[0] for budget in (8, 24)]
    assert [x.state_bytes(4) for x in plan.layers] == [x.state_bytes(4) for x in alone]
    assert plan.state_bytes(model.dtype) <= MOST
    assert plan.made_by == {"strategy": "fading", "budget": BUDGET, "shares": shares.layers}


def test_by_default_it_measures(tiny):
    model, tokens = tiny.llama(), windows(tiny)
    plan, found = plan_of(dofla.fade(model, tokens, budget=BUDGET)), model(tokens.input_ids).logits
    shares = dofla.measure_shares(dofla.restore(model), tokens, BUDGET)
    assert plan == fading_plan(model, BUDGET, shares=shares)
    # Directions found on the way to the shares are those found afterwards.
    assert torch.equal(found, dofla.fade(model, tokens, budget=BUDGET, shares=shares)(tokens.input_ids).logits)
    assert plan.state_bytes(model.dtype) <= MOST


def test_refusals(tiny):
    model, tokens = tiny.llama(), windows(tiny)
    with pytest.raises(DoflaError, match="shares is 'odd': give measured, even, or what"):
        dofla.fade(model, tokens, shares="odd")
    with pytest.raises(
        DoflaError, match=r"at 0\.71 of budget 3: budget 2 is too small .*: give more, or shares='even'"
    ):
        dofla.measure_shares(tiny.llama(head_dim=32), tokens, 3)


def test_a_memory_that_would_hold_the_windows_is_not_what_shares_are_measured_with(tiny):
    model, tokens = tiny.llama(), windows(tiny, 1, 256)
    held = [fading_plan(model, budget).layers[0] for budget in (32, 64)]
    held = [layer.window + layer.sinks + layer.stages[0][0] + layer.kept for layer in held]
    assert held[0] < 128 < held[1]
    small, large = (dofla.measure_shares(model, tokens, budget) for budget in (32, 64))
    assert small.made_by["budget"] == 32
    assert large.made_by["budget"] == 64 * 128 // held[1]
    assert plan_of(dofla.fade(model, tokens, budget=64)).made_by == {
        "strategy": "fading",
        "budget": 64,
        "shares": large.layers,
    }
