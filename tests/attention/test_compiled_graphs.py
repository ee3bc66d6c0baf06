"""What torch.compile asks of the operators, and heads in its graph: the same numbers, in one graph for all tokens."""

import pytest
import torch
from compressed_heads import MOST, SIZE, heads_of, padded, step, vectors
from forms import KernelCalls, needs_kernels, sample
from torch._dynamo.testing import CompileCounterWithBackend

from dofla.attention import FeatureState, TokenBuffer, compiled
from dofla.attention.exact import ExactPart

pytestmark = needs_kernels


def check(calls: KernelCalls, count: int) -> None:
    assert len(calls.calls) == count
    for func, args, kwargs in calls.calls:
        torch.library.opcheck(func, args, kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[SIZE, SIZE], [SIZE._replace(sinks=0)], [SIZE, MOST, SIZE]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_read_compressed_returns_what_it_says_it_does(sizes, dtype):
    heads = heads_of(0, sizes)
    inputs, weight = vectors(1, heads, 2, 2, 12, dtype), padded([3, 0], 12)
    _, state = step(heads, [x[:, :, :9] for x in inputs], None, weight[:, :9])
    with KernelCalls() as calls:
        step(heads, [x[:, :, 9:] for x in inputs], state, weight[:, 9:])
        step(heads, [x[:, :, 9:10] for x in inputs], state)
    check(calls, 2)


@pytest.mark.parametrize("length", [1, 9])
def test_linear_attention_returns_what_it_says_it_does(length):
    given = sample(0, batch=2, heads=2, groups=2, length=length)
    line = TokenBuffer(given.key, given.value, given.log_weight)
    state = FeatureState.empty(2, 2, given.features.features, given.value.shape[-1])
    exact = ExactPart(given.query, line, 1, TokenBuffer.empty(given.key, given.value, 2), torch.zeros(2, 2).long(), 0.3)
    with KernelCalls() as calls:
        compiled.linear_attention(given.query, line, state, given.features.affine(0.3, torch.float32), exact)
    check(calls, 1)


@pytest.mark.parametrize(
    "backend", [pytest.param("aot_eager", marks=pytest.mark.slow), pytest.param("inductor", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_front", [False, True])
@torch.no_grad()
def test_compiled_heads_do_what_they_do_uncompiled(backend, dtype, in_front):
    torch._dynamo.reset()
    heads = heads_of()
    inputs = vectors(1, heads, 3, 2, 40, dtype)
    weight = padded([0, 7, 33], 40) if in_front else None
    counter = CompileCounterWithBackend(backend)

    def read(attend):
        outputs, state, found = [], None, []
        for part in (slice(0, 30), *(slice(n, n + 1) for n in range(30, 40))):
            own = None if weight is None else weight[:, part]
            out, state = attend(heads, [x[:, :, part] for x in inputs], state, own)
            outputs.append(out)
            found.append(state.rows)
        return torch.cat(outputs, 2), found

    wanted, before = read(step)
    out, rows = read(torch.compile(step, backend=counter, fullgraph=True, dynamic=False))
    assert counter.frame_count == 2  # a prompt and a token
    assert torch.equal(out, wanted)
    assert all(map(torch.equal, rows, before))
