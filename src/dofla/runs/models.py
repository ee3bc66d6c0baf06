"""The models of a run: each is made once, step by step, and kept in a folder of its own."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from transformers import PreTrainedModel

from dofla.distillation import History, distill_end_to_end, tracked
from dofla.distillation.distributed import wait
from dofla.distillation.tracking import Progress
from dofla.integration.checkpoint import apply_adapter, write_adapter
from dofla.integration.converted import Converted
from dofla.integration.surgery import restore
from dofla.runs.opened import Opened
from dofla.runs.recipe import ModelSpec, Recipe, slug
from dofla.runs.view import View
from dofla.storage.files import new_folder, read_json, write_json

MODELS, ADAPTER, END_TO_END = "models", "adapter", "end_to_end"
"""In a run's folder, all its models; in a model's, its adapter, and training end to end with the adapter after it."""
_TRAINED = "trained.json"

Asked = TypeVar("Asked", bound=Recipe)
Spec = TypeVar("Spec", bound=ModelSpec)


class Models(ABC, Generic[Asked, Spec]):
    """Makes the models of a recipe, whose list of models is not looked at; what the folder of the run has is kept."""

    def __init__(self, recipe: Asked, folder: str | Path, view: View | None = None) -> None:
        self.recipe, self.folder, self.view = recipe, Path(folder), view or View(quiet=True)
        self.opened = Opened(recipe, self.view)

    @abstractmethod
    def convert(self, spec: Spec, seed: int) -> None:
        """Make the open model this one, as it is before it is trained."""

    def train(self, spec: Spec, seed: int, home: Path) -> None:
        """Train the converted model, layer by layer."""

    @contextmanager
    def made(self, spec: Spec, seed: int) -> Iterator[PreTrainedModel]:
        """Within the block the open model is this one: read if it was made before, otherwise made and kept."""
        home, model = self.home(spec, seed), self.opened.model
        home.mkdir(parents=True, exist_ok=True)
        self.convert(spec, seed)
        try:
            Converted.of(model).plan.save(home / "plan.json")
            steps = [(home, self.train)] + ([(home / END_TO_END, self._train_end_to_end)] if spec.end_to_end else [])
            finished = [n for n, (place, _) in enumerate(steps) if (place / ADAPTER).exists()]
            if finished:
                apply_adapter(model, steps[finished[-1]][0] / ADAPTER)
            for place, train in steps[finished[-1] + 1 :] if finished else steps:
                train(spec, seed, place)
                with new_folder(place / ADAPTER) as folder:
                    write_adapter(model, folder)
            wait()
            yield model
        finally:
            restore(model)

    def home(self, spec: ModelSpec, seed: int) -> Path:
        """The model's folder."""
        return self.folder / MODELS / f"{slug(spec.name)}-seed{seed}"

    def adapter(self, spec: ModelSpec, seed: int) -> Path:
        """The folder of the model's adapter."""
        return self.home(spec, seed) / (END_TO_END if spec.end_to_end else "") / ADAPTER

    def seconds(self, spec: ModelSpec, seed: int) -> float:
        """The seconds that a model was trained, end-to-end training included."""
        home = self.home(spec, seed)
        return recorded_seconds(home / _TRAINED) + recorded_seconds(home / END_TO_END / _TRAINED)

    def _train_end_to_end(self, spec: Spec, seed: int, home: Path) -> None:
        with self.progress(f"train {spec.name} end to end, seed {seed}", home) as progress:
            options = vars(self.recipe.end_to_end) | {"seed": seed, "folder": home, "progress": progress}
            history = distill_end_to_end(self.opened.model, self.opened.training, **options)
        self.record(history, home)

    @contextmanager
    def progress(self, label: str, home: Path) -> Iterator[Progress | bool]:
        """Yield the function to report a training's progress to, on the view and on the recipe's trackers."""
        run, logs = "-".join(home.relative_to(self.folder / MODELS).parts), self.folder / "track"
        with self.view.progress(label) as bar, tracked(self.recipe.track, logs, run, bar.losses) as progress:
            yield progress

    def record(self, history: History, home: Path) -> None:
        """Write the seconds and settings of a training."""
        write_json(home / _TRAINED, {"seconds": round(history.seconds, 3), **history.settings})


def recorded_seconds(path: Path) -> float:
    """Seconds in a file; 0 if there is none."""
    return read_json(path, "a record of seconds")["seconds"] if path.exists() else 0.0
