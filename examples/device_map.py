"""A compressed model spread by accelerate: on a device map, with the layers that do not fit in memory left on disk.

pip install accelerate
python examples/device_map.py [MODEL]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from opening import open_converted
from transformers import AutoModelForCausalLM


def main(name: str = "demo") -> dict[str, str]:
    model, tokenizer = open_converted(name)
    inputs, texts = tokenizer("Once upon a time, there was a", return_tensors="pt"), {}
    with tempfile.TemporaryDirectory() as temporary:
        folder, offload = Path(temporary) / "compressed", Path(temporary) / "offload"
        model.save_pretrained(folder)
        # Two thirds of the model's bytes may be in memory. A layer on disk is read each time that its turn comes.
        memory = {"cpu": model.get_memory_footprint() * 2 // 3}
        for kind, options in {
            "cpu": {"device_map": "cpu"},
            "auto": {"device_map": "auto"},
            "disk": {"device_map": "auto", "max_memory": memory, "offload_folder": offload},
        }.items():
            opened = AutoModelForCausalLM.from_pretrained(folder, **options)
            places = {str(place) for place in getattr(opened, "hf_device_map", {"": opened.device}).values()}
            out = opened.generate(**inputs.to(opened.device), max_new_tokens=12, do_sample=False)
            texts[kind] = tokenizer.decode(out[0])
            print(f"{kind} ({', '.join(sorted(places))}): {texts[kind]}")
    return texts


if __name__ == "__main__":
    main(*sys.argv[1:])
