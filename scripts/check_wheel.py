"""Build the wheel into dist/, install it as a user does, in a new environment, and use it there.

    python scripts/check_wheel.py                  # with the pinned torch
    python scripts/check_wheel.py torch==2.10.0    # with another

Every file of src/dofla that git knows must be in the wheel: C++ sources, recipes, the bundled model, the template
of reports. The wheel's declared requirements are installed with the pinned torch. Then `dofla` and the Python blocks of
README.md that begin with the bundled model run in an empty folder, where nothing of the clone can be imported and no
compiler is found. The kernels inside, of each level that this processor has, have to lose what plain torch loses.
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
from collections.abc import Sequence
from pathlib import Path

from build_wheel import build

from dofla.attention.compiled.prebuilt import LEVELS, flags_of_processor

ROOT = Path(__file__).parent.parent
COMMANDS = (["dofla", "--version"], ["dofla", "check", "demo"])
READ = """
import sys
import torch
import dofla
from dofla.attention import compiled
from dofla.attention.compiled import prebuilt
prebuilt._cpuinfo = lambda: "flags: " + sys.argv[1]
assert bool(compiled.obstacle()) != bool(sys.argv[1]), compiled.obstacle()
model, tokenizer, _ = dofla.demo()
dofla.compress(model, size="64KiB")
ids = dofla.token_windows("sample", tokenizer, length=300, windows=1).input_ids
cache, losses = None, []
for part in ids[:, :200], *ids[:, 200:].split(1, dim=1):
    with torch.no_grad():
        out = model(part, past_key_values=cache, use_cache=True)
    cache = out.past_key_values
    losses.append(out.logits[:, -1].float().log_softmax(-1))
log_probabilities = torch.cat(losses[:-1]).gather(1, ids[0, 200:, None])
print(-log_probabilities.mean().item())
"""
"""A program that prints its loss, after a prompt token by token, by the kernels for a processor with these flags, or
without kernels."""
TOLERANCE = 0.01  # nats: sums are taken in other orders, after which a number may be rounded the other way
_PYTHON = re.compile(r"^```python\n((?:.*\n)*?)```$", re.MULTILINE)


def main(*torch: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(ROOT / "dist")
        missing = sources() - names(wheel)
        if missing:
            sys.exit(f"{wheel.name} lacks {', '.join(sorted(missing))}")
        programs = install(Path(folder) / "venv", wheel, torch or ("-r", str(ROOT / "requirements" / "torch.txt")))
        desk = Path(folder) / "desk"
        desk.mkdir()
        os.environ |= {"CXX": "no-compiler", "XDG_CACHE_HOME": str(desk / "cache"), "HF_HOME": str(desk / "hub")}
        losses = [float(run([programs / "python", "-c", READ, flags], desk)) for flags in ("", *levels())]
        if max(losses) - min(losses) > TOLERANCE:
            sys.exit(f"plain torch, and kernels of each level, lose {losses} nats")
        for command in COMMANDS:
            run([programs / command[0], *command[1:]], desk)
        for block in readme():
            run([programs / "python", "-c", block], desk)


def levels() -> list[str]:
    """Flags of each level that the wheel has kernels for and this processor has."""
    here = set(flags_of_processor())
    return [" ".join(sorted(needed)) for _, needed in LEVELS.values() if needed <= here]


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


def install(folder: Path, wheel: Path, torch: Sequence[str]) -> Path:
    """A new environment with the wheel; its programs."""
    venv.create(folder, with_pip=True)
    programs = folder / "bin"
    pip = [programs / "python", "-m", "pip", "install", "--quiet", "--no-compile"]  # of torch, little is imported
    run([*pip, *torch])
    run([*pip, wheel])
    return programs


def readme() -> list[str]:
    """Its Python blocks that begin with the bundled model."""
    found = _PYTHON.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    found = [block for block in found if "dofla.demo()" in block]
    return found or sys.exit("README.md has no Python block that begins with dofla.demo()")


def run(command: list[str | Path], folder: Path | None = None) -> str:
    """Run it, say how long it took and what it said; without the modules of this process's clone."""
    print("$", *(str(word).replace("\n", "\n  ") for word in command), flush=True)
    start = time.monotonic()
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    said = subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(said, f"  {time.monotonic() - start:.0f} s", sep="", flush=True)
    return said


if __name__ == "__main__":
    main(*sys.argv[1:])
