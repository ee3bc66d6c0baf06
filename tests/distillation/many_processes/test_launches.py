"""Processes that ``torchrun`` starts: one writes, and what it writes is what one alone would."""

import json
import os
import subprocess
import sys

import pytest
from forks import PATIENCE


def launch(*command, folder):
    """What two processes of ``torchrun`` make of a command; fails if they hang."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *command]
    options = {"cwd": folder, "env": os.environ | {"OMP_NUM_THREADS": "1"}, "timeout": PATIENCE}
    return subprocess.run(command, capture_output=True, text=True, **options)


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
    assert ended.stdout.count("run written to together ") == 1
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
    for one, other in zip(*(x["models"] for x in results), strict=True):
        assert one["loss_increase"]["mean"] == pytest.approx(other["loss_increase"]["mean"], abs=5e-3)
        assert one["state_bytes"] == pytest.approx(other["state_bytes"], rel=1e-2)
