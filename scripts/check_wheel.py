"""Build the wheel, install it as a user does, in a new environment, and use it there.

    python scripts/check_wheel.py

Every file of src/dofla that git knows must be in the wheel: C++ sources, recipes, the bundled model, the template
of reports. The wheel's declared requirements are installed with the pinned torch. Then `dofla` and the Python blocks of
README.md that begin with the bundled model run in an empty folder, where nothing of the clone can be imported.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMMANDS = (["dofla", "--version"], ["dofla", "check", "demo"])
_PYTHON = re.compile(r"^```python\n((?:.*\n)*?)```$", re.MULTILINE)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        missing = sources() - names(wheel)
        if missing:
            sys.exit(f"{wheel.name} lacks {', '.join(sorted(missing))}")
        programs = install(Path(folder) / "venv", wheel)
        desk = Path(folder) / "desk"
        desk.mkdir()
        for command in COMMANDS:
            run([programs / command[0], *command[1:]], desk)
        for block in readme():
            run([programs / "python", "-c", block], desk)


def build(folder: Path) -> Path:
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT])
    (wheel,) = folder.glob("*.whl")
    return wheel


def sources() -> set[str]:
    """Files of the package in the clone, by their names in the wheel."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "dofla"],
        cwd=ROOT / "src",
        capture_output=True,
        text=True,
        check=True,
    )
    return set(listed.stdout.split())


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def install(folder: Path, wheel: Path) -> Path:
    """A new environment with the wheel; its programs."""
    venv.create(folder, with_pip=True)
    programs = folder / "bin"
    pip = [programs / "python", "-m", "pip", "install", "--quiet", "--no-compile"]  # of torch, little is imported
    run([*pip, "-r", ROOT / "requirements" / "torch.txt"])
    run([*pip, f"{wheel}[cpu]"])
    return programs


def readme() -> list[str]:
    """Its Python blocks that begin with the bundled model."""
    found = _PYTHON.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    found = [block for block in found if "dofla.demo()" in block]
    return found or sys.exit("README.md has no Python block that begins with dofla.demo()")


def run(command: list[str | Path], folder: Path | None = None) -> None:
    """Run it and say how long it took; without the modules of this process's clone."""
    print("$", *(str(word).replace("\n", "\n  ") for word in command), flush=True)
    start = time.monotonic()
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    subprocess.run(command, cwd=folder, env=environment, check=True)
    print(f"  {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
