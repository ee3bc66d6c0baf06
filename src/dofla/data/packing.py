"""Documents → windows: packed end to end for causal models, one text each for encoders."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from dofla.data.documents import Source, describe, files_of, read_documents
from dofla.data.windows import TokenWindows
from dofla.errors import DoflaError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Enough text per call for a fast tokenizer to use its threads, little enough that few windows stay cheap.
_BATCH_CHARACTERS = 1 << 18
_SHORTEST_LINE = 20


def text_windows(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    windows: int | None,
    split: str,
    keep: Callable[[bytes], bool],
    text_field: str,
    padded: bool,
) -> TokenWindows:
    """Windows of tokens from text or token files, of the documents to ``keep``; see :func:`dofla.token_windows`."""
    name = f"{describe(source)} ({split})"
    files = files_of(source) if isinstance(source, (str, os.PathLike)) else None  # a list is of text files
    if files and files[0].suffix.lower() == ".safetensors" and files[0].is_file():
        return _from_token_file(files[0], name, length, windows, keep)
    documents = (text for text in read_documents(source, text_field=text_field) if keep(text.encode()))
    make = _padded if padded else _packed
    return make(documents, tokenizer, name, length, windows)


def check_cut(length: int, windows: int | None) -> None:
    """DoflaError unless windows of this length and number can be cut."""
    if length < 2:
        raise DoflaError(f"length: {length}; windows need 2 tokens or more")
    if windows is not None and windows < 1:
        raise DoflaError(f"windows: {windows}; ask for 1 or more, or None for all")


def separator_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that stands before a document: the first of bos, eos, cls, sep that the tokenizer has, if any."""
    candidates = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id)
    return next((token for token in candidates if token is not None), None)


def membership(split: str, holdout: float) -> Callable[[bytes], bool]:
    """True if a document, as bytes, is in the split; DoflaError for a split or a fraction that there is not."""
    if not 0 <= holdout < 1:
        raise DoflaError(f"holdout: {holdout}; give a fraction from 0 up to but not including 1")
    if split == "all":
        return lambda _: True
    if split not in ("train", "validation"):
        raise DoflaError(f"split: {split!r}; choose train, validation or all")
    held_out = split == "validation"
    return lambda content: (_hash(content) < holdout * 2**64) == held_out


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def stream_seed(seed: int, split: str) -> int:
    """The seed of a split's own stream of random numbers."""
    return _hash(f"{split} {seed}".encode()) >> 1  # torch seeds are signed 64-bit numbers


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _tokens(tokenizer: PreTrainedTokenizerBase, texts: list[str], **options) -> list[list[int]]:
    # verbose=False: a document longer than the model's context is no news here, it is about to be cut.
    options |= {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    return tokenizer(texts, **options)["input_ids"]


def _packed(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, name: str, length: int, windows: int | None
) -> TokenWindows:
    separator = separator_id(tokenizer)
    stream = array("q")  # eight bytes a token, where a list of int takes 36
    for texts in _batches(documents):
        for ids in _tokens(tokenizer, texts, add_special_tokens=False):
            if separator is not None:
                stream.append(separator)
            stream.extend(ids)
        if windows is not None and len(stream) >= windows * length:
            break
    count = len(stream) // length
    if count == 0:
        raise DoflaError(
            f"{name}: {len(stream)} tokens, and one window needs {length}; give more text, a smaller length, "
            "or another split or holdout"
        )
    if windows is not None:
        count = min(count, windows)
    return TokenWindows(
        torch.frombuffer(stream, dtype=torch.int64, count=count * length).view(count, length), source=name
    )


def _padded(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, name: str, length: int, windows: int | None
) -> TokenWindows:
    if tokenizer.pad_token_id is None:
        raise DoflaError("tokenizer: no pad token, and padded windows need one; set tokenizer.pad_token")
    rows: list[list[int]] = []
    for batch in _batches(islice((piece for document in documents for piece in _pieces(document)), windows)):
        rows += _tokens(tokenizer, batch, truncation=True, max_length=length)
    if not rows:
        raise DoflaError(f"{name}: no text for a window; give more text, or another split or holdout")
    tokens = [torch.tensor(row, dtype=torch.int64) for row in rows]
    input_ids = pad_sequence(tokens, batch_first=True, padding_value=tokenizer.pad_token_id)
    attention_mask = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
    return TokenWindows(input_ids, attention_mask, source=name)


def _pieces(document: str) -> list[str]:
    lines = [line.strip() for line in document.strip().splitlines()]
    return lines if len(lines) == 1 else [line for line in lines if len(line) > _SHORTEST_LINE]


def _from_token_file(
    path: Path, name: str, length: int, windows: int | None, keep: Callable[[bytes], bool]
) -> TokenWindows:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            if "input_ids" not in names or "attention_mask" in names:
                raise DoflaError(
                    f"{path}: tensors {', '.join(names)}; needs input_ids [N, L], without padding, so no attention_mask"
                )
            rows = file.get_slice("input_ids")
            shape, dtype = rows.get_shape(), rows.get_dtype()
            if len(shape) != 2 or dtype[0] not in "IU" or shape[1] < length:
                raise DoflaError(
                    f"{path}: input_ids is {dtype} {shape}; needs integers [N, L] with L at least length={length}"
                )
            found: list[torch.Tensor] = []
            for index in range(shape[0]):
                row = rows[index].to(torch.int64)
                if keep(row.numpy().tobytes()):
                    found += row[: len(row) // length * length].split(length)
                if windows is not None and len(found) >= windows:
                    break
    except SafetensorError as error:
        raise DoflaError(f"{path}: not a readable safetensors file ({error}); check the file") from error
    if not found:
        raise DoflaError(f"{name}: none of its {shape[0]} rows; give more rows, or another split or holdout")
    return TokenWindows(torch.stack(found[:windows]), source=name)
