"""What the benchmarks compare with."""

from types import SimpleNamespace

import pytest
import torch
from transformers.utils import is_optimum_quanto_available


def unpacked(packed, bits):
    """Numbers of so many bits, of which each byte holds some, the first of each first."""
    return torch.cat([(packed >> bits * place) & (2**bits - 1) for place in range(8 // bits)])


@pytest.fixture
def uncompiled(monkeypatch):
    """Where optimum-quanto is installed, PyTorch unpacks: its own extension takes a minute to compile."""
    if is_optimum_quanto_available():
        from optimum.quanto.library.extensions.cpp import ext

        monkeypatch.setattr(ext, "_lib", SimpleNamespace(unpack=unpacked))


@pytest.fixture
def quanto(uncompiled):
    """optimum-quanto is installed, or the test is passed over."""
    pytest.importorskip("optimum.quanto")
