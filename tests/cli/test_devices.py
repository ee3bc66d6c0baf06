"""``--device``: where a model computes, and what is said if there is no such place."""

import pytest
import torch
import typer
from command_line import call

import dofla
from dofla.cli import app
from dofla.runs.folder import claim
from dofla.runs.opening import device_of, open_original
from dofla.runs.recipe import Recipe

COMMANDS = typer.main.get_command(app).commands


def test_every_verb_that_loads_a_model_takes_a_device():
    without = {name for name, command in COMMANDS.items() if "device" not in {x.name for x in command.params}}
    assert without == {"check", "allocate", "report"}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_there_is_the_cpu_alone(capsys):
    assert {device_of(name).type for name in (None, "cpu", "auto")} == {"cpu"}
    for name in ("cuda", "cuda:1", "mps", "gpu"):
        with pytest.raises(dofla.DoflaError, match=f"device '{name}' is not available: choose cpu or auto"):
            device_of(name)
    assert call("evaluate", "demo", "--data", "sample", "--device", "cuda") == 2
    assert capsys.readouterr().err == "dofla: device 'cuda' is not available: choose cpu or auto\n"


def test_an_accelerator_is_found_by_its_names(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert [str(device_of(name)) for name in ("auto", "cuda", "cuda:1", "cpu")] == ["cuda", "cuda", "cuda:1", "cpu"]
    with pytest.raises(dofla.DoflaError, match="choose cpu, cuda, cuda:0, cuda:1 or auto"):
        device_of("cuda:2")


def test_a_model_goes_to_its_device(monkeypatch):
    monkeypatch.setattr("dofla.runs.opening.device_of", lambda name: torch.device(name or "cpu"))
    assert open_original("demo")[0].device.type == "cpu"
    assert open_original("demo", device="meta")[0].device.type == "meta"


def test_a_run_goes_on_with_another_device(tmp_path):
    for device in (None, "cpu", "cuda"):
        claim(tmp_path / "run", "recipe.yaml", Recipe(model="demo", device=device).to_dict())
