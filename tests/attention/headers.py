"""Headers of the kernels in libraries of their own, which tests call through ctypes."""

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from dofla.attention.compiled import build

needs_compiler = pytest.mark.skipif(
    platform.machine() not in build.FLAGS or shutil.which("c++") is None, reason="no C++ compiler for this machine"
)


def library_of(source: str, folder: Path, *flags: str) -> ctypes.CDLL:
    """C++ that includes headers of the kernels, compiled as they are but for further flags."""
    (folder / "source.cpp").write_text(source, encoding="utf-8")
    build.write_headers(folder)
    flags = (*build.FLAGS[platform.machine()], *flags, "-shared", "-I.")
    command = ["c++", *flags, "-iquote", str(Path(build.__file__).parent), "source.cpp", "-o", "library.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "library.so"))
