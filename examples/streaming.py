"""Text shown word by word as it comes, by transformers' TextStreamer; the cache behind it does not grow.

python examples/streaming.py [MODEL]
"""

from __future__ import annotations

import sys

from opening import open_converted
from transformers import DynamicCache, TextStreamer

from dofla.integration.cache import CACHE_ARGUMENT, cache_bytes


def main(name: str = "demo") -> list[int]:
    model, tokenizer = open_converted(name)
    inputs = tokenizer("Once upon a time, there was a little boy named Tim.", return_tensors="pt").to(model.device)
    cache, sizes = DynamicCache(config=model.config), []
    for tokens in (64, 64):  # the second time it goes on where it stopped, from the cache
        streamer = TextStreamer(tokenizer, skip_prompt=True)
        options = {"max_new_tokens": tokens, "do_sample": False, CACHE_ARGUMENT: cache, "streamer": streamer}
        written = model.generate(**inputs, **options, repetition_penalty=1.1)
        sizes.append(cache_bytes(cache))
        print(f"[{written.shape[1]} tokens, {sizes[-1]:,} bytes of state]")
        inputs = {"input_ids": written, "attention_mask": written.new_ones(written.shape)}
    return sizes


if __name__ == "__main__":
    main(*sys.argv[1:])
