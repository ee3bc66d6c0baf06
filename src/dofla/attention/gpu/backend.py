"""The backend of Triton kernels, for GPUs. The modules of kernels need triton and are imported at the first call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dofla.attention import gpu
from dofla.attention.backend import Backend, Packed, joined
from dofla.attention.coding import CodedTokens, Coder, ScoredTokens
from dofla.attention.coding.coder import Numbers
from dofla.attention.coding.heavy_hitters import weight_steps
from dofla.attention.coding.operations import Coded
from dofla.attention.drawn import Drawn, Line
from dofla.attention.exact import ExactPart
from dofla.attention.flat import Layout
from dofla.attention.gpu.codes import Codes
from dofla.attention.gpu.operators import decode, decode_token, decoders_of, empty_output, prepare
from dofla.attention.state import FeatureState, TokenBuffer


class Triton(Backend):
    """Triton kernels for a GPU, where no gradient is asked for."""

    def traceable(self, tokens: int, retains: bool) -> bool:
        return tokens == 1 and retains

    def takes(self, vectors: Sequence[Tensor], others: Sequence[Tensor] = ()) -> bool:
        return gpu.usable(*vectors)

    def read_packed(
        self,
        layouts: Sequence[Layout],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_weight: Tensor | None,
        states: list[Tensor],
        scaling: float,
        in_place: bool,
    ) -> Packed | None:
        if query.shape[-2] != 1 or not all(layout.retains for layout in layouts):
            return None
        if torch.compiler.is_compiling():
            after = states if in_place else [state.clone() for state in states]
            for layout in layouts:
                layout.register()
            ids = [id(layout) for layout in layouts]
            prepare(ids, scaling, query.device)
            return Packed(decode_token(query, key, value, log_weight, after, ids, scaling), after, [])
        return Packed(*decode(layouts, query, key, value, log_weight, states, scaling, in_place), [])

    def read_pages(
        self,
        layouts: Sequence[Layout],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pools: list[Tensor],
        pages: Tensor,
        starts: list[int],
        scaling: float,
    ) -> Tensor | None:
        if starts != list(range(len(pages) + 1)) or not all(layout.retains for layout in layouts):
            return None  # kernels are for a token of each sequence
        from dofla.attention.gpu.side_by_side import common_rows

        (_, decoder), *others = decoders_of(layouts)
        if others or (pool := common_rows(pools)) is None:
            return None
        query, key, value = (x.transpose(0, 2) for x in (query, key, value))
        out = empty_output(layouts, query, key, value)
        decoder(query, key, value, None, pool, out, scaling, *weight_steps(scaling, query.device), pages)
        return out.transpose(0, 2)

    def pack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        from dofla.attention.gpu.pack import pack

        return pack(x)

    def encode(self, coders: Sequence[Coder], vectors: Sequence[Tensor]) -> list[Coded]:
        from dofla.attention.gpu.encode import entered

        return [entered(coder, x) for coder, x in zip(coders, vectors, strict=True)]

    def requantize(self, coders: Sequence[Coder], codes: Sequence[Coded], tier: int) -> list[Coded]:
        from dofla.attention.gpu.encode import age

        return [age(coder, coder.numbers(*own, tier), tier + 1) for coder, own in zip(coders, codes, strict=True)]

    def unrotated(self, coder: Coder, codes: Coded, tier: int) -> Tensor:
        from dofla.attention.gpu.unrotate import unrotated

        return unrotated(coder, Codes.of(coder, *codes, tier))

    def rotate_queries(self, coder: Coder, query: Tensor) -> tuple[Tensor, Callable[[slice], Numbers]]:
        from dofla.attention.gpu.rotate_query import rotate_queries

        rotated, (numbers, units) = rotate_queries(coder, query, query.shape[1] // coder.heads)
        return rotated, lambda part: (numbers[:, :, part], units[:, :, part])

    def attend(
        self,
        key: Coder,
        value: Coder,
        rotated: Tensor,
        line: CodedTokens | ScoredTokens,
        tier: int,
        evicted_at: Tensor | None,
        scaling: float,
        unrounded: TokenBuffer | None = None,
    ) -> tuple[Tensor, Tensor]:
        from dofla.attention.gpu.tiers import attend

        keys = Codes.of(key, line.key, line.key_scale, tier)
        values = Codes.of(value, line.value, line.value_scale, tier)
        return attend(rotated, keys, values, line.log_weight, evicted_at, scaling)

    def select_survivors(
        self, coder: Coder, query_integers: Numbers, real: Tensor, line: ScoredTokens, newest: int, scaling: float
    ) -> tuple[ScoredTokens, Tensor, Tensor]:
        from dofla.attention.gpu.heavy_hitters import select_survivors

        keys = Codes.of(coder, line.key, line.key_scale, len(coder.tiers) - 1)
        index, score, left, evicted_at = select_survivors(
            query_integers, real, keys, line.score, newest, *weight_steps(scaling, real.device)
        )
        return replace(line.chosen(index), score=score), left, evicted_at

    def linear_attention(
        self, a: Tensor, b: Tensor, tokens: TokenBuffer, state: FeatureState, exact: ExactPart | None
    ) -> tuple[Tensor, Tensor, FeatureState]:
        if not gpu.usable(a, b, tokens.value, state.mean):  # features may train where queries do not
            return super().linear_attention(a, b, tokens, state, exact)
        b = b + tokens.log_weight[:, None, :, None]
        out, normalizer, after = gpu.linear_attention(a, b, tokens.value, state=state)
        return joined(out, normalizer, exact), normalizer, after

    def exact_causal(self, query: Tensor, line: Line, window: int, sinks: int, scaling: float) -> tuple[Tensor, Drawn]:
        if query.dtype != torch.bfloat16 or line.padded:
            return super().exact_causal(query, line, window, sinks, scaling)
        from dofla.attention.gpu.drawn import drawn
        from dofla.attention.gpu.flash import flash_attention

        out, normalizer = flash_attention(query, line, scaling)
        return out, drawn(query, line, normalizer, window, sinks, scaling)
