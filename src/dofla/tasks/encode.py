"""Contexts and continuations as tokens, split the way lm-evaluation-harness splits them (0.4.13, HFLM)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.errors import DoflaError
from dofla.integration.positions import positions_of
from dofla.tasks.styles import Request

_DEFAULT_LIMIT = 2048
_NO_LIMIT = int(1e30)  # what transformers calls a tokenizer's limit that nobody set


class Row(NamedTuple):
    """``tokens``, of which the first ``context`` are given and the likelihood of the others is asked."""

    tokens: list[int]
    context: int


def encode(requests: Sequence[Request], tokenizer: PreTrainedTokenizerBase, limit: int) -> list[Row]:
    """One row per request.

    Context and continuation are encoded in one piece and split after as many tokens as the context alone has; spaces
    at the context's end count as the continuation's. An empty context is the tokenizer's bos token, or its eos token.
    The context loses tokens from the left until the model's input fits into ``limit``.

    Raises:
        DoflaError: if a continuation has no tokens or too many, or a context is empty and the tokenizer has neither
            token.
    """
    pairs = [_with_spaces_moved(request) for request in requests]
    prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    known = _encoded((text for pair in pairs for text in (pair[0], pair[0] + pair[1])), tokenizer, prefix)
    rows = []
    for context, continuation in pairs:
        if context:
            given, asked = known[context], known[context + continuation][len(known[context]) :]
        else:
            given, asked = _from_nothing(continuation, tokenizer, prefix)
        if not asked:
            raise DoflaError(f"the continuation {continuation!r} has no tokens of its own: give a longer choice")
        if len(asked) > limit:
            raise DoflaError(f"the choice {continuation[:40]!r}... has {len(asked)} tokens, the model reads {limit}")
        tokens = (given + asked)[-(limit + 1) :]
        rows.append(Row(tokens, len(tokens) - len(asked)))
    return rows


def token_limit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of tokens a model reads: by its positions, else by its tokenizer, else 2048."""
    if (positions := positions_of(model)) is not None:
        return positions
    limit = tokenizer.model_max_length
    return _DEFAULT_LIMIT if limit is None or limit >= _NO_LIMIT else int(limit)


def _with_spaces_moved(request: Request) -> Request:
    context = request.context.rstrip()
    return Request(context, request.context[len(context) :] + request.continuation)


def _encoded(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, prefix: int | None) -> dict[str, list[int]]:
    """Each distinct text's tokens. A text that spells out the start token does not get another one."""
    start = None if prefix is None else tokenizer.decode(prefix)
    plain, started = [], []
    for text in dict.fromkeys(texts):
        (plain if start is None or not text.startswith(start) else started).append(text)
    known = {}
    for part, options in ((plain, {}), (started, {"add_special_tokens": False})):
        if part:
            known |= zip(part, tokenizer(part, verbose=False, **options)["input_ids"], strict=True)
    return known


def _from_nothing(
    continuation: str, tokenizer: PreTrainedTokenizerBase, prefix: int | None
) -> tuple[list[int], list[int]]:
    if prefix is None:
        raise DoflaError("a question is empty and the tokenizer has no bos or eos token to start from: set one")
    asked = tokenizer.encode(continuation, add_special_tokens=False)
    return (asked[:1], asked[1:]) if asked[:1] == [prefix] else ([prefix], asked)
