"""A compressed model in transformers' pipeline for text: nothing about it is special.

python examples/text_generation.py [MODEL]
"""

from __future__ import annotations

import sys

from opening import open_converted
from transformers import pipeline


def main(name: str = "demo") -> list[str]:
    model, tokenizer = open_converted(name)
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompts = ["Once upon a time, there was a little dog. He", "Lily and Tom went to the park. They"]
    answers = write(prompts, batch_size=2, max_new_tokens=24, do_sample=False)
    texts = [answer[0]["generated_text"] for answer in answers]
    print("\n".join(texts))
    return texts


if __name__ == "__main__":
    main(*sys.argv[1:])
