"""The losses of a training to TensorBoard, Weights & Biases and the like, through accelerate's trackers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from dofla.display import Bar, reporting
from dofla.distillation.distributed import joined
from dofla.errors import DoflaError
from dofla.storage.extras import extra

Progress = Callable[[int, int, Mapping[str, float]], None]


@contextmanager
def tracked(
    trackers: Sequence[Any], folder: str | Path, run: str, progress: Progress | bool = True
) -> Iterator[Progress | bool]:
    """For the time of the block, a ``progress`` for :func:`dofla.linear.distill` or
    :func:`dofla.linear.distill_end_to_end` that keeps the losses; ``loss`` is their mean, ``loss/LAYER`` each of them.

        with dofla.linear.tracked(["tensorboard"], "runs/logs", "first") as progress:
            dofla.linear.distill(student, tokens, progress=progress)

    Args:
        trackers: what accelerate takes for ``log_with``: names (``tensorboard``, ``wandb``, ...) or trackers of one's
            own; none: the block gets ``progress`` itself.
        folder: where trackers that keep files put them.
        run: what the run is called there.
        progress: called as well; True, the default, for a bar, False for none.

    Raises:
        DoflaError: a tracker that is unknown or not installed.
    """
    if not trackers:
        yield progress
        return
    accelerate = extra("accelerate", "track", "keeping losses elsewhere")
    joined()  # as accelerate alone would not join processes without a GPU; it lets the main one track
    try:
        accelerator = accelerate.Accelerator(log_with=list(trackers), project_dir=str(folder))
    except ValueError as error:
        raise DoflaError(f"track is {', '.join(map(str, trackers))}: {' '.join(str(error).split())}") from error
    for name in trackers:
        if isinstance(name, str) and name != "all" and name not in map(str, accelerator.log_with):
            raise DoflaError(f"track is {name}, which is not installed: pip install {name}")
    accelerator.init_trackers(run)

    def keep(step: int, steps: int, losses: Mapping[str, float]) -> None:
        values = {"loss": fmean(losses.values())} | {f"loss/{name}": value for name, value in losses.items()}
        accelerator.log(values, step=step)
        if report is not None:
            report(step, steps, losses)

    try:
        with reporting(run, progress, Bar.losses) as report:
            yield keep
    finally:
        for tracker in accelerator.trackers:  # end_training would take the processes of a launch apart as well
            tracker.finish()
