"""Conversations that a student goes on with: what it remembers of a text it has read is kept for when the text returns,
longer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from functools import wraps
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from dofla.errors import DoflaError
from dofla.integration.prompt_state import read_prompt
from dofla.integration.surgery import linear_layers

_SNAPSHOTS = 2
"""Of a session: after its last prompt, from which another answer can be written, and after the answer."""


class Sessions:
    """``generate`` of a student, reading of each prompt only what is new.

    A turn of a chat repeats all turns before it. The state after them is still there, of the same bytes however long
    they were, so a turn costs its own tokens. A state cannot be rolled back, hence two of them: if the answer comes
    back in other tokens than it was written in, or is to be written again, the one after the prompt serves.

    Args:
        student: a linearised model.
        most: sessions that are remembered; what has not been gone on with for longest is forgotten.
        static: whether states stand in static caches, as a ``generate`` that was compiled wants them
            (:func:`dofla.compile_generate`).

    Attributes:
        read: how many tokens of the last prompt were new, its very last not counted.

    Raises:
        DoflaError: the model is not linearised, or writes no text; ``most`` below 1.
    """

    def __init__(self, student: PreTrainedModel, most: int = 32, *, static: bool = False) -> None:
        linear_layers(student)
        if not student.can_generate():
            raise DoflaError(f"{type(student).__name__} writes no text: there are no sessions to keep")
        if most < 1:
            raise DoflaError(f"sessions: {most}; remember 1 or more")
        self.read = 0
        self._student, self._snapshots, self._static = student, _SNAPSHOTS * most, static
        self._known: OrderedDict[tuple[int, ...], Cache] = OrderedDict()

    def __len__(self) -> int:
        """Snapshots held."""
        return len(self._known)

    def generating(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """``generate`` that goes on from what is known; calls with several sequences, beams, padding or a cache of
        their own pass through. Results are the same, up to the order of sums in a prompt that is read in two calls."""

        @wraps(generate)
        def going_on(inputs: Tensor | None = None, *args: Any, **options: Any) -> Any:
            input_ids = options.get("input_ids", inputs)
            if input_ids is None or args or not self._goes_on(input_ids, options):
                return generate(inputs, *args, **options)
            cache = self._before(input_ids)
            result = generate(inputs, past_key_values=cache, **options)
            sequence = result if isinstance(result, Tensor) else result.sequences
            self._remember(sequence[:, :-1], cache)  # the last token was written, and never read
            return result

        return going_on

    def _goes_on(self, input_ids: Tensor, options: dict[str, Any]) -> bool:
        config = options.get("generation_config") or self._student.generation_config
        beams, sequences, cache = (
            options.get(name, getattr(config, name))
            for name in ("num_beams", "num_return_sequences", "cache_implementation")
        )
        mask = options.get("attention_mask")
        alone = len(input_ids) == 1 and beams in (1, None) and sequences in (1, None) and (mask is None or mask.all())
        return alone and cache is None and options.get("past_key_values") is None

    def _before(self, input_ids: Tensor) -> Cache:
        """The cache before the last token of a prompt [1, L], of one's own."""
        tokens = tuple(input_ids[0, :-1].tolist())
        known = max((key for key in self._known if tokens[: len(key)] == key), key=len, default=())
        self.read = len(tokens) - len(known)
        cache = deepcopy(self._known[known]) if known else self._empty()
        if self.read:
            read_prompt(self._student, input_ids[:, len(known) : -1], cache=cache)
            self._remember(input_ids[:, :-1], deepcopy(cache))
        elif known:
            self._known.move_to_end(known)
        return cache

    def _empty(self) -> Cache:
        config = self._student.config
        return StaticCache(config, max_cache_len=1) if self._static else DynamicCache(config=config)  # of any length

    def _remember(self, sequence: Tensor, cache: Cache) -> None:
        key = tuple(sequence[0].tolist())
        self._known[key] = cache
        self._known.move_to_end(key)
        while len(self._known) > self._snapshots:
            self._known.popitem(last=False)


def keep_sessions(student: PreTrainedModel, most: int = 32, *, static: bool = False) -> Sessions:
    """Let ``student.generate`` go on from texts that it has read: see :class:`Sessions`, which is returned."""
    sessions = Sessions(student, most, static=static)
    student.generate = sessions.generating(student.generate)
    return sessions
