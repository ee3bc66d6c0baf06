"""Many clients of ``vllm serve`` for some minutes: are requests lost, does memory grow, do answers differ from alone?

    python benchmarks/serving/vllm_load.py FOLDER --minutes 10 -- --dtype float32
    python benchmarks/serving/vllm_load.py FOLDER --minutes 3 -- --dtype float32 --tensor-parallel-size 2

Run it in an environment with vLLM (``nox -s vllm`` makes one). FOLDER is a compressed model; what follows ``--`` goes
to the server. Prompts are random tokens, 16 to 8,000 of them, evenly by their logarithm. Each is answered alone first.
Then all clients ask at once, again and again; one request in ten is given up in the middle of its prompt, one in ten
in the middle of its answer. An answer may differ from the first token on whose two best are less than ``--tie`` nats
apart: sums are in another order beside other requests. In bfloat16 they differ by more than that, with softmax
attention as well. Exit status 1 if a request is lost or an answer is another one.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import openai
import psutil
import typer

Answer = list[tuple[str, float]]
"""Tokens, and how far the best is above the next, in nats."""


def main(
    folder: Annotated[str, typer.Argument(help="Folder of the compressed model.")],
    options: Annotated[list[str] | None, typer.Argument(help="Of the server.")] = None,
    minutes: Annotated[float, typer.Option(help="How long all clients ask.")] = 10,
    clients: Annotated[int, typer.Option(min=1)] = 64,
    prompts: Annotated[int, typer.Option(min=1, help="Different ones.")] = 40,
    longest: Annotated[int, typer.Option(min=16, help="Tokens of a prompt at most.")] = 8000,
    new_tokens: Annotated[int, typer.Option(min=2, help="Of an answer.")] = 16,
    tie: Annotated[float, typer.Option(help="Nats.")] = 0.1,
) -> None:
    rng = random.Random(0)
    lengths = [round(16 * (longest / 16) ** rng.random()) for _ in range(prompts)]
    texts = [[rng.randrange(10, 10_000) for _ in range(length)] for length in lengths]
    with serving(folder, "--max-model-len", str(longest + new_tokens + 1), *(options or [])) as (url, server):
        found = asyncio.run(load(url, folder, server, texts, clients, 60 * minutes, new_tokens, tie))
    raise typer.Exit(int(found["lost"] + found["another answer"] > 0))


async def load(
    url: str,
    model: str,
    server: psutil.Process,
    texts: list[list[int]],
    clients: int,
    seconds: float,
    new_tokens: int,
    tie: float,
) -> Counter[str]:
    """How many requests ended in which way, which it prints as well."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=3600, max_retries=0)
    counts, firsts, rng = Counter[str](), [], random.Random(1)

    async def ask(text: list[int], most: int | None = None) -> Answer:
        """The answer, or its first tokens."""
        given = {"max_tokens": new_tokens, "temperature": 0, "logprobs": 2, "extra_body": {"min_tokens": new_tokens}}
        answer: Answer = []
        async with await client.completions.create(model=model, prompt=text, stream=True, **given) as stream:
            async for part in stream:
                known = part.choices[0].logprobs
                for token, tops in zip(known.tokens, known.top_logprobs, strict=True):
                    best = sorted(tops.values())
                    answer.append((token, best[-1] - best[0] if len(best) > 1 else float("inf")))
                if most is not None and len(answer) >= most:
                    break
        return answer

    alone = [await ask(text) for text in texts]
    begin, before = time.monotonic(), memory(server)
    held = [before]

    async def one() -> None:
        while time.monotonic() < begin + seconds:
            n, way, asked = rng.randrange(len(texts)), rng.random(), time.monotonic()
            try:
                if way < 0.1:
                    await asyncio.wait_for(ask(texts[n]), rng.random())
                elif way < 0.2:
                    await ask(texts[n], most=2)
                else:
                    counts[verdict(await ask(texts[n]), alone[n], tie)] += 1
                    firsts.append(time.monotonic() - asked)
                    continue
                counts["given up"] += 1
            except TimeoutError:
                counts["given up"] += 1
            except openai.OpenAIError as error:
                counts["lost"] += 1
                print(f"lost: {error}", flush=True)

    async def watch() -> None:
        while time.monotonic() < begin + seconds:
            await asyncio.sleep(min(20, seconds / 5))
            held.append(memory(server))

    await asyncio.gather(watch(), *(one() for _ in range(clients)))
    again = [verdict(await ask(text), answer, tie) for text, answer in zip(texts, alone, strict=True)]
    half = len(held) // 2
    print(f"{clients} clients, {seconds / 60:.0f} minutes: " + ", ".join(f"{n} {way}" for way, n in counts.items()))
    print(f"seconds to a whole answer, median {statistics.median(firsts):.1f}, most {max(firsts):.1f}")
    print(f"server, MiB: {before:.0f} before, {max(held[:half]):.0f} in the first half, {max(held[half:]):.0f} later")
    print(f"alone once more: {Counter(again)}", flush=True)
    counts["another answer"] += sum(way == "another answer" for way in again)
    return counts


def verdict(answer: Answer, alone: Answer, tie: float) -> str:
    """Whether an answer is that which was given alone."""
    if len(answer) != len(alone):
        return "lost"
    differs = next((n for n, both in enumerate(zip(answer, alone, strict=True)) if both[0][0] != both[1][0]), None)
    if differs is None:
        return "the same"
    return "differ from a near tie on" if alone[differs][1] < tie else "another answer"


def memory(server: psutil.Process) -> float:
    """MiB of a server and its processes."""
    return sum(own.memory_info().rss for own in (server, *server.children(recursive=True))) / 2**20


@contextmanager
def serving(folder: str, *options: str) -> Iterator[tuple[str, psutil.Process]]:
    """The address of a server, once it is ready, and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", str(port)]
    with Path(os.devnull).open("w") as nowhere:
        server = subprocess.Popen([*command, *options], stdout=nowhere, stderr=nowhere)
        try:
            while server.poll() is None:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                    break
                except OSError:
                    time.sleep(0.5)
            if server.poll() is not None:
                raise typer.BadParameter(f"the server did not start: try {' '.join([*command, *options])}")
            yield f"http://127.0.0.1:{port}", psutil.Process(server.pid)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    typer.run(main)
