"""Compiling the kernels, once per machine and version, into the user's cache folder."""

import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
from pathlib import Path

import torch

from dofla.attention import constants
from dofla.attention.compiled import SWITCH
from dofla.attention.layout import layout_header
from dofla.errors import DoflaError
from dofla.storage.files import new_folder

_HERE = Path(__file__).parent
_COMMON = ("-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
FLAGS = {"x86_64": (*_COMMON, "-march=native", "-mprefer-vector-width=512"), "aarch64": (*_COMMON, "-mcpu=native")}
"""Compiler flags, by machine."""
_LIBRARY = "dofla_kernels"

logger = logging.getLogger(__name__)


def load() -> str | None:
    """Make ``torch.ops.dofla`` ready, compiling it if need be; the reason why not, or None."""
    try:
        reason = _obstacle()
        if reason is not None:
            return reason
        folder = cache_folder()
        if (folder / f"{_LIBRARY}.so").exists():
            torch.ops.load_library(folder / f"{_LIBRARY}.so")
        else:
            _compile_and_load(folder)
        from dofla.attention.compiled import shapes  # noqa: F401  they can be registered now
    except Exception as error:  # compilers fail in many ways, and attention must go on without
        logger.warning("the compiled kernels could not be built, plain torch is used instead: %s", error)
        return f"building failed: {error}"
    return None if torch.ops.dofla.supported() else "this processor lacks the vector instructions they need"


def cache_folder() -> Path:
    """Where the library of these sources, this torch and this processor is or will be."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    flags = FLAGS[platform.machine()]
    digest = hashlib.sha256("\0".join((torch.__version__, *flags, _processor())).encode())
    for path in (*_sources(), *sorted(_HERE.glob("*.h"))):
        digest.update(path.read_bytes())
    for header in _generated().values():
        digest.update(header.encode())
    return root / "dofla" / f"kernels-{digest.hexdigest()[:16]}"


def constants_header() -> str:
    """``constants.h``: the numbers of :mod:`dofla.attention.constants`, ``MOST_BITS`` as ``kMostBits``."""
    lines = []
    for name, value in vars(constants).items():
        if name.isupper():
            kind, number = ("int", value) if isinstance(value, int) else ("float", f"{value.hex()}f")
            lines.append(f"constexpr {kind} k{name.title().replace('_', '')} = {number};\n")
    return f"#pragma once\n\nnamespace dofla {{\n{''.join(lines)}}}\n"


def write_headers(folder: Path) -> None:
    """Write the headers that are made of Python into a folder, which must be among the compiler's include folders."""
    for name, header in _generated().items():
        (folder / name).write_text(header, encoding="utf-8")


def _generated() -> dict[str, str]:
    return {"constants.h": constants_header(), "layout.h": layout_header()}


def _sources() -> list[Path]:
    return sorted(_HERE.glob("*.cpp"))


def _obstacle() -> str | None:
    if os.environ.get(SWITCH, "1") == "0":
        return f"switched off by {SWITCH}=0"
    if platform.machine() not in FLAGS or platform.system() != "Linux":
        return f"made for x86-64 and ARM Linux (aarch64), not {platform.machine()} {platform.system()}"
    if (cache_folder() / f"{_LIBRARY}.so").exists():
        return None
    if shutil.which(_compiler()[0]) is None:
        return "no C++ compiler found"
    if _ninja_folder() is None:
        return "ninja is not installed: pip install 'dofla[cpu]'"
    return None


def _ninja_folder() -> str | None:
    """Where ninja is; the one of the Python package need not be on the path."""
    found = shutil.which("ninja")
    if found is None and importlib.util.find_spec("ninja"):
        found = shutil.which("ninja", path=importlib.import_module("ninja").BIN_DIR)
    return found and str(Path(found).parent)


def _compile_and_load(folder: Path) -> None:
    """Built under another name first, so that an interrupted build leaves nothing that looks done."""
    from torch.utils.cpp_extension import load

    logger.warning("compiling the CPU kernels into %s, once (about 10 seconds)", folder)
    before, library, loaded = os.environ.copy(), folder / f"{_LIBRARY}.so", False
    os.environ["PATH"] = os.pathsep.join((before.get("PATH", ""), _ninja_folder() or ""))
    try:
        with new_folder(folder) as building:
            if len(_compiler()) > 1:
                os.environ["CXX"] = _in_one_word(building)
            write_headers(building)
            load(
                _LIBRARY,
                [str(path) for path in _sources()],
                extra_include_paths=[str(building)],
                extra_cflags=list(FLAGS[platform.machine()]),
                build_directory=str(building),
                is_python_module=False,
            )
            loaded = True
    except DoflaError:
        if not library.exists():  # otherwise another process was first, and its library is the same
            raise
        if not loaded:
            torch.ops.load_library(library)
    finally:
        for name in ("PATH", "CXX"):
            os.environ.pop(name, None)
        os.environ |= {name: before[name] for name in ("PATH", "CXX") if name in before}


def _compiler() -> list[str]:
    """The compiler, and what it is told."""
    return shlex.split(os.environ.get("CXX") or "c++")


def _in_one_word(building: Path) -> str:
    """A compiler of several words as torch takes it: ``ccache c++`` it would take for a program of that name."""
    script = building / "compiler"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(_compiler())} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return str(script)


def _processor() -> str:
    """The instruction sets, since the compiler uses all of them and home folders are shared between machines."""
    names = ("flags", "Features", "CPU implementer", "CPU part")  # the first on x86-64, the others on ARM
    return "\n".join(sorted({line for line in _cpuinfo().splitlines() if line.startswith(names)}))


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return f"flags {platform.processor()}"
