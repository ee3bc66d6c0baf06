"""transformers' and dofla's side of engine_memory.py, which starts it: one model in a process of its own.

    python torch_worker.py MODEL THREADS POSITIONS KIND

KIND is "softmax", "evict=False" or a size, such as "1.5MiB"; behind it may stand "int8", of weights, and "compiled".
"""

from __future__ import annotations

import sys

import torch
from engine_worker import answer
from engines import SOFTMAX, bytes_of, pack_weights, token

import dofla
from dofla.integration.cache import cache_bytes
from dofla.runs.opening import open_original


class Torch:
    """A model with its cache, as it is or under torch.compile."""

    def __init__(self, name: str, cache: str, words: list[str]) -> None:
        self.model = open_original(name, dtype="int8" if "int8" in words else "bfloat16")[0].eval()
        if cache != SOFTMAX:
            dofla.compress(self.model, **({"evict": False} if cache == "evict=False" else {"size": cache}))
        self.kind, self.weights = " compiled" if "compiled" in words else "", bytes_of(self.model)

    def read(self, count: int) -> None:
        self._token, self._cache = token(self.model, self.kind, 1, count, 8)

    def token(self, _: int) -> None:
        self._token()

    def bytes(self, _: int) -> int:
        return cache_bytes(self._cache)


def main(name: str, threads: str, _: str, kind: str) -> None:
    torch.set_num_threads(int(threads))
    pack_weights()
    with torch.inference_mode():
        cache, *words = kind.split(", ")
        answer({kind: Torch(name, cache, words)})


if __name__ == "__main__":
    main(*sys.argv[1:])
