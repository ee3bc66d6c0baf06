"""Compile the Triton kernels as a GPU would be given them, without one: registers, spills and shared memory of each.

    python scripts/gpu_kernels.py                       # compute capabilities 8.0, 9.0 and 10.0
    python scripts/gpu_kernels.py 90 --dim 128

The functions of dofla.attention.gpu are called with tensors of the CPU, and what they would launch is compiled, with
the options and the constants of that launch. Needs triton, on Linux.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import torch
import triton
import typer
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from dofla.attention import Call, CodedTokens, Coder, CompressedHeads, FeatureState, HeadSizes, gpu
from dofla.attention.drawn import Line
from dofla.attention.gpu.drawn import drawn
from dofla.attention.gpu.encode import encode
from dofla.attention.gpu.heavy_hitters import select_survivors
from dofla.attention.gpu.rotate_query import rotate_queries
from dofla.attention.gpu.tier import attend, unrotated
from dofla.attention.gpu.token import Decoder


class _Absent:
    """A driver of a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # what is compiled for one is not taken for another

    def get_current_stream(self, _device: int) -> int:
        return 0


def main(
    capabilities: Annotated[list[int] | None, typer.Argument(help="Compute capabilities, ten times.")] = None,
    dim: Annotated[int, typer.Option(help="Size of a head, and features.")] = 64,
    groups: Annotated[int, typer.Option(help="Query heads of a KV head.")] = 3,
    tokens: Annotated[int, typer.Option(help="Of the tier.")] = 217,
) -> None:
    run = JITFunction.run

    def compile_only(kernel: JITFunction, *args, grid, warmup, **options):
        report(kernel.__name__, run(kernel, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    for capability in capabilities or [80, 90, 100]:
        driver.set_active(_Absent(capability))
        print(f"\ncompute capability {capability / 10}: heads of {dim}, groups of {groups}")
        print(f"{'kernel':<22} {'warps':>5} {'registers':>9} {'stack':>7} {'shared':>9}")
        for length in (1, 256):
            print(f"{length} token{'s' * (length > 1)}")
            for call in calls(length, dim, groups, tokens):
                with suppress(RuntimeError):  # nothing is filled, and what is no index follows the last launch
                    call()


def calls(length: int, dim: int, groups: int, tokens: int) -> list[Callable[[], object]]:
    """Of all kernels, for ``length`` tokens."""
    a, b, value = torch.zeros(1, groups, length, dim), torch.zeros(1, 1, length, dim), torch.zeros(1, 1, length, dim)
    features = FeatureState.empty(1, 1, dim, dim)
    coder = Coder(1, dim, 3.0)
    coder.reset()
    line = torch.zeros(1, 1, tokens + length, dim)
    codes, rotated = coder.encode(line), torch.zeros(1, groups, length, dim + 1)
    score = torch.zeros(1, 1, tokens + length, dtype=torch.int16)
    coded, prompt = (
        CodedTokens(*codes, *codes, score),
        Line(line.bfloat16(), line.bfloat16(), score.long(), padded=False),
    )
    if length == 1:  # all that a decoded token of a compressed cache takes
        newest = tokens // 4
        heads = CompressedHeads([HeadSizes(31, 2, newest, n - newest) for n in (tokens, tokens // 2)], dim, dim, 3.0)
        heads.reset_parameters()
        states, decoder = heads.layout.empty(1, a.device).rows, Decoder(heads, heads.layout, [0, 1])
        query, new = torch.zeros(1, 2 * groups, 1, dim), torch.zeros(1, 2, 1, dim)
        out, pages = torch.zeros_like(query), torch.tensor([0])
        call = Call(query, new, new, 1.0)
        padded = call._replace(log_weight=torch.zeros(1, 1))
        return [
            lambda: gpu.linear_attention(a, b, value, state=features),
            lambda: decoder(call, states, out),
            lambda: decoder(call, states, out, pages),
            lambda: decoder(padded, states, out),
        ]
    return [
        lambda: gpu.linear_attention(a, b, value, state=features),
        lambda: gpu.linear_attention(a, b, value.bfloat16(), state=features),
        lambda: encode(coder, b),
        lambda: rotate_queries(coder, a, groups),
        lambda: select_survivors(
            coder, coder.rotate_query_integer(a), torch.ones(1, length) > 0, coded, tokens // 4, 1.0
        ),
        lambda: attend(coder, coder, rotated, coded, score.int(), 1.0),
        lambda: drawn(a.bfloat16(), prompt, rotated[..., 0], 31, 2, 1.0),
        lambda: unrotated(coder, codes),
    ]


def report(name: str, kernel) -> None:
    """What the assembler says of a kernel; the stack is what did not fit into registers."""
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        found = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", found).groups()
    print(
        f"{name:<22} {kernel.metadata.num_warps:>5} {registers:>9} {stack:>7} {kernel.metadata.shared:>9}", flush=True
    )


if __name__ == "__main__":
    typer.run(main)
