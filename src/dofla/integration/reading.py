"""The check that a model can read tokens at all: PyTorch itself says no more than that an index is out of range."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from dofla.data import Images, TokenWindows, as_windows
from dofla.errors import DoflaError
from dofla.integration.positions import positions_of, table_of_positions


def check_readable(model: PreTrainedModel, input_ids: Tensor, what: str, new_tokens: int = 0) -> None:
    """See that the model knows all of these tokens [B, L], and has positions for them and the new ones to follow.

    DoflaError, saying ``what`` they are, if there are none; if one has no embedding; if there are more than positions,
    where these are learned one by one. Rotary ones go on beyond those that training has seen, if not as well.
    """
    if input_ids.ndim != 2 or not input_ids.numel():
        raise DoflaError(f"{what}: expected tokens [B, L], got {list(input_ids.shape)}: give a text")
    name, embedding = type(model).__name__, model.get_input_embeddings()
    weight = getattr(embedding, "weight", None)
    if weight is None:
        raise DoflaError(f"{name} reads several tokens at each place (MusicGen): only text and images are supported")
    known = getattr(embedding, "num_embeddings", None) or len(weight)  # weights may be shared out among GPUs
    for token in (int(input_ids.min()), int(input_ids.max())):
        if not 0 <= token < known:
            raise DoflaError(f"{what}: token {token}, and {name} knows 0 to {known - 1}: use its own tokenizer")
    # Where there is no table they are computed, and go on.
    most, length = positions_of(model), input_ids.shape[1]
    if most is not None and table_of_positions(model) is not None and length + new_tokens > most:
        more = f" and {new_tokens} to follow" if new_tokens else ""
        raise DoflaError(f"{what}: {length} tokens{more}, and {name} has {most} positions: take fewer")


def keeps_states(model: PreTrainedModel) -> bool:
    """True if a cache of the model's can be made beforehand, and read into piece by piece."""
    own = getattr(model, "_supports_default_dynamic_cache", None)  # transformers' list of models with another cache
    return not model.config.is_encoder_decoder and (own is None or own())


def check_keeps_states(model: PreTrainedModel) -> None:
    """DoflaError if :func:`keeps_states` says no."""
    if not keeps_states(model):
        why = "is an encoder-decoder" if model.config.is_encoder_decoder else "works with a cache of its own kind"
        raise DoflaError(f"{type(model).__name__} {why}, into which no text is read beforehand: use its generate alone")


def windows_for(
    model: PreTrainedModel, data: TokenWindows | Images | Tensor | Mapping[str, Any]
) -> TokenWindows | Images:
    """Convert data to windows that the model can read; DoflaError as :func:`dofla.data.as_windows` and
    :func:`check_readable`."""
    windows = as_windows(data)
    if isinstance(windows, TokenWindows):
        check_readable(model, windows.input_ids, windows.source)
    return windows
