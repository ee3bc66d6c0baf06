"""transformers' and dofla's side of engine_memory.py, which starts it: one model in a process of its own.

    python torch_worker.py MODEL THREADS POSITIONS KIND

KIND is "softmax", "evict=False" or a size, such as "1.5MiB"; behind it may stand "int8", of weights, and "compiled".
"""

from __future__ import annotations

import sys

import torch
from engine_worker import answer
from engines import SOFTMAX, InTorch, pack_weights

import dofla
from dofla.runs.opening import open_original

NEW_TOKENS = 8
"""Of each prompt, at most."""


def main(name: str, threads: str, _: str, kind: str) -> None:
    torch.set_num_threads(int(threads))
    pack_weights()
    cache, *words = kind.split(", ")
    model, _ = open_original(name, dtype="int8" if "int8" in words else "bfloat16")
    if cache != SOFTMAX:
        dofla.compress(model, **({"evict": False} if cache == "evict=False" else {"size": cache}))
    with torch.inference_mode():
        answer({kind: InTorch(model.eval(), "compiled" in words, NEW_TOKENS)})


if __name__ == "__main__":
    main(*sys.argv[1:])
