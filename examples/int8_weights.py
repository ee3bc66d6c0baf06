"""A compressed model whose weights are kept in int8, by torchao.

    pip install 'dofla[int8]'
    python examples/int8_weights.py [MODEL]

MODEL is one that is not compressed yet. The folder that is saved has the weights in int8 and opens as any other does.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from opening import some_text
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

import dofla


@torch.no_grad()
def main(name: str = "demo") -> dict[str, tuple[float, float]]:
    place, found = dofla.demo()[0].name_or_path if name == "demo" else name, {}
    tokenizer = AutoTokenizer.from_pretrained(place)
    tokens = some_text(tokenizer, windows=4, seed=7)
    for kind, quantized in {"as it came": None, "int8": TorchAoConfig(Int8WeightOnlyConfig())}.items():
        model = AutoModelForCausalLM.from_pretrained(place, quantization_config=quantized)
        dofla.compress(model, ratio=8)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(folder)
        found[kind] = (model(input_ids=tokens, labels=tokens).loss.item(), mebibytes(model))
        print("{}: loss {:.3f}, {:.1f} MiB".format(kind, *found[kind]))
    prompt = tokenizer("Once upon a time, there was a", return_tensors="pt")
    print(tokenizer.decode(model.generate(**prompt, max_new_tokens=12, do_sample=False)[0]))
    return found


def mebibytes(model: torch.nn.Module) -> float:
    """Of all weights; of those in int8, codes and scales."""
    parts = [getattr(w, n) for w in model.parameters() for n in getattr(w, "tensor_data_names", ())]
    return sum(x.nbytes for x in [*parts, *(w for w in model.parameters() if type(w) is torch.nn.Parameter)]) / 2**20


if __name__ == "__main__":
    main(*sys.argv[1:])
