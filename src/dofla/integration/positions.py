"""The number of positions of a model, and the start of the state of a text that is longer."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from dofla.errors import DoflaError
from dofla.integration.offload import device_of

_FIELDS = ("max_position_embeddings", "max_target_positions")
"""Fields of a config that hold the number of positions; the second is that of decoders that transcribe (Whisper)."""
_TABLES = ("wpe", "embed_positions", "position_embeddings")
"""Names of the modules in transformers that are a table of positions of a text."""
_AGAIN = 4
"""Divisor of the positions: one part in so many is read again by default."""


def stated_positions(config: PreTrainedConfig) -> int | None:
    """The number of positions that a config states; None if it states none."""
    config = config.get_text_config()
    return next((found for field in _FIELDS if (found := getattr(config, field, None))), None)


def positions_of(model: PreTrainedModel, context: int | None = None) -> int | None:
    """The number of positions that a model has for a text, or a ``context`` if that is smaller; None if neither is
    known."""
    most, table = stated_positions(model.config), table_of_positions(model)
    if most is not None and table is not None and table.padding_idx is not None:
        most = min(most, table.num_embeddings - table.padding_idx - 1)  # RoBERTa and its kin count from beyond padding
    return min((known for known in (most, context) if known is not None), default=None)


def table_of_positions(model: PreTrainedModel) -> nn.Embedding | None:
    """The one that a model has learned, where its positions are not computed."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and path.rpartition(".")[2] in _TABLES:
            return module
    return None


def new_factors_at(config: PreTrainedConfig) -> int | None:
    """The number of positions from which on all rotary positions turn by other factors (LongRoPE); None if none do."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope, *(own for own in rope.values() if isinstance(own, dict))]
    long = (own.get("original_max_position_embeddings") for own in kinds if own.get("rope_type") == "longrope")
    return min((most for most in long if most), default=None)


def is_rotary(model: PreTrainedModel) -> bool:
    """True if the positions of the model are rotary: it notices how far tokens stand apart, and not where."""
    return any(name.endswith("rotary_emb") for name, _ in model.named_modules())


def check_context(context: int, positions: int | None) -> None:
    """DoflaError for a context that is longer than the positions of a model, where these are known."""
    if positions is not None and context > positions:
        raise DoflaError(f"context is {context}: the model has {positions} positions")


def read_again(positions: int) -> int:
    """Tokens that a new state begins with."""
    return max(positions // _AGAIN, 1)


def restart_index(begun: int, read: int, length: int, positions: int, overlap: int) -> int:
    """Start index of the state after reading up to ``length`` tokens of a text, of which ``read`` have been read, those
    before the present state ``begun`` too: unchanged while the text fits into ``positions``; otherwise ``overlap``
    tokens before the first unread one, or as many as fit."""
    if length - begun <= positions:
        return begun
    return max(read - overlap, length - positions)


def text_positions(model: PreTrainedModel, length: int, batch: int = 1, first: int = 0) -> dict[str, Any]:
    """Arguments with the positions, from the ``first`` on, of a text [batch, length] without pictures: none, unless the
    model otherwise takes them from the last picture that it saw, in any call."""
    known = hasattr(model, "_prepare_position_ids_for_generation")  # not of a model without a head
    if not known or not any("rope_deltas" in vars(module) for module in model.modules()):
        return {}
    ids = torch.zeros(batch, length, dtype=torch.int64, device=device_of(model))
    prepare = model._prepare_position_ids_for_generation
    places = prepare(ids, {"input_ids": ids})  # type: ignore[operator] # of their GenerationMixin
    return {"position_ids": places[..., first:]}
