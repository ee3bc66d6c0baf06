"""Weights in int8 (torchao) beside those of a checkpoint, with softmax attention and with a compressed cache.

    python benchmarks/speed/int8.py models/smollm2-135m --text data/books-val.txt.gz
    python benchmarks/speed/int8.py models/smollm2-135m --compile

Of each text: KL divergence from the model as it came, and by how much its loss is higher, in nats per token, over whole
windows. Then bytes of all weights, milliseconds of a token after a prompt of random tokens, and beside them what they
are to softmax attention's. With ``--compile`` all stand there once more under torch.compile with packed weights and, of
softmax attention, a static cache, as ``dofla.serving.CompiledModel`` has it. All take turns at every token, and of each
the least time is taken, as others on the machine can only add to it. Models in int8 are those that ``--set dtype=int8``
opens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from latency import COMPILED, INT8, KINDS, pack_weights, token
from model import machine
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from turns import least

import dofla
from dofla.runs.opening import open_original


def main(
    model: Annotated[str, typer.Argument(help="A folder or a name on the hub.")],
    text: Annotated[list[Path] | None, typer.Option(help="To judge on; repeatable; default none.")] = None,
    size: Annotated[str, typer.Option(help="Of the compressed caches.")] = "1.5MiB",
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 2048,
    windows: Annotated[int, typer.Option(help="Of each text, spread over it evenly.")] = 4,
    context: Annotated[int, typer.Option(help="Tokens before those timed.")] = 512,
    new_tokens: Annotated[int, typer.Option(help="Tokens timed; 0: none.")] = 24,
    compile: Annotated[bool, typer.Option("--compile", help="Tokens under torch.compile as well.")] = False,
) -> None:
    transformers.logging.set_verbosity_error()
    pack_weights()
    print(", ".join(f"{key} {value}" for key, value in machine("cpu").items()))
    models = {}
    for kind in (*KINDS, *(kind + INT8 for kind in KINDS)):
        models[kind], tokenizer = open_original(model, dtype="int8" if kind.endswith(INT8) else None)
        if kind.startswith("compressed"):
            dofla.compress(models[kind], size=size)
    for path in text or []:
        ids = dofla.token_windows(path, tokenizer, length=length, split="all").input_ids
        found = figures(models, ids[torch.linspace(0, len(ids) - 1, windows).long()])
        print(f"\n{path.name}, {windows} windows of {length} tokens{'':9}KL  loss increase")
        for kind, (kl, increase) in found.items():
            print(f"{kind:<44}{kl:>12.5f}{increase:>15.5f}", flush=True)
    print(f"\n{'weights, MiB':<32}" + "".join(f"{bytes_of(own) / 2**20:>18.1f}" for own in models.values()))
    with torch.inference_mode():
        for way in ("", COMPILED)[: (1 + compile) * (new_tokens > 0)]:
            calls = {kind: token(own, kind + way, 1, context, new_tokens)[0] for kind, own in models.items()}
            taken = least(calls, new_tokens)
            print(f"{'':<32}" + "".join(f"{kind + way:>18}" for kind in taken).rstrip())
            print(f"{f'ms of a token after {context}':<32}" + "".join(f"{1e3 * x:>18.1f}" for x in taken.values()))
            ratios = (x / taken["softmax"] for x in taken.values())
            print(f"{'beside softmax' + way:<32}" + "".join(f"{x:>18.2f}" for x in ratios), flush=True)


@torch.inference_mode()
def figures(models: dict[str, PreTrainedModel], windows: Tensor) -> dict[str, tuple[float, float]]:
    """KL divergence from the first of the models and increase of the loss, of each."""
    sums = {kind: torch.zeros(2, dtype=torch.float64) for kind in models}
    for window in windows:
        right = None
        for kind, model in models.items():
            found = model(window[None]).logits[0, :-1].float().log_softmax(-1)
            loss = cross_entropy(found, window[1:]).item()
            if right is None:
                right, least_loss = found, loss
            kl = torch.stack([(p.exp() * (p - q)).sum() for p, q in zip(right, found, strict=True)]).mean().item()
            sums[kind] += torch.tensor([kl, loss - least_loss], dtype=torch.float64)
    return {kind: tuple((own / len(windows)).tolist()) for kind, own in sums.items()}


def bytes_of(model: PreTrainedModel) -> int:
    """Of all weights, shared ones once; of those in int8, codes, scales and zero points."""
    total = 0
    for weight in model.parameters():
        parts = weight.__tensor_flatten__()[0] if hasattr(weight, "__tensor_flatten__") else []
        total += sum(getattr(weight, name).nbytes for name in parts) if parts else weight.nbytes
    return total


if __name__ == "__main__":
    typer.run(main)
