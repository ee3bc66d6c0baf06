"""Log-likelihoods of a task's choices. What the choices of an item share is read once, into a cache."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from dofla.errors import DoflaError
from dofla.integration.sites import evaluation_mode
from dofla.tasks.encode import Row, encode, token_limit
from dofla.tasks.items import Task
from dofla.tasks.scores import TaskScores
from dofla.tasks.styles import STYLES

TOKENS_PER_PASS = 1024
"""Positions whose logits are held at one time: 200 MB in bfloat16 for a vocabulary of 100 000."""

_ROWS_AT_A_TIME = 16


@dataclass(frozen=True)
class _Group:
    """Rows (by their number) that begin with the same ``prefix``."""

    prefix: list[int]
    rows: list[int]


@dataclass(frozen=True)
class _Rest:
    """The part of a row beyond its prefix: tokens to read, and the ones they must predict, from place ``first`` on."""

    row: int
    source: int
    read: list[int]
    targets: list[int]
    first: int


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    *,
    batch_size: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> TaskScores:
    """Log-likelihood of every choice of every item.

    Args:
        model: a causal language model, softmax or linear, as it stands; for a student's teacher call this within
            ``dofla.softmax(student)``.
        batch_size: contexts per forward pass.
        progress: called with (done, total) items.

    Raises:
        DoflaError: if the model is no causal language model, a choice has no tokens or more than the model reads, or
            a likelihood is not finite.
    """
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise DoflaError(f"{type(model).__name__} cannot score choices: give a causal language model")
    requests = [STYLES[task.style](item) for item in task.items]
    limit = token_limit(model, tokenizer)
    try:
        rows = encode([request for choices in requests for request in choices], tokenizer, limit)
    except DoflaError as error:
        raise DoflaError(f"task {task.name}: {error}") from error
    ends = list(accumulate(map(len, requests)))
    spans = [range(end - len(choices), end) for end, choices in zip(ends, requests, strict=True)]
    item_of = [item for item, span in enumerate(spans) for _ in span]
    groups = _grouped(rows, spans)
    found: list[float] = [0.0] * len(rows)
    done: set[int] = set()
    with evaluation_mode(model), torch.inference_mode():
        for begin in range(0, len(groups), batch_size):
            batch = groups[begin : begin + batch_size]
            for row, value in _read(model, rows, batch, limit):
                found[row] += value
            if progress:
                done.update(item_of[row] for group in batch for row in group.rows)
                progress(len(done), len(requests))
    if not all(map(math.isfinite, found)):
        raise DoflaError(f"task {task.name}: a log-likelihood is NaN or infinite: check the model's dtype and its maps")
    return TaskScores(
        task.name,
        [item.id for item in task.items],
        [item.answer for item in task.items],
        [found[span.start : span.stop] for span in spans],
        [[request.characters for request in choices] for choices in requests],
    )


def _grouped(rows: Sequence[Row], items: Sequence[range]) -> list[_Group]:
    """Rows by what they share, the longest first, so that a batch holds little padding."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for item in items:
        # The last token is only predicted, and one token of the context must be left to predict the first from.
        columns = zip(*(rows[n].tokens[: min(rows[n].context, len(rows[n].tokens) - 1)] for n in item), strict=False)
        shared = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
        for n in item:
            prefix = shared or rows[n].tokens[: rows[n].context]
            groups.setdefault(tuple(prefix), []).append(n)
    ordered = sorted(groups.items(), key=lambda group: -len(group[0]))
    return [_Group(list(prefix), members) for prefix, members in ordered]


def _read(
    model: PreTrainedModel, rows: Sequence[Row], groups: Sequence[_Group], limit: int
) -> Iterator[tuple[int, float]]:
    """Parts of the rows' log-likelihoods: of the token after the prefix, then of the others."""
    tokens, mask = _padded([group.prefix for group in groups], left=True)
    rests = [_rest(rows[n], n, source, len(group.prefix)) for source, group in enumerate(groups) for n in group.rows]
    cache = DynamicCache(config=model.config) if any(rest.read for rest in rests) else None
    last = _logits(model, tokens, mask, limit, 1, cache)[:, -1]
    ready = [rest for rest in rests if rest.first < 0]
    if ready:
        sources = torch.tensor([rest.source for rest in ready], device=last.device)
        values = _log_likelihoods(last[sources], [rest.targets[0] for rest in ready])
        yield from zip((rest.row for rest in ready), values.tolist(), strict=True)
    for part in _passes([rest for rest in rests if rest.read]):
        values = _continued(model, cache, mask, part, limit)
        yield from zip((rest.row for rest in part), values.tolist(), strict=True)


