"""Conversations that a student goes on with: what it remembers of a text it has read is kept for when the text returns,
longer."""

from __future__ import annotations

import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from copy import copy, deepcopy
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from dofla.errors import DoflaError
from dofla.integration.positions import beginning, positions_within, read_again
from dofla.integration.prompt_state import read_prompt
from dofla.integration.surgery import plan_of

logger = logging.getLogger(__name__)

_SNAPSHOTS = 2
"""Of a session: after its last prompt, from which another answer can be written, and after the answer."""
_ANSWER = 2
"""Of the positions, the part that is at least there for an answer, if it is to be as long."""
_PIECE = 1024
"""Tokens of a prompt that are read at a time: others wait for no more of them (:func:`dofla.continuous_batching`)."""
_WRITTEN = 20
"""Tokens that transformers writes if nothing is said."""


class Sessions:
    """``generate`` of a student, reading of each prompt only what is new.

    A turn of a chat repeats all turns before it. The state after them is still there, of the same bytes however long
    they were, so a turn costs its own tokens. A state cannot be rolled back, hence two of them: if the answer comes
    back in other tokens than it was written in, or is to be written again, the one after the prompt serves.

    A conversation may be longer than the model has positions, or than its memory was made for. What would pass them
    with its answer begins a new state, into which as many of its last tokens are read again as :class:`~dofla.Stream`
    reads, and those that are new; what was told before is gone. There is room for the tokens that are asked for, up to
    half the positions, and an answer ends where positions do.

    Args:
        student: a linearised model.
        most: sessions that are remembered; what has not been gone on with for longest is forgotten.
        static: whether states stand in static caches, as a ``generate`` that was compiled wants them
            (:func:`dofla.compile_generate`).

    Attributes:
        read: how many tokens of the last prompt had to be read, its very last not counted.

    Raises:
        DoflaError: the model is not linearised, or writes no text; ``most`` below 1.
    """

    def __init__(self, student: PreTrainedModel, most: int = 32, *, static: bool = False) -> None:
        plan = plan_of(student)
        if not student.can_generate():
            raise DoflaError(f"{type(student).__name__} writes no text: there are no sessions to keep")
        if most < 1:
            raise DoflaError(f"sessions: {most}; remember 1 or more")
        self.read = 0
        self._student, self._snapshots, self._static = student, _SNAPSHOTS * most, static
        self._positions = positions_within(student, plan.reach) or sys.maxsize
        # Of each text, the token at which its state begins, and the state.
        self._known: OrderedDict[tuple[int, ...], tuple[int, Cache]] = OrderedDict()
        self._lock = threading.Lock()  # of what is known: dofla.continuous_batching answers several calls at once

    def __len__(self) -> int:
        """Snapshots held."""
        return len(self._known)

    def generating(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """``generate`` that goes on from what is known; calls with several sequences, beams, padding or a cache of
        their own pass through. Results are the same, up to the order of sums in a prompt that is read in two calls, as
        long as positions last."""

        @wraps(generate)
        def going_on(inputs: Tensor | None = None, *args: Any, **options: Any) -> Any:
            input_ids = options.get("input_ids", inputs)
            if input_ids is None or args or not self._goes_on(input_ids, options):
                return generate(inputs, *args, **options)
            asked = self._asked(input_ids.shape[1], options)
            begun, cache = self._before(input_ids, min(asked, self._positions // _ANSWER))
            room = self._positions - (input_ids.shape[1] - begun)
            if asked > room:
                logger.warning("max_new_tokens: %d, and positions end after %d: so will the answer", asked, room)
            if begun or asked > room:
                options = _writing(min(asked, room), options)
            # Positions are counted from where the state begins, so generate sees the text from there on.
            own = {name: _from(begun, x, input_ids) for name, x in options.items()}
            result = generate(_from(begun, inputs, input_ids), past_key_values=cache, **own)
            sequence = result if isinstance(result, Tensor) else result.sequences
            if begun:
                sequence = torch.cat([input_ids[:, :begun].to(sequence.device), sequence], dim=1)
            self._remember(sequence[:, :-1], begun, cache)  # the last token was written, and never read
            if isinstance(result, Tensor):
                return sequence
            result.sequences = sequence
            return result

        return going_on

    def _goes_on(self, input_ids: Tensor, options: dict[str, Any]) -> bool:
        names = ("num_beams", "num_return_sequences", "cache_implementation")
        beams, sequences, cache = (self._setting(name, options) for name in names)
        mask = options.get("attention_mask")
        alone = len(input_ids) == 1 and beams in (1, None) and sequences in (1, None) and (mask is None or mask.all())
        return alone and cache is None and options.get("past_key_values") is None

    def _setting(self, name: str, options: dict[str, Any]) -> Any:
        """Of a call, as ``generate`` finds it."""
        configs = (options.get("generation_config"), self._student.generation_config)
        found = [options.get(name), *(getattr(config, name, None) for config in configs)]
        return next((value for value in found if value is not None), None)

    def _asked(self, length: int, options: dict[str, Any]) -> int:
        """How many tokens may follow a prompt of ``length``."""
        new, most = (self._setting(name, options) for name in ("max_new_tokens", "max_length"))
        if new is not None:
            return new
        return _WRITTEN if most is None else most - length

    def _before(self, input_ids: Tensor, room: int) -> tuple[int, Cache]:
        """Where a state with ``room`` for more begins in a prompt [1, L], and the cache before its last token, of one's
        own."""
        tokens = tuple(input_ids[0, :-1].tolist())
        with self._lock:
            known = max((key for key in self._known if tokens[: len(key)] == key), key=len, default=())
            begun, cache = self._known.get(known, (0, None))
            if known and len(known) == len(tokens):
                self._known.move_to_end(known)
        first = beginning(begun, len(known), input_ids.shape[1] + room, self._positions, read_again(self._positions))
        goes_on = cache is not None and first == begun
        cache, read = (deepcopy(cache), len(known)) if goes_on else (self._empty(), first)
        self.read = len(tokens) - read
        if self.read:
            read_prompt(self._student, input_ids[:, read:-1], chunk=_PIECE, cache=cache)
            self._remember(input_ids[:, :-1], first, deepcopy(cache))
        return first, cache

    def _empty(self) -> Cache:
        config = self._student.config
        return StaticCache(config, max_cache_len=1) if self._static else DynamicCache(config=config)  # of any length

    def _remember(self, sequence: Tensor, begun: int, cache: Cache) -> None:
        key = tuple(sequence[0].tolist())
        with self._lock:
            self._known[key] = begun, cache
            self._known.move_to_end(key)
            while len(self._known) > self._snapshots:
                self._known.popitem(last=False)


def _from(begun: int, given: Any, input_ids: Tensor) -> Any:
    """What is given to ``generate``, without what stands before ``begun`` if it has an entry for each token."""
    return given[:, begun:] if isinstance(given, Tensor) and given.shape == input_ids.shape else given


def _writing(tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    """A call's options, with so many tokens to write."""
    config, limits = options.get("generation_config"), {"max_new_tokens": tokens, "max_length": None}
    if config is None or limits.keys() & options.keys():
        return options | limits
    config = copy(config)
    config.max_new_tokens, config.max_length = tokens, None
    return options | {"generation_config": config}


def keep_sessions(student: PreTrainedModel, most: int = 32, *, static: bool = False) -> Sessions:
    """Let ``student.generate`` go on from texts that it has read, past the positions of the model too: see
    :class:`Sessions`, which is returned."""
    sessions = Sessions(student, most, static=static)
    student.generate = sessions.generating(student.generate)
    return sessions
