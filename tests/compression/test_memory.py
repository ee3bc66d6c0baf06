"""What calibration needs beyond the weights: estimated, compared with what there is, and told of where it runs out."""

import re

import pytest
import torch

import dofla
from dofla.compression.memory import calibration_memory
from dofla.errors import DoflaError


@pytest.mark.parametrize("part", [1, 0.9])
def test_too_little_is_told_before_anything_is_read(tiny, part, monkeypatch, caplog):
    model, told = tiny.llama(), []
    available = part * calibration_memory(model, 256)
    monkeypatch.setattr("dofla.integration.room.available_memory", lambda _: available)
    dofla.calibrate(model, tiny.tokens(2, 96), progress=lambda *_: told.append(caplog.text))
    said = re.search("too little memory: calibration takes about .* are available: give batch_size=1", told[0])
    assert bool(said) == (part < 1)


@pytest.mark.parametrize("words", ["CUDA out of memory", "DefaultCPUAllocator: can't allocate memory", "another fault"])
def test_running_out_says_what_to_change(tiny, words):
    def fail(*_):
        raise (torch.OutOfMemoryError if "CUDA" in words else RuntimeError)(words)

    with pytest.raises((DoflaError, RuntimeError)) as error:
        dofla.calibrate(tiny.llama(), tiny.tokens(2, 96), progress=fail)
    told = str(error.value).startswith("calibration ran out of memory: give batch_size=1")
    assert told == ("another" not in words)


def test_check_estimates_weights_and_calibration(tiny, monkeypatch):
    model = tiny.llama()
    extra = calibration_memory(model)
    monkeypatch.setattr("dofla.runs.check.available_memory", lambda _: extra + 1)
    assert dofla.check(model).memory == 4 * model.num_parameters() + extra
    assert "too little memory" not in str(dofla.check(model))  # the weights are there already
    assert "too little memory" in str(dofla.check(model.config))
