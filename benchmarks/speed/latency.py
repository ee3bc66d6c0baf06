"""A compressed cache beside softmax attention: milliseconds of a decoded token and of a prompt, by context.

    python benchmarks/speed/latency.py
    python benchmarks/speed/latency.py --int8 --dtypes bfloat16
    python benchmarks/speed/latency.py --batch 16 --dtypes bfloat16 --contexts 2048 --new-tokens 4
    python benchmarks/speed/latency.py --compile
    python benchmarks/speed/latency.py --contexts 8 --contexts 8192 --contexts 65536 --prompts 8192

A model in a real one's shape with random weights, as it is (transformers' "sdpa" attention and default dynamic cache)
and with a compressed cache (``dofla.compress``), both in one process and taking turns at every token and every prompt.
Of each the least time is taken, as others on the machine can only add to it; below, what the slowest compressed token
takes beside a softmax token after the shortest context, which has little else to do than to read the weights and is
timed anew in turns with every other, as a machine is not as quick one minute as the next. With
``--int8`` both models stand there once more with their weights in eight bits (torchao), the output layer's as well;
int8.py has them for a real model, with what they lose. With ``--batch`` a token is one of each sequence. With
``--compile`` it is tokens alone, and both models also under torch.compile with packed weights and a static cache, as
``dofla.serving.CompiledModel`` has it; for softmax attention that is as long as the context and the tokens decoded, and
each length is compiled anew. Softmax attention does not take part in contexts beyond ``--longest``. Beside a prompt
stands what the model's linear layers take for it alone, one after the other. KV heads have the head budgets of the
student in docs/students, or those of another ``--plan``; with ``--even``, and in models of other shapes, all the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch._inductor.config as inductor
import transformers
import typer
from model import MODELS, Job, build, machine
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from turns import least

import dofla
from dofla.compression.head_budgets import HeadBudgets
from dofla.compression.plan import compressed_plan
from dofla.compression.size import parse_size
from dofla.compression.target import Target
from dofla.integration.cache import CACHE_ARGUMENT
from dofla.integration.surgery import convert
from dofla.serving.compiled_model import PACKED, own_graph
from dofla.storage.files import read_json

SHIPPED = Path(__file__).parents[2] / "docs/students/smollm2-135m-compressed/plan.json"
KINDS = ("softmax", "compressed")
LINEAR, FLOOR = "linear layers", "softmax, shortest"
COMPILED = " compiled"
INT8 = " int8"
EMPTY = 8
CONTEXT = 8192
"""SmolLM2's positions, which the shipped student is calibrated for."""


def main(
    model: Annotated[str, typer.Option(help=f"Of {', '.join(MODELS)}.")] = "smollm2-135m",
    dtypes: Annotated[list[str] | None, typer.Option(help="Default float32 and bfloat16.")] = None,
    contexts: Annotated[list[int] | None, typer.Option(help="Tokens before those decoded.")] = None,
    prompts: Annotated[list[int] | None, typer.Option(help="Tokens read in one call.")] = None,
    size: Annotated[str, typer.Option(help="Of the compressed cache.")] = "1.5MiB",
    plan: Annotated[Path, typer.Option(help="Of a student whose head budgets to take.")] = SHIPPED,
    even: Annotated[bool, typer.Option("--even", help="All KV heads the same size instead.")] = False,
    longest: Annotated[int, typer.Option(help="Tokens of context up to which softmax attention takes part.")] = 8192,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded at each context.")] = 24,
    repeats: Annotated[int, typer.Option(min=1, help="Times each prompt is read.")] = 3,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    int8: Annotated[bool, typer.Option("--int8", help="Both models with weights in eight bits as well.")] = False,
    compile: Annotated[bool, typer.Option("--compile", help="Tokens under torch.compile as well, no prompts.")] = False,
    out: Annotated[str | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    transformers.logging.set_verbosity_error()
    pack_weights()
    contexts = sorted(contexts or [EMPTY, 512, 2048, 4096])
    prompts = [] if compile else sorted(prompts or [512, 2048])
    found: dict[str, Any] = {"machine": machine("cpu"), "model": model, "size": size, "batch": batch, "rows": []}
    print(", ".join(f"{key} {value}" for key, value in found["machine"].items()))
    own = None if even or model != "smollm2-135m" else head_budgets_of(plan)
    for dtype in dtypes or ["float32", "bfloat16"]:
        models = both(model, dtype, size, max(contexts + prompts) + new_tokens, own)
        if int8:
            others = both(model, dtype, size, max(contexts + prompts) + new_tokens, own)
            models |= {kind + INT8: in_eight_bits(other) for kind, other in others.items()}
        kinds = [kind + way for way in ("", COMPILED)[: 1 + compile] for kind in models]
        shown = [*kinds, *[LINEAR] * bool(prompts), FLOOR]
        print(f"\n{model}, {dtype}, ms at the least{'':7}" + "".join(f"{x:>18}" for x in shown) + f"{'ratio':>8}")
        with torch.inference_mode():
            rows = [("prompt", n, read(models, batch, n, repeats)) for n in prompts]
            for n in contexts:
                own_kinds = [kind for kind in kinds if n <= longest or kind.startswith("compressed")]
                rows.append(("token", n, decode(models, own_kinds, batch, n, contexts[0], new_tokens)))
        for what, tokens, taken in rows:
            times = "".join(f"{1e3 * taken[kind]:>18.1f}" if kind in taken else f"{'':>18}" for kind in shown)
            ratio = f"{taken['compressed'] / taken['softmax']:>8.2f}" if "softmax" in taken else ""
            label = f"a prompt of {tokens} tokens" if what == "prompt" else f"a token after {tokens}"
            print(f"{label:<45}{times}{ratio}".rstrip(), flush=True)
            found["rows"].append({"dtype": dtype, "what": what, "tokens": tokens, **taken})
        slowest = max(taken["compressed"] / taken[FLOOR] for what, _, taken in rows if what == "token")
        print(f"the slowest compressed token is {slowest:.2f} times a softmax token after {contexts[0]}")
        print(f"to read all weights once takes {1e3 * once(models['softmax']):.1f} ms")
    if out:
        Path(out).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def head_budgets_of(plan: Path) -> HeadBudgets:
    """Of a compressed model's KV heads."""
    return HeadBudgets(read_json(plan, "a plan")["made_by"]["head_budgets"])


def both(
    name: str, dtype: str, size: str, longest: int, head_budgets: HeadBudgets | None
) -> dict[str, PreTrainedModel]:
    shared = {"batch": 1, "tokens": max(longest, CONTEXT), "new_tokens": 1, "chunk": longest}
    job = Job(name, "softmax", dtype=dtype, device="cpu", seconds=0, memory_gib=0, **shared)
    models = {kind: build(job) for kind in KINDS}
    compressed_by(models["compressed"], size, head_budgets)
    return models


def compressed_by(model: PreTrainedModel, size: str, head_budgets: HeadBudgets | None) -> PreTrainedModel:
    """The model with a compressed cache of these head budgets, calibrated on random tokens."""
    target = Target.of(model, CONTEXT)
    calibration = dofla.calibrate(model, random_tokens(model, 1, 256), head_budgets="even", context=CONTEXT)
    calibration.apply(convert(model, compressed_plan(target, parse_size(size), head_budgets=head_budgets)))
    return model


@torch.inference_mode()
def once(model: PreTrainedModel) -> float:
    """Seconds of reading all weights, of which a token needs each."""
    weights = [p.detach().flatten().view(torch.int32) for p in model.parameters()]  # tied ones are there once
    return least({"read": lambda: [x.max() for x in weights]}, 10)["read"]


def in_eight_bits(model: PreTrainedModel) -> PreTrainedModel:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig(set_inductor_config=False))
    return model


def random_tokens(model: PreTrainedModel, batch: int, length: int) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (batch, length))


