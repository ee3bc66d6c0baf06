"""Tiny random models for all tests, as the fixture ``tiny``, and the demo's tokenizer. Nothing may try the network.

Tests compute in one thread, or in ``OMP_NUM_THREADS``, and so do the processes they start.
"""

import atexit
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # its own calibrations, and no user's
    os.environ["HF_HOME"] = os.path.join(os.environ["HF_HOME"], worker)
else:
    os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="dofla-tests-")
    atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import trials
from hypothesis import settings
from tiny_families import teacher
from transformers import (
    AutoTokenizer,
    BertModel,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ViTModel,
)
from transformers.utils import logging

from dofla.attention import CompressedHeads, compiled
from dofla.integration.sites import attention_sites
from dofla.integration.surgery import convert
from dofla.linear import Plan
from dofla.plans.layers import CompressedLayer, FeatureLayer, LayerPlan
from dofla.runs.demo import model_path

settings.register_profile("any machine", deadline=None)  # times decide no test
settings.load_profile("any machine")

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
logging.set_verbosity_error()
logging.disable_progress_bar()

VOCABULARY = 64
# Weights of this size make attention far from uniform.
_SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}
_TEXT = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


class Tiny:
    """Models with the weights of a seed, texts for them, and plans that treat all their layers alike."""

    def llama(self, seed: int = 0, **config) -> LlamaForCausalLM:
        defaults = {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 256}
        return self._make(LlamaForCausalLM, {**_SIZE, **_TEXT, **defaults, **config}, seed)

    def gpt2(self, seed: int = 0, **config) -> GPT2LMHeadModel:
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.3}
        return self._make(GPT2LMHeadModel, {**_TEXT, **sizes, **config}, seed)

    def bert(self, seed: int = 0, **config) -> BertModel:
        return self._make(BertModel, {**_SIZE, **_TEXT, "intermediate_size": 48, **config}, seed)

    def vit(self, seed: int = 0, **config) -> ViTModel:
        sizes = {**_SIZE, "intermediate_size": 48, "image_size": 16, "patch_size": 4, "num_channels": 3}
        return self._make(ViTModel, {**sizes, **config}, seed)

    def tokens(self, windows: int, length: int, seed: int = 0) -> torch.Tensor:
        return torch.randint(VOCABULARY, (windows, length), generator=torch.Generator().manual_seed(seed))

    def images(self, count: int, seed: int = 0) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {"pixel_values": torch.randn(count, 3, 16, 16, generator=generator)}

    def padded(self, windows: int, length: int, side: str = "right", seed: int = 0) -> dict[str, torch.Tensor]:
        """Windows of which the second half of the tokens is padding, less of it from window to window."""
        mask = torch.ones(windows, length, dtype=torch.int64)
        for n in range(windows):
            spare = max(length // 2 - n, 0)
            if side == "left":
                mask[n, :spare] = 0
            else:
                mask[n, length - spare :] = 0
        return {"input_ids": self.tokens(windows, length, seed), "attention_mask": mask}

    def plan(self, model: PreTrainedModel, features: int | list[int] = 8, **options) -> Plan:
        """The same features, window, sinks, ... in every layer."""
        return self._plan(model, FeatureLayer, features=features, **options)

    def compressed_plan(self, model: PreTrainedModel, **sizes) -> Plan:
        """The same compressed cache of a few tokens in every layer. How a text is cut into calls changes nothing."""
        few = {"window": 4, "sinks": 2, "newest": 5, "heavy_hitters": 6}
        return replace(self._plan(model, CompressedLayer, **few | sizes), prefill="sequential")

    def compressed(self, model: PreTrainedModel, **sizes) -> PreTrainedModel:
        """The model with such caches, which are not calibrated."""
        return convert(model, self.compressed_plan(model, **sizes)).model

    @staticmethod
    def _plan(model: PreTrainedModel, kind: type[LayerPlan], **fields) -> Plan:
        sites = attention_sites(model).values()
        return Plan([kind(x.name, x.kv_heads, x.head_dim, x.value_dim, **fields) for x in sites])

    @staticmethod
    def _make(kind: type[PreTrainedModel], config: dict[str, Any], seed: int) -> PreTrainedModel:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return kind(kind.config_class(**config)).eval()


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    return Tiny()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_path())


@pytest.fixture
def importances(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor | None]:
    """The importance of tokens in each call of a layer with a compressed cache."""
    found, step = list[torch.Tensor | None](), CompressedHeads.step
    monkeypatch.setattr(
        CompressedHeads, "step", lambda self, call, state: found.append(call.importance) or step(self, call, state)
    )
    return found


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A llama teacher on disk."""
    teacher("llama").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def pytest_configure(config: pytest.Config) -> None:
    """Where several processes share the tests, have the kernels compiled once, before there are such processes."""
    if config.getoption("numprocesses", None):
        compiled.obstacle()


# How many wrong inputs were tried is said at the end. A process that shares the tests tells the one that prints it.
_tallies: list[dict] = []


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["trials"] = trials.tally()
    else:
        _tallies.append(trials.tally())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    _tallies.append(getattr(node, "workeroutput", {}).get("trials", {}))


def pytest_terminal_summary(terminalreporter) -> None:
    for line in trials.summary(_tallies):
        terminalreporter.write_line(line)
