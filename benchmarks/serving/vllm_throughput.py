"""Compressed models in vLLM beside the same models with vLLM's own cache: tokens a second, time to the first token, and
how many sequences fit.

    python benchmarks/serving/vllm_throughput.py COMPRESSED ORIGINAL --clients 1 --clients 8 --length 512 --length 2048

Run it in an environment with vLLM (``nox -s vllm`` makes one). COMPRESSED is a folder that ``save_pretrained`` wrote
of a compressed model, ORIGINAL that of the model before. All clients ask at once, each with a text of its own; each
cell is the median over ``--rounds``, after one round of the first cell that is not counted. The models take turns, each
in a process of its own. ``--kv-cache-dtype fp8`` adds vLLM's fp8 cache, where the device has it. Sequences that fit are
those of the longest length in ``--space`` GiB. Compressed models are transformers' in vLLM, whose own layers are fused;
``--unfused`` adds the original as transformers' model. With ``--shared`` all prompts begin with the same tokens, which
were read before; models that keep known prefixes stand beside dofla without, to which the ratios are. ``--ngram`` adds
dofla with as many candidates from the text, and prompts are then texts that repeat.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Annotated

import typer


def main(
    compressed: Annotated[str, typer.Argument(help="Folder of the compressed model.")],
    original: Annotated[str, typer.Argument(help="Folder or hub name of the original.")],
    clients: Annotated[list[int] | None, typer.Option(help="Repeatable; default 1, 8, 32.")] = None,
    length: Annotated[list[int] | None, typer.Option(help="Tokens of a prompt; repeatable; default 512, 2048.")] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Of which the median counts.")] = 3,
    most: Annotated[int | None, typer.Option(help="Leave out cells with more prompt tokens, of all clients.")] = None,
    space: Annotated[int, typer.Option(min=1, help="GiB of cache on a CPU.")] = 1,
    kv_cache_dtype: Annotated[list[str] | None, typer.Option(help="More caches of the original; repeatable.")] = None,
    unfused: Annotated[bool, typer.Option("--unfused", help="Add the original as transformers' model.")] = False,
    shared: Annotated[int, typer.Option(help="Tokens with which all prompts begin, known before.")] = 0,
    ngram: Annotated[int, typer.Option(help="Candidates of speculative decoding.")] = 0,
    worker: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    clients, lengths = clients or [1, 8, 32], length or [512, 2048]
    cells = [(count, tokens) for count in clients for tokens in lengths if most is None or count * tokens <= most]
    if not cells:
        raise typer.BadParameter(f"--most {most} leaves nothing out of {clients} clients and {lengths} tokens")
    if worker is not None:
        return measure(
            **json.loads(worker), cells=cells, new_tokens=new_tokens, rounds=rounds, shared=shared, repeats=ngram > 0
        )
    kinds = {"dofla": (compressed, "auto"), "vLLM's cache": (original, "auto")}
    kinds |= {f"vLLM's {name} cache": (original, name) for name in kv_cache_dtype or []}
    tasks = {name: {"model": model, "dtype": dtype, "known": shared > 0} for name, (model, dtype) in kinds.items()}
    if unfused:
        tasks["vLLM's cache, unfused"] = {"model": original, "dtype": "auto", "known": shared > 0, "of": "transformers"}
    if shared:
        tasks["dofla, prefixes read"] = {"model": compressed, "dtype": "auto", "known": False}
    if ngram:
        tasks["dofla, candidates"] = {"model": compressed, "dtype": "auto", "known": False, "candidates": ngram}
    found = {}
    for name, own in tasks.items():
        task = json.dumps(own)
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": str(space)}
        run = subprocess.run(
            [sys.executable, *sys.argv, "--worker", task],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found[name] = json.loads(run.stdout.strip().splitlines()[-1])
    print("| cache | KiB per sequence | sequences in the space |\n|---|---|---|")
    for name, of in found.items():
        print(f"| {name} | {of['bytes'] / 1024:.0f} | {of['sequences']} |")
    print("\n| clients | prompt | cache | tokens a second | time to first token |\n|---|---|---|---|---|")
    for count, tokens in cells:
        base = found["dofla, prefixes read" if shared else "vLLM's cache"]["cells"][f"{count} {tokens}"]
        for name, of in found.items():
            cell = of["cells"][f"{count} {tokens}"]
            times = f"{cell['first']:.2f} s ({cell['first'] / base['first']:.2f} x)"
            speed = f"{cell['speed']:.1f} ({cell['speed'] / base['speed']:.2f} x)"
            print(f"| {count} | {tokens} | {name} | {speed} | {times} |", flush=True)


def measure(
    model: str,
    dtype: str,
    known: bool,
    cells: list[tuple[int, int]],
    new_tokens: int,
    rounds: int,
    shared: int,
    repeats: bool,
    candidates: int = 0,
    of: str = "auto",
) -> None:
    """Print the figures of one model as JSON."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    most, clients = shared + max(tokens for _, tokens in cells) + new_tokens + 1, max(count for count, _ in cells)
    options = {"max_model_len": most, "max_num_seqs": clients, "enable_prefix_caching": known}
    if candidates:
        options["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": candidates,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    llm = LLM(model, kv_cache_dtype=dtype, model_impl=of, **options)
    engine, sampling = llm.llm_engine, SamplingParams(max_tokens=new_tokens, min_tokens=new_tokens, temperature=0)
    generator, found = torch.Generator().manual_seed(0), {}
    vocabulary = engine.model_config.get_vocab_size()
    prefix = torch.randint(vocabulary // 2, (shared,), generator=generator).tolist()

    def answer(count: int, length: int, name: str) -> tuple[float, float]:
        """Tokens a second, and the median time to the first token."""
        prompts = torch.randint(vocabulary // 2, (count, length), generator=generator)
        if repeats:
            prompts[:, length // 2 :] = prompts[:, : length - length // 2]
        prompts = [prefix + prompt for prompt in prompts.tolist()]
        start, first = time.perf_counter(), {}
        for number, prompt in enumerate(prompts):
            engine.add_request(f"{name} {number}", {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                first.setdefault(output.request_id, time.perf_counter() - start)
        return count * new_tokens / (time.perf_counter() - start), statistics.median(first.values())

    answer(*cells[0], "compiles")
    for count, length in cells:
        speeds, firsts = zip(*(answer(count, length, f"{count} {length} {n}") for n in range(rounds)), strict=True)
        found[f"{count} {length}"] = {"speed": statistics.median(speeds), "first": statistics.median(firsts)}
    config = engine.engine_core.engine_core.scheduler.kv_cache_config
    sequences = get_max_concurrency_for_kv_cache_config(engine.vllm_config, config)
    size = config.kv_cache_tensors[0].size / sequences  # all are parts of one allocation, whose size each has
    print(json.dumps({"cells": found, "bytes": size, "sequences": int(sequences)}))


if __name__ == "__main__":
    typer.run(main)