def _rest(row: Row, number: int, source: int, prefix: int) -> _Rest:
    """The place in ``read`` that predicts target 0 is ``first``: -1 if that is the last token of the prefix."""
    first = row.context - 1 - prefix
    return _Rest(number, source, row.tokens[prefix:-1], row.tokens[row.context :], first)


def _passes(rests: list[_Rest]) -> Iterator[list[_Rest]]:
    """Rests of like length, as many as ``TOKENS_PER_PASS`` allows."""
    rests = sorted(rests, key=lambda rest: -len(rest.read))
    while rests:
        count = max(1, TOKENS_PER_PASS // len(rests[0].read))
        yield rests[:count]
        rests = rests[count:]


def _continued(model: PreTrainedModel, cache: DynamicCache, before: Tensor, rests: list[_Rest], limit: int) -> Tensor:
    """Log-likelihoods [R] of the targets that the tokens read here predict."""
    sources = torch.tensor([rest.source for rest in rests])
    tokens, _ = _padded([rest.read for rest in rests], left=False)
    # Padding on the right is seen by nobody who counts, and a mask without holes is cheaper.
    mask = torch.cat([before[sources], torch.ones_like(tokens)], dim=1)
    keep = tokens.shape[1] - min(max(rest.first, 0) for rest in rests)
    logits = _logits(model, tokens, mask, limit, keep, _rows_of(cache, sources.to(model.device)))
    counts = torch.zeros(len(rests), keep, dtype=torch.bool)
    wanted = []
    for n, rest in enumerate(rests):
        targets = rest.targets[1:] if rest.first < 0 else rest.targets
        end = len(rest.read) - (tokens.shape[1] - keep)
        counts[n, end - len(targets) : end] = True
        wanted += targets
    values = _log_likelihoods(logits[counts.to(logits.device)], wanted).cpu()
    return torch.zeros(len(rests)).index_add(0, counts.nonzero()[:, 0], values)


def _log_likelihoods(logits: Tensor, wanted: list[int]) -> Tensor:
    """Log-probability [N] of one token each under logits [N, V], in float32 whatever the model computes in."""
    index = torch.tensor(wanted, device=logits.device)[:, None]
    # Some rows at a time: they stay in a CPU's cache between the steps of a softmax, which is four times as fast.
    parts = zip(logits.split(_ROWS_AT_A_TIME), index.split(_ROWS_AT_A_TIME), strict=True)
    return torch.cat([part.log_softmax(-1, dtype=torch.float32).gather(-1, at)[:, 0] for part, at in parts])


def _logits(
    model: PreTrainedModel, tokens: Tensor, mask: Tensor, limit: int, keep: int, cache: DynamicCache | None
) -> Tensor:
    """Logits [B, keep, V] at the last ``keep`` of ``tokens`` [B, L]; ``mask`` [B, past + L] counts the past too."""
    accepted = inspect.signature(model.forward).parameters
    options = {}
    if "position_ids" in accepted:
        # Only padding on the right can lie beyond the model's last position.
        positions = (mask.cumsum(-1) - 1).clamp(0, limit - 1)[:, -tokens.shape[1] :]
        options["position_ids"] = positions.to(model.device)
    if "logits_to_keep" in accepted:
        # As places, not as a number: a slice is not contiguous, and its product with a vocabulary many times slower.
        options["logits_to_keep"] = torch.arange(tokens.shape[1] - keep, tokens.shape[1], device=model.device)
    out = model(
        tokens.to(model.device),
        attention_mask=mask.to(model.device),
        past_key_values=cache,
        use_cache=cache is not None,
        **options,
    )
    return out.logits[:, -keep:]


def _padded(sequences: Sequence[list[int]], *, left: bool) -> tuple[Tensor, Tensor]:
    """Tokens [B, L] and their mask [B, L]."""
    longest = max(map(len, sequences))
    tokens = torch.zeros(len(sequences), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for n, sequence in enumerate(sequences):
        part = slice(longest - len(sequence), None) if left else slice(len(sequence))
        tokens[n, part] = torch.tensor(sequence)
        mask[n, part] = 1
    return tokens, mask


def _rows_of(cache: DynamicCache, index: Tensor) -> DynamicCache:
    """A cache of its own whose row n is row ``index[n]`` of ``cache``, which stays as it is."""
    part = copy.copy(cache)
    part.layers = [copy.copy(layer) for layer in cache.layers]
    part.batch_select_indices(index)
    return part
