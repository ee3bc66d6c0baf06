"""Continuous batching: calls of ``generate`` from several threads write their tokens together, one pass of the model
for a token of each."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.utils import ModelOutput

from dofla.attention import side_by_side
from dofla.errors import DoflaError
from dofla.integration.cache import CACHE_ARGUMENT, LinearCacheLayer
from dofla.integration.extending import Extension, extend
from dofla.integration.student import Student
from dofla.integration.wrapped import unwraps_its_model

_BY_LENGTH = ("dynamic", "longrope")
"""Rotary positions that turn all rows of a batch by the longest of them."""


class ContinuousBatching:
    """``generate`` of a student, called from several threads at once.

    All passes of the model are made by one thread. A call that writes waits with its token until every other that
    writes has one too; then one pass reads them all, each row with the state and the position of its own call. As
    states are of constant size, they stand side by side as they are, with no pages and no padding. Calls come and go at
    any token. Between two such passes somebody's prompt is read, or a piece of it (:func:`dofla.read_prompt`).

    What a call writes is what it would have written alone, up to the order of sums in products of several rows. Calls
    with several sequences, padding, static caches or layers of other kinds (softmax, a sliding window, recurrent), and
    models whose positions depend on the length (``dynamic`` and ``longrope``), take their passes alone, in turn.

    Args:
        student: a linearized model.

    Attributes:
        rows: of the last pass that read tokens of several calls, how many.

    Raises:
        DoflaError: the model is not linearized, or writes no text.
    """

    def __init__(self, student: PreTrainedModel) -> None:
        Student.of(student)
        if not student.can_generate():
            raise DoflaError(f"{type(student).__name__} writes no text: there are no calls of generate to batch")
        config = student.config.get_text_config()
        self._joins = (getattr(config, "rope_parameters", None) or {}).get("rope_type") not in _BY_LENGTH
        self._config = student.config
        self._begin()

    def _begin(self) -> None:
        self.rows = 0
        self._batch: _Batch | None = None
        self._lock, self._here = threading.Lock(), threading.local()
        self._writing = 0  # calls that may ask for a token
        self._asked: list[_Step] = []  # tokens that are asked for
        self._passes = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dofla-passes")
        self._passes.submit(self._arrive).result()

    def _arrive(self) -> None:
        self._here.passes = True

    def __getstate__(self) -> dict[str, Any]:
        """The attributes that a copy is made from; it has a thread of its own."""
        return {name: vars(self)[name] for name in ("_joins", "_config")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def generate(self, own: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run the student's ``own`` generate, with its tokens read together with those of other calls."""
        self._here.writes = True
        with self._lock:
            self._writing += 1
        try:
            return own(*args, **options)
        finally:
            self._here.writes = False
            self._stop_writing()
            self._passes.submit(self._settle).result()

    def read(self, own: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """A pass of the model, or of what is below its head, in turn."""
        if getattr(self._here, "passes", False):
            return own(*args, **options)
        writes = getattr(self._here, "writes", False)
        if writes and not args and (step := self._step(own, options)) is not None:
            with self._lock:
                self._asked.append(step)
                self._go_on()
            return step.answer.result()
        with self._others_go_on(writes):
            modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
            return self._passes.submit(copy_context().run, _in_modes, modes, own, args, options).result()

    def _step(self, forward: Callable[..., Any], options: dict[str, Any]) -> _Step | None:
        """A pass that can be made with others, if it can."""
        kind = dict(options)
        kind.pop("cache_position", None)  # which follows from the cache
        ids, places, cache = (kind.pop(name, None) for name in ("input_ids", "position_ids", CACHE_ARGUMENT))
        tensors = all(isinstance(x, Tensor) and x.shape == (1, 1) for x in (ids, places))
        plain = all(isinstance(x, Hashable) and not isinstance(x, (Tensor, tuple)) for x in kind.values())
        if not (self._joins and tensors and plain and type(cache) is DynamicCache and _only_states(cache)):
            return None
        return _Step(forward, ids, places, cache, tuple(sorted(kind.items())))

    @contextmanager
    def _others_go_on(self, writes: bool) -> Iterator[None]:
        """While this call reads, those that write do not wait for it."""
        if writes:
            self._stop_writing()
        try:
            yield
        finally:
            if writes:
                with self._lock:
                    self._writing += 1

    def _stop_writing(self) -> None:
        with self._lock:
            self._writing -= 1
            self._go_on()

    def _go_on(self) -> None:
        """Read the tokens that are asked for, if nobody else is about to ask."""
        if self._asked and len(self._asked) >= self._writing:
            steps, self._asked = self._asked, []
            self._passes.submit(self._read, steps)

    def _read(self, steps: Sequence[_Step]) -> None:
        kinds = defaultdict(list)
        for step in steps:
            kinds[step.forward, step.kind].append(step)
        for (forward, kind), own in kinds.items():
            try:
                with torch.no_grad():
                    answers = self._read_together(forward, dict(kind), own)
            except BaseException as error:  # whatever it is, those that wait must hear of it
                self._batch = None
                for step in own:
                    step.answer.set_exception(error)
            else:
                for step, answer in zip(own, answers, strict=True):
                    step.answer.set_result(answer)

    def _read_together(
        self, forward: Callable[..., Any], kind: dict[str, Any], steps: Sequence[_Step]
    ) -> list[ModelOutput]:
        caches = [step.cache for step in steps]
        if self._batch is None or self._batch.caches != caches:
            self._settle()
        if len(steps) == 1:
            step = steps[0]
            return [forward(input_ids=step.ids, position_ids=step.places, **{CACHE_ARGUMENT: step.cache}, **kind)]
        self._batch = self._batch or _Batch(caches, self._config)
        ids, places = torch.cat([step.ids for step in steps]), torch.cat([step.places for step in steps])
        out = forward(input_ids=ids, position_ids=places, **{CACHE_ARGUMENT: self._batch.cache}, **kind)
        self._batch.advance()
        self.rows = len(steps)
        return [_row(out, n, cache) for n, cache in enumerate(caches)]

    def _settle(self) -> None:
        """Each call has its own state again."""
        if self._batch is not None:
            self._batch.settle()
            self._batch = None


@dataclass(frozen=True)
class _Step:
    """A token that a call wants to be read: its id and its position [1, 1], and whatever else ``forward`` is told."""

    forward: Callable[..., Any]
    ids: Tensor
    places: Tensor
    cache: DynamicCache
    kind: tuple[tuple[str, Hashable], ...]
    answer: Future = field(default_factory=Future)


class _Batch:
    """Caches of several calls as one, as long as the same calls go on together; their own hold the states of before."""

    def __init__(self, caches: list[DynamicCache], config: Any) -> None:
        self.caches, self.cache = caches, DynamicCache(config=config)
        self.cache.layers = []
        for entries in zip(*map(_entries, caches), strict=True):
            entry = LinearCacheLayer(beside_softmax=False)
            entry.states = [side_by_side(states) for states in zip(*(own.states for own in entries), strict=True)]
            entry.tokens, entry.is_initialized = max(own.tokens for own in entries), True
            self.cache.layers.append(entry)

    def advance(self) -> None:
        """Each has read a token."""
        for cache in self.caches:
            for entry in _entries(cache):
                entry.advance(1)

    def settle(self) -> None:
        """States back to where they belong; copies, so that none keeps those of all."""
        for n, cache in enumerate(self.caches):
            for entry, joined in zip(_entries(cache), _entries(self.cache), strict=True):
                entry.states = [state.map(partial(_copied, row=n)) for state in joined.states or ()]


def _entries(cache: Cache) -> list[LinearCacheLayer]:
    """Entries of a cache that holds what linear layers carry on, and nothing else (:func:`_only_states`)."""
    return [entry for entry in cache.layers if isinstance(entry, LinearCacheLayer)]


def _only_states(cache: Cache) -> bool:
    """True if it holds what linear layers carry on, and nothing else."""
    entries = cache.layers
    return bool(entries) and all(
        isinstance(entry, LinearCacheLayer) and entry.states and not entry.beside_softmax for entry in entries
    )


def _copied(t: Tensor, row: int) -> Tensor:
    return t[row : row + 1].clone()


def _row(out: ModelOutput, n: int, cache: Cache) -> ModelOutput:
    """The model's output for row ``n`` alone, with that row's ``cache``."""
    own = {name: value[n : n + 1] for name, value in out.items() if isinstance(value, Tensor)}
    return type(out)(**own, **{CACHE_ARGUMENT: cache})


def _in_modes(
    modes: tuple[bool, bool], forward: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """A pass as the thread that asks for it would make it: inference mode or not, gradients or not."""
    inference, gradients = modes
    with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
        return forward(*args, **options)


class _Batched(Extension):
    """A model whose passes are made in turn with others."""

    place, holder = 1, "_dofla_batching"
    _dofla_batching: ContinuousBatching

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._dofla_batching.read(super().__call__, args, options)


class _Writes(_Batched):
    """The same, and its calls of ``generate`` write together."""

    def generate(self, *args: Any, **options: Any) -> Any:
        return self._dofla_batching.generate(super().generate, args, options)


@unwraps_its_model
def continuous_batching(student: PreTrainedModel) -> ContinuousBatching:
    """Let calls of ``student.generate`` from several threads write together: see :class:`ContinuousBatching`, which is
    returned. Called again, it begins anew."""
    batching = ContinuousBatching(student)
    extend(student, _Writes, batching)
    if student.base_model is not student:  # prompts are read without the head
        extend(student.base_model, _Batched, batching)
    return batching
