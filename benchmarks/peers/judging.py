"""What both environments share: how a memory is judged, and the rows of the table, a file each. Nothing of dofla.

A window is a prompt and the last :data:`WRITTEN` tokens of the text, each of which is predicted from the true ones
before it. The loss of a memory is that of these tokens, in nats per token.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Cache, DynamicCache, PreTrainedModel

SOFTMAX = "softmax cache"
WRITTEN = 512
"""Tokens at the end of a window that are judged."""
FLOAT_BYTES = 2
"""Of a floating-point number that a cache keeps, whatever it was computed in: peers are run in bfloat16."""
LIMITS = "limits"
"""Where the file of tokens says how many bytes memories may take."""


@dataclass
class Row:
    """A memory on the same windows as all others.

    Attributes:
        memory: its name.
        size: how its size goes.
        limit: the bytes that it was to take at most; 0 where there was no choice.
        prompt_bytes, end_bytes: per sequence, when the prompt has been read and at the end of the window; the most that
            is held, where it goes up and down.
        losses: of each window, by the name of the text; nats per token.
    """

    memory: str
    size: str
    limit: int
    prompt_bytes: int
    end_bytes: int
    losses: dict[str, list[float]]

    def write(self, folder: Path) -> None:
        """Into a file of its own, whole or not there."""
        write_json(folder / f"{self.name}.json", asdict(self))

    @property
    def name(self) -> str:
        """Of the row, and of its file."""
        return f"{self.memory}, {self.limit}"


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Whole, or not there."""
    write_text(path, json.dumps(data, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Whole, or as it was."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def read_rows(folder: Path) -> dict[str, Row]:
    """By name."""
    rows = (Row(**json.loads(path.read_text())) for path in sorted(folder.glob("*.json")))
    return {row.name: row for row in rows}


def read_texts(folder: Path) -> tuple[dict[str, Tensor], list[int]]:
    """Windows [N, L] by the name of the text, and the bytes that memories may take."""
    with safe_open(folder / "tokens.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()[LIMITS])  # noqa: SIM118


def read_prompt(model: PreTrainedModel, window: Tensor) -> tuple[Cache, Tensor]:
    """The cache of all but the last tokens of a window [1, L], and the logits [1, V] of the first of those."""
    cache = DynamicCache(config=model.config)
    return cache, model(window[:, :-WRITTEN], past_key_values=cache, logits_to_keep=1).logits[:, -1]


def loss_of(model: PreTrainedModel, cache: Cache, first: Tensor, window: Tensor, *, chunk: int = WRITTEN) -> float:
    """Mean loss of the last tokens of a window [1, L], given the logits [1, V] of the ``first`` of them.

    They are written in calls of ``chunk`` tokens to a ``cache`` of the prompt, which may hold fewer than were read.
    """
    places = torch.arange(window.shape[1] - WRITTEN, window.shape[1]).split(chunk)
    logits = [model(window[:, part], past_key_values=cache, position_ids=part[None]).logits[0] for part in places]
    return cross_entropy(torch.cat([first, *logits])[:-1].float(), window[0, -WRITTEN:]).item()


def filled(pairs: Iterable[tuple[Tensor, Tensor]], cache: Cache) -> Cache:
    """``cache`` with these keys and values [B, Hkv, n, d] of each layer."""
    for index, (keys, values) in enumerate(pairs):
        cache.update(keys, values, index)
    return cache


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of what a cache keeps: codes as they are, :data:`FLOAT_BYTES` for a floating-point number."""
    total = 0
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):  # a quantized one: codes, scales and offsets
            total += bytes_of(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        else:
            total += tensor.numel() * (FLOAT_BYTES if tensor.is_floating_point() else tensor.element_size())
    return total


def token_bytes(model: PreTrainedModel) -> int:
    """Of a token in a softmax cache: a key and a value in each KV head."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * FLOAT_BYTES * head_dim * config.num_key_value_heads * config.num_hidden_layers
