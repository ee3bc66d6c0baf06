"""Where the Triton kernels are tested: on a GPU, or on the CPU in Triton's interpreter."""

import contextlib
import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from dofla.attention import gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

needs_device = pytest.mark.skipif(
    find_spec("triton") is None or not (INTERPRETED or torch.cuda.is_available()),
    reason="needs triton and either a CUDA GPU or TRITON_INTERPRET=1, which runs the kernels on the CPU",
)


@contextlib.contextmanager
def calls_of_kernels() -> Iterator[list[str]]:
    """The kernels are used, in the interpreter as well; gives the names of those of a compressed cache as they are
    called."""
    from dofla.attention.gpu import heavy_hitters, operators, tier

    called: list[str] = []

    def usable(*tensors: torch.Tensor) -> bool:
        gradients = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        return not gradients and all(t.dtype in (torch.float32, torch.bfloat16) for t in tensors)

    def recorded(function):
        def call(*args):
            called.append(function.__name__)
            return function(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier, "attend", recorded(tier.attend))
        patch.setattr(heavy_hitters, "select_survivors", recorded(heavy_hitters.select_survivors))
        patch.setattr(operators, "decoders_of", recorded(operators.decoders_of))
        if INTERPRETED:
            patch.setattr(gpu, "usable", usable)
        yield called
