"""Directions of keys and values: moments of what attention gets, weighed by what errors do."""

import pytest
import torch
from sizes import FAMILIES, compress
from tiny_families import teacher, tokens
from torch import nn

import dofla
from dofla.attention import Moments
from dofla.compression.directions import LEVELS, measure_directions
from dofla.integration.converted import Converted
from dofla.integration.placement import placed_over
from dofla.integration.recorder import recording, run_body
from dofla.integration.sites import attention_sites


def test_moments_are_those_of_all_tokens_of_the_windows(tiny):
    model, seen = tiny.llama().double(), []
    windows = dofla.TokenWindows.of(tiny.padded(3, 40))
    name, *_ = names = list(attention_sites(model))
    found = measure_directions(model, placed_over(windows, 2, 40), names)
    with torch.no_grad(), recording(model, [name], seen.append):
        run_body(model, {"input_ids": windows.input_ids, "attention_mask": windows.attention_mask})
    (call,) = seen
    real = windows.attention_mask.bool()
    queries = call.query.unflatten(1, (2, 2)).transpose(1, 3)[real].movedim(2, 0).flatten(1, 2)  # [Hkv, n, d]
    keys, values = (x.transpose(1, 2)[real].transpose(0, 1) for x in (call.key, call.value))
    own, rounding = found[name], {"rtol": 1e-6, "atol": 1 / LEVELS}
    moments = [Moments.of(x) for x in (queries, keys, values)]
    torch.testing.assert_close(own.key_mean.double(), moments[1].mean, **rounding)
    torch.testing.assert_close(own.value_mean.double(), moments[2].mean, **rounding)
    wanted = moments[0].second, moments[1].covariance, moments[2].covariance
    for kept, matrix in zip((own.queries, own.keys, own.values), wanted, strict=True):
        size = matrix.diagonal(dim1=1, dim2=2).max().item()
        torch.testing.assert_close(kept.whole, matrix, rtol=0, atol=len(matrix[0]) * size / LEVELS)
        assert torch.linalg.eigvalsh(kept.whole).min() > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_weighed_by_the_output_projection(family):
    model = teacher(family).double()
    compress(model, tokens(4, 48), head_budgets="even")
    layer = next(iter(Converted.of(model).layers.values()))
    with_output = layer.compressed.tiers[0].value.rotation.clone()
    dofla.restore(model)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "c_proj.weight", "dense.weight", "out_proj.weight")) and "mlp" not in name:
            with torch.no_grad():
                # Errors in half of each head's numbers count for nothing now.
                wide = parameter.T if "c_proj" in name else parameter
                wide.view(len(wide), -1, layer.compressed.tiers[0].value.dim)[..., ::2] *= 1e-3
    compress(model, tokens(4, 48), head_budgets="even")
    rotation = next(iter(Converted.of(model).layers.values())).compressed.tiers[0].value.rotation.double()
    assert not torch.equal(rotation.short(), with_output)
    assert rotation[..., ::2].abs().mean() < 0.2 * rotation[..., 1::2].abs().mean()


class EightBits(nn.Module):
    """A linear layer whose weight is kept in integers."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.scale, self.bias = linear.in_features, linear.weight.abs().max() / 127, linear.bias
        self.register_buffer("weight", (linear.weight / self.scale).round().to(torch.int8))

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


def test_a_quantized_model_is_calibrated_by_what_its_weights_stand_for(tiny):
    model, ids = tiny.llama(), tiny.tokens(3, 96)
    with torch.no_grad():
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and name.startswith("model.layers"):
                setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], EightBits(module))
        whole = tiny.llama()
        for name, module in model.named_modules():
            if isinstance(module, EightBits):
                whole.get_submodule(name).weight.copy_(module.weight * module.scale)
    found, wanted = (dofla.calibrate(x, dofla.TokenWindows.of(ids)) for x in (model, whole))
    for name, own in wanted.directions.items():
        torch.testing.assert_close(found.directions[name].weighing(model), own.weighing(whole))
        assert found.costs[name] == pytest.approx(wanted.costs[name], rel=1e-3)
    dofla.compress(model, ids, ratio=4)
    assert model.generate(ids[:1, :8], max_new_tokens=4).shape == (1, 12)
