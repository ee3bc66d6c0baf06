"""What torch.compile asks of the operators, and a layer in its graph: the same numbers, in one graph for all tokens."""

from __future__ import annotations

import pytest
import torch
from coded_layers import SCALING, TIERS, assert_same_codes, layer_of, vectors
from forms import needs_kernels, sample
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from dofla.attention import FeatureState, TokenBuffer, compiled
from dofla.attention.exact import ExactPart

pytestmark = needs_kernels
SIZES = {
    "head_dim": 16,
    "value_dim": 24,
    "window": 5,
    "sinks": 2,
    "tiers": [TIERS[1]] * 2,
    "features": 0,
    "heavy_hitters": 9,
}


class Calls(TorchDispatchMode):
    """Arguments of our operators' calls."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "dofla":
            self.found.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def check(calls: Calls, count: int) -> None:
    assert len(calls.found) == count
    for func, args, kwargs in calls.found:
        torch.library.opcheck(func, args, kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [
        {},
        {"heavy_hitters": 0, "sinks": 0},
        {"features": 4},
        {"heavy_hitters": 0, "features": 4},
        {"tiers": [TIERS[0], TIERS[1], TIERS[0]]},
    ],
    ids=["heavy hitters", "by age", "features", "by age, features", "ragged"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attend_and_code_returns_what_it_says_it_does(other, dtype):
    layer = layer_of(0, **{**SIZES, **other})
    inputs = vectors(1, layer, 2, 2, 12, dtype)
    weight = torch.ones(2, 12)
    weight[0, :3] = 0
    _, states = layer(*(x[:, :, :9] for x in inputs), scaling=SCALING, weight=weight[:, :9])
    with Calls() as calls:
        layer(*(x[:, :, 9:] for x in inputs), scaling=SCALING, weight=weight[:, 9:], states=states)
        layer(*(x[:, :, 9:10] for x in inputs), scaling=SCALING, states=states)
    calls.found = [call for call in calls.found if call[0] is torch.ops.dofla.attend_and_code.default]
    check(calls, 2)


@pytest.mark.parametrize("length", [1, 9])
def test_linear_attention_returns_what_it_says_it_does(length):
    given = sample(0, batch=2, heads=2, groups=2, length=length)
    line = TokenBuffer(given.key, given.value, given.log_weight)
    state = FeatureState.empty(2, 2, given.features.features, given.value.shape[-1])
    exact = ExactPart(given.query, line, 1, TokenBuffer.empty(given.key, given.value, 2), torch.zeros(2, 2).long(), 0.3)
    with Calls() as calls:
        compiled.linear_attention(given.query, line, state, given.features.affine(0.3, torch.float32), exact)
    check(calls, 1)


@pytest.mark.parametrize(
    "backend", [pytest.param("aot_eager", marks=pytest.mark.slow), pytest.param("inductor", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_a_compiled_layer_does_what_it_does_uncompiled(backend, dtype, padded):
    torch._dynamo.reset()
    layer = layer_of(0, **SIZES)
    inputs = vectors(1, layer, 3, 2, 40, dtype)
    weight = (torch.arange(40) >= torch.tensor([[0], [7], [33]])).float() if padded else None
    counter = CompileCounterWithBackend(backend)

    def read(attend):
        outputs, states, found = [], None, []
        for part in (slice(0, 30), *(slice(n, n + 1) for n in range(30, 40))):
            own = None if weight is None else weight[:, part]
            out, states = attend(*(x[:, :, part] for x in inputs), scaling=SCALING, weight=own, states=states)
            outputs.append(out)
            found.append(states)
        return torch.cat(outputs, 2), found

    wanted, before = read(layer)
    out, states = read(torch.compile(layer, backend=counter, fullgraph=True, dynamic=False))
    assert counter.frame_count == 2  # a prompt and a token
    assert torch.equal(out, wanted)
    assert_same_codes(states, before)
