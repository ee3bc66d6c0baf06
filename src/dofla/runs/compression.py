"""A compression: one calibration, kept beside the model that is compressed by it."""

import math
from pathlib import Path

from dofla.compression.calibrate import measure
from dofla.compression.compress import check_fit, compress
from dofla.compression.directions import LENGTH, WINDOWS
from dofla.compression.retrieval import AUTO
from dofla.compression.target import Target
from dofla.distillation.distributed import wait
from dofla.runs.models import Models
from dofla.runs.recipe import Compression, ModelSpec

CALIBRATION = "calibration.safetensors"


class CompressedModels(Models[Compression, ModelSpec]):
    """Makes the model of a compression."""

    def convert(self, spec: ModelSpec, seed: int) -> None:
        path = self.folder / CALIBRATION
        if not path.exists():
            self._calibrate(path)
        wait()
        asked = ("size", "ratio", "context", "retrieval_heads", "keep_softmax", "prefill", "evict", "bits")
        compress(self.opened.model, calibration=path, **{name: getattr(self.recipe, name) for name in asked})

    def _calibrate(self, path: Path) -> None:
        recipe, model, text = self.recipe, self.opened.model, self.opened.training
        target = Target.of(model, recipe.context, recipe.keep_softmax)
        size = target.size(recipe.size, recipe.ratio, recipe.evict)
        given = {name: getattr(recipe, name) for name in ("head_budgets", "retrieval_heads", "prefill", "bits")}
        check_fit(target, size, None, **given)  # before minutes go
        windows = text.take(math.ceil(WINDOWS * LENGTH / text.length))
        tokenizer = self.opened.tokenizer if recipe.retrieval_heads else None
        needed = recipe.retrieval_heads not in (0, AUTO)
        options = model, target, windows, recipe.head_budgets, tokenizer, recipe.evaluate.batch_size
        with self.view.progress("calibrate") as bar:
            measured = measure(*options, bar.stage, needed)
        measured.save(path)
