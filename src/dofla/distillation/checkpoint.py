"""The state of a distillation on disk: one file, replaced whole, from which a run goes on as if never stopped."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dofla.data import Images, TokenWindows
from dofla.distillation.distributed import gather, make_alike
from dofla.errors import DoflaError, malformed
from dofla.storage.files import cannot_write, write_json
from dofla.storage.rank import is_main_process
from dofla.storage.tensors import digest, read_tensors, write_tensors

STATE, CURVES = "distill.safetensors", "losses.json"
logger = logging.getLogger(__name__)
_MOMENTS = ("exp_avg", "exp_avg_sq")

Parts = Mapping[str, nn.Module | nn.Parameter]
"""The modules and parameters that are trained, by name."""


class Checkpoint:
    """The resumable state of a run in ``folder``: trained parameters, optimizer moments and loss curve, with settings.
    Of several processes the main one writes, and all read.

    Args:
        folder: None to keep nothing, and find nothing.
        settings: of the run, and whatever else it must have in common with one that goes on with it.
        windows: that it trains on.
        every: steps between two states.
        parts: that are trained; the buffers of modules are kept as well.
        optimizer: of the parameters.
        columns: of the loss curve: the layers, or the one loss of all.
    """

    def __init__(
        self,
        folder: str | Path | None,
        settings: dict[str, Any],
        windows: TokenWindows | Images,
        every: int,
        parts: Parts,
        optimizer: Optimizer,
        columns: Sequence[str],
    ) -> None:
        self.folder, self.every = None if folder is None else Path(folder), every
        self.parts, self.optimizer, self.columns = parts, optimizer, columns
        self._earlier, self._started = 0.0, time.perf_counter()
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(self.folder, error.errno) from error
        data = digest(windows.batch(range(len(windows))).values())
        self.settings = settings | {"windows": len(windows), "data": data}

    @property
    def seconds(self) -> float:
        """The time the training has taken, in processes that were broken off and in this one."""
        return self._earlier + time.perf_counter() - self._started

    def resume(self) -> list[list[float]]:
        """Load what an interrupted run left and return its curve [steps done][columns]; save the start of a new run.
        All processes then go on from the same parts. DoflaError if the file is damaged, belongs to other settings, or
        is not seen by all processes."""
        curve: list[list[float]] = []
        if self.folder is not None and (self.folder / STATE).exists():
            curve = self._load(self.folder / STATE)
        elif self.folder is not None:
            self._save(self.folder, curve)
        tensors = list(self._tensors().values())
        if (gather(torch.tensor(len(curve), device=tensors[0].device)) != len(curve)).any():
            raise DoflaError(f"not all processes see the same files in {self.folder}: choose another folder")
        make_alike(tensors)
        return curve

    def _load(self, path: Path) -> list[list[float]]:
        tensors, metadata = read_tensors(path, "remove it to start over")
        with malformed(f"{path} is damaged", "remove it to start over"):
            found, self._earlier = dict(json.loads(metadata["settings"])), float(metadata.get("seconds", 0))
        for key, value in json.loads(json.dumps(self.settings)).items():
            if found.get(key) != value:
                raise DoflaError(
                    f"{path} belongs to a run with another {key}: remove it to start over, or choose another folder"
                )
        curve, wanted = tensors.get("curve", torch.empty(0, 0)), self._tensors()
        parameters = _parameters(wanted)
        shapes = {name: tensor.shape for name, tensor in wanted.items()}
        shapes |= {f"{name}:{key}": parameter.shape for name, parameter in parameters.items() for key in _MOMENTS}
        shapes["curve"] = torch.Size([len(curve), len(self.columns)] if len(curve) else [0])
        for name, shape in shapes.items():
            if name not in tensors or tensors[name].shape != shape:
                what = f"{name} is missing, or not {list(shape)}"
                raise DoflaError(f"{path} is damaged ({what}): remove it to start over")
        with torch.no_grad():
            for name, tensor in wanted.items():
                tensor.copy_(tensors[name])
        for name, parameter in parameters.items():
            moments = {key: tensors[f"{name}:{key}"].to(parameter.device) for key in _MOMENTS}
            self.optimizer.state[parameter] = {"step": torch.tensor(float(len(curve))), **moments}
        logger.info("%s: going on after %d steps", path, len(curve))
        return curve.tolist()

    def keep(self, curve: list[list[float]]) -> None:
        """Every so many steps, and after the last, replace the state file and the readable curves."""
        if self.folder is not None and (len(curve) % self.every == 0 or len(curve) == self.settings["steps"]):
            self._save(self.folder, curve)

    def _save(self, folder: Path, curve: list[list[float]]) -> None:
        if not is_main_process():
            return
        tensors = self._tensors()
        for name, parameter in _parameters(tensors).items():
            for key in _MOMENTS:
                tensors[f"{name}:{key}"] = self.optimizer.state[parameter].get(key, torch.zeros_like(parameter))
        metadata = {"settings": json.dumps(self.settings), "seconds": f"{self.seconds:.3f}"}
        write_tensors(folder / STATE, tensors | {"curve": torch.tensor(curve, dtype=torch.float64)}, metadata)
        curves = {name: [losses[n] for losses in curve] for n, name in enumerate(self.columns)}
        write_json(folder / CURVES, {"loss": self.settings["loss"], "layers": curves})

    def _tensors(self) -> dict[str, Tensor]:
        """All that is kept of the parts as they are now, by name."""
        found: dict[str, Tensor] = {}
        for name, part in self.parts.items():
            own = part.state_dict(keep_vars=True) if isinstance(part, nn.Module) else {"": part}
            found |= {f"{name}.{key}".rstrip("."): tensor for key, tensor in own.items()}
        return found


def _parameters(tensors: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
