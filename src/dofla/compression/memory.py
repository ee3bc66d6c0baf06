"""The memory that a calibration takes beyond a model's weights, estimated before it begins."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from dofla.compression.retrieval import FAR
from dofla.display import size
from dofla.distillation.objective import POSITIONS_AT_A_TIME
from dofla.errors import DoflaError, ran_out_of_memory
from dofla.integration.offload import device_of
from dofla.integration.room import warn_if_short

WAYS_OUT = (
    "give batch_size=1 and shorter windows (--set length=512), open the model with device_map='auto' and "
    "offload_folder=FOLDER (--set offload=FOLDER), or take a calibration that was made elsewhere"
)


def calibration_memory(model: PreTrainedModel, tokens: int = FAR) -> int:
    """Estimate, in bytes, for a model that reads so many tokens at once: an allocator keeps what one stage took, and
    what works in half precision takes as much as in float32."""
    layers = (x for x in model.base_model.modules() if not isinstance(x, nn.Embedding))
    weights = (weight for x in layers for weight in x.parameters(recurse=False) if weight.is_floating_point())
    config = model.config.get_text_config()
    widest = max((max(x.shape[-2:]) for x in weights if x.ndim > 1), default=4 * config.hidden_size)
    numbers = tokens * (3 * widest + 8 * config.hidden_size)  # vectors that are there at once
    numbers += 4 * POSITIONS_AT_A_TIME * config.vocab_size  # logits and their logarithms, of both models
    return numbers * torch.float32.itemsize + (64 + 3 * config.num_hidden_layers) * 2**20  # kernels; sums and coders


def warn_of_memory(model: PreTrainedModel, tokens: int) -> None:
    """A warning if calibration, which reads so many tokens at once, takes more memory than is available."""
    needed = calibration_memory(model, tokens)
    what = f"calibration takes about {size(needed)} beyond the weights"
    warn_if_short(needed, device_of(model), what, WAYS_OUT)


@contextmanager
def ways_out() -> Iterator[None]:
    """Within the block, running out of memory is an error that says what to change."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        raise DoflaError(f"calibration ran out of memory: {WAYS_OUT}") from error
