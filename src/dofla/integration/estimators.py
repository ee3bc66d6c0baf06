"""Estimators of a layer's degrees of freedom: from rows of attention, or from queries and keys as in the paper."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dofla.errors import DoflaError
from dofla.integration.recorder import AttentionCall
from dofla.profiles.spectrum import Spectrum, attention_spectrum, gram_spectrum

_ROWS = 64
"""Rows of attention per window."""
_WINDOWS = 8
"""Windows at least, if there are so many: a few samples are spread over them rather than all from one."""


class AttentionRows:
    """Rows of a layer's attention, a few at random of each of some windows, and the Gram matrices of these rows.

    Each row is that of a query head drawn at random from its group. Windows and rows are the same for all heads.
    """

    samples: ClassVar[int] = 4096
    normalization: ClassVar[str] = "mean"

    def __init__(self, samples: int, windows: int, generator: torch.Generator) -> None:
        count = min(windows, max(_WINDOWS, samples // _ROWS))
        self.rows = max(1, min(_ROWS, samples // count))
        self.windows = set(torch.randperm(windows, generator=generator)[:count].tolist())
        self.generator = generator
        self.values: list[Tensor] = []  # [Hkv, R] of each window, R smaller where it is shorter
        self.retries: set[str] = set()

    def add(self, call: AttentionCall, part: Sequence[int]) -> None:
        """Take the rows of the windows that were chosen."""
        for place, window in enumerate(part):
            if window in self.windows:
                here = slice(place, place + 1)
                weight = None if call.weight is None else call.weight[here]
                self._look(replace(call, query=call.query[here], key=call.key[here], weight=weight))

    def _look(self, call: AttentionCall) -> None:
        length, kv_heads = call.key.shape[2], call.key.shape[1]
        real = torch.arange(length) if call.weight is None else call.weight[0].bool().cpu().nonzero()[:, 0]
        if not len(real):
            return
        rows = real[torch.randperm(len(real), generator=self.generator)[: self.rows]]
        member = torch.randint(call.query.shape[1] // kv_heads, (len(rows),), generator=self.generator)
        weights = call.log_weights(rows.to(call.key.device)).exp()[0].unflatten(0, (kv_heads, -1))
        values, retry = attention_spectrum(weights[:, member, torch.arange(len(rows))].cpu())
        self.values.append(values)
        self.retries |= {retry} if retry else set()

    def spectra(self, scaling: float) -> list[Spectrum]:
        """The spectra of the KV heads, each with eigenvalues [W, R] of W windows; ``scaling`` is in the attention
        already. DoflaError if the windows hold padding alone."""
        if not self.values:
            raise DoflaError("the windows that were looked at hold padding alone: give real tokens")
        widest, retry = max(values.shape[1] for values in self.values), max(self.retries, default=None)
        # A matrix of fewer rows is filled up with zeros, and scaled so that a row weighs the same in all of them.
        filled = [F.pad(x * (widest / x.shape[1]), (0, widest - x.shape[1])) for x in self.values]
        return [Spectrum(values, 0.0, retry) for values in torch.stack(filled, dim=1)]


class Reservoir:
    """A uniform sample of a layer's queries and keys, of fixed size, from a stream of any length, and the Gram matrix
    of the attention kernel on them: the paper's.

    Half of the candidates are keys, half are queries, each of a query head drawn at random from its group. The draw
    is the same for all heads. Every candidate gets a random number and the largest ``size`` stay (reservoir sampling
    by random keys), so each of them is equally likely to be kept. It does not matter which windows they are of.
    """

    samples: ClassVar[int] = 1024
    normalization: ClassVar[str] = "trace"

    def __init__(self, size: int, windows: int, generator: torch.Generator) -> None:
        self.size, self.generator = size, generator
        self.tags = torch.empty(0)
        self.vectors = torch.empty(0, 0, 0)  # [Hkv, n, d]

    def add(self, call: AttentionCall, part: Sequence[int]) -> None:
        """Offer all queries and keys of a call."""
        batch, kv_heads, length, head_dim = call.key.shape
        groups = call.query.shape[1] // kv_heads
        tags = torch.rand(2 * batch * length, generator=self.generator)
        if call.weight is not None:
            tags[~call.weight.bool().flatten().cpu().repeat(2)] = -1.0
        candidates = torch.cat([self.tags, tags])
        keep = candidates.topk(min(self.size, len(candidates))).indices
        keep = keep[candidates[keep] >= 0]
        old, new = keep[keep < len(self.tags)], keep[keep >= len(self.tags)] - len(self.tags)
        keys, queries = new[new < batch * length], new[new >= batch * length] - batch * length
        member = torch.randint(groups, (len(queries),), generator=self.generator)
        grouped = call.query.view(batch, kv_heads, groups, length, head_dim)
        parts = [call.key[keys // length, :, keys % length], grouped[queries // length, :, member, queries % length]]
        parts = [part.transpose(0, 1).to("cpu", torch.float32) for part in parts]
        if len(self.tags):
            parts.insert(0, self.vectors[:, old])
        self.vectors = torch.cat(parts, dim=1)
        self.tags = torch.cat([candidates[old], tags[torch.cat([keys, queries + batch * length])]])

    def spectra(self, scaling: float) -> list[Spectrum]:
        """The spectra of the KV heads, each with eigenvalues [J] and those of subsamples."""
        # Keys stand together, and so do queries: by tag they are in random order, as subsamples have to be.
        order = self.tags.argsort()
        return [gram_spectrum(vectors, scaling) for vectors in self.vectors[:, order]]


ESTIMATORS: dict[str, type[AttentionRows] | type[Reservoir]] = {"attention": AttentionRows, "paper": Reservoir}
"""Estimators for one layer, with defaults for the number of samples and the normalization of their Gram matrices."""
