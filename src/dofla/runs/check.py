"""The check of a model before anything is opened or measured, from its config alone: layers, bytes, time."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dofla.compression.memory import WAYS_OUT, calibration_memory
from dofla.compression.plan import compressed_plan
from dofla.compression.size import parse_size
from dofla.compression.target import Target
from dofla.display import Part, Result, size, table
from dofla.errors import DoflaError
from dofla.integration.checkpoint import class_of
from dofla.integration.contents import check_model, check_unconverted
from dofla.integration.converted import is_converted
from dofla.integration.offload import device_of
from dofla.integration.packages import packaged_path
from dofla.integration.positions import positions_of
from dofla.integration.precision import is_slow
from dofla.integration.reading import check_readable
from dofla.integration.room import available_memory
from dofla.integration.sites import AttentionSite, a_few_tokens, check_kept
from dofla.integration.weightless import StandInProducts, without_weights
from dofla.integration.wrapped import unwrapped
from dofla.plans.plan import LENGTHS, Plan
from dofla.runs.calibration import calibration_seconds

COMPRESSED, SOFTMAX, BOUNDED, REFUSED = "compressed", "stays softmax", "already bounded", "refused"
"""The kinds of layers."""
FOUR_BITS = 4.5 / 16
"""Bytes of a cache of 4 bits over those in bfloat16: 64 numbers have a scale and a zero point, as in QuantizedCache."""
_FAILURES = (AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of models whose forward pass wants more than text."""


@dataclass(frozen=True)
class CheckedLayer:
    """An attention module; what it ``becomes`` is :data:`COMPRESSED`, :data:`SOFTMAX`, :data:`BOUNDED` or
    :data:`REFUSED`, and the ``reason`` is why it is refused or stays softmax, or what bounds it."""

    name: str
    kv_heads: int
    head_dim: int
    value_dim: int
    becomes: str
    reason: str | None = None


@dataclass(frozen=True)
class CacheSize:
    """Bytes per sequence after so many ``tokens``, in bfloat16 where nothing is compressed: ``softmax`` of the
    original's cache, ``compressed`` of all layers of the other, ``no_eviction`` of one that holds every token, ``size``
    of what was asked for the compressed layers."""

    tokens: int
    softmax: int
    compressed: int
    no_eviction: int
    size: int

    @property
    def factor(self) -> float:
        """The compression factor: softmax bytes per compressed byte."""
        return self.softmax / self.compressed


@dataclass
class Check(Result):
    """A check of a model: its support by :func:`dofla.compress`, and the sizes of its cache before and after.

    Attributes:
        model: class.
        parameters: how many.
        supported: whether :func:`dofla.compress` takes it with these options.
        reason: why it does not: the error of :func:`dofla.compress`.
        layers: attention modules; none if they cannot be reached.
        cache: by length and size; where layers are refused, as if they were kept softmax; empty if no layer would be
            compressed.
        positions: of the model, if it says.
        seconds: of calibration on this machine, an estimate; None if nothing would be calibrated.
        memory: bytes of weights and calibration together, an estimate.
        available: bytes that there are for them on this machine, if it says.
    """

    model: str
    parameters: int
    supported: bool
    reason: str | None = None
    layers: list[CheckedLayer] = field(default_factory=list, repr=False)
    cache: list[CacheSize] = field(default_factory=list, repr=False)
    positions: int | None = None
    seconds: float | None = None
    memory: int | None = None
    available: int | None = None

    def parts(self) -> Iterator[Part]:
        """The verdict, layers grouped by what they become, and bytes by length and size."""
        yield f"{self.model}, {_count(self.parameters)} parameters: {'' if self.supported else 'not '}supported"
        if self.reason:
            yield self.reason
        if self.layers:
            yield ""
            yield from self._layers()
        if self.cache:
            yield ""
            yield from self._cache()
        if self.seconds is not None and self.memory is not None:
            yield ""
            yield f"calibration: about {_duration(self.seconds)} and {size(self.memory)} on this machine (estimates)"
            if self.available is not None and self.memory > self.available:
                yield f"too little memory, {size(self.available)} are available: {WAYS_OUT}"

    def _layers(self) -> Iterator[Part]:
        groups: dict[tuple, int] = {}
        for x in self.layers:
            head = f"{x.head_dim}" if x.head_dim == x.value_dim else f"{x.head_dim}/{x.value_dim}"
            key = (re.sub(r"\d+", "*", x.name), str(x.kv_heads), head, x.becomes, x.reason)
            groups[key] = groups.get(key, 0) + 1
        shown = table("attention", "layers", "KV heads", "head size", "becomes", widest=34)
        for (name, kv_heads, head, becomes, _), count in groups.items():
            shown.add_row(name, str(count), kv_heads, head, becomes)
        yield shown
        for becomes, reason in dict.fromkeys((becomes, reason) for *_, becomes, reason in groups if reason):
            yield f"{becomes}: {reason}"

    def _cache(self) -> Iterator[Part]:
        shown = table("tokens", "softmax", "4 bits", "no eviction", "compressed", "factor")
        for x in self.cache:
            factor = f"{x.factor:.1f}" if x.factor < 100 else f"{x.factor:.0f}"
            others = (x.softmax, x.softmax * FOUR_BITS, x.no_eviction, x.compressed)
            shown.add_row(f"{x.tokens:,}", *map(size, others), factor)
        yield shown
        refused = any(x.becomes == REFUSED for x in self.layers)
        yield "per sequence, softmax in bfloat16" + (", refused layers kept softmax" if refused else "")
        yield "no eviction: evict=False, 3 bits a number; compressed: without heads that hold every token"
        if self.positions is not None and self.positions < max(LENGTHS):
            yield f"the model has {self.positions:,} positions"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        plain = super().to_dict()
        for row, own in zip(plain["cache"], self.cache, strict=True):
            row["factor"] = own.factor
        return plain


