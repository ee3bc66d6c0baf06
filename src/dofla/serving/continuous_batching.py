"""Continuous batching: calls of ``generate`` from several threads share passes, each of which reads a token of all."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.utils import ModelOutput

from dofla.errors import DoflaError
from dofla.integration.cache import CACHE_ARGUMENT, StateLayer
from dofla.integration.converted import Converted
from dofla.serving.models import Module, view, writing

_BY_LENGTH = ("dynamic", "longrope")
"""Rotary positions that turn all rows of a batch by the longest of them."""


class ContinuousBatching:
    """``generate`` of a compressed model, called from several threads at once.

        with dofla.serving.ContinuousBatching(model) as batching, ThreadPoolExecutor() as threads:
            answers = list(threads.map(batching.generate, prompts))

    One thread makes all passes of the model. A call waits with its token until every other has one too; then one pass
    reads them all, each row with the state and the position of its own call. States are brought to the size of the
    largest, and stand side by side, with no pages and no padding. Calls come and go at any token. Between two such
    passes a prompt is read, or a piece of it (:func:`read_prompt`).

    What a call writes is what it would have written alone, up to the order of sums in products of several rows. Calls
    with several sequences, padding, static caches or layers of other kinds (softmax, a sliding window, recurrent), and
    models whose positions depend on the length (``dynamic`` and ``longrope``), take their passes alone, in turn.

    Args:
        model: a compressed model, which stays as it is.

    Attributes:
        model: a view of it, whose passes are made in turn with those of the calls.
        rows: of the last pass that read tokens of several calls, how many.

    Raises:
        DoflaError: the model is not compressed, or writes no text.
    """

    def __init__(self, model: nn.Module) -> None:
        converted = Converted.of(writing(model))
        own, self._layers = converted.model, list(converted.layers.values())
        rope = getattr(own.config.get_text_config(), "rope_parameters", None) or {}
        self._joins, self._config, self._forward = rope.get("rope_type") not in _BY_LENGTH, own.config, own.forward
        self._passes = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dofla-passes")
        self._writer: Any = _routed(own, self._token)
        self.model = _routed(own, self._in_turn)
        if own.base_model is not own:  # prompts are read without the head
            body = {own.base_model_prefix: _routed(own.base_model, self._in_turn)}
            self.model = view(self.model, _modules={**own._modules, **body})
        self.rows, self._open = 0, True
        self._caches: list[DynamicCache] = []  # of the calls whose tokens were read last, together
        self._joined: DynamicCache | None = None
        self._lock = threading.Lock()
        self._writing = 0  # calls that may ask for a token
        self._asked: list[_Step] = []  # tokens that are asked for

    def __enter__(self) -> ContinuousBatching:
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._passes.shutdown()

    def generate(self, *args: Any, **options: Any) -> Any:
        """The result of ``model.generate``; DoflaError after the ``with`` block."""
        if not self._open:
            raise DoflaError("the block of this ContinuousBatching has ended: make another")
        self._count(1)
        try:
            return self._writer.generate(*args, **options)
        finally:
            self._passes.submit(self._settle).result()
            self._count(-1)

    def _count(self, calls: int, *asked: _Step) -> None:
        """So many more calls write, and these tokens are asked for: read all if nobody else is about to ask."""
        with self._lock:
            self._writing += calls
            self._asked += asked
            if self._asked and len(self._asked) >= self._writing:
                self._passes.submit(self._read, self._asked)
                self._asked = []

    def _in_turn(self, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """A pass by itself."""
        return self._passes.submit(torch.no_grad()(forward), *args, **options).result()

    def _token(self, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """A pass of a call that writes: of a token, together with those of others."""
        if not args and (step := self._step(options)) is not None:
            self._count(0, step)
            return step.answer.result()
        self._count(-1)  # the others do not wait for it
        self._passes.submit(self._settle)  # if it has read tokens with them
        try:
            return self._in_turn(forward, *args, **options)
        finally:
            self._count(1)

    def _step(self, options: dict[str, Any]) -> _Step | None:
        """A pass that can be made with others, if it can."""
        kind = {name: value for name, value in options.items() if name != "cache_position"}  # follows from the cache
        ids, places, cache = (kind.pop(name, None) for name in ("input_ids", "position_ids", CACHE_ARGUMENT))
        tensors = all(isinstance(x, Tensor) and x.shape == (1, 1) for x in (ids, places))
        plain = all(isinstance(x, Hashable) and not isinstance(x, (Tensor, tuple)) for x in kind.values())
        if not (self._joins and tensors and plain and type(cache) is DynamicCache and _states(cache)):
            return None
        return _Step(ids, places, cache, tuple(sorted(kind.items())))

    @torch.no_grad()
    def _read(self, steps: list[_Step]) -> None:
        kinds = defaultdict(list)
        for step in steps:
            kinds[step.kind].append(step)
        for own in kinds.values():
            try:
                answers = self._read_together(own)
            except BaseException as error:  # whatever it is, those that wait must hear of it
                self._caches, self._joined = [], None
                for step in own:
                    step.answer.set_exception(error)
            else:
                for step, answer in zip(own, answers, strict=True):
                    step.answer.set_result(answer)

    def _read_together(self, steps: list[_Step]) -> list[ModelOutput]:
        caches = [step.cache for step in steps]
        if self._caches != caches:
            self._settle()
            self._caches, self._joined = caches, self._join(caches) if len(caches) > 1 else caches[0]
        options = {name: torch.cat([getattr(x, name) for x in steps]) for name in ("input_ids", "position_ids")}
        out = self._forward(**{CACHE_ARGUMENT: self._joined}, **options, **dict(steps[0].kind))
        if len(steps) == 1:
            return [out]
        for entry in (entry for cache in caches for entry in _states(cache)):
            entry.advance(1)
        self.rows = len(steps)
        rows = [{name: x[n : n + 1] for name, x in out.items() if isinstance(x, Tensor)} for n in range(self.rows)]
        return [type(out)(**row, **{CACHE_ARGUMENT: cache}) for row, cache in zip(rows, caches, strict=True)]

    def _join(self, caches: list[DynamicCache]) -> DynamicCache:
        """Caches of calls as one, as long as the same calls go on together; their own hold the states of before."""
        joined = DynamicCache(config=self._config)
        joined.layers = []
        for layer, entries in zip(self._layers, zip(*map(_states, caches), strict=True), strict=True):
            entry = StateLayer(beside_softmax=False)
            entry.states = layer.joined([own.states or () for own in entries])
            entry.tokens, entry.is_initialized = max(own.tokens for own in entries), True
            joined.layers.append(entry)
        return joined

    def _settle(self) -> None:
        """Each call has its own state again: a copy, so that none keeps those of all."""
        if self._joined is not None and len(self._caches) > 1:
            for n, cache in enumerate(self._caches):
                for layer, entry, joined in zip(self._layers, _states(cache), _states(self._joined), strict=True):
                    states = [state.map(lambda t, n=n: t[n : n + 1].clone()) for state in joined.states or ()]  # type: ignore[misc]
                    entry.states = layer.resized(states, int(entry.tokens))
        self._caches, self._joined = [], None


@dataclass(frozen=True)
class _Step:
    """A token that a call wants to be read: its id and its position [1, 1], and whatever else ``forward`` is told."""

    input_ids: Tensor
    position_ids: Tensor
    cache: DynamicCache
    kind: tuple[tuple[str, Hashable], ...]
    answer: Future = field(default_factory=Future)


def _states(cache: Cache) -> list[StateLayer]:
    """The entries of a cache that holds what compressed layers carry on, and nothing else; none of any other, nor where
    tokens may be taken back."""
    entries = [x for x in cache.layers if isinstance(x, StateLayer) and x.states and not x.beside_softmax]
    return [] if len(entries) < len(cache.layers) or any(x.record_past for x in entries) else entries


def _routed(module: Module, through: Callable[..., Any]) -> Module:
    """A view of a module whose passes are made ``through`` a function."""
    return view(module, forward=wraps(module.forward)(partial(through, module.forward)))
