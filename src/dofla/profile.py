"""Profile: what a teacher's attention looks like, per layer and KV head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dofla.errors import DoflaError
from dofla.files import new_folder, read_json, write_json
from dofla.spectrum import DEFAULT_LAMBDA, Spectrum, degrees_of_freedom


@dataclass
class HeadStatistics:
    """What else is known of one KV head; attention figures are means over rows and over the head's queries."""

    query_norm_mean: float = 0.0
    query_norm_max: float = 0.0
    key_norm_mean: float = 0.0
    key_norm_max: float = 0.0
    entropy: float = 0.0  # nats
    mass_first: dict[int, float] = field(default_factory=dict)  # share of attention on the first n tokens
    mass_last: dict[int, float] = field(default_factory=dict)  # share on the last n, the query's own included


@dataclass
class LayerProfile:
    """One attention module."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scaling: float
    causal: bool
    spectra: list[Spectrum]  # per KV head
    statistics: list[HeadStatistics]  # per KV head


@dataclass(frozen=True)
class SkippedLayer:
    """An attention module left softmax."""

    name: str
    kv_heads: int
    head_dim: int
    value_dim: int
    reason: str


@dataclass
class Profile:
    """All layers that can be linearised, how they were measured, and of which model.

    ``profile.dof()`` is instant for any λ and any normalisation, since the eigenvalues are kept.
    """

    model: str
    layers: list[LayerProfile]
    samples: int
    tokens: int
    source: str
    seed: int
    normalization: str = "trace"
    skipped: list[SkippedLayer] = field(default_factory=list)
    dtype: str = "float32"  # of the model, and so of the tokens in a window

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the model's dtype."""
        return getattr(torch, self.dtype).itemsize

    def dof(self, lam: float = DEFAULT_LAMBDA, normalization: str | None = None) -> list[list[float]]:
        """Degrees of freedom [layer][KV head] at tolerance ``lam``; ``normalization`` as the profile's by default."""
        chosen = normalization or self.normalization
        return [[degrees_of_freedom(s, lam, chosen) for s in layer.spectra] for layer in self.layers]

    def save(self, folder: str | Path) -> Path:
        """Write ``profile.json`` and ``spectra.safetensors`` into a new folder; DoflaError if it exists."""
        with new_folder(folder) as out:
            self.write(out)
        return Path(folder)

    def write(self, folder: Path) -> None:
        """Write the two files into an existing folder."""
        tensors = {layer.name: torch.stack([s.eigenvalues for s in layer.spectra]) for layer in self.layers}
        save_file(tensors, folder / "spectra.safetensors")
        write_json(folder / "profile.json", self._to_json())

    @classmethod
    def load(cls, folder: str | Path) -> Profile:
        """Read what :meth:`save` wrote; DoflaError naming the file if it is missing or damaged."""
        folder = Path(folder)
        data, path = read_json(folder / "profile.json", "a profile"), folder / "spectra.safetensors"
        try:
            tensors = load_file(path)
        except FileNotFoundError:
            raise DoflaError(f"{path} is missing: run dofla profile again") from None
        except (SafetensorError, OSError) as error:
            raise DoflaError(f"{path} is damaged ({error}): run dofla profile again") from error
        try:
            return cls._from_json(data, tensors)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise DoflaError(f"{folder / 'profile.json'} is no profile ({what}): run dofla profile again") from error

    def _to_json(self) -> dict:
        dof = self.dof()
        layers = []
        for layer, row in zip(self.layers, dof, strict=True):
            entry = {k: getattr(layer, k) for k in _LAYER_FIELDS}
            entry["per_head"] = [
                {"dof": round(n, 4), "log_scale": s.log_scale, "retry": s.retry, **vars(h)}
                for n, s, h in zip(row, layer.spectra, layer.statistics, strict=True)
            ]
            layers.append(entry)
        head = {"format": 1, "model": self.model, "source": self.source, "samples": self.samples}
        head |= {"tokens": self.tokens, "seed": self.seed, "normalization": self.normalization}
        head["dtype"] = self.dtype
        skipped = [vars(x) for x in self.skipped]
        return head | {"lambda_of_dof_shown": DEFAULT_LAMBDA, "skipped": skipped, "layers": layers}

    @classmethod
    def _from_json(cls, data: dict, tensors: dict[str, Tensor]) -> Profile:
        layers = []
        for entry in data["layers"]:
            eigenvalues = tensors[entry["name"]]
            if len(eigenvalues) != len(entry["per_head"]):
                raise ValueError(f"{entry['name']}: {len(eigenvalues)} spectra for {len(entry['per_head'])} heads")
            if not torch.isfinite(eigenvalues).all():
                raise ValueError(f"{entry['name']}: its eigenvalues are not finite")
            spectra, statistics = [], []
            for values, head in zip(eigenvalues, entry["per_head"], strict=True):
                spectra.append(Spectrum(values, head.pop("log_scale"), head.pop("retry")))
                head.pop("dof")
                for key in ("mass_first", "mass_last"):
                    head[key] = {int(n): share for n, share in head[key].items()}
                statistics.append(HeadStatistics(**head))
            layers.append(LayerProfile(**{k: entry[k] for k in _LAYER_FIELDS}, spectra=spectra, statistics=statistics))
        kept = {k: data[k] for k in ("model", "samples", "tokens", "source", "seed", "normalization")}
        kept["dtype"] = data.get("dtype", "float32")  # profiles of version 0.1 do not say
        if not isinstance(getattr(torch, str(kept["dtype"]), None), torch.dtype):
            raise ValueError(f"dtype is {kept['dtype']!r}")
        return cls(layers=layers, **kept, skipped=[SkippedLayer(**x) for x in data["skipped"]])


_LAYER_FIELDS: Sequence[str] = ("name", "heads", "kv_heads", "head_dim", "value_dim", "scaling", "causal")
