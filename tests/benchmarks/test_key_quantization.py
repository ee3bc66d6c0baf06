"""``benchmarks/quality/key_quantization.py``: what a key bias costs quantized keys, one way and another."""

import pytest
import torch
from benches import script_fixture

import dofla
from dofla.compression.directions import measure_directions
from dofla.integration.placement import placed_over
from dofla.integration.sites import attention_sites

module = script_fixture("quality", "key_quantization")


def divergences(module, model, tokens, bits):
    """KL to the original, by way."""
    found = measure_directions(model, placed_over(tokens, 1, None), list(attention_sites(model)))
    before, kl = module.logs(model, tokens), {}
    for name, way in module.WAYS.items():
        with module.quantized(model, {x: module.QuantizedKeys(own, way, bits) for x, own in found.items()}):
            after = module.logs(model, tokens)
        kl[name] = sum((p.exp() * (p - q)).sum(-1).mean() for p, q in zip(before, after, strict=True)).item()
    assert all(torch.equal(a, b) for a, b in zip(before, module.logs(model, tokens), strict=True))
    return kl


@pytest.mark.parametrize(("bits", "times"), [(8.0, 4), (3.0, 1.5)])  # in three bits other keys cost much as well
def test_a_key_bias_costs_what_is_not_taken_off(module, tiny, bits, times):
    model, tokens = tiny.llama(attention_bias=True), dofla.TokenWindows.of(tiny.tokens(3, 64))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias[[-5, -1]] = 300.0  # of the last head the pair that turns least
    kl = divergences(module, model, tokens, bits)
    assert kl["none"] > times * max(kl["outliers"], kl["every"])


def test_keys_without_bias_are_as_good_any_way(module, tiny):
    kl = divergences(module, tiny.llama(), dofla.TokenWindows.of(tiny.tokens(3, 64)), 8.0)
    assert max(kl.values()) < 0.01
