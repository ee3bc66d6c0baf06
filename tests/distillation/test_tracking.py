"""Losses in trackers, through accelerate."""

import pytest
from accelerate.tracking import GeneralTracker
from students import student_of

import dofla
from dofla import DoflaError

OPTIONS = {"steps": 3, "batch_size": 2}
FIRST, SECOND = "model.layers.0.self_attn", "model.layers.1.self_attn"


class Notebook(GeneralTracker):
    """Keeps what it gets."""

    name = "notebook"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict]] = []
        self.closed = False

    @property
    def tracker(self):
        return self.rows

    def store_init_configuration(self, values: dict) -> None:
        pass

    def log(self, values: dict, step: int | None = None, **kwargs) -> None:
        self.rows.append((step, values))

    def finish(self) -> None:
        self.closed = True


@pytest.fixture
def student(tiny):
    return student_of(tiny, features=4, window=2)


def test_each_step_is_kept_with_all_its_losses(tiny, student, tmp_path):
    notebook, seen = Notebook(), []
    with dofla.linear.tracked([notebook], tmp_path, "first", lambda *step: seen.append(step)) as progress:
        history = dofla.linear.distill(student, tiny.tokens(6, 16), **OPTIONS, progress=progress)
        assert not notebook.closed
    assert notebook.closed
    assert [step for step, _ in notebook.rows] == [1, 2, 3]
    for (_, values), losses in zip(notebook.rows, history.losses.tolist(), strict=True):
        assert [values[f"loss/{name}"] for name in (FIRST, SECOND)] == losses
        assert values["loss"] == pytest.approx(sum(losses) / 2)
    assert [step[:2] for step in seen] == [(1, 3), (2, 3), (3, 3)]


def test_end_to_end_as_well(tiny, student, tmp_path):
    notebook, options = Notebook(), OPTIONS | {"weights": "maps"}
    with dofla.linear.tracked([notebook], tmp_path, "first") as progress:
        history = dofla.linear.distill_end_to_end(student, tiny.tokens(6, 16), **options, progress=progress)
    assert [values["loss"] for _, values in notebook.rows] == pytest.approx(history.losses[:, 0].tolist())


def test_a_training_that_fails_closes_the_tracker(tmp_path):
    notebook = Notebook()
    with pytest.raises(ZeroDivisionError), dofla.linear.tracked([notebook], tmp_path, "first"):
        _ = 1 / 0
    assert notebook.closed


def test_tensorboard_gets_files_that_it_can_read(tiny, student, tmp_path):
    with dofla.linear.tracked(["tensorboard"], tmp_path, "first") as progress:
        history = dofla.linear.distill(student, tiny.tokens(6, 16), **OPTIONS, progress=progress)
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(tmp_path / "first"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", f"loss/{FIRST}", f"loss/{SECOND}"}
    found = [event.value for event in events.Scalars(f"loss/{SECOND}")]
    assert found == pytest.approx(history.losses[:, 1].tolist())


def test_without_trackers_nothing_is_between():
    def progress(*_):
        raise AssertionError

    with dofla.linear.tracked([], "nowhere", "first", progress) as same:
        assert same is progress


@pytest.mark.parametrize(("name", "words"), [("paper", "Unsupported"), ("aim", "not installed: pip install aim")])
def test_a_tracker_that_is_not_there_is_one_line(tmp_path, name, words):
    with pytest.raises(DoflaError, match=rf"track is {name}.*{words}"), dofla.linear.tracked([name], tmp_path, "a"):
        pass
