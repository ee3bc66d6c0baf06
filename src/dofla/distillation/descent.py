"""Adam at rates of their own for each kind of parameter, which fall along a cosine."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dofla.errors import DoflaError
from dofla.layers import AttentionLayer


class Descent:
    """Adam that takes ``steps`` on groups of parameters, as :class:`torch.optim.Adam` has them, at rates that fall to 0
    along a cosine: the paper names rates and no schedule."""

    def __init__(self, groups: Sequence[dict[str, Any]], steps: int) -> None:
        self.steps = steps
        self.rates = [group["lr"] for group in groups]
        self.parameters: list[nn.Parameter] = [parameter for group in groups for parameter in group["params"]]
        self.optimizer = torch.optim.Adam(groups)
        self.optimizer.zero_grad()  # of what a run that was broken off may have left

    def step(self, number: int) -> None:
        """Take step ``number``, from 0, along the gradients, and forget them."""
        share = (1 + math.cos(math.pi * number / self.steps)) / 2
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * share
        for parameter in self.parameters:  # Adam is to count the same steps for all, as a checkpoint does
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()


def groups_of(layers: Mapping[str, AttentionLayer], given: Mapping[str, float]) -> list[dict[str, Any]]:
    """The parameters of the layers' feature maps, in a group for each name, at the rates ``given`` or the maps' own;
    DoflaError if there is nothing to train, for a name that no map has, or a rate that is missing or out of range."""
    groups: dict[str, dict[str, Any]] = {}
    for layer in layers.values():
        for feature_map in layer.maps:
            for name, parameter in feature_map.named_parameters():
                rate = checked_rate(name, given.get(name, feature_map.learning_rates.get(name)))
                group = groups.setdefault(name, {"params": [], "lr": rate, "betas": feature_map.betas})
                group["params"].append(parameter)
    unknown = set(given) - set(groups)
    if unknown:
        known = ", ".join(sorted(groups))
        raise DoflaError(f"learning_rates names {sorted(unknown)[0]!r}: the feature maps have {known}")
    if not groups:
        raise DoflaError(
            "the feature maps of this plan have nothing to train: distill_end_to_end trains weights as well"
        )
    return list(groups.values())


def checked_rate(name: str, rate: float | None) -> float:
    """The rate; DoflaError naming what it is of unless it is a positive number."""
    if rate is None or not 0 < rate < math.inf:
        raise DoflaError(f"the learning rate of {name!r} is {rate}: give a positive number in learning_rates")
    return rate
