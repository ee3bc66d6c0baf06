"""Seconds of prefill and decode against the length of the context, and where two such curves cross."""

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

from dofla.data import TokenWindows
from dofla.integration.cache import CACHE_ARGUMENT, StateLayer
from dofla.integration.checkpoint import apply_adapter
from dofla.integration.converted import Converted
from dofla.integration.offload import device_of
from dofla.integration.positions import positions_of
from dofla.integration.recorder import evaluation_mode, run_body
from dofla.integration.surgery import convert, original, restore
from dofla.report.runs import SPEED, RunRecord
from dofla.runs.folder import machine
from dofla.runs.opened import Opened
from dofla.runs.view import View
from dofla.serving.prompt_state import read_prompt
from dofla.storage.files import write_json
from dofla.storage.lock import locked

MOST = 3
"""Models of a run that are timed: those that lost least."""
FIRST, LAST = 128, 16_384
"""Shortest and longest context that is timed, in tokens; each is twice the one before."""

_STEPS = 6
_PATIENCE = 0.8  # seconds: nothing is repeated that took more, and no longer prompt is read
_ROOM = 2**30  # bytes of a cache at most


def measure_speed(run: RunRecord, view: View) -> None:
    """Time the best models of a run that were not timed yet, some ten seconds each, and keep that in their folders;
    DoflaError if another process works there, or if the original or an adapter is gone, or does not fit."""
    wanted = [model for model in run.models[:MOST] if model.speed is None]
    if not wanted:
        return
    with locked(run.folder), view.progress("speed") as bar:
        opened = Opened(run.recipe, view)
        text = _longest_text(opened.validation)
        for n, record in enumerate(wanted):
            bar(n, len(wanted), record.name)
            convert(opened.model, record.plan, seed=record.seed)
            try:
                with evaluation_mode(opened.model):
                    apply_adapter(opened.model, record.adapter)
                    found = timings(opened.model, text) | {"machine": machine()}
            finally:
                restore(opened.model)
            write_json(record.folder / SPEED, found)
        bar(len(wanted), len(wanted))


def _longest_text(windows: TokenWindows) -> Tensor:
    """The real tokens of the first window that has most of them."""
    if windows.attention_mask is None:
        return windows.input_ids[0]
    longest = windows.attention_mask.sum(dim=1).argmax()
    return windows.input_ids[longest][windows.attention_mask[longest].bool()]


@torch.inference_mode()
def timings(model: PreTrainedModel, ids: Tensor) -> dict[str, Any]:
    """Time a converted model and its original in turns, so that both meet the same machine.

    Longer and longer contexts are read until one takes a second. To time decode after longer ones, keys and values are
    repeated up to their length, which a state of constant size does not notice; so are ``ids``, tokens [T] of any text.

    Returns:
        ``original`` and ``model``, each with ``prefill`` and, if it generates, ``decode``: pairs of tokens of context
        and seconds, of so many tokens (best of two) and of one more (best of six), or of fewer where that would take
        long; ``threads``.
    """
    text = ids.repeat(math.ceil(LAST / len(ids)))[None].to(device_of(model))
    whose: dict[str, Callable[[PreTrainedModel], AbstractContextManager[object]]]
    whose = {"original": original, "model": nullcontext}
    record: dict[str, Any] = {who: {"prefill": []} for who in whose}
    read: Callable[[PreTrainedModel, Tensor], object]
    read = read_prompt if model.can_generate() else lambda own, ids: run_body(own, {"input_ids": ids})
    lengths = _lengths(model, 0)
    for length in lengths:
        for who, attention in whose.items():
            with attention(model):
                if length == lengths[0]:
                    read(model, text[:, :length])  # warms up
                seconds = _best(2, partial(read, model, text[:, :length]))
            record[who]["prefill"].append([length, seconds])
        if max(record[who]["prefill"][-1][1] for who in whose) > _PATIENCE:
            break
    if model.can_generate():
        room = _ROOM // max(1, Converted.of(model).plan.softmax_bytes(1, model.dtype))
        for length in [n for n in _lengths(model, _STEPS) if n <= max(room, FIRST)]:
            for who, attention in whose.items():
                with attention(model):
                    cache = read_prompt(model, text[:, : min(length, FIRST)])
                    _stretch(cache, length)
                    step = partial(model, text[:, :1], use_cache=True, **{CACHE_ARGUMENT: cache})
                    record[who].setdefault("decode", []).append([length, _best(_STEPS, step)])
    return record | {"threads": torch.get_num_threads()}


def _lengths(model: PreTrainedModel, spare: int) -> list[int]:
    most = min(LAST, (positions_of(model) or LAST) - spare)
    doubled = [FIRST * 2**n for n in range(int(math.log2(LAST // FIRST)) + 1)]
    return [length for length in doubled if length <= most] or [most]


def _stretch(cache: Cache, length: int) -> None:
    """Change a cache as if the context were ``length`` tokens long; layers with a sliding window keep their size."""
    for entry in cache.layers:
        if isinstance(entry, StateLayer):
            entry.tokens = length
        elif isinstance(entry, DynamicLayer) and not entry.is_sliding:
            for name in ("keys", "values"):
                if (x := getattr(entry, name)) is not None:
                    setattr(entry, name, x.repeat(1, 1, math.ceil(length / x.shape[-2]), 1)[:, :, :length])


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


def crossing(original: Iterable[Sequence[float]], model: Iterable[Sequence[float]]) -> float | None:
    """The context, in tokens, from which on the model takes less time, of two lists of tokens and seconds: by a power
    law between two lengths that both have; the shortest if it is faster from there on, None if it is not at the
    longest."""
    ours = {pair[0]: pair[1] for pair in model}
    both = [(n, math.log(seconds / ours[n])) for n, seconds in original if n in ours]
    if not both or both[-1][1] <= 0:
        return None
    where = both[0][0]
    for (a, before), (b, after) in pairwise(both):
        if before <= 0 < after:
            where = a * (b / a) ** (-before / (after - before))
    return where
