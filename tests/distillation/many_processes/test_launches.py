"""Processes that ``torchrun`` starts: one writes, and none outlives another that has ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from forks import PATIENCE

from dofla.distillation.checkpoint import CURVES, STATE

SCRIPT = """
import os, signal, sys
import torch
from transformers import AutoModelForCausalLM
import dofla

folder, death = sys.argv[1:]

def progress(step, steps, losses):
    print(f"step {step}", flush=True)

def die(module, args):
    if os.environ["RANK"] == "1" and len(seen) > 10:  # some are read before the first step
        if death == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("out of luck")
    seen.append(1)

seen = []
student = dofla.linear.linearize(AutoModelForCausalLM.from_pretrained(folder), budget=4)
student.base_model.register_forward_pre_hook(die)
tokens = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(0))
dofla.linear.distill(student, tokens, batch_size=1, epochs=100, progress=progress, folder=folder + "/run",
checkpoint_every=1)
"""


def launch(*command, folder):
    """What two processes of ``torchrun`` make of a command; fails if they hang."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *command]
    options = {"cwd": folder, "env": os.environ | {"OMP_NUM_THREADS": "1"}, "timeout": PATIENCE}
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.fixture
def folder(tiny, tmp_path):
    tiny.llama().save_pretrained(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def dies(folder, death):
    ended = launch("script.py", ".", death, folder=folder)
    assert ended.returncode != 0
    assert ended.stdout.splitlines()[:1] == ["step 1"], ended.stderr
    assert ended.stdout.count("step 1\n") == 1  # the first alone shows progress
    names = sorted(path.name for path in (folder / "run").iterdir() if not path.name.startswith("."))
    assert names == sorted([STATE, CURVES])
    return ended.stderr


@pytest.mark.long
@pytest.mark.parametrize(("death", "message"), [("kill", "-9"), ("fault", "ValueError: out of luck")])
def test_a_process_that_ends_ends_the_others(folder, death, message):
    assert message in dies(folder, death)


RECIPE = """
model: demo
budget: 8
data: {source: demo, length: 32, windows: 14}
profile: {samples: 16, windows: 4}
curves: {windows: 8, steps: 2, held_out: 2, rows: 4}
students: [{name: Measured}, {name: Whole, strategy: hybrid, end_to_end: true}]
distill: {steps: 4, rows: 4}
end_to_end: {steps: 2, batch_size: 1}
evaluate: {prompts: 1, prompt_tokens: 4, new_tokens: 4}
"""


@pytest.mark.long
def test_a_recipe_is_run_together(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    half = ["--set", "distill.batch_size=1", "--set", "curves.batch_size=1", "--set", "end_to_end.accumulate=1"]
    ended = launch("-m", "dofla", "run", "recipe.yaml", "--out", "together", *half, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("everything is in together") == 1
    whole = ["--set", "distill.batch_size=2", "--set", "curves.batch_size=2", "--set", "end_to_end.accumulate=2"]
    alone = [sys.executable, "-m", "dofla", "run", "recipe.yaml", "--out", "alone", *whole]
    subprocess.run(alone, cwd=tmp_path, check=True, capture_output=True, timeout=PATIENCE)
    files = [
        sorted(
            str(path.relative_to(tmp_path / run)) for path in (tmp_path / run).rglob("*") if ".dofla." not in path.name
        )
        for run in ("together", "alone")
    ]
    assert files[0] == files[1]
    results = [json.loads((tmp_path / run / "results.json").read_text()) for run in ("together", "alone")]
    # Adam's first steps take the signs of gradients, and sums in another order give the smallest another sign: so
    # curves differ in their third digit, and by them one head or another gets a feature more.
    for one, other in zip(*(x["students"] for x in results), strict=True):
        assert one["loss_increase"]["mean"] == pytest.approx(other["loss_increase"]["mean"], abs=5e-3)
        assert one["state_bytes"] == pytest.approx(other["state_bytes"], rel=1e-2)
