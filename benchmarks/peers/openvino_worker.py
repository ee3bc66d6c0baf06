"""OpenVINO GenAI's side of engines.py, which starts it: in an environment with openvino-genai, and nothing of dofla.

    python openvino_worker.py FOLDER THREADS POSITIONS KIND...

FOLDER has a folder for each kind of weights, as optimum-cli exports them. Kinds are such as "int8", "int8, cache u4",
"int8, evicting": weights, and a cache in u8, in u4, or in u8 with evictions to 672 tokens once a prompt is read.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import openvino_genai as genai
from engine_worker import answer
from openvino import Tensor

EVICTING = "evicting"
CACHE = 1
"""GiB of a cache at most."""


class OpenVino:
    """Weights of one kind; precision of products and everything else as OpenVINO chooses it."""

    def __init__(self, folder: Path, cache: str, threads: int, positions: int) -> None:
        self.weights = (folder / "openvino_model.bin").stat().st_size
        settings = genai.SchedulerConfig()
        settings.max_num_batched_tokens, settings.cache_size = positions, CACHE
        settings.enable_prefix_caching = False
        if cache == EVICTING:
            settings.use_cache_eviction = True
            settings.cache_eviction_config = genai.CacheEvictionConfig(32, 128, 672, genai.AggregationMode.NORM_SUM)
        properties = {
            "INFERENCE_NUM_THREADS": threads,
            "KV_CACHE_PRECISION": cache.removeprefix("cache ") if cache.startswith("cache ") else "u8",
        }
        self.pipeline = genai.ContinuousBatchingPipeline(str(folder), settings, "CPU", properties)
        self.options = genai.GenerationConfig(max_new_tokens=positions, ignore_eos=True, do_sample=False)
        self.handle = None

    def read(self, count: int) -> None:
        self.clear()
        tokens = Tensor(np.random.default_rng(count).integers(1000, 20000, (1, count)))
        self.handle = self.pipeline.add_request(0, tokens, self.options)
        while not self.handle.can_read():
            self.pipeline.step()

    def clear(self) -> None:
        if self.handle is not None:
            self.handle.cancel()
            self.pipeline.step()  # in which it is dropped

    def token(self, _: int) -> None:
        self.pipeline.step()

    def bytes(self, _: int) -> int:
        metrics = self.pipeline.get_metrics()
        return round(metrics.cache_usage / 100 * metrics.cache_size_in_bytes)


def main(folder: str, threads: str, positions: str, *kinds: str) -> None:
    engines = {}
    for kind in kinds:
        weights, _, cache = kind.partition(", ")
        engines[kind] = OpenVino(Path(folder) / weights, cache, int(threads), int(positions))
    answer(engines)
    for engine in engines.values():
        engine.clear()


if __name__ == "__main__":
    main(*sys.argv[1:])
