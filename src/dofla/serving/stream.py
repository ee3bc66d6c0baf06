"""Text that does not end: a state does not grow with it, and positions begin anew before they are used up."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from dofla.errors import DoflaError
from dofla.integration.cache import CACHE_ARGUMENT
from dofla.integration.positions import positions_of, positions_within, read_again, restart_index, text_positions
from dofla.integration.reading import check_keeps_states, check_readable
from dofla.integration.student import Student
from dofla.serving.prompt_state import read_prompt


class Stream:
    """A student that reads on and on.

        stream = dofla.Stream(student)
        for piece in pieces:
            logits = stream.read(piece)

    A state takes any number of tokens, but a model has positions for so many, and a memory may be made for fewer:
    beyond them a student fails. What would not fit any more begins a new state, into which the ``overlap`` tokens
    before it are read again: what was told before these is gone, and memory stays as it is.

    Args:
        student: a linearized causal language model.
        overlap: tokens read again into each new state; default a quarter of the positions, which makes reading cost a
            third more.
        positions: that may be used; default those that the student was made for, all that the model has if not fewer.

    Attributes:
        ids: the tokens [B, n] read into the state, from its first on.
        cache: the state after them; ``generate`` goes on from a copy of it, given ``ids`` and what follows on them.
        tokens: read so far, since the stream began, each counted once.

    Raises:
        DoflaError: not linearized; no positions known, or more than there are; an overlap that leaves no room; an
            encoder-decoder, or a model with a cache of its own kind.
    """

    def __init__(self, student: PreTrainedModel, overlap: int | None = None, positions: int | None = None) -> None:
        within, known = positions_within(student, Student.of(student).plan.context), positions_of(student)
        check_keeps_states(student)
        positions = within if positions is None else positions
        if positions is None:
            raise DoflaError(f"{type(student).__name__} does not say how many positions it has: give positions")
        if positions < 2 or positions > (known or positions):
            raise DoflaError(f"positions: {positions}; give 2 to {known}, which the model has")
        overlap = read_again(positions) if overlap is None else overlap
        if not 0 < overlap < positions:
            raise DoflaError(f"overlap: {overlap}; give 1 to {positions - 1}, with {positions} positions")
        self.overlap, self.positions, self.tokens = overlap, positions, 0
        self.ids: Tensor | None = None
        self.cache: Cache = DynamicCache(config=student.config)
        self._student = student

    @torch.inference_mode()
    def read(self, ids: Tensor) -> Tensor:
        """Logits [B, T, V] of the tokens after each of the next ones [B, T]; of a long text, give a few hundred at a
        time.

        Raises:
            DoflaError: no tokens, such as the model does not know, or of another number of sequences than before.
        """
        check_readable(self._student, ids[..., :1], "the stream")
        pieces = ids.to(self._student.device).split(self.positions - self.overlap, dim=1)
        for piece in pieces:
            check_readable(self._student, piece, "the stream")
        if self.ids is not None and len(ids) != len(self.ids):
            raise DoflaError(f"the stream: {len(ids)} sequences, and it began with {len(self.ids)}: begin another")
        return torch.cat([self._read(piece) for piece in pieces], dim=1)

    def _read(self, piece: Tensor) -> Tensor:
        """The same for what a new state has room for."""
        held = piece[:, :0] if self.ids is None else self.ids
        if begun := restart_index(0, held.shape[1], held.shape[1] + piece.shape[1], self.positions, self.overlap):
            held = held[:, begun:]
            self.cache = read_prompt(self._student, held)
        read, self.ids = held.shape[1], torch.cat([held, piece], dim=1)
        places = text_positions(self._student, self.ids.shape[1], len(piece))
        own = {name: all_of[..., read:] for name, all_of in places.items()}
        logits = self._student(piece, use_cache=True, **{CACHE_ARGUMENT: self.cache}, **own).logits
        self.tokens += piece.shape[1]
        return logits
