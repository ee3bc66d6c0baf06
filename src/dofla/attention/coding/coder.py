"""The codes of one side of some KV heads, keys or values: a rotation, and a few bits for each number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from dofla.attention.coding.blocks import decode, encode, from_bytes, to_bytes, whole
from dofla.attention.coding.levels import DISTORTION
from dofla.attention.constants import MOST_BITS
from dofla.attention.eight_bits import pack, power_of_two
from dofla.attention.rows import Rows

_SUM = (2**24 - 1) / 127
"""The largest sum of absolute values of a row of the rotation: products with seven-bit integers then add up exactly."""
_REGULAR = 1e-3
"""The least weight of a direction, as a fraction of the mean eigenvalue of the quadratic form that weighs errors."""

Numbers = tuple[Tensor, Tensor]
"""Vectors in blocks: integers [B, Hkv, L, blocks, block], and what one is worth in each [B, Hkv, L, blocks, 1]."""
Codes = tuple[Tensor, Tensor]
"""Codes [B, Hkv, L, bytes] and scales [B, Hkv, L, blocks] of vectors, uint8."""


@dataclass
class Moments:
    """Sums over the tokens of a calibration, per KV head; add as many batches as there are."""

    count: int  # tokens
    total: Tensor  # Σ x [Hkv, d]
    square: Tensor  # Σ x xᵀ [Hkv, d, d]

    @classmethod
    def of(cls, x: Tensor) -> Moments:
        """The moments of vectors [Hkv, n, d]."""
        x = x.double()
        return cls(x.shape[1], x.sum(1), x.mT @ x)

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.square + other.square)

    def __getitem__(self, heads: Sequence[int]) -> Moments:
        """The moments of some KV heads."""
        return Moments(self.count, self.total[list(heads)], self.square[list(heads)])

    @property
    def mean(self) -> Tensor:
        """[Hkv, d]"""
        return self.total / self.count

    @property
    def second(self) -> Tensor:
        """E x xᵀ [Hkv, d, d]."""
        return self.square / self.count

    @property
    def covariance(self) -> Tensor:
        """[Hkv, d, d]"""
        return self.second - self.mean.unsqueeze(-1) * self.mean.unsqueeze(-2)


class _Constant:
    """A part of a coder's row of constants."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __get__(self, coder: Coder, _: object = None) -> Tensor:
        return coder._rows.part(coder.constants, self.place)


