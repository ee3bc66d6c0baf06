"""Features drawn by leverage, for all heads of a linearized model: no training, one pass over the tokens."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofla.data import Images, TokenWindows
from dofla.display import Bar
from dofla.errors import DoflaError
from dofla.feature_maps import PRF
from dofla.feature_maps.heads import FeatureHeads
from dofla.integration.converted import Converted
from dofla.integration.estimators import Reservoir
from dofla.integration.reading import windows_for
from dofla.integration.recorder import AttentionCall, read_windows
from dofla.integration.wrapped import takes_model
from dofla.paper.sampling import leverage_features
from dofla.profiles.tolerance import DEFAULT_LAMBDA


@takes_model("sample features", Bar.stage)
def sample_features(
    student: PreTrainedModel,
    windows: TokenWindows | Images | Tensor | Mapping[str, Tensor],
    *,
    lam: float = DEFAULT_LAMBDA,
    samples: int = 512,
    candidates: int = 4096,
    proposal: str = "data",
    batch_size: int = 4,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | bool = True,
) -> PreTrainedModel:
    """Draw z and alpha of every ``prf`` head from the optimal density (arXiv 2507.03340, section 2, Theorem 3).

    The model runs with softmax attention and a reservoir keeps ``samples`` queries and keys per KV head; then each
    head's features are drawn by :func:`dofla.paper.sampling.leverage_features`, one head independent of the
    others. If anything fails, no feature has changed.

    This is the estimate of K that Theorem 3 is about, and near K at the vectors it was drawn for. Attention sees K
    normalized over keys, and there the rows of short queries count as much as those of long ones, which have nearly
    all the features: alone, without a window, such a student is usually no better than an untrained one.

    Args:
        student: a linearized model all of whose linear layers use the ``prf`` map; changed in place, and returned.
        windows: [N, L], or images as ``{"pixel_values": [N, C, H, W]}``.
        lam: λ, relative to the trace of each head's operator.
        samples: J, vectors per KV head.
        candidates: of which each head's features are chosen.
        proposal: a name in :data:`dofla.paper.sampling.PROPOSALS`.
        batch_size: windows per forward pass.
        seed: of the reservoir and of the draws.
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (stage, done, total) after each batch ("reading") and each layer ("drawing").

    Raises:
        DoflaError: not linearized; a layer with another feature map; NaN in the activations, with layer and batch;
            tokens that are all padding; a number out of range.
    """
    layers = Converted.of(student).layers
    features = {own.name: own.features_per_head for own in Converted.of(student).plan.linear}
    for name, layer in layers.items():
        for feature_map in layer.maps:
            if not isinstance(feature_map, PRF):
                kind = type(feature_map).__name__
                raise DoflaError(f"layer {name} has the feature map {kind}: only prf can be sampled, or distill it")
    if samples < 2:
        raise DoflaError(f"samples is {samples}: at least 2 vectors are needed, 512 is the default")
    windows = windows_for(student, windows)
    reservoirs = {name: Reservoir(samples, len(windows), torch.Generator().manual_seed(seed)) for name in layers}
    scalings: dict[str, float] = {}

    def look(call: AttentionCall, part: Sequence[int]) -> None:
        scalings[call.name] = call.scaling
        reservoirs[call.name].add(call, part)

    read_windows(student, layers, windows, batch_size, look, progress)
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for done, name in enumerate(layers, start=1):
        vectors = reservoirs[name].vectors  # [Hkv, J, d]
        if vectors.shape[1] == 0:
            raise DoflaError(f"layer {name} saw padding only: give windows with real tokens")
        drawn[name] = [
            leverage_features(
                head, scalings[name], count, lam, candidates=candidates, proposal=proposal, generator=generator
            )
            for head, count in zip(vectors, features[name], strict=True)
        ]
        if callable(progress):
            progress("drawing", done, len(layers))
    for name, layer in layers.items():
        for group in layer.groups:
            assert isinstance(group, FeatureHeads)
            assert isinstance(group.map, PRF)
            with torch.no_grad():
                for row, head in enumerate(group.heads):
                    for own, found in zip((group.map.z, group.map.log_alpha), drawn[name][head], strict=True):
                        own[row].copy_(found)
    return student
