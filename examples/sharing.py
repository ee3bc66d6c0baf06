"""A compressed model to give away: figures on its model card, saved whole and as an adapter, and pushed if a name is
given.

python examples/sharing.py [MODEL] [OWNER/NAME]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from opening import open_converted, some_text

import dofla


def main(name: str = "demo", repository: str | None = None) -> str:
    model, tokenizer = open_converted(name)
    dofla.note(model, figures=dofla.evaluate(model, some_text(tokenizer, windows=4, seed=7)), license="apache-2.0")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "compressed"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        dofla.save_adapter(model, Path(temporary) / "adapter")
        for path in sorted(Path(temporary).rglob("*.safetensors")):
            print(f"{path.relative_to(temporary)}: {path.stat().st_size / 1024:,.0f} KiB")
        card = (folder / "README.md").read_text(encoding="utf-8")
        print(card)
    if repository is not None:
        # Needs `hf auth login`. dofla.push_adapter(model, repository) uploads the adapter alone.
        print(model.push_to_hub(repository), tokenizer.push_to_hub(repository))
    return card


if __name__ == "__main__":
    main(*sys.argv[1:])
