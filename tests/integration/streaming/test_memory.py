"""A model of 16 layers that stay on disk is profiled and distilled in less than a quarter of its bytes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SIZES = {"windows": 8, "length": 32, "steps": 4}
linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident sizes are read from /proc")


@pytest.fixture(scope="module")
def benchmark():
    """``benchmarks/speed/streaming.py``, which the figures in the docs come from."""
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location(
        "streaming", Path(__file__).parents[3] / "benchmarks/speed/streaming.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


@pytest.fixture(scope="module")
def folder(benchmark, tmp_path_factory):
    """A model of 16 layers, 181 MiB, and a tiny one."""
    folder = tmp_path_factory.mktemp("models")
    benchmark.write_model(folder / "tiny", 2, hidden_size=64)
    benchmark.write_model(folder / "model", 16, hidden_size=512)
    return folder


def growth(benchmark, folder, way, what):
    """Largest memory of a process that works on the model, as a share of the model's bytes."""
    grown, _ = benchmark.measured(folder, way, what, **SIZES)
    return grown / (folder / "model" / "model.safetensors").stat().st_size


@pytest.mark.slow
@linux
def test_a_streamed_model_is_distilled_in_a_quarter_of_its_bytes(benchmark, folder):
    assert growth(benchmark, folder, "stream", "distill") < 0.25


@linux
@pytest.mark.long
def test_it_is_profiled_in_a_quarter_of_its_bytes(benchmark, folder):
    assert growth(benchmark, folder, "stream", "profile") < 0.25


@linux
@pytest.mark.long
@pytest.mark.parametrize("what", ["profile", "distill"])
def test_the_measure_sees_weights_in_memory(benchmark, folder, what):
    assert growth(benchmark, folder, "memory", what) > 0.9
