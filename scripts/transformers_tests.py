"""Run transformers' own tests of models and of generation with compressed models.

    pip install parameterized httpx
    git clone --depth 1 https://github.com/huggingface/transformers clone
    python scripts/transformers_tests.py clone

CLONE has the tests, which the package does not ship; what they test is the transformers that is installed. Where the
two are of different versions some tests fail by themselves: each runs twice, as it is, and with every model compressed
as soon as it is built. Nothing is downloaded, and tests that need the hub, a GPU or several processes are left out.

The exit status is 1 if a test fails with compressed models alone and CANNOT does not say why, or if one passes of which
CANNOT says that it fails.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from functools import wraps
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

MODELS = {
    "llama": "LlamaModelTest",
    "qwen2": "Qwen2ModelTest",
    "gemma3": "Gemma3TextModelTest",
    "mistral": "MistralModelTest",
    "gpt_neox": "GPTNeoXModelTest",
}
LEFT_OUT = ("fsdp2", "test_tp_")  # several processes, whose models nothing here compresses
TOKENS = 16
"""The size, in tokens of a bfloat16 cache: room for some fifty, seven of them in int8. Only tests of long rotary
positions, of which none compares a compressed model with an uncompressed one, read more."""
BY_THE_WAY = ("*_dict_output*", "test_assisted_*", "*_compilation_*", "test_model_outputs_*", "test_retain_grad_*")
"""Tests that ask for attention weights by the way: they are told that the model has none."""
CANNOT: dict[str, tuple[str, ...]] = {
    "asks for attention weights, which are never formed": (
        "test_attention_outputs",
        "test_capture_outputs_decorator",
        "qwen2:test_sliding_window_mask",
    ),
    "packs sequences into one row, or gives a mask of four dimensions": (
        "test_custom_4d_attention_mask",
        "test_*_padding_matches_padding_free_with_position_ids",
    ),
    "has windows of two tokens in all layers: none is left to compress": ("mistral:test_eager_matches_sdpa_*",),
    "wants a difference below 1e-4 to softmax attention without rounding": ("test_eager_matches_sdpa_*_fp32_*",),
    "wants another implementation of attention": (
        "test_can_set_attention_dynamically",
        "test_sdpa_can_dispatch_non_composite_models",
        "test_assisted_decoding_matches_greedy_search_1_same",
        "gpt_neox:test_cached_forward_with_and_without_attention_mask",
    ),
    "asks for a QuantizedCache, whose place the compressed cache takes": ("test_generate_with_quant_cache",),
    "overwrites saved weights, which then do not fit their checksum": ("test_model_weights_reload_*",),
    "compares with a model that is opened without weights, and so is not compressed": (
        "test_can_init_all_missing_weights",
        "test_from_pretrained_no_checkpoint",
        "test_init_weights_can_init_buffers",
    ),
}
"""Tests that cannot pass with a compressed cache, by the reason; those of one model have its name in front."""
_MODEL, _LOG = "DOFLA_TESTED_MODEL", "DOFLA_OUTCOMES"
_MISSING = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="of transformers' repository")
    parser.add_argument("--model", choices=MODELS, action="append", help="default all")
    parser.add_argument("--test", default="", help="expression of pytest -k, to run some of the tests")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as logs, ThreadPoolExecutor(given.processes) as pool:
        runs = {
            (name, compressed): pool.submit(outcomes, given, name, compressed, Path(logs) / f"{name}-{compressed}")
            for name in given.model or MODELS
            for compressed in (False, True)
        }
        sys.exit(told({key: run.result() for key, run in runs.items()}))


def outcomes(given: argparse.Namespace, name: str, compressed: bool, log: Path) -> dict[str, str]:
    """What became of each test of a model: passed, skipped, or the first line of the error."""
    here = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(here),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        _MODEL: name if compressed else "",
        _LOG: str(log),
    }
    expression = " and ".join([*(f"not {word}" for word in LEFT_OUT), *([f"({given.test})"] if given.test else [])])
    tests = f"tests/models/{name}/test_modeling_{name}.py::{MODELS[name]}"
    options = ["-q", "-p", Path(__file__).stem, "-p", "no:cacheprovider", "-k", expression]
    command = [sys.executable, "-m", "pytest", *options, tests]
    done = subprocess.run(command, cwd=given.clone, env=environment, capture_output=True, text=True, check=False)
    if not log.exists():
        sys.exit(f"{name}: no test has run\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    found: dict[str, str] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        test, outcome = json.loads(line)
        if found.get(test, "passed") in ("passed", "skipped"):  # of its subtests and phases, the first that failed
            found[test] = outcome
    return found


def told(found: dict[tuple[str, bool], dict[str, str]]) -> int:
    """Print a line per model and what is unexpected; the exit status."""
    print(f"{'':<10}{'tests':>8}{'passed':>8}{'compressed fails':>18}{'fails anyway':>14}{'skipped':>9}")
    unexpected, reasons = [], dict.fromkeys(CANNOT, 0)
    for name in dict.fromkeys(model for model, _ in found):
        plain, ours = found[name, False], found[name, True]
        skipped = [test for test, outcome in plain.items() if outcome == "skipped"]
        passed = [test for test, outcome in plain.items() if outcome == "passed"]
        failed = [test for test in passed if ours.get(test, "not run") != "passed"]
        row = len(plain), len(passed) - len(failed), len(failed), len(plain) - len(passed) - len(skipped), len(skipped)
        print(f"{name:<10}{row[0]:>8}{row[1]:>8}{row[2]:>18}{row[3]:>14}{row[4]:>9}")
        for test in passed:
            reason = why(name, test)
            if test in failed and reason:
                reasons[reason] += 1
            elif test in failed:
                unexpected.append(f"{name}: {test} failed: {ours.get(test, 'not run')}")
            elif reason:
                unexpected.append(f"{name}: {test} passed, and cannot: {reason}")
    print()
    for reason, count in reasons.items():
        print(f"{count:>4} {reason}")
    print(*unexpected, sep="\n")
    return int(bool(unexpected))


def why(name: str, test: str) -> str | None:
    """The reason why a test of a model cannot pass."""
    for reason, patterns in CANNOT.items():
        if any(fnmatch(test, pattern) or fnmatch(f"{name}:{test}", pattern) for pattern in patterns):
            return reason
    return None


# From here on the script is a plug-in of the pytest that it has started in the clone.


def pytest_configure(config: Any) -> None:
    clone = Path.cwd()
    sys.path.insert(0, str(clone))
    use_installed(clone)
    if name := os.environ[_MODEL]:
        compress_all(importlib.import_module(f"transformers.models.{name}.modeling_{name}"))


def use_installed(clone: Path) -> None:
    """Let the clone's tests import the transformers that is installed: with the clone's helpers for tests, and None
    for names that it does not have."""
    import transformers
    import transformers.utils

    transformers.utils.direct_transformers_import = lambda *args, **kwargs: transformers
    helpers = str(clone / "src" / "transformers" / "testing_utils.py")
    loader = SourceFileLoader("transformers.testing_utils", helpers)
    module = module_from_spec(spec_from_loader(loader.name, loader))
    sys.modules[loader.name] = transformers.testing_utils = module
    loader.exec_module(module)
    while True:
        try:
            importlib.import_module("tests.causal_lm_tester")
            return
        except ImportError as error:
            if (missing := _MISSING.match(str(error))) is None or not missing[2].startswith("transformers"):
                raise
            setattr(sys.modules[missing[2]], missing[1], None)


def compress_all(module: Any) -> None:
    """Have every model of a module of transformers compressed at the end of its construction."""
    from transformers import PreTrainedModel

    building: list[Any] = []
    for cls in vars(module).values():
        if inspect.isclass(cls) and issubclass(cls, PreTrainedModel) and cls.__module__ == module.__name__:
            cls.__init__ = compressing(cls.__init__, building)


def compressing(init: Callable, building: list[Any]) -> Callable:
    import torch

    import dofla

    @wraps(init)
    def build(model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        building.append(model)
        try:
            init(model, config, *args, **kwargs)
        finally:
            building.pop()
        weights = [*model.parameters()]
        if building or not weights or weights[0].is_meta:  # a part of a model, or one whose weights are yet to load
            return
        config = model.config
        with torch.random.fork_rng():
            windows = torch.randint(config.vocab_size, (2, min(16, config.max_position_embeddings)))
            ratio = max(config.max_position_embeddings / TOKENS, 1.01)
            dofla.compress(model, windows, ratio=ratio, head_budgets="even", progress=False)

    return build


def pytest_runtest_setup(item: Any) -> None:
    random.seed(0)
    if os.environ[_MODEL]:
        item.cls.has_attentions = not any(fnmatch(item.name, pattern) for pattern in BY_THE_WAY)
        item.cls._check_past_key_values_for_generate = check_cache
    sys.modules["tests.test_modeling_common"].global_rng.seed(0)


def check_cache(case: Any, batch_size: int, past_key_values: Any, seq_length: int, config: Any) -> None:
    """The check of a compressed cache in place of that of the shapes of keys and values: layers, sequences, tokens."""
    assert len(past_key_values) == config.num_hidden_layers
    for layer in past_key_values.layers:
        assert {len(state.rows) for state in layer.states} == {batch_size}
        assert int(layer.get_seq_length()) == seq_length


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        outcome = report.outcome
        if outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            outcome = (crash.message if crash else str(report.longrepr)).strip().split("\n")[0][:300] or "failed"
        with open(os.environ[_LOG], "a", encoding="utf-8") as log:
            log.write(json.dumps([report.nodeid.split("::")[-1], outcome]) + "\n")


if __name__ == "__main__":
    main()
