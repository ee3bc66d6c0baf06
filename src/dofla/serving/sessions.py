"""Conversations that a student goes on with: what it remembers of a text it has read is kept for when the text returns,
longer."""

from __future__ import annotations

import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from dofla.errors import DoflaError
from dofla.integration.cache import CACHE_ARGUMENT
from dofla.integration.calls import setting, text_alone
from dofla.integration.extending import Extension, extend
from dofla.integration.interface import LINEAR
from dofla.integration.positions import positions_within, read_again, restart_index, text_positions
from dofla.integration.reading import keeps_states
from dofla.integration.student import Student
from dofla.integration.weights_watch import WeightsWatch
from dofla.integration.wrapped import unwraps_its_model
from dofla.serving.prompt_state import read_prompt

logger = logging.getLogger(__name__)

_SNAPSHOTS = 2
"""Number of snapshots of a session: after its last prompt, from which another answer can be written, and after the
answer."""
_ANSWER = 2
"""Divisor of the positions: at least one part in so many is left to an answer, if it may be that long."""
_PIECE = 1024
"""Tokens of a prompt that are read at a time: others wait for no more of them (:func:`dofla.continuous_batching`)."""
_WRITTEN = 20
"""Tokens that transformers writes if nothing is said."""


class Sessions:
    """``generate`` of a student, reading of each prompt only what is new.

    A turn of a chat repeats all turns before it. The state after them is still there, of the same bytes however long
    they were, so a turn costs its own tokens. A state cannot be rolled back, hence two of them: if the answer comes
    back in other tokens than it was written in, or is to be written again, the one after the prompt serves.

    Calls that go on with one text use sessions, and results are the same, up to the order of sums in a prompt that is
    read in two calls, as long as positions last. All others pass through to the model's own ``generate``: several
    sequences, beams, padding, a cache of their own or none, pictures, positions or any other argument that is not known
    here; and all calls of an encoder-decoder, of a model with a cache of its own kind, or within
    :func:`dofla.softmax`.

    A conversation may be longer than the model has positions, or than its memory was made for. What would pass them
    with its answer begins a new state, into which as many of its last tokens are read again as :class:`~dofla.Stream`
    reads, and those that are new; what was told before is gone. There is room for the tokens that are asked for, up to
    half the positions, and an answer ends where positions do. With ``return_dict_in_generate`` there is then no
    cache in the result, as it would not hold all of the sequence.

    States read with other weights are forgotten. That is noticed at the next call, in less than a hundredth of a
    token's time, if a parameter or buffer was written to in place (an optimizer's step, ``load_state_dict``), replaced
    or moved, if peft's adapters were switched, chosen, scaled or merged, if the model was put into training mode, and
    if a few numbers of each weight show that it was written to through ``weight.data``.

    Copies of the student have sessions of their own, which begin with nothing.

    Args:
        student: a linearized model.
        most: sessions that are remembered; what has not been gone on with for longest is forgotten.
        static: whether states stand in static caches, as a ``generate`` that was compiled wants them
            (:func:`dofla.compile_generate`).

    Attributes:
        read: how many tokens of the last prompt had to be read, its very last not counted.

    Raises:
        DoflaError: the model is not linearized, or writes no text; ``most`` below 1.
    """

    def __init__(self, student: PreTrainedModel, most: int = 32, *, static: bool = False) -> None:
        plan = Student.of(student).plan
        if not student.can_generate():
            raise DoflaError(f"{type(student).__name__} writes no text: there are no sessions to keep")
        if most < 1:
            raise DoflaError(f"sessions: {most}; remember 1 or more")
        self._most, self._static = _SNAPSHOTS * most, static
        self._positions = positions_within(student, plan.context) or sys.maxsize
        self._forget_all()

    def _forget_all(self) -> None:
        self.read = 0
        # Of each text, the token at which its state begins, and the state.
        self._known: OrderedDict[tuple[int, ...], tuple[int, Cache]] = OrderedDict()
        self._watch, self._weights = WeightsWatch(), 0  # how often they were others
        self._lock = threading.Lock()  # of what is known: dofla.continuous_batching answers several calls at once

    def __getstate__(self) -> dict[str, Any]:
        """The attributes that a copy is made from; it has no sessions yet."""
        return {name: vars(self)[name] for name in ("_most", "_static", "_positions")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_all()

    def __len__(self) -> int:
        """Snapshots held."""
        return len(self._known)

    def generate(
        self,
        student: PreTrainedModel,
        own: Callable[..., Any],
        inputs: Tensor | None,
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Any:
        """Run the student's ``own`` generate with these arguments, from the state of a session where one fits."""
        input_ids = None if args or not _linear(student) else text_alone(student, inputs, options)
        if input_ids is None:
            return own(inputs, *args, **options)
        weights = self._weights_of(student)
        asked = _asked(student, input_ids.shape[1], options)
        begun, cache = self._before(student, input_ids, min(asked, self._positions // _ANSWER), weights)
        room = self._positions - (input_ids.shape[1] - begun)
        if asked > room:
            logger.warning("max_new_tokens: %d, and positions end after %d: so will the answer", asked, room)
        if begun or asked > room:
            options = _writing(min(asked, room), options)
        # Positions are counted from where the state begins, so generate sees the text from there on.
        options = {name: _from(begun, x, input_ids) for name, x in options.items()}
        options |= text_positions(student, input_ids.shape[1] - begun)
        result = own(_from(begun, inputs, input_ids), **{CACHE_ARGUMENT: cache}, **options)
        sequence = result if isinstance(result, Tensor) else result.sequences
        if begun:
            sequence = torch.cat([input_ids[:, :begun].to(sequence.device), sequence], dim=1)
        # The last token was written, and never read. A cache that the caller gets may be gone on with.
        kept = cache if isinstance(result, Tensor) else deepcopy(cache)
        self._remember(sequence[:, :-1], begun, kept, weights)
        if isinstance(result, Tensor):
            return sequence
        result.sequences = sequence
        if begun:
            setattr(result, CACHE_ARGUMENT, None)
        return result

    def _weights_of(self, student: PreTrainedModel) -> int:
        """A number that is another one if the weights are others; what was read with those before is forgotten."""
        with self._lock:
            if self._watch.changed(student):
                self._known.clear()
                self._weights += 1
            return self._weights

    def _before(self, student: PreTrainedModel, input_ids: Tensor, room: int, weights: int) -> tuple[int, Cache]:
        """Where a state with ``room`` for more begins in a prompt [1, L], and the cache before its last token, of one's
        own."""
        tokens = tuple(input_ids[0, :-1].tolist())
        with self._lock:
            known = max((key for key in self._known if tokens[: len(key)] == key), key=len, default=())
            begun, cache = self._known.get(known, (0, None))
            if known and len(known) == len(tokens):
                self._known.move_to_end(known)
        length, overlap = input_ids.shape[1] + room, read_again(self._positions)
        first = restart_index(begun, len(known), length, self._positions, overlap)
        if cache is not None and first == begun:
            cache, read = deepcopy(cache), len(known)
        else:
            cache, read = self._empty(student), first
        self.read = len(tokens) - read
        if self.read:
            read_prompt(student, input_ids[:, read:-1], chunk=_PIECE, cache=cache)
            self._remember(input_ids[:, :-1], first, deepcopy(cache), weights)
        return first, cache

    def _empty(self, student: PreTrainedModel) -> Cache:
        config = student.config
        return StaticCache(config, max_cache_len=1) if self._static else DynamicCache(config=config)  # of any length

    def _remember(self, sequence: Tensor, begun: int, cache: Cache, weights: int) -> None:
        key = tuple(sequence[0].tolist())
        with self._lock:
            if weights != self._weights:  # they changed while this was written
                return
            self._known[key] = begun, cache
            self._known.move_to_end(key)
            while len(self._known) > self._most:
                self._known.popitem(last=False)


class _GoesOn(Extension):
    """A student whose calls of ``generate`` go on from what it has read."""

    place, holder = 0, "_dofla_sessions"
    _dofla_sessions: Sessions

    def generate(self, inputs: Tensor | None = None, *args: Any, **options: Any) -> Any:
        return self._dofla_sessions.generate(self, super().generate, inputs, args, options)


def _linear(student: PreTrainedModel) -> bool:
    """True if it computes linear attention now, with a cache that can be kept."""
    return student.config._attn_implementation == LINEAR and keeps_states(student)


def _asked(student: PreTrainedModel, length: int, options: dict[str, Any]) -> int:
    """The number of tokens that may follow a prompt of ``length`` tokens, by the call's settings."""
    new, most = (setting(student, name, options) for name in ("max_new_tokens", "max_length"))
    if new is not None:
        return new
    return _WRITTEN if most is None else most - length


def _from(begun: int, given: Any, input_ids: Tensor) -> Any:
    """An argument of ``generate``, without the entries before ``begun`` if it has one for each token."""
    return given[:, begun:] if isinstance(given, Tensor) and given.shape == input_ids.shape else given


def _writing(tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    """A call's options, with so many tokens to write."""
    config, limits = options.get("generation_config"), {"max_new_tokens": tokens, "max_length": None}
    if config is None or limits.keys() & options.keys():
        return options | limits
    config = copy(config)
    config.max_new_tokens, config.max_length = tokens, None
    return options | {"generation_config": config}


@unwraps_its_model
def keep_sessions(student: PreTrainedModel, most: int = 32, *, static: bool = False) -> Sessions:
    """Let ``student.generate`` go on from texts that it has read, past the positions of the model too: see
    :class:`Sessions`, which is returned. Called again, it begins anew."""
    sessions = Sessions(student, most, static=static)
    if not keeps_states(student):
        logger.warning("%s keeps no states of texts: each prompt is read as a whole", type(student).__name__)
    extend(student, _GoesOn, sessions)
    return sessions
