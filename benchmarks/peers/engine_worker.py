"""What llama_worker.py and openvino_worker.py share: an engine's side of engines.py, in an environment of its own.

A line of JSON on standard input, [KIND, WHAT, NUMBER], is answered by one on standard output:

- read: so many random tokens in one call, into an empty cache; the logits of the last are there;
- token: one more;
- bytes: of the cache, as far as it is filled.

The first line that is written says which kinds there are, and the bytes of their weights.
"""

from __future__ import annotations

import json
import sys
from typing import Protocol


class Engine(Protocol):
    """Weights of one kind with a cache of one kind."""

    weights: int  # bytes

    def read(self, count: int) -> None: ...

    def token(self, _: int) -> None: ...

    def bytes(self, _: int) -> int: ...


def answer(engines: dict[str, Engine]) -> None:
    """Do what standard input asks, until it ends."""
    print(json.dumps({kind: engine.weights for kind, engine in engines.items()}), flush=True)
    for line in sys.stdin:
        kind, what, number = json.loads(line)
        print(json.dumps(getattr(engines[kind], what)(number)), flush=True)
