"""What ``torch.set_default_device`` and ``torch.set_default_dtype`` say changes nothing."""

import pytest
import torch
from sizes import compress, size_of

import dofla
from dofla.integration.converted import Converted


def compressed(model, samples):
    return Converted.of(compress(model, samples, tokens=48)).plan.to_dict()


def features(model, samples):
    student = dofla.linear.linearize(model, budget=24)
    losses = [dofla.linear.distill(student, samples, steps=2, batch_size=2).losses]
    losses += [dofla.linear.distill_end_to_end(student, samples, steps=2, batch_size=2).losses]
    return [x.tolist() for x in losses], dofla.evaluate(student, samples).to_dict()


def profiled(model, samples):
    return dofla.linear.profile(model, samples, samples=32).dof()


def judged(model, samples):
    return dofla.frontier(model, samples, {"own": [dofla.TokenWindows(samples)]}, sizes=[size_of(model, 48)]).to_dict()


def written(model, samples):
    student = compress(model, samples, tokens=48, head_budgets="even")
    options = {"attention_mask": torch.ones_like(samples), "max_new_tokens": 4, "do_sample": False}
    return student.generate(samples, **options).tolist(), dofla.serving.Stream(student).read(samples).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("way", [compressed, features, profiled, judged, written])
def test_defaults_change_nothing(tiny, way):
    samples = tiny.tokens(8, 48)
    expected = way(tiny.llama(), samples)
    model = tiny.llama()
    with torch.device("meta"):  # where tensors have no numbers
        assert way(model, samples) == expected
    for dtype in (torch.bfloat16, torch.float64):
        model = tiny.llama()
        torch.set_default_dtype(dtype)
        try:
            assert way(model, samples) == expected
            assert torch.get_default_dtype() == dtype
        finally:
            torch.set_default_dtype(torch.float32)
