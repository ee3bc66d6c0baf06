"""Compiling the kernels, once per machine and version, into the user's cache folder."""

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from dofla.attention import constants
from dofla.attention.compiled import SWITCH
from dofla.attention.compiled.prebuilt import flags_of_processor, prebuilt
from dofla.attention.layout import layout_header
from dofla.errors import DoflaError
from dofla.storage.files import new_folder

_HERE = Path(__file__).parent
_COMMON = ("-std=c++20", "-O3", "-fPIC", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math")
X86 = (*_COMMON, "-mprefer-vector-width=512")
FLAGS = {"x86_64": (*X86, "-march=native"), "aarch64": (*_COMMON, "-mcpu=native")}
"""Compiler flags, by machine."""
LOWEST_TORCH = "2.10"
"""The first torch with what tensor.h takes of its stable ABI."""
_LIBRARY = "dofla_kernels.so"

logger = logging.getLogger(__name__)


def load() -> str | None:
    """Make ``torch.ops.dofla`` ready, compiling it if need be; the reason why not, or None."""
    try:
        reason = _obstacle()
        if reason is not None:
            return reason
        if not _load_prebuilt():
            if (library := cache_folder() / _LIBRARY).exists():
                torch.ops.load_library(library)
            else:
                _compile_and_load(library)
        from dofla.attention.compiled import shapes  # noqa: F401  they can be registered now
    except Exception as error:  # compilers fail in many ways, and attention must go on without
        logger.warning("the compiled kernels could not be built, plain torch is used instead: %s", error)
        return f"building failed: {error}"
    return None


def _load_prebuilt() -> bool:
    """True if there is a library for this processor, and the system loads it."""
    if (library := prebuilt()) is None:
        return False
    try:
        torch.ops.load_library(library)
    except OSError as error:
        logger.warning("%s cannot be loaded, the kernels are compiled instead: %s", library, error)
        return False
    return True


def cache_folder() -> Path:
    """Where the library of these sources, this torch and this processor is or will be."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    flags = FLAGS[platform.machine()]
    # The compiler uses all instruction sets, and home folders are shared between machines.
    digest = hashlib.sha256("\0".join((torch.__version__, *flags, *flags_of_processor())).encode())
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
    if torch.__version__ < LOWEST_TORCH:  # it compares numbers
        return f"made for torch {LOWEST_TORCH} or newer, not {torch.__version__}"
    if prebuilt() or (cache_folder() / _LIBRARY).exists() or shutil.which(_compiler()[0]):
        return None
    return "no C++ compiler found"


def _compile_and_load(library: Path) -> None:
    """Built under another name first, so that an interrupted build leaves nothing that looks done."""
    logger.warning("compiling the CPU kernels into %s, once (about 10 seconds)", library.parent)
    try:
        with new_folder(library.parent) as building:
            compile_library(building / _LIBRARY, FLAGS[platform.machine()])
    except DoflaError:
        if not library.exists():  # otherwise another process was first, and its library is the same
            raise
    torch.ops.load_library(library)


def compile_library(library: Path, flags: Sequence[str]) -> None:
    """Write the library of the kernels; DoflaError with what the compiler says if it fails."""
    torch_folder, building = Path(torch.__file__).parent, library.parent
    write_headers(building)
    objects = [building / f"{source.stem}.o" for source in _sources()]
    include = "-I", building, "-isystem", torch_folder / "include"
    _all([[*_compiler(), *flags, *include, "-c", x, "-o", to] for x, to in zip(_sources(), objects, strict=True)])
    _all([[*_compiler(), "-shared", "-s", *objects, "-L", torch_folder / "lib", "-ltorch_cpu", "-o", library]])
    for path in objects:
        path.unlink()


def _all(commands: Sequence[Sequence[str | Path]]) -> None:
    """Run commands at once; the first that fails ends the others."""
    running = [subprocess.Popen(x, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for x in commands]
    try:
        for command, process in zip(commands, running, strict=True):
            said, _ = process.communicate()
            if process.returncode:
                raise DoflaError(f"{shlex.join(map(str, command))} failed: {said.strip() or process.returncode}")
    finally:
        for process in running:
            process.kill()


def _compiler() -> list[str]:
    """The compiler, and what it is told."""
    return shlex.split(os.environ.get("CXX") or "c++")
