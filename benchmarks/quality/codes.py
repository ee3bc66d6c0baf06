"""Codes of keys and values side by side, nothing evicted: bits per number, loss increase and KL(original ‖ coded).

    python benchmarks/quality/codes.py --model models/qwen2.5-coder-0.5b --calibrate data/english-train.txt.gz \\
        --text data/english-val.txt.gz --text data/books-val.txt.gz --code trellis:3,3 --code turboquant:3,3 \\
        --dofla evict=false --dofla size=3.1MiB

``--code`` names a code and its bits per number of keys and of values. What a code stores beside those counts too:
"bits" has all bytes of keys and values. The last 32 tokens and the first 16 are exact in all of them. ``--dofla``
has options of ``dofla.compress``, with values as in YAML: a cache as users have it.

trellis      what :func:`dofla.compress` does: calibrated directions, blocks of 16, trellis codes, a scale of 8 bits
turboquant   a random rotation, a norm of 16 bits per vector, the best levels of normal numbers (arXiv 2504.19874)
rotated      eigenvectors of queries' second moments for keys and of what the output projection makes of values, then a
             Hadamard matrix, clipping, integers with a scale and a zero of 16 bits per vector (OSCAR, arXiv 2605.17757)
kivi         integers, of keys by channel over 32 tokens, of values by token over 32 channels; a scale and a zero of 16
             bits for each 32 (arXiv 2402.02750)
token        integers, a scale and a zero of 16 bits per vector: as most 4-bit caches have

Python source, the standard library of the interpreter that runs this, is always among the texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from compressed import options_of
from key_quantization import compared, logs, texts_of
from rich.console import Console
from torch import Tensor, nn
from transformers import PreTrainedModel

import dofla
from dofla.attention import Coder, KeySmoothing
from dofla.attention.coding.coder import token_bytes
from dofla.compression.directions import Directions, measure_directions
from dofla.display import table
from dofla.integration.converted import Converted
from dofla.integration.interface import visiting
from dofla.integration.placement import placed_over
from dofla.integration.sites import attention_sites
from dofla.runs.opening import open_original

RECENT, SINKS = 32, 16
CLIP = 0.96
"""The part of the range of a rotated vector that ``rotated`` keeps, as in OSCAR."""

Code = Callable[[Tensor], Tensor]
"""What becomes of vectors [B, Hkv, L, d] that are stored."""


class Side:
    """Keys or values of a layer, as codes know them: their covariance and mean, and the quadratic form by which errors
    count, all [Hkv, d, d] or [Hkv, d]."""

    def __init__(self, found: Directions, model: PreTrainedModel, keys: bool) -> None:
        self.keys = keys
        self.queries, of_keys, of_values = found.moments()
        self.moments = of_keys if keys else of_values
        self.weighing = self.queries.second if keys else found.weighing(model)
        self.heads, self.dim = self.moments.total.shape


def trellis(side: Side, bits: float) -> tuple[Code, float]:
    """dofla's code."""
    smoothing, coder = KeySmoothing(side.heads, side.dim), Coder(side.heads, side.dim, bits)
    moments, weighing = side.moments, side.weighing
    if side.keys:
        smoothing.calibrate(moments, side.queries)
        queries, moments = smoothing.moments(side.queries, moments)
        weighing = queries.second
    coder.calibrate(moments, weighing)
    mean, scale = smoothing.mean.unsqueeze(1), smoothing.scale.unsqueeze(1)

    def code(x: Tensor) -> Tensor:
        return coder.unrotate(coder.decode(*coder.encode((x - mean) / scale))) * scale + mean

    return code, 8 * token_bytes(side.dim, bits) / side.dim


def turboquant(side: Side, bits: float) -> tuple[Code, float]:
    """A random rotation, and the levels of Lloyd and Max for numbers of a normal distribution."""
    rotation = torch.linalg.qr(torch.randn(side.dim, side.dim, generator=torch.Generator().manual_seed(0))).Q
    levels = _levels(2 ** int(bits))
    borders = (levels[1:] + levels[:-1]) / 2

    def code(x: Tensor) -> Tensor:
        size = (x.norm(dim=-1, keepdim=True) / side.dim**0.5).half().float()
        return levels[torch.bucketize(x @ rotation / size, borders)] * size @ rotation.T

    return code, bits + 16 / side.dim


def rotated(side: Side, bits: float) -> tuple[Code, float]:
    """Eigenvectors of the form by which errors count, a Hadamard matrix, integers of what is left by clipping."""
    weighing = torch.eye(side.dim).expand(side.heads, -1, -1) if side.weighing is None else side.weighing
    hadamard = torch.ones(1, 1)
    while len(hadamard) < side.dim:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    rotation = torch.linalg.eigh(weighing.double()).eigenvectors.float() @ hadamard / side.dim**0.5

    def code(x: Tensor) -> Tensor:
        return _integers(x @ rotation, bits, -1, CLIP) @ rotation.mT

    return code, bits + 32 / side.dim


def kivi(side: Side, bits: float) -> tuple[Code, float]:
    """Integers of keys by channel, of values by token, in groups of 32."""

    def code(x: Tensor) -> Tensor:
        if not side.keys:
            return _integers(x.unflatten(-1, (-1, 32)), bits, -1).flatten(-2)
        whole = x.shape[2] // 32 * 32  # what is left is recent
        grouped = _integers(x[:, :, :whole].unflatten(2, (-1, 32)), bits, 3).flatten(2, 3)
        return torch.cat([grouped, x[:, :, whole:]], 2)

    return code, bits + 1


