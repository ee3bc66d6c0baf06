"""What ``torch.set_default_device`` says changes nothing: here it says that tensors have no numbers."""

from __future__ import annotations

import pytest
import torch

import dofla
from dofla.integration.surgery import plan_of


def faded(model, samples):
    return plan_of(dofla.fade(model, samples, budget=24)).to_dict()


def features(model, samples):
    student = dofla.linearize(model, budget=24)
    losses = [dofla.distill(student, samples, steps=2, batch_size=2).losses]
    losses += [dofla.distill_end_to_end(student, samples, steps=2, batch_size=2).losses]
    return [x.tolist() for x in losses], dofla.evaluate(student, samples).to_dict()


def profiled(model, samples):
    found = dofla.profile(model, samples, samples=32)
    return found.dof(), dofla.measure_curves(model, samples, budget=24, steps=2).to_dict()


def judged(model, samples):
    return dofla.frontier(model, samples, {"own": [dofla.TokenWindows(samples)]}, budgets=[24]).to_dict()


def written(model, samples):
    student = dofla.fade(model, samples, budget=24, shares="even")
    options = {"attention_mask": torch.ones_like(samples), "max_new_tokens": 4, "do_sample": False}
    return student.generate(samples, **options).tolist(), dofla.Stream(student).read(samples).tolist()


@pytest.mark.parametrize("way", [faded, features, profiled, judged, written])
def test_a_default_device_changes_nothing(tiny, way):
    samples = tiny.tokens(8, 48)
    expected = way(tiny.llama(), samples)
    model = tiny.llama()
    with torch.device("meta"):
        assert way(model, samples) == expected
