"""Several processes make the student that one makes of batches as many times as large."""

import os

import pytest
import torch
from arithmetic import adam_error, in_float64, sum_error
from forks import in_processes
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import dofla
from dofla.distillation import distill, distill_end_to_end
from dofla.distillation.checkpoint import CURVES, STATE
from dofla.errors import DoflaError
from dofla.feature_maps import FEATURE_MAPS
from dofla.integration.converted import Converted

WINDOWS, LENGTH, BATCH = 23, 16, 2
STEPS, HEADS = 4, 4
HIGHEST_RATE = max(rate for kind in FEATURE_MAPS.values() for rate in kind.learning_rates.values())

PLANS = {
    "plain": {"features": 6},
    "ragged": {"features": [5, 3]},
    "hybrid": {"features": 6, "feature_map": "mlp", "window": 2, "sinks": 1},
}
CASES = {
    "output": ("llama", "tokens", "hybrid", {}),
    "softmax": ("llama", "padded", "ragged", {"loss": "softmax", "accumulate": 1}),
    "l2": ("gpt2", "padded", "plain", {"loss": "l2"}),
    "direct": ("llama", "padded", "ragged", {"loss": "direct"}),
    "context": ("llama", "tokens", "hybrid", {"context": 40}),
    "encoder": ("bert", "padded", "hybrid", {"rows": 5}),
    "images": ("vit", "images", "plain", {}),
}
"""Family, data, plan, options. Of the last batch of an epoch some processes have a window more than others."""


def student_and_data(tiny, family, data, plan):
    model = getattr(tiny, family)()
    student = in_float64(dofla.linear.linearize(model, tiny.plan(model, **PLANS[plan])))
    if data == "images":
        return student, {name: images.double() for name, images in tiny.images(WINDOWS).items()}
    return student, getattr(tiny, data)(WINDOWS, LENGTH)


def maps_of(student):
    """Everything in the feature maps, by name."""
    return {f"{n}.{k}": v for n, layer in Converted.of(student).layers.items() for k, v in layer.state_dict().items()}


def train(tiny, case, batch_size, folder=None):
    family, data, plan, options = CASES[case]
    student, windows = student_and_data(tiny, family, data, plan)
    options = {"steps": STEPS, "batch_size": batch_size, "rows": 9, "accumulate": 2, **options}
    history = distill(student, windows, folder=folder, **options)
    return maps_of(student) | {"losses": history.losses}


def train_end_to_end(tiny, batch_size, accumulate):
    student, windows = student_and_data(tiny, "llama", "padded", "hybrid")
    options = {"steps": STEPS, "batch_size": batch_size, "accumulate": accumulate}
    history = distill_end_to_end(student, windows, **options)
    return dict(student.state_dict()) | {"losses": history.losses}


def work(tiny, folder):
    rank = os.environ["RANK"]
    save_file(train(tiny, "output", BATCH, folder / "run"), folder / f"with a folder {rank}")
    save_file(train_end_to_end(tiny, 1, 1), folder / f"end to end {rank}")


def work_on_cases(tiny, folder):
    for case in CASES:
        save_file(train(tiny, case, BATCH), folder / f"{case} {os.environ['RANK']}")


@pytest.fixture(
    scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)], ids=lambda count: f"{count} processes"
)
def trained(request, tiny, tmp_path_factory):
    """Number of processes, and the folder in which each has put what it made."""
    folder = tmp_path_factory.mktemp("trained")
    assert in_processes(request.param, work, tiny, folder) == [0] * request.param
    return request.param, folder


@pytest.fixture(scope="module")
def cases(trained, tiny):
    """The same, with what each made of every case."""
    count, folder = trained
    assert in_processes(count, work_on_cases, tiny, folder) == [0] * count
    return trained


def made_by_all(folder, case, count):
    """What the first has made, which is what all have made, to the last bit."""
    first, *others = (load_file(folder / f"{case} {rank}") for rank in range(count))
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)
    return first


def assert_alike(together, alone):
    """Weights and losses, but for the order in which rows of windows are added up."""
    losses = together.pop("losses"), alone.pop("losses")
    assert_close(*losses, rtol=sum_error(WINDOWS * LENGTH), atol=0)
    assert not torch.equal(losses[0][0], losses[0][-1])
    assert {value.dtype for value in together.values()} == {torch.float64}
    terms = WINDOWS * LENGTH * HEADS
    bound = adam_error(STEPS, HIGHEST_RATE, sum_error(terms, dtype=torch.float64))  # gradients are of order 1
    assert_close(together, alone, rtol=0, atol=bound)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_they_train_as_one_does_with_larger_batches(tiny, cases, case):
    count, folder = cases
    found = made_by_all(folder, case, count)
    if case == "output":  # a folder changes no number
        with_a_folder = made_by_all(folder, "with a folder", count)
        assert all(torch.equal(value, with_a_folder[name]) for name, value in found.items())
    assert_alike(found, train(tiny, case, BATCH * count))


def test_end_to_end_they_train_as_one_does_that_accumulates_more(tiny, trained):
    count, folder = trained
    assert_alike(made_by_all(folder, "end to end", count), train_end_to_end(tiny, 1, count))


def test_a_run_goes_on_with_another_number_of_processes(tiny, trained):
    count, folder = trained
    assert sorted(path.name for path in (folder / "run").iterdir()) == sorted([STATE, CURVES])
    together = made_by_all(folder, "with a folder", count)
    opened = train(tiny, "output", BATCH * count, folder / "run")
    assert all(torch.equal(value, together[name]) for name, value in opened.items())


def refused(tiny):
    student, windows = student_and_data(tiny, "llama", "tokens", "plain")
    with pytest.raises(DoflaError, match=r"^the last batch of an epoch has 1 of 23 windows, and there are 2 processes"):
        distill(student, windows, batch_size=11)
    with pytest.raises(DoflaError, match="not all processes see the same files in"):
        distill(student, windows, batch_size=2, steps=2, checkpoint_every=1, folder=f"run-{os.environ['RANK']}")


def test_what_they_cannot_share_is_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    student, windows = student_and_data(tiny, "llama", "tokens", "plain")
    distill(student, windows, batch_size=4, steps=2, folder=tmp_path / "run-0")
    assert in_processes(2, refused, tiny) == [0, 0]
