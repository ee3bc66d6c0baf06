"""A compression: one calibration, kept beside the model that is compressed by it."""

import math
from pathlib import Path

from dofla.compression.calibrate import calibrate
from dofla.compression.calibration import Calibration
from dofla.compression.compress import check_fit, compress
from dofla.compression.directions import LENGTH, WINDOWS
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
        asked = ("size", "ratio", "context", "retrieval_heads", "keep_softmax", "prefill")
        compress(self.opened.model, calibration=path, **{name: getattr(self.recipe, name) for name in asked})

    def _calibrate(self, path: Path) -> None:
        recipe, model = self.recipe, self.opened.model
        tokenizer = self.opened.tokenizer if recipe.retrieval_heads else None
        target = Target.of(model, recipe.context, recipe.keep_softmax)
        size = target.size(recipe.size, recipe.ratio)
        check_fit(target, size, None, recipe.head_budgets, recipe.retrieval_heads, recipe.prefill)  # before minutes go
        with self.view.progress("calibrate") as bar:
            measured: Calibration = calibrate(
                model,
                self.opened.training.take(math.ceil(WINDOWS * LENGTH / self.opened.training.length)),
                head_budgets=recipe.head_budgets,
                tokenizer=tokenizer,
                context=recipe.context,
                keep_softmax=recipe.keep_softmax,
                batch_size=recipe.evaluate.batch_size,
                progress=bar.stage,
            )
        measured.save(path)
