"""Measuring an original: one pass over the tokens, a sample of each head, then spectra."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofla.data import Images, TokenWindows
from dofla.display import Bar
from dofla.errors import DoflaError, check_choice
from dofla.integration.converted import is_converted
from dofla.integration.estimators import ESTIMATORS
from dofla.integration.reading import windows_for
from dofla.integration.recorder import AttentionCall, read_windows
from dofla.integration.sites import AttentionSite, attention_sites, check_kept, check_left, refuse
from dofla.integration.wrapped import takes_model
from dofla.profiles.profile import LayerProfile, Profile, SkippedLayer
from dofla.profiles.spectrum import NORMALIZATIONS


@takes_model("profile", Bar.stage)
def profile(
    model: PreTrainedModel,
    windows: TokenWindows | Images | Tensor | Mapping[str, Tensor],
    *,
    samples: int | None = None,
    batch_size: int = 4,
    estimator: str = "attention",
    normalization: str | None = None,
    keep_softmax: Sequence[str] = (),
    seed: int = 0,
    progress: Callable[[str, int, int], None] | bool = True,
) -> Profile:
    """Measure the degrees of freedom of a softmax model's attention (arXiv 2507.03340, Algorithm 1, steps 1 to 3).

    Queries and keys are taken after positions and norms. What is kept is a sample of fixed size per KV head, so memory
    does not grow with the text.

    Args:
        model: the original, in any dtype; runs without gradients.
        windows: [N, L], or images as ``{"pixel_values": [N, C, H, W]}``.
        samples: J, per KV head: rows of attention, 64 of each of J / 64 windows (of less than 512 samples fewer rows,
            of 8 windows), 4096 by default; or vectors in one Gram matrix, 1024, which takes longer.
        batch_size: windows per forward pass.
        estimator: ``attention``, the Gram matrix of a window's rows of attention; ``paper``, that of the kernel on
            queries and keys of all the text, as Algorithm 1 has it, which differs much from draw to draw.
        normalization: of the Gram matrix, see :func:`dofla.profiles.spectrum.degrees_of_freedom`; default ``mean`` for
            attention, whose rows have a scale, and ``trace`` for the paper's kernel, which has none.
        keep_softmax: attention modules to leave out, for instance those that linear attention cannot express.
        seed: of the sample.
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (stage, done, total) after each batch ("reading") and each layer ("spectra").

    Raises:
        DoflaError: no attention the interface reaches; a layer that cannot be converted and is not in
            ``keep_softmax``; NaN in the activations, with layer and batch; an unknown estimator or normalization.
    """
    check_choice("estimator", estimator, ESTIMATORS)
    normalization = normalization or ESTIMATORS[estimator].normalization
    check_choice("normalization", normalization, NORMALIZATIONS)
    samples = ESTIMATORS[estimator].samples if samples is None else samples
    if samples < 2:
        raise DoflaError(f"samples is {samples}: at least 2 are needed, {ESTIMATORS[estimator].samples} is the default")
    if is_converted(model):
        raise DoflaError("the model is converted already: call dofla.restore(model) and profile the original")
    windows = windows_for(model, windows)
    sites, skipped = _choose(model, keep_softmax)
    made = ESTIMATORS[estimator]
    estimators = {name: made(samples, len(windows), torch.Generator().manual_seed(seed)) for name in sites}

    def look(call: AttentionCall, part: Sequence[int]) -> None:
        estimators[call.name].add(call, part)

    read_windows(model, sites, windows, batch_size, look, progress)
    layers = []
    for done, (name, site) in enumerate(sites.items(), start=1):
        spectra = estimators[name].spectra(site.scaling)
        shape = {k: getattr(site, k) for k in ("heads", "kv_heads", "head_dim", "value_dim", "scaling", "causal")}
        layers.append(LayerProfile(name, **shape, spectra=spectra))
        if callable(progress):
            progress("spectra", done, len(sites))
    return Profile(
        model=model.config._name_or_path or type(model).__name__,
        layers=layers,
        samples=samples,
        tokens=windows.tokens,
        source=windows.source,
        seed=seed,
        normalization=normalization,
        skipped=skipped,
        dtype=str(model.dtype).removeprefix("torch."),
        estimator=estimator,
    )


def _choose(model: PreTrainedModel, keep_softmax: Sequence[str]) -> tuple[dict[str, AttentionSite], list[SkippedLayer]]:
    sites, chosen, skipped = attention_sites(model), {}, []
    check_kept(sites, keep_softmax)
    for name, site in sites.items():
        if name in keep_softmax or site.linear_time or site.shares_keys:
            shares = "shares keys and values with other layers" if site.shares_keys else "asked for"
            reason = "attends to a bounded window already" if site.linear_time else shares
            skipped.append(SkippedLayer(name, site.kv_heads, site.head_dim, site.value_dim, reason))
        else:
            refuse(site)
            chosen[name] = site
    check_left(model.config, type(model).__name__, chosen)
    return chosen, skipped
