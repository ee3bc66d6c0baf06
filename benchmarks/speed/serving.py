"""Several clients of ``dofla serve`` at once: tokens a second with requests answered side by side, one after the other,
and by the same server with the model as it was, one after the other as well.

    python benchmarks/speed/serving.py docs/students/smollm2-135m-compressed --base-model models/smollm2-135m

Each client asks once, for a text of its own to be gone on with; what is timed is from the first request to the last
answer, prompts and all, of OpenAI's client over HTTP. All of it takes turns in one process; the best of a few rounds.
"""

from __future__ import annotations

import pydoc_data.topics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Annotated

import openai
import typer
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase, logging

import dofla
from dofla.display import table
from dofla.runs.opening import open_converted, open_original
from dofla.serving import ContinuousBatching
from dofla.serving.server import conversing, listening, server


def main(
    student: Annotated[str, typer.Argument(help="Folder or hub name of a student.")],
    base_model: Annotated[str, typer.Option(help="The model that it was.")],
    clients: Annotated[list[int] | None, typer.Option(help="How many at once; repeatable; default 1, 4, 16.")] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 256,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each answer, at most.")] = 64,
    dtype: Annotated[str | None, typer.Option(help="Of the models; default that of the checkpoint.")] = None,
    rounds: Annotated[int, typer.Option(help="Of which the best counts.")] = 2,
) -> None:
    logging.set_verbosity_error()
    counts = clients or [1, 4, 16]
    softmax, tokenizer = open_original(base_model, dtype)
    linear, _ = open_converted(student, dtype, base_model)
    texts = _texts(tokenizer, prompt)
    shown = table("clients", "softmax", "in turn", "side by side", "over softmax", "over in turn", gap=2)
    with ExitStack() as stack:
        compressed = conversing(stack.enter_context(ContinuousBatching(linear)))
        ways = [(softmax, 1), (compressed, 1), (compressed, max(counts))]
        addresses = [stack.enter_context(_served(model, tokenizer, at_once)) for model, at_once in ways]
        for count in counts:
            speeds = [0.0] * len(ways)
            for _ in range(rounds):
                own = list(islice(texts, count))
                for way, address in enumerate(addresses):
                    speeds[way] = max(speeds[way], _tokens_a_second(address, own, new_tokens))
            before, in_turn, together = speeds
            cells = [f"{x:.1f} tokens/s" for x in speeds]
            shown.add_row(str(count), *cells, f"{together / before:.2f} ×", f"{together / in_turn:.2f} ×")
    Console(width=120).print(shown)


def _texts(tokenizer: PreTrainedTokenizerBase, length: int) -> Iterator[str]:
    """One after the other, of the language reference, none like another."""
    topics = pydoc_data.topics.topics.values()
    while True:
        for window in dofla.token_windows(list(topics), tokenizer, length=length, split="all").input_ids:
            yield tokenizer.decode(window)


@contextmanager
def _served(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, at_once: int) -> Iterator[str]:
    """The address of a server, as long as the block lasts."""
    with listening("127.0.0.1", 0) as place:
        running = server("model", model, tokenizer, at_once)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [place]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{place.getsockname()[1]}/v1"
        finally:
            running.should_exit = True
            thread.join()


def _tokens_a_second(address: str, prompts: list[str], new_tokens: int) -> float:
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=5)

    def ask(prompt: str) -> int:
        options = {"model": "model", "max_tokens": new_tokens, "temperature": 0}
        return client.completions.create(prompt=prompt, **options).usage.completion_tokens

    with ThreadPoolExecutor(len(prompts)) as threads:
        started = time.perf_counter()
        written = sum(threads.map(ask, prompts))
        return written / (time.perf_counter() - started)


if __name__ == "__main__":
    typer.run(main)
