"""Students of the tiny models."""

from __future__ import annotations

from transformers import PreTrainedModel

import dofla

COMPRESSED = {"features": 0, "window": 4, "sinks": 2, "feature_map": "none", "token_dtype": "int8", "heavy_hitters": 6}
COMPRESSED |= {"tiers": [[5, 4.0], [4, 3.0]]}
"""Layers with a compressed cache of a few tokens."""


def student_of(tiny, kind="llama", **plan) -> PreTrainedModel:
    return _linearized(tiny, getattr(tiny, kind)(), plan)


def reader_of(tiny, kind="llama", **plan) -> PreTrainedModel:
    """The same with the vocabulary of the demo's tokenizer."""
    return _linearized(tiny, getattr(tiny, kind)(vocab_size=2048), plan)


def _linearized(tiny, model, plan) -> PreTrainedModel:
    return dofla.linearize(model, tiny.plan(model, **plan))
