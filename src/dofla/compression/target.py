"""The target: a model as a compressed cache sees it, looked at once."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from dofla.compression.size import size_or_ratio
from dofla.errors import DoflaError, check_numbers
from dofla.integration.positions import check_context, positions_of
from dofla.integration.sites import AttentionSite, attention_sites, check_kept, check_left, refuse
from dofla.integration.tokenizer import load_tokenizer

_SAMPLED = 4
"""Numbers of a weight of each module that tell one model from another of the same shapes."""


@dataclass(frozen=True)
class Target:
    """All that planning and calibrating know of a model and of what is asked for."""

    name: str
    kind: str  # its class
    config: PreTrainedConfig
    sites: Mapping[str, AttentionSite]  # its attention modules by name
    fingerprint: str  # digest of the names and shapes of its attention modules
    weights: Sequence[float]  # a few of each of them, as bfloat16, in which most are kept
    positions: int | None  # that it has, if it says
    context: int | None = None  # tokens that the cache is for; None: all positions
    keep_softmax: Collection[str] = ()  # names of modules that are left as they are

    @classmethod
    def of(
        cls, model: PreTrainedModel, context: int | None = None, keep_softmax: Collection[str] | None = ()
    ) -> Target:
        """The target that a model is, which reads a few tokens; DoflaError for a context that is no number of
        tokens."""
        kind, positions = type(model).__name__, positions_of(model)
        if context is not None:
            check_numbers(context=context)
            check_context(context, positions)
        sites = attention_sites(model)
        shapes = [f"{x.name} {x.heads} {x.kv_heads} {x.head_dim} {x.value_dim}" for x in sites.values()]
        fingerprint = hashlib.blake2b("\n".join(shapes).encode(), digest_size=8).hexdigest()
        name, weights = model.config._name_or_path or kind, _a_few_weights(map(model.get_submodule, sites))
        return cls(name, kind, model.config, sites, fingerprint, weights, positions, context, keep_softmax or ())

    @property
    def length(self) -> int | None:
        """Tokens that the cache is for, if that is known."""
        return self.context or self.positions

    @cached_property
    def compressed(self) -> list[AttentionSite]:
        """The modules that get a compressed cache.

        Raises:
            DoflaError: a name in ``keep_softmax`` that is no module; a module that cannot be compressed; none is left.
        """
        check_kept(self.sites, self.keep_softmax)
        sites = self._chosen()
        for site in sites:
            refuse(site)
            if not site.causal:
                raise DoflaError(
                    f"layer {site.name} is bidirectional: an encoder keeps no tokens, linearize it instead"
                )
            if site.head_dim % 8 or site.value_dim % 8:
                dims = f"{site.head_dim} and {site.value_dim}"
                raise DoflaError(f"layer {site.name}: heads of {dims} numbers: a compressed cache needs multiples of 8")
        check_left(self.config, self.kind, sites)
        return sites

    def size(self, size: int | str | None, ratio: float | None, evict: bool = True) -> int | None:
        """Bytes of the compressed cache, None if nothing is evicted; DoflaError for a size of such a cache, and as
        :func:`dofla.compression.size.size_or_ratio`."""
        if not evict:
            for what, value in (("size", size), ("ratio", ratio)):
                if value is not None:
                    raise DoflaError(
                        f"{what} is {value!r} and evict is False: a cache that evicts nothing grows: leave the {what} "
                        "out, or evict"
                    )
            return None
        cached = sum(x.kv_heads * (x.head_dim + x.value_dim) for x in self._chosen()) * torch.bfloat16.itemsize
        return size_or_ratio(size, ratio, self.length and self.length * cached, self.kind)

    def _chosen(self) -> list[AttentionSite]:
        return [x for x in self.sites.values() if not (x.linear_time or x.shares_keys or x.name in self.keep_softmax)]


def tokenizer_of(model: PreTrainedModel, needed: bool = True) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside the weights of a model; if there is none, DoflaError where it is ``needed``."""
    try:
        return load_tokenizer(model.name_or_path or "")
    except DoflaError as error:
        if not needed:
            return None
        raise DoflaError(
            f"{model.name_or_path or type(model).__name__} has no tokenizer to calibrate with: give the tokenizer, "
            "windows of text, or a calibration"
        ) from error


@torch.no_grad()
def _a_few_weights(modules: Iterable[nn.Module]) -> list[float]:
    """Numbers of the first matrix of each module; none of one that is not in memory, or that nothing dequantizes."""
    found: list[float] = []
    for module in modules:
        for name, weight in module.named_parameters():
            if ".dofla." not in f".{name}" and weight.ndim == 2:
                known = type(weight) is nn.Parameter or type(weight).dequantize is not Tensor.dequantize
                if known and weight.is_floating_point() and not weight.is_meta:
                    some = weight.dequantize().reshape(-1)[:: max(1, weight.numel() // _SAMPLED)][:_SAMPLED]
                    found += some.to(torch.bfloat16).tolist()
                break
    return found
