"""Building the kernels: each way it can fail leaves a reason, plain torch, and nothing half-written."""

import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from forms import KernelCalls, attend, needs_kernels, sample
from torch.torch_version import TorchVersion

from dofla.attention import compiled
from dofla.attention.compiled import SWITCH, build, prebuilt

MAY_BUILD = platform.system() == "Linux" and platform.machine() in build.FLAGS
needs_linux = pytest.mark.skipif(not MAY_BUILD, reason="no x86-64 or ARM Linux")
can_build = pytest.mark.skipif(
    not MAY_BUILD or shutil.which("c++") is None,
    reason="no x86-64 or ARM Linux with a C++ compiler",
)

ATTEND = """
import logging
logging.basicConfig(format="%(message)s")
import torch
from dofla.attention import Call, attend, compiled
from dofla.feature_maps import PRF
prf = PRF(1, 8, 4).requires_grad_(False)
prf.reset_parameters(torch.Generator().manual_seed(0))
x = torch.randn(1, 1, 9, 8, generator=torch.Generator().manual_seed(0))
out, _ = attend(Call(x, x, x, 0.3), prf, window=2)
print(float(out.sum()), compiled.obstacle())
"""
"""A program that attends once, and prints the sum of the outputs and the obstacle."""


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache folder and an obstacle nobody has asked for yet; those of this process come back afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiled, "obstacle", lru_cache(maxsize=1)(compiled.obstacle.__wrapped__))
    return tmp_path


def left_in(cache: Path) -> list[str]:
    folder = cache / "dofla"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def assert_attention_is_plain_torch():
    s = sample(0, heads=2, groups=2)
    with KernelCalls() as calls:
        out, _ = attend(*s.vectors, s.features, scaling=0.7, window=3, sinks=1)
    assert not calls.names
    assert (out - s.naive(0.7, window=3, sinks=1)).abs().max() < 1e-4


def start(cache: Path, program: str = ATTEND, **environment: str) -> subprocess.Popen:
    inherited = {name: value for name, value in os.environ.items() if name not in (SWITCH, "CXX")}
    inherited |= {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1", **environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", program], env=inherited, start_new_session=True, **pipes)


