"""A compressed model in bfloat16: half the bytes of the weights. Feature maps and their state stay in float32, which
has room for the exponents of real heads.

    python examples/half_precision.py [MODEL]
"""

from __future__ import annotations

import sys

import torch
from opening import open_converted, some_text


@torch.no_grad()
def main(name: str = "demo") -> dict[torch.dtype, float]:
    model, tokenizer = open_converted(name)
    tokens, losses = some_text(tokenizer, windows=4, seed=7), {}
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        losses[dtype] = model(input_ids=tokens, labels=tokens).loss.item()
        size = model.get_memory_footprint() / 2**20
        print(f"{dtype}: loss {losses[dtype]:.3f}, {size:.1f} MiB")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
