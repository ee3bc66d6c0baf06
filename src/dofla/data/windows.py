"""TokenWindows: what every consumer of data in this package takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from dofla.errors import DoflaError, check_numbers

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class TokenWindows:
    """Windows of tokens, all of one length.

    Attributes:
        input_ids: [N, L] integers, stored as int64.
        attention_mask: [N, L], 1 a real token, 0 padding; None if all are real.
        source: what a run record says of where the tokens came from.

    Raises:
        DoflaError: not N ≥ 1 windows of L ≥ 1 integers with a mask of the same shape, if any.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None = None
    source: str = "tensor"

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_ids", _int64(self.input_ids, "input_ids"))
        if self.attention_mask is not None:
            object.__setattr__(self, "attention_mask", _int64(self.attention_mask, "attention_mask"))
            if self.attention_mask.shape != self.input_ids.shape:
                raise DoflaError(
                    f"attention_mask: shape {list(self.attention_mask.shape)} differs from that of input_ids, "
                    f"{list(self.input_ids.shape)}; give one number per token"
                )

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def length(self) -> int:
        """Tokens per window, L."""
        return self.input_ids.shape[1]

    @property
    def tokens(self) -> int:
        """Real tokens in all windows together."""
        return int(self.input_ids.numel() if self.attention_mask is None else self.attention_mask.sum())

    def batch(self, indices: Sequence[int] | torch.Tensor) -> dict[str, torch.Tensor]:
        """The windows at these positions, in order: ``input_ids`` [B, L] and, if padded, ``attention_mask`` [B, L]."""
        chosen = torch.as_tensor(indices, dtype=torch.long, device=self.input_ids.device)
        batch = {"input_ids": self.input_ids[chosen]}
        if self.attention_mask is not None:
            batch["attention_mask"] = self.attention_mask[chosen]
        return batch

    def take(self, n: int) -> TokenWindows:
        """The first n windows, or all of them if there are fewer; DoflaError for n < 1."""
        if n < 1:
            raise DoflaError(f"take: {n} windows asked for; ask for 1 or more")
        mask = None if self.attention_mask is None else self.attention_mask[:n]
        return replace(self, input_ids=self.input_ids[:n], attention_mask=mask)

    @classmethod
    def of(cls, tokens: TokenWindows | torch.Tensor | Mapping[str, Any]) -> TokenWindows:
        """Windows from what callers have at hand.

        Args:
            tokens: TokenWindows, which are returned themselves; an integer tensor [N, L]; or a mapping such as a
                tokenizer's BatchEncoding with ``input_ids`` and perhaps ``attention_mask``, both [N, L] tensors.

        Raises:
            DoflaError: anything else.
        """
        if isinstance(tokens, TokenWindows):
            return tokens
        if isinstance(tokens, Mapping):
            if "input_ids" not in tokens:
                raise DoflaError(f"tokens: a mapping with {', '.join(map(str, tokens)) or 'no keys'}; needs input_ids")
            return cls(tokens["input_ids"], tokens.get("attention_mask"))
        return cls(tokens)


@dataclass(frozen=True, eq=False)
class Images:
    """Images for a vision model, used like windows of tokens.

    Attributes:
        pixel_values: [N, C, height, width].
        source: what a run record says of where the images came from.
    """

    pixel_values: torch.Tensor
    source: str = "images"

    def __len__(self) -> int:
        return self.pixel_values.shape[0]

    @property
    def tokens(self) -> int:
        """The number of images, because the split of an image into tokens is up to the model."""
        return len(self)

    def batch(self, indices: Sequence[int] | torch.Tensor) -> dict[str, torch.Tensor]:
        """The images at these positions, in this order."""
        return {"pixel_values": self.pixel_values[torch.as_tensor(indices, dtype=torch.long)]}

    def take(self, n: int) -> Images:
        """The first n images, or all of them if there are fewer."""
        return replace(self, pixel_values=self.pixel_values[:n])


def as_windows(data: TokenWindows | Images | torch.Tensor | Mapping[str, Any]) -> TokenWindows | Images:
    """Convert data to windows as :meth:`TokenWindows.of` does; a mapping with pixel_values becomes Images."""
    if isinstance(data, Images):
        return data
    if isinstance(data, Mapping) and "pixel_values" in data:
        return Images(data["pixel_values"])
    return TokenWindows.of(data)


def batches(windows: Sized, batch_size: int) -> list[range]:
    """Positions of the windows, or of whatever else, of each batch, in order; the last batch may be smaller."""
    check_numbers(batch_size=batch_size)
    count = len(windows)
    return [range(start, min(start + batch_size, count)) for start in range(0, count, batch_size)]


def counted(parts: Sequence[T], progress: Callable[[int, int], None] | None) -> Iterator[T]:
    """The parts, one by one; ``progress`` is called with (done, total) when the next one is asked for."""
    for done, part in enumerate(parts, start=1):
        yield part
        if progress:
            progress(done, len(parts))


def predicted(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """1 where a real token follows a real one [B, L - 1], which is where a loss counts."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    return mask[:, 1:] * mask[:, :-1]


def _int64(tensor: Any, name: str) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise DoflaError(
            f"{name}: a {type(tensor).__name__}, not a tensor; give integers [windows, length] "
            '(a tokenizer returns tensors when called with return_tensors="pt")'
        )
    if tensor.is_floating_point() or tensor.is_complex() or (tensor.dtype is torch.bool and name == "input_ids"):
        raise DoflaError(f"{name}: {tensor.dtype} values; give integers [windows, length]")
    if tensor.ndim != 2 or tensor.numel() == 0:
        raise DoflaError(f"{name}: shape {list(tensor.shape)}; give integers [windows, length] with at least one token")
    return tensor.clone().long() if tensor.is_inference() else tensor.long()  # others can be read with gradients
