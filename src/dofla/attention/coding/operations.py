"""Operations on the codes of a compressed cache, in plain torch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dofla.attention.coding.coder import Coder, Codes, Numbers, encode_together
from dofla.attention.coding.heavy_hitters import select_survivors, visible
from dofla.attention.coding.tokens import CodedTokens
from dofla.attention.constants import LOG_ZERO
from dofla.attention.eight_bits import pack
from dofla.attention.kernel import exact_scores
from dofla.attention.state import accumulable


class CodeOperations:
    """Operations on codes. Kernels of a backend give the same results, bit for bit but for the sums of attention."""

    pack = staticmethod(pack)
    select_survivors = staticmethod(select_survivors)

    def encode(self, coders: Sequence[Coder], vectors: Sequence[Tensor]) -> list[Codes]:
        """Codes of vectors [B, Hkv, L, d], for each coder."""
        return encode_together(coders, [own.rotate_integer(x) for own, x in zip(coders, vectors, strict=True)])

    def encode_last(self, coders: Sequence[Coder], vectors: Sequence[Tensor], counts: Sequence[int]) -> list[Codes]:
        """Likewise of the last vectors alone, so many for each coder."""
        return self.encode(coders, [x[:, :, x.shape[2] - n :] for x, n in zip(vectors, counts, strict=True)])

    def decode(self, coder: Coder, codes: Codes) -> Tensor:
        """Vectors [B, Hkv, L, d], float32, as they were before rotation, up to quantization."""
        return coder.unrotate(coder.decode(*codes))

    def rotate_queries(self, coder: Coder, query: Tensor) -> tuple[Tensor, Callable[[slice], Numbers]]:
        """Queries [B, H, L, d] rotated to the codes of keys [B, H, L, d + 1], where the last number is their product
        with the mean of the keys; and what gives those of some tokens as integers, as :meth:`select_survivors` takes
        them."""
        rotated, beside = coder.rotate_query(accumulable(query))
        rotated = torch.cat([rotated, beside.unsqueeze(-1)], -1)
        return rotated, lambda part: coder.rotate_query_integer(query[:, :, part])

    def attend(
        self, key: Coder, value: Coder, rotated: Tensor, line: CodedTokens, evicted_at: Tensor, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of queries [B, H, L, d + 1], as :meth:`rotate_queries` gives them, to a line of S tokens, of which
        the last L enter the tier with one query each. Each is seen until the query it is evicted at [B, Hkv, S].
        Returns output [B, H, L, dv], rotated like the values, and log-normalizer [B, H, L]."""
        keys = key.decode(line.key, line.key_scale).to(rotated.dtype)
        values = value.decode(line.value, line.value_scale).to(rotated.dtype)
        seen = visible(line, evicted_at, rotated.shape[-2])
        scores = exact_scores(rotated, torch.cat([keys, torch.ones_like(keys[..., :1])], -1), scaling)
        scores = scores.unflatten(1, (seen.shape[1], -1))
        scores = (scores + line.log_weight[:, :, None, None]).masked_fill(~seen.unsqueeze(2), LOG_ZERO)
        out = scores.softmax(-1) @ values.unsqueeze(2) * seen.any(-1)[:, :, None, :, None]
        return out.flatten(1, 2), scores.logsumexp(-1).flatten(1, 2)
