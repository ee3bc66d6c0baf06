"""The backend of Triton kernels, for GPUs. The modules of kernels need triton and are imported at the first call."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dofla.attention import gpu
from dofla.attention.backend import Backend, Compressed, merge_exact
from dofla.attention.call import Call
from dofla.attention.coding import CodedTokens, Coder
from dofla.attention.coding.coder import Codes, Numbers
from dofla.attention.drawn import Drawn, Line
from dofla.attention.exact import ExactPart
from dofla.attention.gpu.operators import decode, decode_token, prepare
from dofla.attention.layout import CompressedState
from dofla.attention.state import FeatureState, TokenBuffer


class Triton(Backend):
    """Triton kernels for a GPU, where no gradient is asked for."""

    def traceable(self, tokens: int, compressed: bool) -> bool:
        return tokens == 1 and compressed

    def takes(self, vectors: Sequence[Tensor], others: Sequence[Tensor] = ()) -> bool:
        return gpu.usable(*vectors)

    def read_compressed(
        self, heads: Compressed, call: Call, state: CompressedState
    ) -> tuple[Tensor, CompressedState] | None:
        if call.query.shape[-2] != 1:
            return None
        call = call.smoothed()
        rows = state.rows if call.in_place else state.rows.clone()
        if torch.compiler.is_compiling():
            known = heads.register()
            prepare(known, call.scaling, call.query.device, rows.shape[-1])
            out = decode_token(*call.vectors, call.log_weight, rows, known, call.scaling)
        else:
            out = decode(heads, call, rows)
        return out, CompressedState(rows)

    def read_pages(
        self, heads: Compressed, call: Call, pool: Tensor, pages: Tensor, starts: list[int]
    ) -> Tensor | None:
        if starts != list(range(len(pages) + 1)):
            return None  # kernels are for a token of each sequence
        return decode(heads, call.smoothed(), pool, pages)

    def pack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        from dofla.attention.gpu.encode import pack

        return pack(x)

    def encode(self, coders: Sequence[Coder], vectors: Sequence[Tensor]) -> list[Codes]:
        from dofla.attention.gpu.encode import encode

        return [encode(coder, x) for coder, x in zip(coders, vectors, strict=True)]

    def encode_last(self, coders: Sequence[Coder], vectors: Sequence[Tensor], counts: Sequence[int]) -> list[Codes]:
        from dofla.attention.gpu.encode import encode_last

        return encode_last(coders, vectors, counts)

    def decode(self, coder: Coder, codes: Codes) -> Tensor:
        from dofla.attention.gpu.tier import unrotated

        return unrotated(coder, codes)

    def rotate_queries(self, coder: Coder, query: Tensor) -> tuple[Tensor, Callable[[slice], Numbers]]:
        from dofla.attention.gpu.rotate_query import rotate_queries

        rotated, (numbers, units) = rotate_queries(coder, query, query.shape[1] // coder.heads)
        return rotated, lambda part: (numbers[:, :, part], units[:, :, part])

    def attend(
        self, key: Coder, value: Coder, rotated: Tensor, line: CodedTokens, evicted_at: Tensor, scaling: float
    ) -> tuple[Tensor, Tensor]:
        from dofla.attention.gpu.tier import attend

        return attend(key, value, rotated, line, evicted_at, scaling)

    def select_survivors(
        self, coder: Coder, query_integers: Numbers, real: Tensor, line: CodedTokens, newest: int, scaling: float
    ) -> tuple[CodedTokens, Tensor]:
        from dofla.attention.gpu.heavy_hitters import select_survivors

        return select_survivors(coder, query_integers, real, line, newest, scaling)

    def linear_attention(
        self, a: Tensor, b: Tensor, tokens: TokenBuffer, state: FeatureState, exact: ExactPart | None
    ) -> tuple[Tensor, FeatureState]:
        if not gpu.usable(a, b, tokens.value, state.mean):  # features may train where queries do not
            return super().linear_attention(a, b, tokens, state, exact)
        b = b + tokens.log_weight[:, None, :, None]
        out, normalizer, after = gpu.linear_attention(a, b, tokens.value, state=state)
        return merge_exact(out, normalizer, exact), after

    def exact_causal(self, query: Tensor, line: Line, window: int, sinks: int, scaling: float) -> tuple[Tensor, Drawn]:
        dim, value_dim = line.key.shape[-1], line.value.shape[-1]
        # Flash attention takes keys and values of one size.
        if not _draws(query, line) or dim != value_dim:
            return super().exact_causal(query, line, window, sinks, scaling)
        from dofla.attention.gpu.drawn import drawn, flash_attention

        line = replace(line, key=line.key.to(query.dtype), value=line.value.to(query.dtype))
        out, normalizer = flash_attention(query, line, scaling)
        return out, drawn(query, line, normalizer, window, sinks, scaling)

    def drawn_lately(self, query: Tensor, line: Line, window: int, sinks: int, scaling: float) -> Tensor:
        if not _draws(query, line):
            return super().drawn_lately(query, line, window, sinks, scaling)
        from dofla.attention.gpu.drawn import drawn_lately

        return drawn_lately(query, replace(line, key=line.key.to(query.dtype)), window, sinks, scaling)


def _draws(query: Tensor, line: Line) -> bool:
    """True if there are kernels for the attention that tokens draw from such queries: heads are of 256 numbers at most,
    as those of flash attention."""
    return query.dtype == torch.bfloat16 and not line.padded and line.key.shape[-1] <= 256
