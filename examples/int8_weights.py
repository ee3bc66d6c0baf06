"""A compressed model whose weights are kept in eight bits, by optimum-quanto; the feature maps stay as they are.

    pip install optimum-quanto
    python examples/int8_weights.py [MODEL]

Save the model before, and do this each time it is opened: dofla's files hold plain weights. torchao does the same on
a CPU, ``quantize_(model, Int8WeightOnlyConfig(), filter_fn=...)``. bitsandbytes, and 8-bit weights by way of
``quantization_config``, cannot be had: a model has one of those, and a compressed model's is dofla's.
"""

from __future__ import annotations

import sys

import torch
from opening import open_converted, some_text
from optimum.quanto import freeze, qint8, quantize


@torch.no_grad()
def main(name: str = "demo") -> dict[str, tuple[float, float]]:
    model, tokenizer = open_converted(name)
    tokens, found = some_text(tokenizer, windows=4, seed=7), {}
    for kind in (str(model.dtype).removeprefix("torch."), "int8"):
        if kind == "int8":
            quantize(model, weights=qint8, exclude=["*.dofla*", "lm_head"])
            freeze(model)
        found[kind] = (model(input_ids=tokens, labels=tokens).loss.item(), mebibytes(model))
        print("{}: loss {:.3f}, {:.1f} MiB".format(kind, *found[kind]))
    prompt = tokenizer("Once upon a time, there was a", return_tensors="pt")
    print(tokenizer.decode(model.generate(**prompt, max_new_tokens=12, do_sample=False)[0]))
    return found


def mebibytes(model: torch.nn.Module) -> float:
    """Of all weights, shared ones once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}.values()) / 2**20


if __name__ == "__main__":
    main(*sys.argv[1:])
