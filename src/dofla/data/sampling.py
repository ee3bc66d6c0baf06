"""Windows sampled from the model itself, for when its training text is not at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from dofla.data.windows import TokenWindows
from dofla.errors import DoflaError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def separator_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that stands before a document: the first of bos, eos, cls, sep that the tokenizer has, if any."""
    candidates = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id)
    return next((token for token in candidates if token is not None), None)


def self_sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int,
    length: int,
    seed: int = 0,
    batch_size: int = 64,
    temperature: float = 1.0,
) -> TokenWindows:
    """Windows of tokens drawn from the model, each starting with the tokenizer's separator.

    Ancestral sampling from the model's distribution: the top-k, penalties and the like that a checkpoint carries for
    chatting are not applied, and an end-of-text token does not end a window, since text packed into windows has them
    inside. Same seed, batch size and machine: same windows. The global random state, the model's mode and its
    generation settings are left as they were.

    Args:
        model: a causal language model; of a student, the softmax model it was is sampled from.
        tokenizer: the model's.
        count: windows.
        length: tokens of each.
        seed: of the draws.
        batch_size: windows that are drawn at a time.
        temperature: of the distribution; 1 is the model's own.

    Returns:
        Windows [count, length] on the CPU.

    Raises:
        DoflaError: not a causal language model; ``length`` above its positions; no token to start from; count or
            batch_size < 1, length < 2, temperature ≤ 0.
    """
    start = separator_id(tokenizer)
    _check(model, start, count, length, batch_size, temperature)
    # Here and not above: what touches transformers' inside is built on this package.
    from dofla.integration.sites import evaluation_mode
    from dofla.integration.surgery import as_teacher

    samples = []
    settings = _sampling_settings(model, temperature, length)
    with as_teacher(model), evaluation_mode(model), settings, _seeded(model, seed):
        for begin in range(0, count, batch_size):
            prompt = torch.full((min(batch_size, count - begin), 1), start, dtype=torch.int64, device=model.device)
            samples.append(model.generate(prompt, attention_mask=torch.ones_like(prompt)).cpu())
    name = f"self-sampled from {type(model).__name__}, seed {seed}, temperature {temperature:g}"
    return TokenWindows(torch.cat(samples), source=name)


def _check(
    model: PreTrainedModel, start: int | None, count: int, length: int, batch_size: int, temperature: float
) -> None:
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise DoflaError(
            f"model: {type(model).__name__} cannot be sampled from; give a causal language model, or a text as source"
        )
    if start is None:
        raise DoflaError("tokenizer: no bos, eos, cls or sep token to start a sample from; set tokenizer.bos_token")
    for name, value, least in (("count", count, 1), ("batch_size", batch_size, 1), ("length", length, 2)):
        if value < least:
            raise DoflaError(f"{name}: {value}; give {least} or more")
    if not temperature > 0:
        raise DoflaError(f"temperature: {temperature}; give a number above 0")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise DoflaError(
            f"length: {length}, and {type(model).__name__} has {positions} positions; give {positions} or less"
        )


@contextmanager
def _sampling_settings(model: PreTrainedModel, temperature: float, length: int) -> Iterator[None]:
    """Plain sampling to exactly `length` tokens, for as long as the context lasts.

    The model's own generation config is set aside rather than overridden: `generate` fills whatever an argument leaves
    at None, eos_token_id included, from it.
    """
    from transformers import GenerationConfig

    settings = model.generation_config
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=temperature, top_k=0, top_p=1.0, max_length=length, use_cache=True
    )
    try:
        yield
    finally:
        model.generation_config = settings


@contextmanager
def _seeded(model: PreTrainedModel, seed: int) -> Iterator[None]:
    """The generators of the CPU and of the model's GPUs start at `seed`, and get their state back afterwards."""
    gpus = sorted({parameter.device.index for parameter in model.parameters() if parameter.is_cuda})
    with torch.random.fork_rng(devices=gpus, device_type="cuda"):
        # Not torch.manual_seed, which would also seed the GPUs that are not saved here.
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            torch.cuda.default_generators[gpu].manual_seed(seed)
        yield
