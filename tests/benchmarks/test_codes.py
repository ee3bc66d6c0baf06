"""``benchmarks/quality/codes.py``: codes of keys and values, nothing evicted."""

import pytest
import torch
from benches import script_fixture

import dofla
from dofla.compression.directions import measure_directions
from dofla.integration.placement import placed_over
from dofla.integration.sites import attention_sites

module = script_fixture("quality", "codes")


@pytest.fixture
def model(tiny):
    return tiny.llama(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)


@pytest.fixture
def sides(module, model, tiny):
    tokens = dofla.TokenWindows.of(tiny.tokens(3, 64))
    found = measure_directions(model, placed_over(tokens, 1, None), list(attention_sites(model)))
    return {name: [module.Side(own, model, keys) for keys in (True, False)] for name, own in found.items()}


@pytest.mark.parametrize("name", ["trellis", "turboquant", "rotated", "kivi", "token"])
def test_more_bits_leave_less_error(module, sides, name):
    for side in next(iter(sides.values())):
        x = torch.randn(1, side.heads, 64, side.dim, generator=torch.Generator().manual_seed(1))
        errors, sizes = [], []
        for bits in (2, 3, 4):
            code, size = module.CODES[name](side, bits)
            errors.append((code(x) - x).square().mean().item())
            sizes.append(size)
        assert errors[0] > 1.5 * errors[1] > 2.25 * errors[2] > 0
        assert sizes[2] == sizes[1] + 1 == sizes[0] + 2
        assert sizes[0] > 2


def test_exact_codes_change_nothing_and_rounded_ones_do(module, model, sides, tiny):
    tokens = dofla.TokenWindows.of(tiny.tokens(1, 64))
    before = module.logs(model, tokens)
    with module.coded(model, dict.fromkeys(sides, (lambda x: x, lambda x: x))):
        assert module.compared(model, tokens, before)[1] < 1e-6
    rounded = {name: tuple(module.CODES["token"](side, 2)[0] for side in pair) for name, pair in sides.items()}
    with module.coded(model, rounded):
        assert module.compared(model, tokens, before)[1] > 1e-6
    assert module.compared(model, tokens, before)[1] == 0
