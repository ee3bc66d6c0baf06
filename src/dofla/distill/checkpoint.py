"""The state of a distillation on disk: one file, replaced whole, from which a run goes on as if never stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dofla.data import Images, TokenWindows
from dofla.errors import DoflaError
from dofla.files import replacing, write_json
from dofla.layer import LinearAttention
from dofla.plan import Plan

STATE, CURVES = "distill.safetensors", "losses.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Checkpoint:
    """Feature maps, optimiser moments and loss curve of a run in ``folder``, with the settings they belong to."""

    def __init__(
        self, folder: str | Path, settings: dict[str, Any], plan: Plan, windows: TokenWindows | Images
    ) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DoflaError(f"cannot write to {self.folder}: {error.strerror}") from error
        digest = hashlib.blake2b(digest_size=8)
        for data in windows.batch(range(len(windows))).values():
            digest.update(data.cpu().contiguous().view(torch.uint8).numpy())
        self.settings = settings | {"plan": plan.to_dict()["layers"], "windows": len(windows)}
        self.settings["data"] = digest.hexdigest()

    def resume(self, layers: Mapping[str, LinearAttention], optimizer, columns: Sequence[str]) -> list[list[float]]:
        """Load what an interrupted run left and return its curve [steps done][columns]; save the start of a new run.

        Raises:
            DoflaError: if the file is damaged or belongs to other settings.
        """
        path = self.folder / STATE
        if not path.exists():
            self.save(layers, optimizer, [], columns)
            return []
        try:
            with safe_open(path, "pt") as file:
                found = json.loads((file.metadata() or {})["settings"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise DoflaError(f"{path} is damaged ({error}): remove it to start over") from error
        for key, value in json.loads(json.dumps(self.settings)).items():
            if found.get(key) != value:
                raise DoflaError(
                    f"{path} belongs to a run with another {key}: remove it to start over, or choose another folder"
                )
        try:
            curve = tensors["curve"]
            with torch.no_grad():
                for name, parameter in _named_parameters(layers):
                    parameter.copy_(tensors[name])
                    moments = {key: tensors[f"{name}:{key}"].to(parameter.device) for key in _MOMENTS}
                    optimizer.state[parameter] = {"step": torch.tensor(float(len(curve))), **moments}
        except KeyError as error:
            raise DoflaError(f"{path} is damaged ({error} is missing): remove it to start over") from error
        return curve.tolist()

    def save(
        self, layers: Mapping[str, LinearAttention], optimizer, curve: list[list[float]], columns: Sequence[str]
    ) -> None:
        """Replace the state file and the readable curves, whose ``columns`` are the layers or the one loss of all."""
        tensors: dict[str, Tensor] = {"curve": torch.tensor(curve, dtype=torch.float64)}
        for name, parameter in _named_parameters(layers):
            tensors[name] = parameter.detach().cpu().contiguous()
            for key in _MOMENTS:
                moment = optimizer.state[parameter].get(key, torch.zeros_like(parameter))
                tensors[f"{name}:{key}"] = moment.detach().cpu().contiguous()
        with replacing(self.folder / STATE) as partial:
            save_file(tensors, partial, metadata={"settings": json.dumps(self.settings)})
        by_layer = {name: [losses[n] for losses in curve] for n, name in enumerate(columns)}
        write_json(self.folder / CURVES, {"loss": self.settings["loss"], "layers": by_layer})


def _named_parameters(layers: Mapping[str, LinearAttention]):
    for layer_name, layer in layers.items():
        for name, parameter in layer.named_parameters():
            yield f"{layer_name}.{name}", parameter
