"""A prompt's state on disk: read a long document once, then go on from there as often as one likes."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from dofla.errors import DoflaError
from dofla.integration.cache import CACHE_ARGUMENT, StateLayer
from dofla.integration.converted import Converted, is_converted
from dofla.integration.offload import device_of
from dofla.integration.positions import text_positions
from dofla.integration.reading import check_keeps_states, check_readable
from dofla.layers.state_file import constants_of, filled, form, tensors_of
from dofla.storage.tensors import read_tensors, write_tensors


def read_prompt(model: PreTrainedModel, input_ids: Tensor, *, chunk: int = 4096, cache: Cache | None = None) -> Cache:
    """The cache after a prompt [B, L], read ``chunk`` tokens at a time so that memory does not grow with L; or after
    more of a prompt whose ``cache`` is given, and goes on. Logs a warning where it goes past the model's positions.

    Raises:
        DoflaError: no tokens, or such as the model cannot read; a chunk below 1; an encoder-decoder, or a model with a
            cache of its own kind.
    """
    check_keeps_states(model)
    if chunk < 1:
        raise DoflaError(f"chunk: {chunk}; read 1 token or more at a time")
    check_readable(model, input_ids, "the prompt")
    cache = DynamicCache(config=model.config) if cache is None else cache
    if not cache.get_seq_length() and is_converted(model) and Converted.of(model).plan.prefill == "twice":
        chunk = input_ids.shape[1]  # all of it tells what is needed later
    with torch.inference_mode():
        for piece in input_ids.to(device_of(model)).split(chunk, dim=1):
            begun = int(cache.get_seq_length())
            places = text_positions(model, begun + piece.shape[1], len(piece), begun)
            model.base_model(piece, use_cache=True, **{CACHE_ARGUMENT: cache}, **places)
    return cache


def save_state(cache: Cache, input_ids: Tensor, path: str | Path, model: PreTrainedModel) -> None:
    """Write what ``model`` remembers of a prompt, and the prompt's tokens [B, L], as one safetensors file.

    Raises:
        DoflaError: as :func:`check_saved`; an empty cache.
    """
    if not cache.layers:
        raise DoflaError("the cache is empty: read the prompt with read_prompt")
    _check_states(cache)
    tensors: dict[str, Tensor] = {"input_ids": input_ids}
    layers = _layers(model)
    for index, entry in enumerate(cache.layers):
        assert isinstance(entry, StateLayer)
        for group, state in enumerate(layers[index].resized(entry.states, input_ids.shape[1])):
            tensors |= tensors_of(state, f"{index}.{group}")
    write_tensors(path, tensors, _form(model, layers))


def check_saved(model: PreTrainedModel) -> None:
    """DoflaError if a layer of the model's cache holds keys and values, which no file takes: a layer that was kept
    softmax, with a sliding window, or recurrent. Reads a token."""
    _check_states(read_prompt(model, torch.zeros(1, 1, dtype=torch.int64)))


def load_state(path: str | Path, model: PreTrainedModel) -> tuple[Tensor, Cache]:
    """The prompt's tokens [B, L] and a fresh cache holding its state, ready for ``generate``:

        prompt, cache = load_state(path, model)
        ids = torch.cat([prompt, question], dim=1)
        model.generate(ids, cache=cache)  # past_key_values=cache before transformers 5.24

    Raises:
        DoflaError: naming the file, if it is missing or damaged, of another version, or of a model of another plan.
    """
    tensors, metadata = read_tensors(path, "read the prompt again", finite=False)
    layers = _layers(model)
    if not _form(model, layers).items() <= metadata.items():
        raise DoflaError(f"{path} is no state of this version and of a model of this plan: read the prompt again")
    tensors = {name: tensor.to(device_of(model)) for name, tensor in tensors.items()}
    input_ids = tensors.get("input_ids")
    if input_ids is None or input_ids.dtype != torch.int64:
        raise DoflaError(f"{path} is damaged (it holds no tokens): read the prompt again")
    check_readable(model, input_ids, f"{path} is damaged")
    cache = read_prompt(model, input_ids[:, :1])  # of the same form, and filled with what was saved
    for index, entry in enumerate(cache.layers):
        if isinstance(entry, StateLayer):
            try:
                states = layers[index].resized(entry.states or (), input_ids.shape[1])
                entry.states = [filled(state, f"{index}.{n}", tensors) for n, state in enumerate(states)]
            except ValueError as error:
                raise DoflaError(f"{path} is damaged ({error}): read the prompt again") from None
            entry.tokens = input_ids.shape[1]
    return input_ids, cache


def _check_states(cache: Cache) -> None:
    for index, entry in enumerate(cache.layers):
        if not isinstance(entry, StateLayer) or entry.states is None:
            raise DoflaError(
                f"layer {index} is not compressed (kept softmax, with a sliding window, or recurrent), and what it "
                "holds is not saved: a model all of whose layers are compressed or linearized can be"
            )


def _layers(model: PreTrainedModel) -> dict[Any, Any]:
    """The layers of the plan by their number."""
    return {m.layer_idx: m.dofla for m in model.modules() if "dofla" in m._modules}


def _form(model: PreTrainedModel, layers: dict[Any, Any]) -> dict[str, str]:
    """The things on which the form of a state of these layers depends."""
    constants = {"constants": constants_of(layers[min(layers)])} if layers else {}
    return form(Converted.of(model).plan.to_dict()["layers"]) | constants
