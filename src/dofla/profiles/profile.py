"""Profile: what a model's attention looks like, per layer and KV head."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dofla.display import Part, Result
from dofla.errors import malformed
from dofla.profiles.spectrum import NORMALIZATIONS, Spectrum, degrees_of_freedom, standard_error
from dofla.profiles.table import degrees_tables, doubtful
from dofla.profiles.tolerance import DEFAULT_LAMBDA
from dofla.storage.fields import build
from dofla.storage.files import new_folder, read_json, write_json
from dofla.storage.tensors import read_tensors, write_tensors


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


@dataclass(frozen=True)
class SkippedLayer:
    """An attention module left softmax."""

    name: str
    kv_heads: int
    head_dim: int
    value_dim: int
    reason: str


@dataclass
class Profile(Result):
    """All layers that can be linearized, how they were measured, and of which model.

    ``profile.dof()`` and ``profile.dof_errors()`` are instant for any λ and any normalization, since the eigenvalues
    are kept. ``str(profile)`` is a table of both.
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
    estimator: str = "attention"  # of the degrees of freedom, see dofla.linear.profile

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the model's dtype."""
        return getattr(torch, self.dtype).itemsize

    def dof(self, lam: float = DEFAULT_LAMBDA, normalization: str | None = None) -> list[list[float]]:
        """Degrees of freedom [layer][KV head] at tolerance ``lam``; ``normalization`` as the profile's by default."""
        chosen = normalization or self.normalization
        return [[degrees_of_freedom(s, lam, chosen) for s in layer.spectra] for layer in self.layers]

    def dof_errors(self, lam: float = DEFAULT_LAMBDA, normalization: str | None = None) -> list[list[float]]:
        """Standard errors of :meth:`dof` [layer][KV head]; NaN where unknown."""
        chosen = normalization or self.normalization
        return [[standard_error(s, lam, chosen) for s in layer.spectra] for layer in self.layers]

    def parts(self, lam: float = DEFAULT_LAMBDA) -> Iterator[Part]:
        """Degrees of freedom ± standard errors, layers down and KV heads across, and which of them to doubt."""
        kind = f"{self.estimator}, {self.normalization}; λ = {lam:.3g}, J = {self.samples}"
        dof, errors = self.dof(lam), self.dof_errors(lam)
        yield from degrees_tables(kind, dof, errors)
        yield from doubtful(dof, errors)
        yield from (f"  left softmax: {x.name} ({x.reason})" for x in self.skipped)

    def save(self, folder: str | Path) -> Path:
        """Write ``profile.json`` and ``spectra.safetensors`` into a new folder; DoflaError if it exists."""
        with new_folder(folder) as out:
            self.write(out)
        return Path(folder)

    def write(self, folder: Path) -> None:
        """Write the two files into an existing folder."""
        tensors = {layer.name: torch.stack([s.eigenvalues for s in layer.spectra]) for layer in self.layers}
        for layer in self.layers:
            subsamples = [s.subsamples for s in layer.spectra if s.subsamples is not None]
            if len(subsamples) == len(layer.spectra):
                tensors[layer.name + _SUBSAMPLES] = torch.stack(subsamples)
        write_tensors(folder / "spectra.safetensors", tensors)
        write_json(folder / "profile.json", self.to_dict())

    @classmethod
    def load(cls, folder: str | Path) -> Profile:
        """Read what :meth:`save` wrote; DoflaError naming the file if it is missing or damaged."""
        folder = Path(folder)
        data = read_json(folder / "profile.json", "a profile")
        tensors, _ = read_tensors(folder / "spectra.safetensors", "run dofla profile again")
        with malformed(f"{folder / 'profile.json'} is no profile", "run dofla profile again"):
            return cls._from_json(data, tensors)

    def to_dict(self) -> dict[str, Any]:
        """The contents of ``profile.json``; a standard error that is unknown is None."""
        layers = []
        for layer, *rows in zip(self.layers, self.dof(), self.dof_errors(), strict=True):
            entry = {k: getattr(layer, k) for k in _LAYER_FIELDS}
            entry["per_head"] = [
                {"dof": round(n, 4), "dof_error": None if math.isnan(error) else round(error, 4)}
                | {"log_scale": s.log_scale, "retry": s.retry}
                for n, error, s in zip(*rows, layer.spectra, strict=True)
            ]
            layers.append(entry)
        head = {"format": _FORMAT} | {name: getattr(self, name) for name in _FIELDS}
        skipped = [vars(x) for x in self.skipped]
        return head | {"lambda_of_dof_shown": DEFAULT_LAMBDA, "skipped": skipped, "layers": layers}

    @classmethod
    def _from_json(cls, data: dict, tensors: dict[str, Tensor]) -> Profile:
        if data.get("format") != _FORMAT:
            raise ValueError(f"format {data.get('format')!r}, this version of dofla reads {_FORMAT}")
        layers = [_layer(entry, tensors, f"layer {entry['name']}") for entry in data["layers"]]
        if data["normalization"] not in NORMALIZATIONS:
            raise ValueError(f"normalization is {data['normalization']!r}")
        if not isinstance(getattr(torch, str(data["dtype"]), None), torch.dtype):
            raise ValueError(f"dtype is {data['dtype']!r}")
        return build(cls, {k: data[k] for k in (*_FIELDS, "skipped")} | {"layers": layers}, "it")


def _layer(entry: dict, tensors: dict[str, Tensor], where: str) -> LayerProfile:
    known = {k: entry[k] for k in _LAYER_FIELDS}
    eigenvalues, heads = tensors[known["name"]], entry["per_head"]
    if eigenvalues.ndim not in (2, 3) or not eigenvalues.is_floating_point() or not eigenvalues.numel():
        raise ValueError(f"{where}: its eigenvalues are {eigenvalues.dtype} {list(eigenvalues.shape)}")
    parts = tensors.get(known["name"] + _SUBSAMPLES, [None] * len(heads))
    if not len(eigenvalues) == len(parts) == len(heads) == known["kv_heads"]:
        raise ValueError(f"{where}: {len(eigenvalues)} spectra, {len(heads)} of {known['kv_heads']} KV heads")
    spectra = []
    for n, (values, own_parts, head) in enumerate(zip(eigenvalues, parts, heads, strict=True)):
        own = {k: v for k, v in head.items() if k not in ("dof", "dof_error")}
        found = own | {"eigenvalues": values, "subsamples": own_parts}
        spectra.append(build(Spectrum, found, f"{where}: per_head[{n}]"))
    layer = build(LayerProfile, known | {"spectra": spectra}, where)
    for key in ("heads", "kv_heads", "head_dim", "value_dim", "scaling"):
        if getattr(layer, key) <= 0:
            raise ValueError(f"{where}: {key} is {getattr(layer, key)}")
    return layer


_FORMAT = 3  # 2 had more of each head
_SUBSAMPLES = "/subsamples"
_FIELDS = ("model", "source", "samples", "tokens", "seed", "estimator", "normalization", "dtype")
_LAYER_FIELDS: Sequence[str] = ("name", "heads", "kv_heads", "head_dim", "value_dim", "scaling", "causal")
