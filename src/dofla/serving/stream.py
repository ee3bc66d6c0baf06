"""Text that does not end: a state does not grow with it, and positions begin anew before they are used up."""

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from dofla.errors import DoflaError
from dofla.integration.cache import CACHE_ARGUMENT
from dofla.integration.offload import device_of
from dofla.integration.positions import positions_of, read_again, restart_index, text_positions
from dofla.integration.reading import check_keeps_states, check_readable
from dofla.serving.models import usable_positions
from dofla.serving.prompt_state import read_prompt


class Stream:
    """A model that reads on and on.

        stream = dofla.serving.Stream(model)
        for piece in pieces:
            logits = stream.read(piece)

    A compressed cache takes any number of tokens, but a model has positions for so many. What would pass them begins a
    new cache, into which the ``overlap`` tokens before it are read again: what stood before these is forgotten.

    Args:
        model: a causal language model.
        overlap: tokens read again into each new cache; default a quarter of the positions, which costs a third more.
        positions: that may be used; default those that the cache was made for, all that the model has if not fewer.

    Attributes:
        ids: the tokens [B, n] read into the cache, from its first on.
        cache: the cache after them; ``generate`` goes on from a copy of it, given ``ids`` and what follows on them.
        tokens: read so far, since the stream began, each counted once.

    Raises:
        DoflaError: no positions known, or more than there are; an overlap that leaves no room; an encoder-decoder, or a
            model with a cache of its own kind.
    """

    def __init__(self, model: PreTrainedModel, overlap: int | None = None, positions: int | None = None) -> None:
        check_keeps_states(model)
        known, positions = positions_of(model), usable_positions(model) if positions is None else positions
        if positions is None:
            raise DoflaError(f"{type(model).__name__} does not say how many positions it has: give positions")
        if positions < 2 or positions > (known or positions):
            most = f"2 to {known}, which the model has" if known else "2 or more"
            raise DoflaError(f"positions: {positions}; give {most}")
        overlap = read_again(positions) if overlap is None else overlap
        if not 0 < overlap < positions:
            raise DoflaError(f"overlap: {overlap}; give 1 to {positions - 1}, with {positions} positions")
        self.model, self.overlap, self.positions, self.tokens = model, overlap, positions, 0
        self.ids: Tensor | None = None
        self.cache: Cache = DynamicCache(config=model.config)

    @torch.inference_mode()
    def read(self, ids: Tensor) -> Tensor:
        """Logits [B, T, V] of the tokens after each of the next ones [B, T]; give a few hundred at a time.

        Raises:
            DoflaError: no tokens, such as the model does not know, or of another number of sequences than before.
        """
        check_readable(self.model, ids[..., :1], "the stream")
        pieces = ids.to(device_of(self.model)).split(self.positions - self.overlap, dim=1)
        for piece in pieces:
            check_readable(self.model, piece, "the stream")
        if self.ids is not None and len(ids) != len(self.ids):
            raise DoflaError(f"the stream: {len(ids)} sequences, and it began with {len(self.ids)}: begin another")
        return torch.cat([self._read(piece) for piece in pieces], dim=1)

    def _read(self, piece: Tensor) -> Tensor:
        """The same for what a new state has room for."""
        held = piece[:, :0] if self.ids is None else self.ids
        if begun := restart_index(0, held.shape[1], held.shape[1] + piece.shape[1], self.positions, self.overlap):
            held = held[:, begun:]
            self.cache = read_prompt(self.model, held)
        read, self.ids = held.shape[1], torch.cat([held, piece], dim=1)
        places = text_positions(self.model, self.ids.shape[1], len(piece), read)
        logits = self.model(piece, use_cache=True, **{CACHE_ARGUMENT: self.cache}, **places).logits
        self.tokens += piece.shape[1]
        return logits
