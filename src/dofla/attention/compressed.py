"""The compressed caches of a layer's KV heads: a local window and sinks in int8, a tier in few bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dofla.attention.backend import REGISTERED, Backend
from dofla.attention.backends import backend_for
from dofla.attention.call import Call
from dofla.attention.coding import Tier
from dofla.attention.constants import LOG_ZERO
from dofla.attention.eight_bits import PackedTokens, rounded
from dofla.attention.exact import ExactPart, merge, take_sinks
from dofla.attention.group import HeadGroup
from dofla.attention.heads import query_heads, select, write
from dofla.attention.layout import CompressedState, Contents, HeadSizes, Layout, Layouts
from dofla.attention.modules import ModuleList
from dofla.attention.prefill import LAST, LEAST_AT_ONCE, LEAST_ON_CPU, MOST_TOKENS, exact_prefill
from dofla.attention.state import masked, side_by_side
from dofla.errors import DoflaError


class CompressedHeads(HeadGroup[CompressedState]):
    """Attention of KV heads with compressed caches, which share one state. Heads of one size have coders together.

    Args:
        sizes: of each KV head.
        head_dim, value_dim: sizes of keys and values, multiples of 8.
        bits: per number in the tier, 1 to 5.

    Attributes:
        layouts: of states.
        layout: the smallest of them.
        evicts: False if all heads hold every token.
        tiers: of each group of the layout.
        coders: those of the tiers' keys, and of their values, as lists, since modules take long to find.
    """

    compressed = True

    def __init__(self, sizes: Sequence[HeadSizes], head_dim: int, value_dim: int, bits: float) -> None:
        super().__init__(range(len(sizes)))
        self.layouts = Layouts(sizes, head_dim, value_dim, bits)
        self.layout, self.evicts = self.layouts.first, not all(size.grows for size in sizes)
        self.tiers: ModuleList[Tier] = ModuleList(
            Tier(len(heads), head_dim, value_dim, size.newest, size.heavy_hitters, bits)
            for size, heads in zip(self.layout.sizes, self.layout.heads, strict=True)
        )
        self.coders = [tier.key for tier in self.tiers], [tier.value for tier in self.tiers]

    @torch.compiler.assume_constant_result
    def register(self) -> int:
        """Their id in :data:`dofla.attention.backend.REGISTERED`. Called while a graph is traced."""
        REGISTERED[id(self)] = self
        return id(self)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        for tier in self.tiers:
            tier.reset()

    def traceable(self, call: Call, has_state: bool) -> bool:
        changes = self.layouts.grow and call.room is not None  # the size of a state, which a graph cannot
        return not changes and super().traceable(call, has_state)

    @torch.no_grad()
    def step(self, call: Call, state: CompressedState | None) -> tuple[Tensor, CompressedState]:
        """See :class:`HeadGroup`; gradients do not pass. DoflaError for a call that is not causal."""
        if not call.causal:
            raise DoflaError("a compressed cache got a call that is not causal: keep the layer softmax (keep_softmax)")
        backend = backend_for(call.vectors, () if call.log_weight is None else (call.log_weight,))
        tokens = call.key.shape[-2]
        least = LEAST_AT_ONCE if call.key.is_cuda else LEAST_ON_CPU
        few = tokens == 1 or (state is not None and tokens < least)
        if few:
            call = call._replace(importance=None)
        # A CPU's kernels read a few tokens that go on from a cache one after the other: exactly, plain torch would
        # decode and code all that it holds for them.
        if call.exact and tokens > 1 and (call.key.is_cuda or not few):
            all_at_once = state is None and not self.evicts and call.query.shape[2] > 0
            held = self._hold_all(call, backend) if all_at_once else None
            return held or self._exact_prefill(call, state, backend)
        before = self._with_room(call, state)
        return backend.read_compressed(self, call, before) or self._read(call.smoothed(), before, backend)

    def _hold_all(self, call: Call, backend: Backend) -> tuple[Tensor, CompressedState] | None:
        """An exact call that begins a sequence, where nothing is evicted: softmax attention, and all tokens enter the
        state. None if the backend has no kernels for it."""
        if (after := backend.hold(self, call)) is None:
            return None
        return _softmax(call, backend), after

    def _exact_prefill(
        self, call: Call, state: CompressedState | None, backend: Backend
    ) -> tuple[Tensor, CompressedState]:
        """An exact call: heads with one local window at once, but for attention, where it needs nothing of theirs. One
        without queries is for the state alone."""
        whole, attends = None, call.query.shape[2] > 0
        begins = state is None and call.importance is not None and call.key.shape[2] <= MOST_TOKENS
        if attends and begins:
            whole, attends = _softmax(call, backend), False
        if not attends:
            call = call._replace(query=call.query[:, :, -LAST:])
        retained = backend.retain_important(self, call) if begins else None
        if retained is not None:
            return call.new_output() if whole is None else whole, retained
        call = call.smoothed()
        if state is None:  # nothing is looked up in an empty one
            layout, held = self._first_layout(call), None
        else:
            before = self._with_room(call, state)
            layout = self.layouts.of(before.rows.shape[-1])
            held = layout.open(before)
        pieces, order, after = list[Tensor](), list[int](), dict[int, Contents]()
        for window in dict.fromkeys(size[:2] for size in layout.sizes):
            groups = [n for n, size in enumerate(layout.sizes) if size[:2] == window]
            heads = [head for n in groups for head in layout.heads[n]]
            own, past = call.of_heads(heads), None if held is None else [held[n] for n in groups]
            tiers, sizes = [self.tiers[n] for n in groups], [layout.groups[n] for n in groups]
            piece, contents = exact_prefill(own, tiers, sizes, past, backend, attends)
            pieces.append(piece)
            order += query_heads(heads, call.groups)
            after |= zip(groups, contents, strict=True)
        state = layout.close([after[n] for n in sorted(after)])
        if whole is not None:
            return whole, state
        out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
        # All heads at once: a GPU would take a launch to copy each.
        return select(out, sorted(range(len(order)), key=order.__getitem__)), state

    def _first_layout(self, call: Call) -> Layout:
        """The layout of the state that begins with a call."""
        return self.layouts.with_room(call.key.shape[-2] if call.room is None else call.room)

    def empty(self, call: Call) -> CompressedState:
        """The state before a call that begins a sequence."""
        return self._first_layout(call).empty(len(call.query), call.query.device)

    def _with_room(self, call: Call, state: CompressedState | None) -> CompressedState:
        """The state before the call, with room for its tokens."""
        if state is None:
            return self.empty(call)
        room = call.room if self.layouts.grow else None
        if room is None or self.layouts.with_room(room).bytes <= state.rows.shape[-1]:
            return state
        return self.resized(state, room)

    def resized(self, state: CompressedState, tokens: int) -> CompressedState:
        before, after = self.layouts.of(state.rows.shape[-1]), self.layouts.with_room(tokens)
        return state if before is after else before.resized(state, after)

    def joined(self, states: Sequence[CompressedState]) -> CompressedState:
        own = [self.layouts.of(state.rows.shape[-1]) for state in states]
        most = max(own, key=lambda layout: layout.bytes)
        return side_by_side([x if at is most else at.resized(x, most) for x, at in zip(states, own, strict=True)])

    def _read(self, call: Call, state: CompressedState, backend: Backend) -> tuple[Tensor, CompressedState]:
        """A call in plain torch, group by group."""
        out, after = call.new_output(), []
        layout = self.layouts.of(state.rows.shape[-1])
        groups = zip(layout.heads, layout.sizes, self.tiers, layout.open(state), strict=True)
        for heads, size, tier, contents in groups:
            piece, kept = _attend(call.of_heads(heads), size.window, tier, contents, backend)
            write(piece.to(out.dtype), out, query_heads(heads, call.groups))
            after.append(kept)
        return out, layout.close(after)


def _softmax(call: Call, backend: Backend) -> Tensor:
    """Softmax attention of a call that begins a sequence."""
    real = None if call.log_weight is None else call.log_weight > LOG_ZERO
    return backend.softmax(*call.vectors, call.scaling, None if real is None or real.all() else real.unsqueeze(1))


def _attend(call: Call, window: int, tier: Tier, held: Contents, backend: Backend) -> tuple[Tensor, Contents]:
    """Output [B, H, L, dv] of one group, and its tokens after the call."""
    length, dtype = call.query.shape[-2], torch.promote_types(call.key.dtype, torch.float32)
    # All keys and values are rounded as they enter, so that it does not matter where a call ends.
    line = held.window.unpacked(dtype).then(masked(rounded(call.key), rounded(call.value), call.log_weight))
    real = line.log_weight[:, -length:] > LOG_ZERO
    entering, sinks, visible_from = take_sinks(held.sinks.unpacked(dtype), line[:length])
    near = ExactPart(call.query, line[1:], window, sinks, visible_from, call.scaling).widened().attend()
    far, tokens = tier.attend(call.query, entering, held.tier, call.scaling, real, backend)
    exact = [PackedTokens.of(own, backend.pack) for own in (line[length:], sinks)]
    return merge(far, near)[0], Contents(exact[0], exact[1], tokens)