def finish(process: subprocess.Popen) -> tuple[float, str, str]:
    """The sum of the outputs, the obstacle and what was logged."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    total, obstacle = out.strip().split(maxsplit=1)
    return float(total), obstacle, err


def on_platform(patch, machine, system):
    patch.setattr(platform, "machine", lambda: machine)
    patch.setattr(platform, "system", lambda: system)


def without_compiler(patch):
    patch.setattr(shutil, "which", lambda name, **options: None)


def with_an_old_torch(patch):
    patch.setattr(torch, "__version__", TorchVersion("2.9.1+cu128"))


NOT_MADE_FOR = "made for x86-64 and ARM Linux (aarch64), not"
OBSTACLES = [
    (lambda patch: patch.setenv(SWITCH, "0"), "switched off by DOFLA_KERNELS=0"),
    (lambda patch: on_platform(patch, "riscv64", "Linux"), f"{NOT_MADE_FOR} riscv64 Linux"),
    (lambda patch: on_platform(patch, "arm64", "Darwin"), f"{NOT_MADE_FOR} arm64 Darwin"),
    (lambda patch: on_platform(patch, "AMD64", "Windows"), f"{NOT_MADE_FOR} AMD64 Windows"),
    pytest.param(without_compiler, "no C++ compiler found", marks=needs_linux),
    pytest.param(lambda patch: patch.setenv("CXX", "no-such-compiler"), "no C++ compiler found", marks=needs_linux),
    pytest.param(with_an_old_torch, "made for torch 2.10 or newer, not 2.9.1+cu128", marks=needs_linux),
]


@pytest.mark.parametrize(("hinder", "obstacle"), OBSTACLES)
def test_where_kernels_cannot_be_built_the_reason_is_said_and_torch_does_the_work(
    fresh, monkeypatch, caplog, hinder, obstacle
):
    hinder(monkeypatch)
    assert compiled.obstacle() == obstacle
    assert_attention_is_plain_torch()
    assert not caplog.records
    assert left_in(fresh) == []


def failures(caplog) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "could not be built" in record.getMessage()]


def failing_compiler(patch, folder):
    patch.setenv("CXX", "/bin/false")


def broken_source(patch, folder):
    source = folder.parent / f"{folder.name}.cpp"
    source.write_text("this is no C++\n", encoding="utf-8")
    patch.setattr(build, "_sources", lambda: [source])


def cache_that_is_a_file(patch, folder):
    (folder / "a file").touch()
    patch.setenv("XDG_CACHE_HOME", str(folder / "a file"))


def damaged_library(patch, folder):
    build.cache_folder().mkdir(parents=True)
    (build.cache_folder() / "dofla_kernels.so").write_bytes(b"half of a library")


@can_build
@pytest.mark.parametrize("fault", [failing_compiler, broken_source, cache_that_is_a_file, damaged_library])
def test_a_failing_build_is_told_once_and_leaves_nothing(fresh, monkeypatch, caplog, fault):
    fault(monkeypatch, fresh)
    before = left_in(fresh)
    for _ in range(3):
        assert_attention_is_plain_torch()
    assert compiled.obstacle().startswith("building failed: ")
    assert len(failures(caplog)) == 1
    assert left_in(fresh) == before


@can_build
def test_an_interrupted_build_leaves_nothing(fresh, monkeypatch):
    def interrupted(library, flags):
        library.write_bytes(b"half of a library")
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "compile_library", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compiled.obstacle()
    assert left_in(fresh) == []


@needs_kernels
@can_build
def test_losing_the_race_for_the_folder_is_no_failure(fresh, monkeypatch, caplog):
    """The other process finishes between the look whether the folder is there and the renaming."""
    monkeypatch.setattr(build, "compile_library", lambda library, flags: library.touch())
    monkeypatch.setattr(torch.ops, "load_library", lambda library: None)  # loaded long ago
    folder, rename = build.cache_folder(), Path.rename

    def rename_later(self, target):
        folder.mkdir()
        (folder / "dofla_kernels.so").touch()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_later)
    assert compiled.obstacle() is None
    assert not failures(caplog)
    assert left_in(fresh) == [folder.name]


@needs_linux
def test_an_empty_cache_variable_means_the_usual_folder(monkeypatch):
    """As the XDG specification has it; otherwise the cache would be wherever the program was started."""
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert build.cache_folder().is_absolute()


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "other"),
    [
        ("x86_64", "flags\t\t: fpu avx2\n", "flags\t\t: fpu avx2 avx512f\n"),
        ("aarch64", "Features\t: fp asimd\nCPU part\t: 0xd0c\n", "Features\t: fp asimd sve\nCPU part\t: 0xd0c\n"),
        ("aarch64", "Features\t: fp asimd\nCPU part\t: 0xd0c\n", "Features\t: fp asimd\nCPU part\t: 0xd40\n"),
    ],
)
def test_each_kind_of_processor_has_a_library_of_its_own(fresh, monkeypatch, machine, cpuinfo, other):
    """Whatever else /proc/cpuinfo tells, and of however many cores."""

    def folder(of):
        with monkeypatch.context() as patched:
            patched.setattr(platform, "machine", lambda: machine)
            patched.setattr(prebuilt, "_cpuinfo", lambda: of)
            return build.cache_folder()

    assert folder(cpuinfo) == folder(f"cpu MHz : 2445\n{cpuinfo}\n{cpuinfo}") != folder(other)


@pytest.mark.parametrize(
    ("flags", "library"),
    [
        ("fpu sse4_2 avx", None),
        ("avx2 bmi1 bmi2 f16c fma movbe", "x86-64-v3"),
        ("avx2 bmi1 bmi2 f16c fma movbe avx512f", "x86-64-v3"),
        ("avx2 bmi1 bmi2 f16c fma movbe avx512f avx512bw avx512cd avx512dq avx512vl avx512_bf16", "x86-64-v4"),
        (
            "avx2 bmi1 bmi2 f16c fma movbe avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni avx512_bf16",
            "x86-64-v4-bf16",
        ),
    ],
)
def test_a_wheel_has_a_library_for_what_the_processor_can_do(monkeypatch, tmp_path, flags, library):
    monkeypatch.setattr(prebuilt, "_cpuinfo", lambda: f"processor\t: 0\nflags\t\t: {flags}\n" * 2)
    assert prebuilt.prebuilt() is None  # in a clone
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    for name in prebuilt.LEVELS:
        (tmp_path / f"{name}.so").touch()
    assert prebuilt.prebuilt() == (library and tmp_path / f"{library}.so")


@needs_kernels
def test_a_library_that_cannot_be_loaded_is_compiled(fresh, monkeypatch, caplog, tmp_path):
    (tmp_path / "half.so").write_bytes(b"half of a library")
    monkeypatch.setattr(build, "prebuilt", lambda: tmp_path / "half.so")
    monkeypatch.setattr(build, "compile_library", lambda library, flags: library.touch())
    load = torch.ops.load_library
    monkeypatch.setattr(torch.ops, "load_library", lambda path: load(path) if path.name == "half.so" else None)
    assert compiled.obstacle() is None
    assert "half.so cannot be loaded, the kernels are compiled instead" in caplog.text


@needs_kernels
@can_build
@pytest.mark.slow
def test_a_compiler_may_be_several_words(tmp_path):
    _, obstacle, _ = finish(start(tmp_path, CXX="env -u HOME c++ -DNDEBUG"))
    assert obstacle == "None"
    assert len(left_in(tmp_path)) == 1


@needs_kernels
@can_build
@pytest.mark.long
def test_two_processes_building_at_once_both_succeed_and_a_third_does_not_build(tmp_path):
    both = [start(tmp_path), start(tmp_path)]
    totals = []
    for process in both:
        total, obstacle, log = finish(process)
        assert obstacle == "None", log
        assert "compiling" in log
        totals.append(total)
    (folder,) = left_in(tmp_path)
    assert folder.startswith("kernels-")
    total, obstacle, log = finish(start(tmp_path))
    assert obstacle == "None"
    assert "compiling" not in log
    assert left_in(tmp_path) == [folder]
    plain, obstacle, _ = finish(start(tmp_path, **{SWITCH: "0"}))
    assert obstacle == "switched off by DOFLA_KERNELS=0"
    assert [*totals, total] == pytest.approx([plain] * 3, rel=1e-4)


@needs_kernels
@can_build
@pytest.mark.long
def test_a_killed_build_leaves_no_folder_that_looks_done(tmp_path):
    process = start(tmp_path)
    deadline = time.monotonic() + 60
    while not any(tmp_path.glob("dofla/.*/*/constants.h")) and time.monotonic() < deadline:  # then the compiler starts
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)  # its compilers too: it has a session of its own
    process.communicate()
    assert left_in(tmp_path)
    assert not any(name.startswith("kernels-") for name in left_in(tmp_path))
    _, obstacle, log = finish(start(tmp_path))
    assert obstacle == "None", log
    assert any(name.startswith("kernels-") for name in left_in(tmp_path))


def test_no_header_repeats_a_number_that_comes_from_python():
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(build.__file__).parent.glob("*.[hc]*"))
    shared = re.findall(r"\bk\w+(?= =)", build.constants_header())
    assert "kLogZero" in shared
    assert [name for name in shared if re.search(rf"\b{name}\s*=[^=]", sources)] == []
