"""A model of which only the config is known: its modules and shapes, and stand-ins in the place of weights."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel


def without_weights(config: PreTrainedConfig, build: Callable[[PreTrainedConfig], PreTrainedModel]) -> PreTrainedModel:
    """The model that ``build`` makes of a config, in evaluation mode, without the memory of its weights: each is a
    single number that is repeated. Products with them are to be taken within :class:`StandInProducts`."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of weights that are not there
    with torch.device("meta"):
        model = build(config)
    made: dict[Tensor, Tensor] = {}  # what several modules share stays one
    for module in model.modules():
        places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for tensors in places:
            for name, tensor in tensors.items():
                if isinstance(tensor, Tensor) and tensor.is_meta:
                    ones = torch.ones((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)
                    one = nn.Parameter(ones, requires_grad=False) if isinstance(tensor, nn.Parameter) else ones
                    tensors[name] = made.setdefault(tensor, one)
    model.set_experts_implementation("eager")  # expert by expert, each a product of its own
    return model.eval()


class StandInProducts(TorchFunctionMode):
    """Within the block linear layers and embeddings return numbers of the right shape that cost nothing to compute:
    a token's embedding differs from another's, and a linear layer repeats its input. So a model runs as it would,
    and what depends on the numbers (causal or not, which experts are chosen) has some to depend on. ``operations`` are
    those in floating point that these layers would have taken."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is functional.embedding:
            tokens, weight = args[:2]
            angles = (tokens.unsqueeze(-1) + 1.0) * torch.arange(1.0, weight.shape[-1] + 1, device=tokens.device)
            return torch.cos(angles).to(weight.dtype)
        if function is functional.linear:
            return self._product(args[0], args[1].shape[0])
        if function is torch.addmm:
            return self._product(args[1], args[2].shape[-1])
        if function in _MATMUL and _stands_in(args[1]) and args[0].ndim >= args[1].ndim:  # experts side by side
            return self._product(args[0], args[1].shape[-1])
        return function(*args, **kwargs or {})

    def _product(self, x: Tensor, width: int) -> Tensor:
        self.operations += 2 * x.numel() * width
        copies = -(-width // x.shape[-1])
        return torch.cat([x] * copies, dim=-1)[..., :width]


_MATMUL = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm)


def _stands_in(weight: Tensor) -> bool:
    """True of one number that is repeated."""
    return weight.numel() > 1 and not any(weight.stride())
