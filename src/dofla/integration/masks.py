"""Masks of attention as dofla takes them: padding [B, keys], and of other patterns the full ones of softmax layers."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)

from dofla.errors import DoflaError
from dofla.integration.instead import RECORDING, computed_instead
from dofla.integration.positions import stated_positions


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The [B, kv_length] padding mask (None if nothing is padded) for plain causal or bidirectional attention.

    Any other pattern (sliding windows, chunks, packed sequences) becomes a full four-dimensional mask, which softmax
    layers use and linear layers refuse.
    """
    positions = batch_size, q_length, kv_length, q_offset, kv_offset
    if (name := computed_instead(kwargs.get("config"))) and name != RECORDING:
        if name not in ALL_MASK_ATTENTION_FUNCTIONS:
            return attention_mask
        return ALL_MASK_ATTENTION_FUNCTIONS[name](*positions, mask_function, attention_mask=attention_mask, **kwargs)
    if mask_function in (causal_mask_function, bidirectional_mask_function) or _bounds_nothing(q_length, kwargs):
        if attention_mask is None:
            return None
        length = kv_length if mask_function is bidirectional_mask_function else q_offset + q_length
        attention_mask = _reaching(attention_mask, length, q_length, kv_length)
        if not torch.compiler.is_compiling() and attention_mask.all():  # a graph cannot ask
            return None
        return attention_mask[:, None, None] if _has_readers(kwargs.get("config")) else attention_mask
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(*positions, mask_function, attention_mask=attention_mask, **kwargs)


def _reaching(mask: Tensor, length: int | Tensor, q_length: int, kv_length: int) -> Tensor:
    """A padding mask of the last ``kv_length`` of ``length`` tokens. Tokens that it does not reach are padding, as in
    transformers' own masks; but one of the new tokens alone is taken as such where they are all that is asked for."""
    if isinstance(length, Tensor):
        length = mask.shape[1] if torch.compiler.is_compiling() else int(length)  # a graph cannot ask
    if not mask.shape[1] == q_length == kv_length:
        mask = F.pad(mask, (0, max(length - mask.shape[1], 0)))
    return mask[:, -kv_length:]


def _bounds_nothing(q_length: int, options: Mapping[str, Any]) -> bool:
    """True if the pattern is a causal window or chunk as long as all positions, and nothing else. transformers allows
    no skip, and says so with ``use_vmap``, where something was added; for one token it allows none in any case."""
    local_size, config = options.get("local_size"), options.get("config")
    if local_size is None or config is None or options.get("allow_is_bidirectional_skip") is not None:
        return False
    positions = stated_positions(config)
    if positions is None or local_size < positions or options.get("use_vmap", False):
        return False
    return options.get("allow_is_causal_skip", False) or q_length == 1


def _has_readers(config: Any) -> bool:
    """True if layers read the keys of others. Such models cut the third dimension of masks (Gemma 4)."""
    return bool(getattr(config, "num_kv_shared_layers", 0))


def plain_mask(mask: Tensor | None, module: nn.Module) -> Tensor | None:
    """The mask that a module got, [B, keys] if it is one of padding."""
    if mask is not None and mask.ndim == 4 and mask.shape[1:3] == (1, 1) and _has_readers(module.config):
        return mask[:, 0, 0]
    return mask


def full_mask(padding: Tensor | None, query: Tensor, key: Tensor, causal: bool) -> Tensor | None:
    if padding is None:
        return visible(query, key) if causal and query.shape[-2] not in (1, key.shape[-2]) else None
    seen = padding[:, None, None, :].bool()
    return seen & visible(query, key) if causal else seen.expand(-1, -1, query.shape[-2], -1)


def visible(query: Tensor, key: Tensor) -> Tensor:
    """The full mask of a causal call without padding."""
    rows, columns = query.shape[-2], key.shape[-2]
    return torch.ones(1, 1, rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)


@torch.compiler.disable
def padding_of(mask: Tensor, query: Tensor, key: Tensor, begins: bool, name: str) -> Tensor | None:
    """The padding [B, keys] that a full mask of a causal call that ``begins`` sequences comes to; DoflaError if it is
    another pattern. A compiled model without a cache gets full masks, as a graph cannot ask if sequences are packed."""
    seen = mask if mask.dtype == torch.bool else mask == 0
    if begins and mask.shape[2:] == (query.shape[-2], key.shape[-2]):
        padding = seen[:, 0, -1].expand(len(key), -1)
        if (seen == visible(query, key) & padding[:, None, None]).all():
            return None if padding.all() else padding
    raise DoflaError(
        f"layer {name} got a {mask.ndim}-dimensional attention mask: it knows padding only, so "
        "pass a [batch, length] mask, and do not pack several sequences into one row"
    )