def token(side: Side, bits: float) -> tuple[Code, float]:
    """Integers by token."""
    return lambda x: _integers(x, bits, -1), bits + 32 / side.dim


CODES = {code.__name__: code for code in (trellis, turboquant, rotated, kivi, token)}


def _integers(x: Tensor, bits: float, dim: int, clip: float = 1.0) -> Tensor:
    """Numbers as integers of so many bits between the least and the largest along ``dim``."""
    low, high = clip * x.amin(dim, keepdim=True), clip * x.amax(dim, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(1e-8)
    return ((x - low) / step).round().clamp(0, 2**bits - 1) * step + low


def _levels(count: int) -> Tensor:
    """The levels with the least squared error for normal numbers (Lloyd 1982, Max 1960)."""
    x = torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(200_000) + 0.5) / 200_000)
    found = x.unflatten(0, (count, -1)).mean(-1)
    for _ in range(200):
        place = torch.bucketize(x, (found[1:] + found[:-1]) / 2)
        found = torch.zeros(count).index_add(0, place, x) / torch.bincount(place, minlength=count)
    return found


@contextmanager
def coded(model: PreTrainedModel, layers: Mapping[str, tuple[Code, Code]]) -> Iterator[None]:
    """Within the block, queries attend to coded keys and values, but for recent tokens and attention sinks."""
    by_module = {model.get_submodule(name): own for name, own in layers.items()}

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        dropout: float,
        scaling: float,
        **_: Any,
    ) -> tuple[Tensor, None]:
        place = torch.arange(key.shape[2])
        behind = place[:, None] - place
        exact, out = (behind < RECENT) | (place < SINKS), []
        new_key, new_value = (code(x.float()) for code, x in zip(by_module[module], (key, value), strict=True))
        queries = query.unflatten(1, (key.shape[1], -1)).unbind(1)  # one KV head after the other, for memory
        for n, q in enumerate(queries):
            scores = torch.where(exact, q @ key[:, n, None].mT, q @ new_key[:, n, None].mT) * scaling
            weights = scores.masked_fill(behind < 0, -torch.inf).softmax(-1)
            out.append((weights * exact) @ value[:, n, None] + (weights * ~exact) @ new_value[:, n, None])
        return torch.cat(out, 1).transpose(1, 2), None

    with visiting(model, None, attention):
        yield


def main(
    model: Annotated[str, typer.Option(help="Folder or hub name of a causal model.")],
    text: Annotated[list[Path], typer.Option(help="Texts to evaluate on; repeatable.")],
    code: Annotated[list[str], typer.Option(default_factory=list, help="NAME:KEY BITS,VALUE BITS; repeatable.")],
    cache: Annotated[list[str], typer.Option("--dofla", default_factory=list, help="Options; repeatable.")],
    calibrate: Annotated[str, typer.Option(help="Text to measure keys, queries and values on, for codes.")] = "sample",
    length: Annotated[int, typer.Option(help="Tokens per window.")] = 2048,
    windows: Annotated[int, typer.Option(help="Of each text.")] = 1,
    known: Annotated[int, typer.Option(help="Windows to measure on.")] = 3,
) -> None:
    opened, tokenizer = open_original(model, "float32")
    texts = texts_of(text, tokenizer, length, windows)
    found: dict[str, Directions] = {}
    if code:
        measured = dofla.token_windows(calibrate, tokenizer, length=length, windows=known, model=opened)
        found = measure_directions(opened, placed_over(measured, 1, None), list(attention_sites(opened)))
    before = {kind: logs(opened, own) for kind, own in texts.items()}
    shown = table("code", "bits", *texts, "mean", gap=2)

    def show(name: str, bits: float) -> None:
        figures = [compared(opened, own, before[kind]) for kind, own in texts.items()]
        figures.append(tuple(sum(each) / len(texts) for each in zip(*figures, strict=True)))
        cells = [f"{increase:.4f}, {kl:.4f}" for increase, kl in figures]
        shown.add_row(name, f"{bits:.2f}", *cells)
        typer.echo(f"{name}, {bits:.2f} bits: {'; '.join(cells)}", err=True)

    for asked in code:
        name, _, numbers = asked.partition(":")
        codes, bits = {}, []
        for layer, own in found.items():
            sides = [Side(own, opened, keys) for keys in (True, False)]
            pair = [CODES[name](side, float(n)) for side, n in zip(sides, numbers.split(","), strict=True)]
            codes[layer] = pair[0][0], pair[1][0]
            bits += [of for _, of in pair]
        with coded(opened, codes):
            show(asked, sum(bits) / len(bits))
    for given in cache:
        dofla.compress(opened, tokenizer=tokenizer, **options_of(given))
        plan = Converted.of(opened).plan
        numbers_held = length * sum(x.kv_heads * (x.head_dim + x.value_dim) for x in plan.layers)
        show(given, 8 * plan.cache_bytes(length, opened.dtype) / numbers_held)
        dofla.restore(opened)
    Console(width=140).print(shown)


if __name__ == "__main__":
    typer.run(main)
