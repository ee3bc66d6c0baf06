"""Layers trained on what they get in the student, towards what the teacher does there."""

import math

import pytest
import torch
from stopping import equal
from students import keep_softmax, student_of
from torch.testing import assert_close

import dofla
from dofla.distillation import LOSSES, distill
from dofla.distillation.losses import softmax_loss
from dofla.errors import DoflaError
from dofla.integration.converted import Converted

WINDOWS, LENGTH = 8, 16
FIRST, SECOND = "model.layers.0.self_attn", "model.layers.1.self_attn"


@pytest.fixture
def seen(monkeypatch):
    """(teacher's call, student's call) of each loss that is computed with the loss ``spy``."""
    pairs = []

    def spy(teacher, call, layer, rows):
        pairs.append((teacher, call))
        return softmax_loss(teacher, call, layer, rows)

    monkeypatch.setitem(LOSSES, "spy", spy)
    return pairs


def projections(student, tokens):
    """Keys before positions, and values, of each layer in a plain forward of the model as it is: [B, Hkv, L, d]."""
    found, hooks = {}, []
    for name in Converted.of(student).layers:
        module = student.get_submodule(name)
        for side in ("k_proj", "v_proj"):

            def keep(_, __, output, key=(name, side), size=module.head_dim):
                found[key] = output.unflatten(-1, (-1, size)).transpose(1, 2)

            hooks.append(module.get_submodule(side).register_forward_hook(keep))
    with torch.no_grad():
        student(**tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("plan", [{}, {"features": [5, 3], "window": 2, "sinks": 1}, {"feature_map": "mlp"}])
@pytest.mark.parametrize("padded", [False, True])
def test_losses_see_the_students_own_calls_and_the_teachers(tiny, seen, plan, padded):
    student = student_of(tiny, **plan)
    tokens = tiny.padded(WINDOWS, LENGTH) if padded else {"input_ids": tiny.tokens(WINDOWS, LENGTH)}
    options = {"steps": 1, "batch_size": WINDOWS, "from_data": False, "context": LENGTH}
    own = projections(student, tokens)
    with dofla.original(student):
        theirs = projections(student, tokens)
    distill(student, tokens, loss="spy", own_inputs=1, **options)
    order = torch.randperm(WINDOWS, generator=torch.Generator().manual_seed(0))
    real = tokens.get("attention_mask", torch.ones(WINDOWS, LENGTH))[order].bool()[:, None, :, None]
    assert [(teacher.name, call.name) for teacher, call in seen] == [(FIRST, FIRST), (SECOND, SECOND)]
    for teacher, call in seen:
        assert_close(call.value * real, own[call.name, "v_proj"][order] * real, rtol=1e-4, atol=1e-5)
        assert_close(teacher.value * real, theirs[call.name, "v_proj"][order] * real, rtol=1e-4, atol=1e-5)
        # Rotary positions turn vectors and keep their length.
        lengths = [x.norm(dim=-1, keepdim=True) for x in (call.key, own[call.name, "k_proj"][order])]
        assert_close(lengths[0] * real, lengths[1] * real, rtol=1e-4, atol=1e-5)
        assert (call.weight is None) == (teacher.weight is None) == (not padded)
    (teacher, call), (later_teacher, later_call) = seen
    for what in ("query", "key", "value"):
        assert torch.equal(getattr(teacher, what), getattr(call, what))
        assert (getattr(later_teacher, what) - getattr(later_call, what)).abs().max() > 0.1


@pytest.mark.parametrize(("share", "own"), [(0.0, 0), (0.25, 1), (0.5, 2), (0.6, 2), (1.0, 4), (1, 4)])
def test_it_is_the_last_steps_that_see_own_inputs(tiny, seen, share, own):
    distill(student_of(tiny), tiny.tokens(WINDOWS, LENGTH), loss="spy", steps=4, own_inputs=share, accumulate=2)
    assert [teacher is call for teacher, call in seen] == [True] * 4 * (4 - own) + [False] * 4 * own


def test_layers_kept_softmax_stay_softmax_on_the_way(tiny, seen):
    model = tiny.llama(num_hidden_layers=3)
    plan = tiny.plan(model)
    keep_softmax(plan, 0)
    student = dofla.linear.linearize(model, plan)
    distill(student, tiny.tokens(WINDOWS, LENGTH), loss="spy", steps=1, own_inputs=1)
    (teacher, call), (later_teacher, later_call) = seen
    assert call.name == SECOND
    assert torch.equal(teacher.key, call.key)
    assert not torch.equal(later_teacher.key, later_call.key)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"own_inputs": -0.1}, "own_inputs is -0.1, loss 'output': give a share of the steps, 0 to 1"),
        ({"own_inputs": 1.5}, "own_inputs is 1.5"),
        ({"own_inputs": math.nan}, "own_inputs is nan"),
        ({"own_inputs": 0.5, "loss": "direct"}, r"own_inputs is 0.5, loss 'direct': .*\(0 for direct\)"),
    ],
)
def test_a_share_out_of_range_or_for_direct_is_refused(tiny, options, message):
    student = student_of(tiny, feature_map="mlp")
    before = {name: value.clone() for name, value in student.state_dict().items()}
    with pytest.raises(DoflaError, match=message):
        distill(student, tiny.tokens(WINDOWS, LENGTH), **options)
    assert equal(student.state_dict(), before)
