"""What the tests of the forms of attention share: feature maps, inputs, and float64 truths written pair by pair."""

import contextlib
from dataclasses import dataclass

import pytest
import torch
from sizes import needs_kernels
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import dofla.attention
from dofla.attention import (
    LOG_ZERO,
    Affine,
    Call,
    FeatureState,
    TokenBuffer,
    chunked,
    compiled,
    log_weights,
    naive_attention,
    recurrent,
)
from dofla.attention.state import Tensors


class Affines(torch.nn.Module):
    """A feature map that is affine, other for queries than for keys."""

    def __init__(self, heads, head_dim, features, spread, curvature, generator):
        super().__init__()
        self.features, self.curvature = features, curvature
        self.weights = [spread * torch.randn(heads, features, head_dim, generator=generator) for _ in range(2)]
        self.biases = [torch.randn(heads, features, generator=generator) for _ in range(2)]

    def affine(self, scaling, dtype):
        parts = zip(self.weights, self.biases, (self.curvature, self.curvature / 3), strict=True)
        return tuple(Affine(weight.to(dtype), bias.to(dtype), scaling, curvature) for weight, bias, curvature in parts)

    def log_query(self, x, scaling):
        return self.affine(scaling, x.dtype)[0](x)

    def log_key(self, x, scaling):
        return self.affine(scaling, x.dtype)[1](x)


class Opaque:
    """The log-features of another map, which does not tell that it is affine."""

    def __init__(self, features_map):
        self.features, self.log_query = features_map.features, features_map.log_query
        self.log_key = features_map.log_key


@dataclass
class Sample:
    """Random float32 input of attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    features: Affines
    weight: Tensor | None

    @property
    def vectors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def log_weight(self) -> Tensor:
        batch, _, length, _ = self.key.shape
        return torch.zeros(batch, length) if self.weight is None else self.weight.log().clamp_min(LOG_ZERO)

    @property
    def harmless_value(self) -> Tensor:
        """With zeros for padding, as the forms ask for."""
        return self.value if self.weight is None else self.value.masked_fill((self.weight == 0)[:, None, :, None], 0)

    def log_features(self, scaling: float) -> tuple[Tensor, Tensor]:
        """In float64, of the same float32 vectors."""
        return self.features.log_query(self.query.double(), scaling), self.features.log_key(self.key.double(), scaling)

    def naive(self, scaling: float, **options) -> Tensor:
        """Causal attention in float64, every pair written out."""
        a, b = self.log_features(scaling)
        exact = {"query": self.query.double(), "key": self.key.double(), "scaling": scaling}
        return naive_attention(a, b, self.value.double(), weight=self.weight, **exact, **options)


def sample(
    seed, *, batch=1, heads=1, groups=1, length=100, head_dim=8, value_dim=6, features=5, spread=0.5, pad="none"
):
    g = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads * groups, length, head_dim, generator=g)
    key = torch.randn(batch, heads, length, head_dim, generator=g)
    value = torch.randn(batch, heads, length, value_dim, generator=g)
    weight = padding(pad, batch, length, g)
    return Sample(query, key, value, Affines(heads, head_dim, features, spread, 0.2, g), weight)


def padding(kind, batch, length, generator):
    """Key weights [B, L]: 0 and 1, but for kind "fractional"."""
    if kind == "none":
        return None
    weight = torch.ones(batch, length)
    for row in range(batch):
        n = int(torch.randint(0, length + 1, (), generator=generator))
        if kind == "left":
            weight[row, :n] = 0
        elif kind == "right":
            weight[row, length - n :] = 0
        elif kind == "any":
            weight[row] = (torch.rand(length, generator=generator) > 0.4).float()
        else:
            weight[row] = (3 * torch.rand(length, generator=generator) - 1).clamp_min(0)
    return weight


def naive_normalizer(a: Tensor, b: Tensor, log_weight: Tensor) -> Tensor:
    """The log-normalizer [B, H, L] of causal attention, every pair written out."""
    b = b.repeat_interleave(a.shape[1] // b.shape[1], dim=1)
    logits = torch.logsumexp(a.unsqueeze(-2) + b.unsqueeze(-3), dim=-1) + log_weight[:, None, None, :]
    later = torch.ones(a.shape[-2], a.shape[-2], dtype=torch.bool).triu(1)
    return logits.masked_fill(later, -torch.inf).logsumexp(dim=-1)


def naive_state(b: Tensor, value: Tensor, log_weight: Tensor) -> FeatureState:
    logits = b + log_weight[:, None, :, None]
    return FeatureState(torch.softmax(logits, dim=-2).mT @ value, logits.logsumexp(dim=-2))


def attend(query, key, value, features, *, scaling, weight=None, state=None, causal=True, **sizes):
    """:func:`dofla.attention.attend` of a call of its own."""
    log_weight = None if weight is None else log_weights(weight)
    return dofla.attention.attend(Call(query, key, value, scaling, log_weight, causal), features, state, **sizes)


def everything(state: Tensors) -> list[Tensor]:
    """All tensors of a state."""
    found = []
    state.map(lambda t: (found.append(t), t)[1])
    return found


def error(got: Tensor, expected: Tensor, value: Tensor) -> float:
    """Largest error of averages of values, relative to the largest value."""
    return float((got.double() - expected.double()).abs().max() / value.double().abs().max())


def compiled_form(a, b, value, *, state):
    batch, _, length, _ = b.shape
    return compiled.linear_attention(a, TokenBuffer(b, value, torch.zeros(batch, length)), state)


FORMS = [
    pytest.param(chunked, id="chunked"),
    pytest.param(recurrent, id="recurrent"),
    pytest.param(compiled_form, id="compiled", marks=needs_kernels),
]


@contextlib.contextmanager
def threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class KernelCalls(TorchDispatchMode):
    """What ran while this was entered: calls of our compiled kernels and their names, and names of torch's operations
    that attention in plain torch is made of."""

    ARITHMETIC = frozenset({"exp", "_softmax", "logsumexp", "sigmoid", "logaddexp"})

    def __init__(self):
        super().__init__()
        self.names, self.plain, self.calls = set(), set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if func.namespace == "dofla":
            self.names.add(name)
            self.calls.append((func, args, kwargs or {}))
        elif name in self.ARITHMETIC:
            self.plain.add(name)
        return func(*args, **(kwargs or {}))

    @property
    def alone(self) -> bool:
        """Whether the kernels did all the work."""
        return bool(self.names) and not self.plain
