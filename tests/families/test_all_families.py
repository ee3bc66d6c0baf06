"""Every family of causal language models in transformers is refused by name, or does all that its original does."""

import pytest
import torch
from expectations import MESSAGES, NOT_TESTED, REFUSED, SUPPORTED
from family_checks import (
    ALL_HELD,
    LENGTH,
    SMALL,
    AllInFloat64,
    behavior,
    compress_to,
    difference,
    divergence,
    evicts,
    logits,
    opened_again,
    texts,
)
from family_models import FAMILIES, build
from models_page import PAGE, page
from torch import Tensor
from transformers import PreTrainedModel

import dofla
from dofla.integration.sites import AttentionSite, attention_sites
from dofla.integration.weightless import StandInProducts, without_weights

SAME = 1e-9
"""Largest difference of two ways to the same number in float64, relative to the largest logit."""
TIMES = 10
"""Factor by which a student may be further from one pass than its original, whose cache may be wrong itself."""
CLOSE, CLOSER = 0.05, 0.2
"""KL to the original with all tokens held at most, in nats, and beside that with few."""

EXAMPLES = set({reason: family for family, reason in REFUSED.items()}.values())
"""A family for each reason to refuse one."""


def copies(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def assert_equal(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert found.keys() == right.keys()
    assert [name for name in right if not torch.equal(found[name], right[name])] == []


@pytest.mark.long
@pytest.mark.parametrize("family", SUPPORTED)
def test_a_family_does_with_a_compressed_cache_what_its_original_does(family, tmp_path):
    # Opened, as the student is below: some families make buffers in another precision when they are opened.
    model = opened_again(build(family, torch.float64), tmp_path / "original")
    weights, ids = copies(model), texts(model, 1, LENGTH, seed=2)
    with AllInFloat64():
        right, original = logits(model, ids), behavior(model)
        student = behavior(compress_to(model, SMALL, "measured"))
        answers = logits(model, ids)
        few = divergence(model, right, ids)
    assert evicts(model)
    for way, far in student.differences.items():
        assert far <= max(SAME, TIMES * original.differences[way]), way
    assert student.same_text or not original.same_text

    opened = opened_again(model, tmp_path / "student")
    assert_equal(copies(opened), copies(model))
    restored = dofla.restore(model)
    assert_equal(copies(restored), weights)
    with AllInFloat64():
        assert difference(logits(opened, ids), answers) <= SAME
        assert difference(logits(restored, ids), right) <= SAME
        all_held = divergence(compress_to(model, ALL_HELD, "even"), right, ids)
    assert all_held <= min(CLOSE, CLOSER * few)


@pytest.mark.parametrize(
    "family", [family if family in EXAMPLES else pytest.param(family, marks=pytest.mark.slow) for family in REFUSED]
)
def test_a_family_is_refused_by_name(family):
    model = build(family)
    weights, implementation = copies(model), model.config._attn_implementation
    with pytest.raises(dofla.DoflaError, match=MESSAGES[REFUSED[family]]) as refusal:
        compress_to(model, SMALL, "even")
    assert "\n" not in str(refusal.value)
    assert_equal(copies(model), weights)
    assert model.config._attn_implementation == implementation


def test_each_family_of_transformers_is_expected_to_do_one_thing():
    assert set(REFUSED) | set(NOT_TESTED) <= set(FAMILIES)
    assert not set(REFUSED) & set(NOT_TESTED)
    assert len(SUPPORTED) >= 120
    assert PAGE.read_text(encoding="utf-8") == page(), "python tests/families/models_page.py writes it anew"


@pytest.mark.slow
@pytest.mark.parametrize("family", [*SUPPORTED, *REFUSED])
def test_check_says_of_a_config_what_becomes_of_the_model(family):
    config = build(family).config
    config.architectures = [FAMILIES[family]]
    assert dofla.check(config, ratio=2).supported == (family in SUPPORTED)


@pytest.mark.slow
def test_a_config_tells_of_a_family_what_its_model_tells():
    """Sites and their shapes, or the refusal, in the same words."""
    different = []
    for family in {*SUPPORTED, *REFUSED}:
        model = build(family)
        with StandInProducts():
            told = sites_of(without_weights(model.config, type(model)))
        if told != sites_of(model):
            different.append(family)
    assert different == []


def sites_of(model: PreTrainedModel) -> dict[str, AttentionSite] | str:
    try:
        return attention_sites(model)
    except dofla.DoflaError as error:
        return str(error)
