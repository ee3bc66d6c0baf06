"""The state of a distillation on disk: one file, replaced whole, from which a run goes on as if never stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dofla.data import Images, TokenWindows
from dofla.errors import DoflaError
from dofla.files import replacing, write_json
from dofla.plan import Plan

STATE, CURVES = "distill.safetensors", "losses.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Checkpoint:
    """What is trained, optimiser moments and loss curve of a run in ``folder``, with the settings they belong to.

    ``parts`` are, by name, the modules that are trained, of which their buffers are kept as well, or parameters alone.
    """

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

    def resume(
        self, parts: Mapping[str, nn.Module | nn.Parameter], optimizer, columns: Sequence[str]
    ) -> list[list[float]]:
        """Load what an interrupted run left and return its curve [steps done][columns]; save the start of a new run.

        Raises:
            DoflaError: if the file is damaged or belongs to other settings.
        """
        path = self.folder / STATE
        if not path.exists():
            self.save(parts, optimizer, [], columns)
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
                for name, tensor in _named_tensors(parts):
                    tensor.copy_(tensors[name])
                    if isinstance(tensor, nn.Parameter):
                        moments = {key: tensors[f"{name}:{key}"].to(tensor.device) for key in _MOMENTS}
                        optimizer.state[tensor] = {"step": torch.tensor(float(len(curve))), **moments}
        except KeyError as error:
            raise DoflaError(f"{path} is damaged ({error} is missing): remove it to start over") from error
        return curve.tolist()

    def save(
        self,
        parts: Mapping[str, nn.Module | nn.Parameter],
        optimizer,
        curve: list[list[float]],
        columns: Sequence[str],
    ) -> None:
        """Replace the state file and the readable curves, whose ``columns`` are the layers or the one loss of all."""
        tensors: dict[str, Tensor] = {"curve": torch.tensor(curve, dtype=torch.float64)}
        for name, tensor in _named_tensors(parts):
            tensors[name] = tensor.detach().cpu().contiguous()
            for key in _MOMENTS if isinstance(tensor, nn.Parameter) else ():
                moment = optimizer.state[tensor].get(key, torch.zeros_like(tensor))
                tensors[f"{name}:{key}"] = moment.detach().cpu().contiguous()
        with replacing(self.folder / STATE) as partial:
            save_file(tensors, partial, metadata={"settings": json.dumps(self.settings)})
        by_layer = {name: [losses[n] for losses in curve] for n, name in enumerate(columns)}
        write_json(self.folder / CURVES, {"loss": self.settings["loss"], "layers": by_layer})


def _named_tensors(parts: Mapping[str, nn.Module | nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            for key, tensor in part.state_dict(keep_vars=True).items():
                yield f"{name}.{key}", tensor
        else:
            yield name, part