def check(
    model: PreTrainedModel | PreTrainedConfig | str | Path,
    sizes: Sequence[str | int] = (),
    *,
    ratio: float | None = None,
    context: int | None = None,
    keep_softmax: Collection[str] = (),
    trust_remote_code: bool = False,
) -> Check:
    """Tell whether :func:`dofla.compress` supports a model, what each layer becomes, how many bytes the cache takes,
    and about how long calibration takes.

    Args:
        model: a model; or a folder, a name on the hub or a config, of which no weights are read: only ``config.json``
            needs to be there.
        sizes: of the compressed cache, each as for :func:`dofla.compress`.
        ratio, context: as for :func:`dofla.compress`, where no sizes are given.
        keep_softmax: layers to leave as they are.
        trust_remote_code: allow the model's repository to bring its own code.

    Raises:
        DoflaError: no such model or config; a model that is compressed already; a size of another form; a name in
            ``keep_softmax`` that is no layer.
    """
    if sizes and ratio is not None:
        raise DoflaError(f"sizes are given and ratio is {ratio:g}: give one of them")
    asked: list[int | None] = list(dict.fromkeys(map(parse_size, sizes))) or [None]
    opened = unwrapped(model) if isinstance(model, nn.Module) else _from_config(model, trust_remote_code)
    if is_converted(opened):
        raise DoflaError("the model is converted already: dofla.restore(model) gives the original back")
    name = type(opened).__name__
    found = Check(name, opened.num_parameters(), False, positions=positions_of(opened))
    with StandInProducts() as standing:
        try:
            tokens = a_few_tokens(opened)
            if "input_ids" in tokens:
                check_readable(opened, tokens["input_ids"], "a few tokens")
            target = Target.of(opened, context, keep_softmax)
        except DoflaError as error:
            found.reason = str(error)
            return found
        except _FAILURES as error:
            found.reason = f"{name} does not read a few tokens of text: {_in_short(error)}"
            return found
        operations, sites = standing.operations / len(next(iter(tokens.values()))[0]), target.sites
        check_kept(sites, keep_softmax)
        found.layers = [_layer(site, keep_softmax) for site in sites.values()]
        try:
            for given in asked:
                compressed_plan(target, target.size(given, ratio))
        except DoflaError as error:
            found.reason = str(error)
        if any(layer.becomes == COMPRESSED for layer in found.layers):
            kept = [layer.name for layer in found.layers if layer.becomes in (SOFTMAX, REFUSED)]
            target = replace(target, keep_softmax=kept)
            whole = [_bytes(n, sites, compressed_plan(target, None))[1] for n in LENGTHS]
            for given in asked:
                with suppress(DoflaError):  # of a size without room for a token of each kind: the reason above
                    plan = compressed_plan(target, target.size(given, ratio))
                    found.cache += [
                        CacheSize(n, *_bytes(n, sites, plan), no_eviction, plan.made_by["size"])
                        for n, no_eviction in zip(LENGTHS, whole, strict=True)
                    ]
    found.supported = found.reason is None
    if found.cache:
        dtype = opened.dtype if isinstance(model, nn.Module) else opened.config.dtype
        dtype = dtype if isinstance(dtype, torch.dtype) else torch.float32
        slow = device_of(opened).type == "cpu" and is_slow(dtype)
        dtype = torch.float32 if slow else dtype
        found.seconds = calibration_seconds(operations, dtype, device_of(opened))
        found.memory = found.parameters * dtype.itemsize + calibration_memory(opened)
        free = available_memory(device_of(opened))
        taken = opened.get_memory_footprint() if isinstance(model, nn.Module) else 0
        found.available = None if free is None else free + taken
    return found