def read(models: dict[str, PreTrainedModel], batch: int, length: int, repeats: int) -> dict[str, float]:
    """Seconds of a prompt read in one call."""
    calls = {kind: prompt(model, batch, length) for kind, model in models.items()}
    return least(calls | {LINEAR: products(models["softmax"], batch, length)}, repeats)


def decode(
    models: dict[str, PreTrainedModel], kinds: Sequence[str], batch: int, context: int, shortest: int, new_tokens: int
) -> dict[str, float]:
    """Seconds of a token of each sequence after ``context`` others; and of softmax attention after the ``shortest``."""
    calls = {kind: token(models[kind.removesuffix(COMPILED)], kind, batch, context, new_tokens)[0] for kind in kinds}
    calls[FLOOR] = token(models["softmax"], "softmax", batch, shortest, new_tokens)[0]
    return least(calls, new_tokens)


def prompt(model: PreTrainedModel, batch: int, length: int) -> Callable[[], None]:
    tokens = random_tokens(model, batch, length)
    return lambda: feed(model, tokens, DynamicCache(config=model.config))


def products(model: PreTrainedModel, batch: int, length: int) -> Callable[[], None]:
    """All linear layers on a prompt, the last on one token of it; those of one width read the same numbers."""
    calls, inputs = [], {}
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            shape = batch, 1 if layer is model.get_output_embeddings() else length, layer.in_features
            if shape not in inputs:
                inputs[shape] = torch.randn(shape, dtype=layer.weight.dtype)
            calls.append((layer, inputs[shape]))

    def run() -> None:
        for layer, x in calls:
            layer(x)

    return run


def token(
    model: PreTrainedModel, kind: str, batch: int, context: int, new_tokens: int
) -> tuple[Callable[[], None], Cache]:
    """Reading one more token, up to ``new_tokens`` of them; and the cache that grows by it."""
    step, cache = model, DynamicCache(config=model.config)
    if kind.endswith(COMPILED):
        step = torch.compile(model, dynamic=False, **own_graph(model))
        cache = StaticCache(model.config, max_cache_len=context + new_tokens + 1)
    tokens = random_tokens(model, batch, 1)
    feed(model, random_tokens(model, batch, context), cache)
    return lambda: feed(step, tokens, cache), cache


def pack_weights() -> None:
    """Let torch.compile make what ``dofla.serving.CompiledModel`` makes."""
    for name, value in PACKED.items():
        setattr(inductor, name, value)


def feed(model: Callable, tokens: torch.Tensor, cache: Cache, chunk: int = 8192) -> None:
    for piece in tokens.split(chunk, dim=1):
        model(piece, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})


if __name__ == "__main__":
    typer.run(main)
