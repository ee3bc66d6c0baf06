"""Feature maps and vectors to try them on."""

import torch

from dofla.feature_maps import FeatureMap, feature_map_class

SCALING = 0.3


def make(name: str, heads: int = 3, head_dim: int = 6, features: int = 5, seed: int = 0) -> FeatureMap:
    feature_map = feature_map_class(name)(heads, head_dim, features)
    feature_map.reset_parameters(torch.Generator().manual_seed(seed))
    return feature_map


def vectors(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rows(feature_map: FeatureMap, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``weight`` [heads, M, d] times each vector of ``x`` [B, heads, L, d], scaled by half the scaling."""
    return torch.einsum("bhld,hmd->bhlm", x, weight) * SCALING**0.5


def estimates(name: str, draws: int, features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernels estimated by independent draws of a map [draws, 4, 4], and the kernel itself [4, 4]."""
    # Every head is an independent draw of the features.
    feature_map = make(name, draws, 6, features, seed=features)
    q, k = (vectors(1, 1, 4, 6, seed=seed).expand(1, draws, 4, 6) for seed in (1, 2))
    with torch.no_grad():
        a, b = feature_map.log_query(q, SCALING).double(), feature_map.log_key(k, SCALING).double()
    return (a.exp() @ b.exp().mT)[0], torch.exp(SCALING * q[0, 0].double() @ k[0, 0].double().mT)


def assert_unbiased(found: torch.Tensor, kernel: torch.Tensor) -> None:
    sigma = found.std(0) / len(found) ** 0.5
    assert ((found.mean(0) - kernel) / sigma).abs().max() < 4.5
    # The test above could pass if the estimates scattered wildly.
    assert (sigma < 0.1 * kernel).all()
