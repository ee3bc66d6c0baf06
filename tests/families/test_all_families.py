"""Every family of causal language models in transformers is refused by name, or does all that its original does."""

from __future__ import annotations

import pytest
import torch
from expectations import MESSAGES, NOT_TESTED, REFUSED, SUPPORTED
from family_checks import (
    ALL_HELD,
    LENGTH,
    SMALL,
    AllInFloat64,
    behavior,
    divergence,
    evicts,
    fade,
    in_float64,
    logits,
    opened_again,
    texts,
)
from family_models import FAMILIES, build

import dofla

SAME = 1e-9
"""Of the largest logit, how far apart two ways to the same number may be in float64."""
TIMES = 10
"""How much further a student may be from one pass than its original, whose cache may be wrong itself."""
CLOSE, CLOSER = 0.05, 0.2
"""KL to the original with all tokens held at most, in nats, and beside that with few."""


@pytest.mark.slow
@pytest.mark.parametrize("family", SUPPORTED)
def test_a_family_does_with_a_compressed_cache_what_its_original_does(family, tmp_path):
    model = in_float64(build(family))
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    ids = texts(model, 1, LENGTH, seed=2)
    with AllInFloat64():
        right, original = logits(model, ids), behavior(model)
        student = behavior(fade(model, SMALL, "measured"))
        answers = logits(model, ids)
    assert evicts(model)
    for way, difference in student.differences.items():
        assert difference <= max(SAME, TIMES * original.differences[way]), way
    assert student.same_text or not original.same_text

    opened = opened_again(model, tmp_path)
    with AllInFloat64():
        assert torch.equal(logits(opened, ids), answers)
        few = divergence(model, right, ids)
        assert torch.equal(logits(dofla.restore(model), ids), right)
        all_held = divergence(fade(model, ALL_HELD, "even"), right, ids)
    assert all_held <= min(CLOSE, CLOSER * few)
    restored = dofla.restore(model).state_dict()
    assert restored.keys() == weights.keys()
    assert all(torch.equal(restored[name], weight) for name, weight in weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("family", REFUSED)
def test_a_family_is_refused_by_name(family):
    model = build(family)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(dofla.DoflaError, match=MESSAGES[REFUSED[family]]) as refusal:
        fade(model, SMALL, "even")
    assert "\n" not in str(refusal.value)
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in weights.items())


def test_each_family_of_transformers_is_expected_to_do_one_thing():
    assert set(REFUSED) | set(NOT_TESTED) <= set(FAMILIES)
    assert not set(REFUSED) & set(NOT_TESTED)
    assert len(SUPPORTED) >= 120
