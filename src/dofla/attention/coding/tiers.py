"""A memory that fades: stages of tokens between the window and the features, with ever fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dofla.attention import compiled, gpu
from dofla.attention.coding.coder import Coder, Numbers, encode_together, token_bytes
from dofla.attention.coding.heavy_hitters import KeptTokens, chosen, keep, pieces, seen
from dofla.attention.coding.tokens import CodedTokens
from dofla.attention.compiled.tiers import DTYPES
from dofla.attention.exact import exact_attention, merge
from dofla.attention.kernel import exact_scores
from dofla.attention.state import LOG_ZERO, TokenBuffer, accumulable

Stage = tuple[int, float]
"""How many tokens, and bits per number."""


class Fading(nn.Module):
    """The stages of some KV heads of a layer, newest tokens first.

    Args:
        heads: KV heads.
        head_dim, value_dim: sizes of their keys and values, multiples of 8.
        stages: tokens and bits of each, bits falling.
        kept: how many tokens the last stage holds beyond those, which stay while they draw attention
            (:mod:`dofla.attention.coding.heavy_hitters`).
    """

    def __init__(self, heads: int, head_dim: int, value_dim: int, stages: Sequence[Stage], kept: int = 0) -> None:
        super().__init__()
        self.counts, self.kept = [count for count, _ in stages], kept
        bits = [bits for _, bits in stages]
        self.key, self.value = Coder(heads, head_dim, bits), Coder(heads, value_dim, bits)

    @property
    def places(self) -> list[int]:
        """Tokens of each stage, kept ones with the last."""
        return [*self.counts[:-1], self.counts[-1] + self.kept]

    def reset(self) -> None:
        """Of both coders."""
        self.key.reset()
        self.value.reset()

    def empty(self, batch: int, device: torch.device) -> tuple[CodedTokens | KeptTokens, ...]:
        """The stages before the first token."""
        heads = self.key.heads
        stages = [self._empty(stage, (batch, heads, count), device) for stage, count in enumerate(self.places)]
        if self.kept:
            stages[-1] = KeptTokens.of(stages[-1])
        return tuple(stages)

    def _empty(self, stage: int, shape: tuple[int, ...], device: torch.device) -> CodedTokens:
        sizes = []
        for coder in (self.key, self.value):
            blocks = coder.dim // coder.block
            sizes += [coder.bytes_per_token(stage) - blocks, blocks]
        free = [torch.zeros(*shape, size, dtype=torch.uint8, device=device) for size in sizes]
        return CodedTokens(*free, torch.full((shape[0], shape[2]), LOG_ZERO, dtype=torch.float32, device=device))

    def attend(
        self,
        query: Tensor,
        leaving: TokenBuffer,
        held: Sequence[CodedTokens | KeptTokens],
        scaling: float,
        real: Tensor | None = None,
        *,
        behind: bool = True,
    ) -> tuple[tuple[Tensor, Tensor], tuple[CodedTokens | KeptTokens, ...], TokenBuffer | None]:
        """Attention to the stages while tokens move through them; gradients pass as if nothing were rounded.

        Args:
            query: [B, H, L, d]; query i sees the stages as they are once token i has entered.
            leaving: L tokens that enter the first stage, one after the other.
            held: what the stages hold before; nothing at the beginning of a sequence.
            scaling: of the scores.
            real: [B, L], which queries are not padding; default all.
            behind: whether somebody asks for what leaves the last stage.

        Returns:
            Output [B, H, L, dv] and log-normaliser [B, H, L]; what the stages hold after; and the L tokens that leave
            the last one, or None.
        """
        turned, asking = self._asked(query)
        length = query.shape[-2]
        with torch.no_grad():
            moving, held = self.enter(leaving), held or self.empty(len(query), query.device)
        unrounded = self._unrounded(leaving, turned.dtype)
        parts, after = [], []
        for stage, count in enumerate(self.counts):
            if self.kept and stage + 1 == len(self.counts):
                real = torch.ones_like(moving.log_weight, dtype=torch.bool) if real is None else real
                part, stays, moving, unrounded = self._attend_kept(
                    asking, turned, real, held[stage], KeptTokens.of(moving), unrounded, scaling
                )
                parts.append(part)
                after.append(stays)
                break
            line = held[stage].then(moving)
            passing = _in_front(unrounded, count)
            parts.append(self._see(turned, line, stage, passing, None, scaling))
            unrounded = passing and passing[:length]
            after.append(line[length:])
            moving = line[:length]
            if stage + 1 < len(self.counts):
                moving = self.aged(moving, stage)
        out, normaliser = reduce(merge, parts)
        left = self.straight(moving, len(self.counts) - 1, turned.dtype, unrounded) if behind else None
        return (self.value.straight(out), normaliser), tuple(after), left

    def _asked(self, query: Tensor) -> tuple[Tensor, Callable[[slice], Numbers]]:
        """Queries turned [B, H, L, d + 1], and what gives those of some tokens as whole numbers, as :func:`keep` takes
        them."""
        if gpu.usable(query):
            from dofla.attention.gpu.rotate_query import ask

            turned, (numbers, units) = ask(self.key, query, query.shape[1] // self.key.heads)
            return turned, lambda part: (numbers[:, :, part], units[:, :, part])
        turned, beside = self.key.against(accumulable(query))
        turned = torch.cat([turned, beside.unsqueeze(-1)], -1)  # the means of keys stand in a number more, which is 1
        return turned, lambda part: self.key.asking(query[:, :, part].detach())

    def _attend_kept(
        self,
        asking: Callable[[slice], Numbers],
        turned: Tensor,
        real: Tensor,
        held: KeptTokens,
        entering: KeptTokens,
        unrounded: TokenBuffer | None,
        scaling: float,
    ) -> tuple[tuple[Tensor, Tensor], KeptTokens, CodedTokens, TokenBuffer | None]:
        """The last stage, where it keeps what draws attention: as :meth:`attend`, output still turned."""
        out, left, last = [], [], len(self.counts) - 1
        for part in pieces(len(entering)) if unrounded is None else [slice(None)]:
            line, passing = held.then(entering[part]), _in_front(unrounded, len(held))
            held, leaving, gone = keep(asking(part), real[:, part], line, self.counts[last], self.key, scaling)
            out.append(self._see(turned[:, :, part], line, last, passing, gone, scaling))
            left.append(line.chosen(leaving))
            if passing is not None:
                unrounded = replace(passing, key=chosen(passing.key, leaving), value=chosen(passing.value, leaving))
        outputs, normalisers = zip(*out, strict=True)
        moving = reduce(KeptTokens.then, left).plain()
        return (torch.cat(outputs, 2), torch.cat(normalisers, 2)), held, moving, unrounded

    def _see(
        self,
        turned: Tensor,
        line: CodedTokens | KeptTokens,
        stage: int,
        unrounded: TokenBuffer | None,
        gone: Tensor | None,
        scaling: float,
    ) -> tuple[Tensor, Tensor]:
        """What turned queries [B, H, L, d + 1] see of a stage: output, turned as well, and log-normaliser.

        ``line`` is what it held and the L tokens that enter; ``gone`` as :func:`keep` gives it, or None where the first
        that came is the first to go.
        """
        length = turned.shape[-2]
        if unrounded is None and gpu.usable(turned):
            from dofla.attention.gpu.tiers import attend

            key = self.key.for_kernels(line.key, line.key_scale, stage)
            value = self.value.for_kernels(line.value, line.value_scale, stage)
            return attend(turned, key, value, line.log_weight, gone, scaling)
        tokens = _through(self._decoded(line, stage, turned.dtype), unrounded)
        tokens = replace(tokens, key=F.pad(tokens.key, (0, 1), value=1.0))
        if gone is None:
            return exact_attention(turned, tokens[1:], len(line) - length - 1, 0, None, None, scaling)
        sees = seen(line, gone, length)
        scores = exact_scores(turned, tokens.key, scaling).unflatten(1, (sees.shape[1], -1))
        scores = (scores + line.log_weight[:, :, None, None]).masked_fill(~sees.unsqueeze(2), LOG_ZERO)
        out = scores.softmax(-1) @ tokens.value.unsqueeze(2) * sees.any(-1)[:, :, None, :, None]
        return out.flatten(1, 2), scores.logsumexp(-1).flatten(1, 2)

    def enter(self, tokens: TokenBuffer) -> CodedTokens:
        """Tokens as the first stage keeps them."""
        if gpu.usable(tokens.key, tokens.value):
            from dofla.attention.gpu.encode import entered

            return CodedTokens(*entered(self.key, tokens.key), *entered(self.value, tokens.value), tokens.log_weight)
        if compiled.usable((tokens.key, tokens.value), (), DTYPES):
            return CodedTokens(*self.key.encode(tokens.key), *self.value.encode(tokens.value), tokens.log_weight)
        return self._kept_by(0, [self.key.exactly_turned(tokens.key), self.value.exactly_turned(tokens.value)], tokens)

    def aged(self, tokens: CodedTokens, stage: int) -> CodedTokens:
        """Tokens of a stage as the next one keeps them."""
        key = self.key.numbers(tokens.key, tokens.key_scale, stage)
        value = self.value.numbers(tokens.value, tokens.value_scale, stage)
        return self._kept_by(stage + 1, [key, value], tokens)

    def _kept_by(self, stage: int, vectors: list[Numbers], tokens: TokenBuffer | CodedTokens) -> CodedTokens:
        if gpu.usable(*(numbers for numbers, _ in vectors)):
            from dofla.attention.gpu.encode import age

            key, value = (age(coder, own, stage) for coder, own in zip((self.key, self.value), vectors, strict=True))
        else:
            key, value = encode_together([self.key, self.value], vectors, stage)
        return CodedTokens(*key, *value, tokens.log_weight)

    def straight(
        self,
        tokens: CodedTokens,
        stage: int,
        dtype: torch.dtype = torch.float32,
        unrounded: TokenBuffer | None = None,
    ) -> TokenBuffer:
        """Tokens of a stage as they were, as nearly as the stage remembers; with the gradients of ``unrounded``."""
        turned = _through(self._decoded(tokens, stage, dtype), unrounded)
        return TokenBuffer(self.key.straight(turned.key), self.value.straight(turned.value), turned.log_weight)

    def _unrounded(self, tokens: TokenBuffer, dtype: torch.dtype) -> TokenBuffer | None:
        """Tokens turned, where a gradient is asked of them."""
        if not torch.is_grad_enabled() or not (tokens.key.requires_grad or tokens.value.requires_grad):
            return None
        return TokenBuffer(
            self.key.turned(tokens.key.to(dtype)), self.value.turned(tokens.value.to(dtype)), tokens.log_weight
        )

    def _decoded(self, tokens: CodedTokens | KeptTokens, stage: int, dtype: torch.dtype) -> TokenBuffer:
        key = self.key.decode(tokens.key, tokens.key_scale, stage)
        value = self.value.decode(tokens.value, tokens.value_scale, stage)
        return TokenBuffer(key.to(dtype), value.to(dtype), tokens.log_weight)


def _in_front(unrounded: TokenBuffer | None, places: int) -> TokenBuffer | None:
    """Behind the ``places`` that were there before, of which nobody asks a gradient."""
    return unrounded and TokenBuffer.empty(unrounded.key, unrounded.value, places).then(unrounded)


def _through(coded: TokenBuffer, unrounded: TokenBuffer | None) -> TokenBuffer:
    """Coded tokens whose gradients are those of the unrounded ones."""
    if unrounded is None:
        return coded
    key, value = (
        own + (x - x.detach())
        for own, x in zip((coded.key, coded.value), (unrounded.key, unrounded.value), strict=True)
    )
    return replace(coded, key=key, value=value)


def stage_bytes(head_dim: int, value_dim: int, bits: float, *, scored: bool = False) -> int:
    """Of a token in a stage of so many bits: a key, a value, and a score where what draws attention is kept."""
    return token_bytes(head_dim, bits) + token_bytes(value_dim, bits) + 2 * scored
