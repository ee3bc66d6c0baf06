"""NVIDIA's kvpress for timing.py: seconds of a prompt and of a token after it, in turns with a softmax cache.

Runs in an environment of its own, as presses.py; nothing of dofla. A prompt is read within the press, in kvpress's own
way; a token is then written to what it left, and that of a press that holds its size within kvpress's DecodingPress.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch
from judging import SOFTMAX, bytes_of, token_bytes, write_json
from presses import PRESSES, Memory, Trial, ratio_to, read_within
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

sys.path.append(str(Path(__file__).parents[1] / "speed"))
from turns import least

TIMED = (("ExpectedAttention", "once"), ("TOVA", "held"), ("KVzip", "kvzip"))
"""Of those that lose least, one that decides while the prompt is read, the one that holds its size, and KVzip."""


def whole(model: PreTrainedModel, ids: Tensor) -> Memory:
    """All of what was read."""
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    return Memory([(layer.keys, layer.values) for layer in cache.layers], [None] * len(cache.layers))


def compressed(model: PreTrainedModel, trial: Trial, ids: Tensor) -> Memory:
    return read_within(model, ids, PRESSES[trial.press](ratio_to(trial.least, ids.shape[1])))[0]


def writing(model: PreTrainedModel, memory: Memory, trial: Trial | None, ids: Tensor) -> Callable[[], None]:
    """One token more, at each call."""
    cache, place = memory.cache(model), torch.tensor([[ids.shape[1]]])
    known = {"past_key_values": cache, "position_ids": place, "logits_to_keep": 1}

    def write() -> None:
        memory.hide(model)
        if trial is None or trial.kind != "held":
            model(ids[:, :1], **known)
            return
        with trial.holding()(model):
            model(ids[:, :1], **known)

    return write


@torch.inference_mode()
def rows(model: PreTrainedModel, length: int, kept: list[int], repeats: int, new_tokens: int) -> list[dict]:
    """Of a prompt of so many random tokens."""
    ids, each = torch.randint(model.config.vocab_size, (1, length)), token_bytes(model)
    trials = {}
    for count, (press, kind) in product(kept, TIMED):
        trial = Trial(press, kind, count * each, count)
        trials[f"{trial.memory}, {count} tokens"] = trial
    memories: dict[str, Memory] = {}

    def read(name: str) -> None:
        memories[name] = compressed(model, trials[name], ids) if name in trials else whole(model, ids)

    prompts = least({name: partial(read, name) for name in (SOFTMAX, *trials)}, repeats)
    # KVzip hides what it evicts, and keeps it.
    held = {name: bytes_of(x for pair in memory.pairs for x in pair) for name, memory in memories.items()}
    tokens = least({name: writing(model, x, trials.get(name), ids) for name, x in memories.items()}, new_tokens)
    return [
        {"memory": x, "turns": "kvpress", "length": length, "prompt": prompts[x], "token": tokens[x], "bytes": held[x]}
        for x in memories
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name, as for timing.py")
    parser.add_argument("out", type=Path, help="JSON file of the rows")
    for name in ("length", "kept"):
        parser.add_argument(f"--{name}", type=int, action="append", required=True, help="tokens; repeatable")
    for name in ("repeats", "new-tokens"):
        parser.add_argument(f"--{name}", type=int, required=True, help="as for timing.py")
    parser.add_argument("--dtype", required=True, help="as for timing.py")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    found = []
    for length in options.length:
        found += rows(model, length, options.kept, options.repeats, options.new_tokens)
    write_json(options.out, {"rows": found})


if __name__ == "__main__":
    main()
