"""A prompt's state on disk: read a long document once, then go on from there as often as one likes."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from dofla.attention import (
    Carried,
    CodedTokens,
    FeatureState,
    FlatState,
    PackedTokens,
    ScoredTokens,
    State,
    TokenBuffer,
)
from dofla.errors import DoflaError
from dofla.feature_maps.layer import LinearAttention
from dofla.integration.cache import CACHE_ARGUMENT, LinearCacheLayer, linear_entry
from dofla.integration.positions import text_positions
from dofla.integration.reading import check_keeps_states, check_readable
from dofla.integration.student import Student
from dofla.storage.tensors import read_tensors, write_tensors

_FORMAT = "7"
"""2 had coarser scales of coded tokens, 3 had those tokens in thirty tensors of each layer, 4 had levels by a
number's own bits, 5 had weights of heavy hitters beside their scores, 6 had other names."""
_Bundle = TypeVar("_Bundle", bound=FeatureState | TokenBuffer | PackedTokens | CodedTokens | ScoredTokens)


def read_prompt(model: PreTrainedModel, input_ids: Tensor, *, chunk: int = 4096, cache: Cache | None = None) -> Cache:
    """The cache after a prompt [B, L], read ``chunk`` tokens at a time so that memory does not grow with L; or after
    more of a prompt whose ``cache`` is given, and goes on. Logs a warning where it goes past the model's positions.

    Raises:
        DoflaError: not linearized; no tokens, or such as the model cannot read; a chunk below 1; an encoder-decoder, or
            a model with a cache of its own kind.
    """
    Student.of(model)
    check_keeps_states(model)
    if chunk < 1:
        raise DoflaError(f"chunk: {chunk}; read 1 token or more at a time")
    check_readable(model, input_ids, "the prompt")
    cache = DynamicCache(config=model.config) if cache is None else cache
    begun, length = int(cache.get_seq_length()), input_ids.shape[1]
    places = text_positions(model, begun + length, len(input_ids))
    with torch.inference_mode():
        for n, piece in enumerate(input_ids.to(model.device).split(chunk, dim=1)):
            first = begun + n * chunk
            own = {name: all_of[..., first : first + piece.shape[1]] for name, all_of in places.items()}
            model.base_model(piece, use_cache=True, **{CACHE_ARGUMENT: cache}, **own)
    return cache


def save_state(cache: Cache, input_ids: Tensor, path: str | Path, model: PreTrainedModel) -> None:
    """Write what ``model`` remembers of a prompt, and the prompt's tokens [B, L], as one safetensors file.

    Raises:
        DoflaError: if a layer of the cache holds keys and values (a layer kept softmax), or the cache is empty.
    """
    if not cache.layers:
        raise DoflaError("the cache is empty: read the prompt with read_prompt")
    tensors: dict[str, Tensor] = {"input_ids": input_ids}
    for index, entry in enumerate(cache.layers):
        if not isinstance(entry, LinearCacheLayer) or entry.states is None:
            raise DoflaError(f"layer {index} has no linear-attention state: only fully linear models can save a prompt")
        for group, state in enumerate(entry.states):
            tensors |= _tensors(state, f"{index}.{group}")
    metadata = {"format": _FORMAT, "plan": json.dumps(Student.of(model).plan.to_dict()["layers"])}
    write_tensors(path, tensors, metadata)


def load_state(path: str | Path, model: PreTrainedModel) -> tuple[Tensor, DynamicCache]:
    """The prompt's tokens [B, L] and a fresh cache holding its state, ready for ``generate``:

        prompt, cache = load_state(path, model)
        ids = torch.cat([prompt, question], dim=1)
        model.generate(ids, cache=cache)  # past_key_values=cache before transformers 5.24

    Raises:
        DoflaError: naming the file, if it is missing, damaged, or was written by a student of another plan.
    """
    tensors, metadata = read_tensors(path, "read the prompt again", finite=False)
    try:
        plan = json.loads(metadata["plan"])
    except (KeyError, ValueError) as error:
        raise DoflaError(f"{path} is no state of a prompt: read the prompt again") from error
    if metadata.get("format") != _FORMAT:
        raise DoflaError(f"{path} was written by an earlier version: read the prompt again")
    if plan != json.loads(json.dumps(Student.of(model).plan.to_dict()["layers"])):
        raise DoflaError(f"{path} was written by a student of another plan: read the prompt again with this one")
    tensors = {name: tensor.to(model.device) for name, tensor in tensors.items()}
    _check_form(tensors, path, model)
    input_ids = tensors.pop("input_ids")
    cache = DynamicCache(config=model.config)
    for layer in Student.of(model).layers.values():
        module = model.get_submodule(layer.name)
        entry, index = linear_entry(cache, module), module.layer_idx
        entry.states = [_state(tensors, f"{index}.{n}", layer, n) for n in range(len(layer.groups))]
        entry.tokens, entry.is_initialized, entry.handed_over = input_ids.shape[1], True, False
    return input_ids, cache


def _check_form(tensors: dict[str, Tensor], path: str | Path, model: PreTrainedModel) -> None:
    """DoflaError naming the file unless it holds tokens [B, L] and the tensors of states of so many sequences."""
    ids = tensors.get("input_ids")
    if ids is None or ids.dtype != torch.int64:
        raise DoflaError(f"{path} is damaged (it holds no tokens): read the prompt again")
    check_readable(model, ids, f"{path} is damaged")
    for index, entry in enumerate(read_prompt(model, ids[:1, :1]).layers):
        for group, state in enumerate(getattr(entry, "states", None) or ()):
            for name, like in _tensors(state, f"{index}.{group}").items():
                found = tensors.get(name, torch.empty(0))
                if (found.dtype, found.shape) != (like.dtype, (len(ids), *like.shape[1:])):
                    raise DoflaError(f"{path} is damaged ({name} has another form): read the prompt again")


def _tensors(part: Any, where: str) -> dict[str, Tensor]:
    """All tensors of a state, or of a part of one, by name."""
    if isinstance(part, Tensor):
        return {where: part}
    if part is None:
        return {}
    parts = enumerate(part) if isinstance(part, tuple) else ((x.name, getattr(part, x.name)) for x in fields(part))
    return {name: t for key, inner in parts for name, t in _tensors(inner, f"{where}.{key}").items()}


def _state(tensors: dict[str, Tensor], where: str, layer: LinearAttention, group: int) -> Carried:
    def bundle(kind: type[_Bundle], part: str) -> _Bundle:
        return kind(*(tensors[f"{where}.{part}.{field.name}"] for field in fields(kind)))

    (features, *counts), coded_tiers = layer.sizes[group], layer.coded_tiers_of(group)
    far = bundle(FeatureState, "features") if features else None
    if layer.layout_of(group) is not None:
        return FlatState(far, tensors[f"{where}.tokens"])
    tokens: type[TokenBuffer | PackedTokens] = PackedTokens if layer.keeps_eight_bits else TokenBuffer
    window, sinks = (bundle(tokens, x) if n else None for x, n in zip(("window", "sinks"), counts, strict=True))
    kinds: list[type[CodedTokens] | type[ScoredTokens]] = [CodedTokens] * len(coded_tiers.counts) if coded_tiers else []
    if coded_tiers and coded_tiers.heavy_hitters:
        kinds[-1] = ScoredTokens
    return State(far, window, sinks, tuple(bundle(kind, f"tiers.{number}") for number, kind in enumerate(kinds)))