def target_of(model: str, context: int | None = None, keep_softmax: Collection[str] = ()) -> Target | None:
    """The target that a model is by its config alone; None if nothing can be said without its weights. DoflaError as
    :func:`dofla.compress`: for what is wrong before weights and text are read."""
    opened = _from_config(model, False)
    with StandInProducts():
        try:
            target = Target.of(opened, context, keep_softmax)
        except DoflaError:
            raise
        except _FAILURES:
            return None
    target.compressed  # noqa: B018 refuses what cannot be compressed
    return target


def _from_config(given: PreTrainedConfig | str | Path, trust_remote_code: bool) -> PreTrainedModel:
    """The model of a config, without weights."""
    config = given if isinstance(given, PreTrainedConfig) else _config(str(given), trust_remote_code)
    what = str(given) if isinstance(given, (str, Path)) else "the model of the config"
    check_unconverted(getattr(config, "quantization_config", None), what)
    kind = class_of(config, trust_remote_code=trust_remote_code)
    if kind is AutoModel and config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        kind = AutoModelForCausalLM
    options = {"trust_remote_code": True} if trust_remote_code and not issubclass(kind, PreTrainedModel) else {}
    try:
        return without_weights(config, partial(getattr(kind, "from_config", kind), **options))
    except Exception as error:  # a config with a wrong field fails in any way
        raise DoflaError(f"cannot build a {config.model_type} model of its config: {_in_short(error)}") from error


def _config(name: str, trust_remote_code: bool) -> PreTrainedConfig:
    place = packaged_path(name)
    check_model(place)
    try:
        written, _ = PreTrainedConfig.get_config_dict(place)
        if "auto_map" in written and written.get("model_type") not in CONFIG_MAPPING and not trust_remote_code:
            raise DoflaError(
                f"model {name!r} brings code of its own: read it, then allow it in Python by trust_remote_code=True "
                "(on the command line dofla check alone does, by --set trust_remote_code=true)"
            )
        return AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
    except DoflaError:
        raise
    except Exception as error:  # a damaged file fails in any way
        raise DoflaError(f"cannot read the config of model {name!r}: {_in_short(error)}") from error


def _in_short(error: Exception) -> str:
    """Its first line, and the second where the first announces it."""
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first


def _layer(site: AttentionSite, keep_softmax: Collection[str]) -> CheckedLayer:
    becomes, reason = COMPRESSED, None
    if site.name in keep_softmax:
        becomes = SOFTMAX
    elif site.linear_time:
        becomes, reason = BOUNDED, "it attends to a window" + (f" of {site.window:,} tokens" if site.window else "")
    elif site.refusal:
        becomes, reason = REFUSED, site.refusal
    elif site.shares_keys:
        becomes, reason = SOFTMAX, "it shares keys and values with other layers"
    elif not site.causal:
        becomes, reason = REFUSED, "it sees both ways: an encoder keeps no tokens"
    elif site.head_dim % 8 or site.value_dim % 8:
        becomes, reason = REFUSED, "the size of its heads is no multiple of 8"
    return CheckedLayer(site.name, site.kv_heads, site.head_dim, site.value_dim, becomes, reason)


def _bytes(tokens: int, sites: Mapping[str, AttentionSite], plan: Plan) -> tuple[int, int]:
    """Bytes of the softmax cache of so many tokens, and of the cache of a model compressed by ``plan``."""
    compressed = {layer.name for layer in plan.compressed}
    softmax, rest = 0, 0
    for site in sites.values():
        held = min(tokens, site.window or tokens) if site.causal and not site.borrows_keys else 0
        own = held * site.kv_heads * (site.head_dim + site.value_dim) * torch.bfloat16.itemsize
        softmax += own
        rest += 0 if site.name in compressed else own
    return softmax, rest + sum(layer.cache_bytes(tokens, torch.bfloat16.itemsize) for layer in plan.compressed)


def _count(parameters: float) -> str:
    for unit in ("", " K", " M"):
        if parameters < 1000:
            return f"{parameters:.3g}{unit}"
        parameters /= 1000
    return f"{parameters:.3g} B" if parameters < 1000 else f"{parameters / 1000:.3g} T"


def _duration(seconds: float) -> str:
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 1):.0f} seconds"
