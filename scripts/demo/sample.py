"""Draws the bundled sample text, which is known as data source ``sample``: run it when the demo's model changes.

python scripts/demo/sample.py
"""

import gzip

from windows import drawn_windows

from dofla.data.documents import SAMPLE
from dofla.runs.opening import open_original

WINDOWS, LENGTH, SEED = 96, 2048, 1
"""Another seed than the demo's, so that text and demo have no window in common."""


def main() -> None:
    model, tokenizer = open_original("demo")
    drawn = drawn_windows(model, tokenizer, WINDOWS, LENGTH, split="train", seed=SEED)
    documents = []
    for window in drawn.input_ids.tolist():
        # The last document of a window is cut, and so is the first unless the window begins with a separator.
        documents += tokenizer.decode(window).split(tokenizer.bos_token)[1:-1]
    lines = [" ".join(document.split()) for document in documents]
    text = "\n\n".join(dict.fromkeys(line for line in lines if line)) + "\n"
    SAMPLE.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{SAMPLE}: {text.count(chr(10) * 2) + 1} documents, {len(tokenizer(text)['input_ids'])} tokens")


if __name__ == "__main__":
    main()
