"""Weights of linear layers in int8, a scale for each row, by torchao."""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel, TorchAoConfig

from dofla.errors import DoflaError
from dofla.storage.extras import extra


def load_in_int8(load: Callable[..., PreTrainedModel], **options: Any) -> PreTrainedModel:
    """The model that ``load`` opens, with the weights of all linear layers in int8, the output layer's as well. Where
    that shares the embedding's, it gets its own: torchao has no embedding in int8.

    Args:
        load: of a checkpoint; gets ``quantization_config`` and the ``options``.

    Raises:
        DoflaError: torchao is not installed, or the checkpoint is compressed or quantized already.
    """
    torchao = extra("torchao.quantization", "int8", "dtype=int8")
    int8 = torchao.Int8WeightOnlyConfig(set_inductor_config=False)
    model = load(quantization_config=TorchAoConfig(int8, include_input_output_embeddings=True), **options)
    if not any(isinstance(weight, torchao.Int8Tensor) for weight in model.parameters()):
        raise DoflaError(f"{model.config._name_or_path} is quantized already and keeps its weights: leave dtype out")
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and type(head.weight) is nn.Parameter:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        for config in (model.config, model.config.get_text_config(decoder=True)):
            config.tie_word_embeddings = False
        torchao.quantize_(head, int8)
    return model
