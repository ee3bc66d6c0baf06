"""Loss increase through the quantization of keys alone, with and without a key bias and outlier channels.

    python benchmarks/quality/key_quantization.py --model models/qwen2.5-coder-0.5b \\
        --calibrate data/english-train.txt.gz --text data/english-val.txt.gz \\
        --text data/books-val.txt.gz

Softmax attention to all tokens; keys are in eight bits, or in eight and then three. Python source, the modules of the
standard library of the interpreter that runs this, is always among the texts. Of each text: nats per token, and
KL(original ‖ quantized). ``by_queries`` is what :func:`dofla.compress` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from compressed import sources
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import dofla
from dofla.attention import Coder, KeySmoothing, Moments, rounded
from dofla.attention.coding.operations import CodeOperations
from dofla.compression.directions import Directions, measure_directions
from dofla.data import TokenWindows
from dofla.display import table
from dofla.integration.interface import softmax_attention, visiting
from dofla.integration.placement import placed_over
from dofla.integration.sites import attention_sites
from dofla.runs.opening import open_original

BITS = (8.0, 3.0)


def none(smoothing: KeySmoothing, keys: Moments, queries: Moments) -> None:
    """Keys as they are."""
    smoothing.reset()


def mean(smoothing: KeySmoothing, keys: Moments, queries: Moments) -> None:
    """Keys without the mean of each channel."""
    smoothing.calibrate(keys)
    smoothing.scale.fill_(1)


def outliers(smoothing: KeySmoothing, keys: Moments, queries: Moments) -> None:
    """The same, with outlier channels scaled."""
    smoothing.calibrate(keys)


def every(smoothing: KeySmoothing, keys: Moments, queries: Moments) -> None:
    """The same, with every channel scaled to the size of the others."""
    smoothing.calibrate(keys)
    size = keys.covariance.diagonal(dim1=1, dim2=2).clamp_min(1e-12).sqrt()
    smoothing.scale.copy_(torch.exp2(size.log2().round()))


def by_queries(smoothing: KeySmoothing, keys: Moments, queries: Moments) -> None:
    """The same, or, where that makes far smaller errors, with every channel scaled by keys' and queries' sizes."""
    smoothing.calibrate(keys, queries)


Way = Callable[[KeySmoothing, Moments, Moments], None]
WAYS: dict[str, Way] = {way.__name__: way for way in (none, mean, outliers, every, by_queries)}


class QuantizedKeys:
    """The keys of a layer, smoothed one way and quantized."""

    def __init__(self, found: Directions, way: Way, bits: float) -> None:
        heads, dim, _ = found.shape
        asked, keys, _ = found.moments()
        self.smoothing, self.coder = KeySmoothing(heads, dim), None
        way(self.smoothing, keys, asked)
        if bits < 8:
            queries, keys = self.smoothing.moments(asked, keys)
            self.coder = Coder(heads, dim, bits)
            self.coder.calibrate(keys, queries.second)

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, H, L, d] and keys [B, Hkv, L, d] with which scores are computed."""
        query, key = self.smoothing(query, key)
        key = rounded(key)
        return query, key if self.coder is None else CodeOperations().decode(self.coder, self.coder.encode(key))


@contextmanager
def quantized(model: PreTrainedModel, layers: Mapping[str, QuantizedKeys]) -> Iterator[None]:
    """Within the block the model's softmax attention sees quantized keys."""
    by_module = {model.get_submodule(name): own for name, own in layers.items()}

    def attention(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        if module in by_module:
            query, key = (x.to(query.dtype) for x in by_module[module](query, key))
        return softmax_attention(module, query, key, *args, **kwargs)

    with visiting(model, None, attention):
        yield


@torch.inference_mode()
def logs(model: PreTrainedModel, windows: TokenWindows) -> list[Tensor]:
    """Log-probabilities [L - 1, V] of each window."""
    return [model(row[None], use_cache=False).logits[0, :-1].log_softmax(-1) for row in windows.input_ids]


def compared(model: PreTrainedModel, windows: TokenWindows, before: list[Tensor]) -> tuple[float, float]:
    """Loss increase and KL of the model as it is now, in nats per token."""
    increase = kl = 0.0
    for row, p, q in zip(windows.input_ids, before, logs(model, windows), strict=True):
        increase += (cross_entropy(q, row[1:]) - cross_entropy(p, row[1:])).item() / len(windows)
        kl += (p.exp() * (p - q)).sum(-1).mean().item() / len(windows)
    return increase, kl


def texts_of(
    paths: list[Path], tokenizer: PreTrainedTokenizerBase, length: int, windows: int
) -> dict[str, TokenWindows]:
    """Windows of each text, and of Python source."""
    return {
        kind: dofla.token_windows(where, tokenizer, length=length, windows=windows, split="all")
        for kind, where in sources(paths).items()
    }


def main(
    model: Annotated[str, typer.Option(help="Folder or hub name of a causal model.")],
    calibrate: Annotated[str, typer.Option(help="Text to measure keys and queries on.")],
    text: Annotated[list[Path], typer.Option(help="Texts to evaluate on; repeatable.")],
    length: Annotated[int, typer.Option(help="Tokens per window.")] = 512,
    windows: Annotated[int, typer.Option(help="Of each text.")] = 3,
    known: Annotated[int, typer.Option(help="Windows to measure on.")] = 4,
) -> None:
    teacher, tokenizer = open_original(model, "float32")
    texts = texts_of(text, tokenizer, length, windows)
    measured = dofla.token_windows(calibrate, tokenizer, length=length, windows=known, model=teacher)
    found = measure_directions(teacher, placed_over(measured, 1, None), list(attention_sites(teacher)))
    shown = table("keys", "bits", *texts, gap=2)
    before = {kind: logs(teacher, own) for kind, own in texts.items()}
    for name, way in WAYS.items():
        for bits in BITS:
            cells = []
            with quantized(teacher, {layer: QuantizedKeys(own, way, bits) for layer, own in found.items()}):
                for kind, own in texts.items():
                    increase, kl = compared(teacher, own, before[kind])
                    cells.append(f"{increase:.4f}, {kl:.4f}")
            shown.add_row(name, f"{bits:g}", *cells)
            typer.echo(f"{name}, {bits:g} bits: {'; '.join(cells)}", err=True)
    Console(width=120).print(shown)


if __name__ == "__main__":
    typer.run(main)