class Coder(nn.Module):
    """Codes of vectors of ``dim`` numbers.

    The constants are undefined until :meth:`reset` or :meth:`calibrate`, or a checkpoint, sets them. They are one row
    of bytes, which the kernels take as it is, and of which the tensors that follow it below are views.

    Args:
        heads: KV heads.
        dim: numbers of a vector, a multiple of 8.
        bits: per number, in the mean over blocks, scales not counted; 1 to 5.

    Attributes:
        bytes_per_token: of the codes and scales of one vector of one head.
        constants: [bytes], uint8.
        rotation: the rotation of vectors, in rows of integers [Hkv, d, d], int16.
        fineness: the unit of the integers in each row of the rotation [Hkv, d]: powers of two.
        back: the inverse of the rotation [Hkv, d, d].
        mean: what is subtracted from vectors before the rotation [Hkv, d].
        middle: the mean, rotated [Hkv, d].
        bits: of each number of a block [blocks], uint8.
    """

    constants: Tensor
    rotation, fineness, back, mean, middle, bits = map(_Constant, range(6))

    def __init__(self, heads: int, dim: int, bits: float) -> None:
        super().__init__()
        self.heads, self.dim, self.mean_bits = heads, dim, bits
        self.block, self.bytes_per_token = block_size(dim), token_bytes(dim, bits)
        turn, vector = (heads, dim, dim), (heads, dim)
        numbers = [(turn, torch.float32), (vector, torch.float32), (vector, torch.float32)]
        bits_of_blocks = (dim // self.block,), torch.uint8
        self._rows = Rows([(turn, torch.int16), (vector, torch.float32), *numbers, bits_of_blocks])
        self.register_buffer("constants", torch.zeros(self._rows.bytes, dtype=torch.uint8))

    @torch.no_grad()
    def reset(self) -> None:
        """Take vectors as they stand, all blocks with the same bits."""
        eye = torch.eye(self.dim, dtype=torch.float64).expand(self.heads, -1, -1)
        self._set(eye, torch.zeros(self.heads, self.dim, dtype=torch.float64), torch.ones(self.dim // self.block))

    @torch.no_grad()
    def calibrate(self, moments: Moments, weighing: Tensor | None = None) -> None:
        """Take the mean, the directions that matter and the bits of the blocks from ``moments`` of vectors like those
        that will be coded; ``weighing`` [Hkv, d, d] is the quadratic form an error is judged by (default: its square).
        """
        covariance = moments.covariance
        eye = torch.eye(self.dim, dtype=torch.float64)
        weighing = eye.expand_as(covariance) if weighing is None else weighing.double()
        size = weighing.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]
        size = torch.where(size > 0, size, 1)  # heads that nobody asks, or whose answers nobody takes
        values, vectors = torch.linalg.eigh(weighing + _REGULAR * size * eye)
        root = vectors * values.sqrt().unsqueeze(1) @ vectors.mT
        variance, directions = torch.linalg.eigh(root @ covariance @ root)
        variance, directions = variance.flip(-1).clamp_min(0), directions.flip(-1)
        shares = variance / variance.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        # Blocks of size 1 in the mean, so that bytes of scales go round it.
        size = variance.unflatten(1, (-1, self.block)).mean(-1).sqrt()
        size = size.clamp_min(1e-6).repeat_interleave(self.block, 1).unsqueeze(-1)
        rotation = directions.mT @ root / size
        self._set(rotation, moments.mean, shares.mean(0).unflatten(0, (-1, self.block)).mean(-1))

    def _set(self, rotation: Tensor, mean: Tensor, variance: Tensor) -> None:
        hadamard = _hadamard(self.block)
        rotation, fineness = _whole_rows((hadamard @ rotation.unflatten(1, (-1, self.block))).flatten(1, 2))
        self.rotation.copy_(rotation)
        self.fineness.copy_(fineness)
        self.mean.copy_(mean)
        whole_turn = self.rotation.double() * self.fineness.double().unsqueeze(-1)
        for back, own in zip(self.back, whole_turn, strict=True):
            # One by one: torch takes several at once by threads that get in each other's way, and is wrong, stops or
            # hangs from a size of some 150 on (pytorch/pytorch#142815).
            back.copy_(torch.linalg.inv(own))
        self.middle.copy_(torch.einsum("hij,hj->hi", whole_turn, self.mean.double()))
        self.bits.copy_(torch.tensor(spread(variance.tolist(), self.mean_bits)))

    @torch.no_grad()
    def take(self, other: Coder, heads: Sequence[int]) -> None:
        """Take the constants of some KV heads of another coder."""
        *of_heads, bits = zip(self._rows.cut(self.constants), other._rows.cut(other.constants), strict=True)
        for own, others in of_heads:
            own.copy_(others[list(heads)])
        bits[0].copy_(bits[1])

    @property
    def starts(self) -> list[int]:
        """Where the constants begin in their row, from :attr:`rotation` to :attr:`bits`."""
        return self._rows.starts

    def fault(self) -> str | None:
        """A description of the first invalid one of the constants, as a file has them; None if all are valid."""
        for name in ("fineness", "back", "mean", "middle"):
            if not getattr(self, name).isfinite().all():
                return f"{name} holds NaN or infinity"
        bits = self.bits.tolist()
        if not all(1 <= n <= MOST_BITS for n in bits) or sum(bits) != whole_bits(len(bits), self.mean_bits):
            return f"bits of blocks are {bits}, not {self.mean_bits} in the mean and 1 to {MOST_BITS} each"
        return None

    def encode(self, x: Tensor) -> Codes:
        """Codes and scales of vectors [B, Hkv, L, d]."""
        return encode_together([self], [self.rotate_integer(x)])[0]

    def rotate_integer(self, x: Tensor) -> Numbers:
        """Vectors [B, Hkv, L, d] rotated, in numbers that do not depend on the order of sums."""
        integers, exponent = pack(x)
        rotated = integers.float() @ self.rotation.float().mT  # exact: integers below 2²⁴
        unit = self.fineness.unsqueeze(1) * power_of_two(exponent)
        return whole((rotated * unit - self.middle.unsqueeze(1)).unflatten(-1, (-1, self.block)))

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Rotated vectors [B, Hkv, L, d], float32, of codes; see :meth:`unrotate` and :meth:`rotate_query`."""
        numbers, unit = self.numbers(codes, scales)
        return (numbers * unit).flatten(-2)

    def unrotate(self, rotated: Tensor) -> Tensor:
        """Vectors [B, H, L, d] that :meth:`decode` gave, or averages of such, as they were before rotation."""
        share = rotated.shape[1] // self.heads
        back = self.back.mT.to(rotated.dtype).repeat_interleave(share, 0)
        return rotated @ back + self.mean.to(rotated.dtype).repeat_interleave(share, 0).unsqueeze(1)

    def rotate_query(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, H, L, d] rotated: their products with rotated keys, [B, H, L] added, are those with the keys."""
        share = query.shape[1] // self.heads
        back = self.back.to(query.dtype).repeat_interleave(share, 0)
        mean = self.mean.to(query.dtype).repeat_interleave(share, 0)
        return query @ back, torch.einsum("bhld,hd->bhl", query, mean)

    def rotate_query_integer(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, H, L, d] rotated as by :meth:`rotate_query`, but exactly: integers [B, H, L, blocks, block] and a
        power of two for each block [B, H, L, blocks, 1]."""
        share = query.shape[1] // self.heads
        columns, fineness = _whole_rows(self.back.mT.double())
        integers, exponent = pack(query)
        rotated = integers.float() @ columns.float().mT.repeat_interleave(share, 0)  # exact: integers below 2²⁴
        unit = fineness.float().repeat_interleave(share, 0).unsqueeze(1) * power_of_two(exponent)
        return whole((rotated * unit).unflatten(-1, (-1, self.block)))

    def numbers(self, codes: Tensor, scales: Tensor) -> Numbers:
        """The rotated vectors that codes [B, Hkv, L, bytes] and scales [B, Hkv, L, blocks] stand for."""
        found, start, first = [], 0, 0
        for bits, run in groupby(self.bits.tolist()):  # neighboring blocks of as many bits at once
            count, size = len(list(run)), bits * self.block // 8
            own, last = codes[..., start : start + count * size].unflatten(-1, (-1, size)), first + count
            found.append(decode(from_bytes(own, bits), scales[..., first:last].unsqueeze(-1), bits))
            start, first = start + count * size, last
        numbers, units = zip(*found, strict=True)
        return torch.cat(numbers, -2), torch.cat(units, -2)


def encode_together(coders: Sequence[Coder], vectors: Sequence[Numbers]) -> list[Codes]:
    """Codes of rotated vectors, for each coder. Blocks of as many bits, in as many vectors, are searched for together:
    a search is some hundred operations, however many they are."""
    places: dict[tuple[int, int, torch.Size], list[tuple[int, int]]] = defaultdict(list)
    found: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for n, coder in enumerate(coders):
        for block, bits in enumerate(coder.bits.tolist()):
            places[bits, coder.block, vectors[n][0].shape[:3]].append((n, block))
    for (bits, *_), alike in places.items():
        numbers, unit = (torch.stack([vectors[n][part][..., block, :] for n, block in alike], -2) for part in (0, 1))
        codes, scales = encode(numbers, unit, bits)
        found |= zip(alike, zip(to_bytes(codes, bits).unbind(-2), scales.unbind(-2), strict=True), strict=True)
    together = [[found[n, block] for block in range(vectors[n][0].shape[-2])] for n in range(len(coders))]
    codes_and_scales = (zip(*blocks, strict=True) for blocks in together)
    return [(torch.cat(codes, -1), torch.cat(scales, -1)) for codes, scales in codes_and_scales]


def _whole_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers [H, n, d] of 16 bits, whose products with integers of seven bits add up exactly in float32, and the
    power of two [H, n] that one of them is worth in each row."""
    most = torch.maximum(matrix.abs().sum(-1) / _SUM, matrix.abs().amax(-1) / (2**15 - 1))
    mantissa, exponent = torch.frexp(most.clamp_min(1e-30))
    fineness = torch.exp2((exponent - (mantissa == 0.5).int()).double())
    return (matrix / fineness.unsqueeze(-1)).round(), fineness


def block_size(dim: int) -> int:
    """16, or 8 where a vector is shorter or has no integer of such blocks."""
    return 16 if dim % 16 == 0 and dim >= 32 else 8


def spread(variance: Sequence[float], bits: float) -> list[int]:
    """Bits of each block, one at least and ``bits`` in the mean: each goes to where it takes away most error."""
    found = [1] * len(variance)
    for _ in range(whole_bits(len(variance), bits) - len(variance)):
        gains = [
            size * (DISTORTION[n] - DISTORTION[n + 1]) if n < MOST_BITS else -1.0
            for size, n in zip(variance, found, strict=True)
        ]
        found[max(range(len(found)), key=lambda n: (gains[n], variance[n]))] += 1  # products round to 0
    return found


def token_bytes(dim: int, bits: float) -> int:
    """The bytes of the codes and scales of a vector of ``dim`` numbers."""
    block = block_size(dim)
    blocks = dim // block
    return whole_bits(blocks, bits) * block // 8 + blocks


def whole_bits(blocks: int, bits: float) -> int:
    """The sum of the bits of blocks that have ``bits`` in the mean, as nearly as whole ones can."""
    return blocks + round((bits - 1) * blocks)


def _hadamard(size: int) -> Tensor:
    """Orthogonal, all entries of one size: what a block holds spreads over all its numbers."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = 1 - 2 * torch.randint(2, (size,), generator=torch.Generator().manual_seed(0)).double()
    return matrix * signs / size**0.5
