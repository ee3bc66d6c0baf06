"""Seconds of reading and of writing against the length of the context, and where two such curves cross."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicLayer, PreTrainedModel

from dofla.integration.cache import CACHE_ARGUMENT, LinearCacheLayer
from dofla.integration.positions import positions_of
from dofla.integration.recorder import run_body
from dofla.integration.student import Student
from dofla.integration.surgery import softmax
from dofla.serving.prompt_state import read_prompt

FIRST, LAST = 128, 16_384
"""Shortest and longest context that is timed, in tokens; each is twice the one before."""

_STEPS = 6
_PATIENCE = 0.8  # seconds: nothing is repeated that took more, and no longer prompt is read
_ROOM = 2**30  # bytes of a cache at most


@torch.inference_mode()
def timings(student: PreTrainedModel, ids: Tensor) -> dict[str, Any]:
    """Time a linearized model and its teacher in turns, so that both meet the same machine.

    Longer and longer contexts are read until one takes a second. To time writing after longer ones, keys and values are
    repeated up to their length, which a state of constant size does not notice.

    Args:
        student: a linearized model; it is its own teacher.
        ids: tokens of any text, of one dimension; they are repeated as well.

    Returns:
        ``teacher`` and ``student``, each with ``read`` and, if it generates, ``write``: pairs of tokens of context and
        seconds, for reading so many tokens (best of two) and for writing one more (best of six), or of fewer where that
        would take long; ``threads``.
    """
    text = ids.repeat(math.ceil(LAST / len(ids)))[None].to(student.device)
    whose: dict[str, Callable[[PreTrainedModel], AbstractContextManager[object]]]
    whose = {"teacher": softmax, "student": nullcontext}
    record: dict[str, Any] = {who: {"read": []} for who in whose}
    read: Callable[[PreTrainedModel, Tensor], object] = read_prompt if student.can_generate() else _run
    lengths = _lengths(student, 0)
    for length in lengths:
        for who, attention in whose.items():
            with attention(student):
                if length == lengths[0]:
                    read(student, text[:, :length])  # warms up
                seconds = _best(2, partial(read, student, text[:, :length]))
            record[who]["read"].append([length, seconds])
        if max(record[who]["read"][-1][1] for who in whose) > _PATIENCE:
            break
    if student.can_generate():
        for who in whose:
            record[who]["write"] = []
        room = _ROOM // max(1, Student.of(student).plan.softmax_bytes(1, student.dtype))
        for length in [n for n in _lengths(student, _STEPS) if n <= max(room, FIRST)]:
            for who, attention in whose.items():
                with attention(student):
                    record[who]["write"].append([length, _writing(student, text, length)])
    return record | {"threads": torch.get_num_threads()}


def _run(model: PreTrainedModel, ids: Tensor) -> object:
    return run_body(model, {"input_ids": ids})


def _lengths(model: PreTrainedModel, spare: int) -> list[int]:
    most = min(LAST, (positions_of(model) or LAST) - spare)
    doubled = [FIRST * 2**n for n in range(int(math.log2(LAST // FIRST)) + 1)]
    return [length for length in doubled if length <= most] or [most]


def _writing(model: PreTrainedModel, text: Tensor, length: int) -> float:
    cache = read_prompt(model, text[:, : min(length, FIRST)])
    _stretch(cache, length)
    return _best(_STEPS, lambda: model(text[:, :1], use_cache=True, **{CACHE_ARGUMENT: cache}))


def _stretch(cache: Cache, length: int) -> None:
    """Change a cache as if the context were ``length`` tokens long. Layers with a sliding window have their size
    already."""
    for entry in cache.layers:
        if isinstance(entry, LinearCacheLayer):
            entry.tokens = length
        elif isinstance(entry, DynamicLayer) and not entry.is_sliding:
            entry.keys, entry.values = (_repeated(x, length) for x in (entry.keys, entry.values))


def _repeated(x: Tensor | None, length: int) -> Tensor | None:
    return None if x is None else x.repeat(1, 1, math.ceil(length / x.shape[-2]), 1)[:, :, :length]


def _best(times: int, work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes at best, when done a few times."""
    best, spent = math.inf, 0.0
    for _ in range(times):
        started = time.perf_counter()
        work()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - started
        best, spent = min(best, seconds), spent + seconds
        if spent > _PATIENCE:
            break
    return best


def crossing(teacher: Iterable[Sequence[float]], student: Iterable[Sequence[float]]) -> float | None:
    """The context from which on the student takes less time, among the lengths that both were timed at.

    Args:
        teacher, student: pairs of tokens and seconds.

    Returns:
        Tokens, by a power law between two lengths; the shortest length if it is faster from there on, None if it is
        not at the longest.
    """
    ours = {pair[0]: pair[1] for pair in student}
    both = [(n, math.log(seconds / ours[n])) for n, seconds in teacher if n in ours]
    if not both or both[-1][1] <= 0:
        return None
    where = both[0][0]
    for (a, before), (b, after) in pairwise(both):
        if before <= 0 < after:
            where = a * (b / a) ** (-before / (after - before))
    return where
