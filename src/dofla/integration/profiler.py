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
from dofla.integration.positions import positions_of
from dofla.integration.reading import windows_for
from dofla.integration.recorder import AttentionCall, read_windows
from dofla.integration.sites import AttentionSite, attention_sites, check_kept, check_left, refuse
from dofla.integration.wrapped import takes_model
from dofla.profiles.profile import HeadStatistics, LayerProfile, Profile, SkippedLayer
from dofla.profiles.spectrum import NORMALIZATIONS

MASS_FIRST = (1, 4)
MASS_LAST = (4, 8, 16, 32)
_ROWS = 32
"""Query rows per sequence whose attention weights are looked at; all rows would cost more than the model itself."""


class Tally:
    """Running statistics of one layer, per KV head."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.sums: dict[str, Tensor] = {}
        self.peaks: dict[str, Tensor] = {}
        self.tokens, self.rows = 0, 0

    def add(self, call: AttentionCall) -> None:
        """Look at one call: norms of all vectors, attention weights of a few rows."""
        batch, kv_heads, length, _ = call.key.shape
        groups = call.query.shape[1] // kv_heads
        real = call.real_rows()
        self.tokens += int(real.sum())
        for name, vectors in (("query_norm", call.query), ("key_norm", call.key)):
            norms = vectors.float().norm(dim=-1).masked_fill(~real.unsqueeze(1), 0)
            norms = norms.view(batch, kv_heads, -1, length)
            self._add(f"{name}_mean", norms.sum(dim=(0, 2, 3)) / norms.shape[2])
            peak = norms.amax(dim=(0, 2, 3))
            self.peaks[f"{name}_max"] = torch.maximum(self.peaks.get(f"{name}_max", peak), peak)

        rows = call.random_rows(_ROWS, self.generator)
        counted = real[:, rows]  # [B, R]
        self.rows += int(counted.sum())
        log_weights = call.log_weights(rows).view(batch, kv_heads, groups, len(rows), length)
        weights = log_weights.exp() * counted[:, None, None, :, None]
        self._add("entropy", self._per_head(-(weights * log_weights.clamp_min(-1e4)).sum(dim=-1)))
        first = real.cumsum(-1)[:, None, :]  # rank of each key among the real ones, from 1
        distance = rows[:, None] - torch.arange(length, device=rows.device)
        for n in MASS_FIRST:
            self._add(f"first {n}", self._mass(weights, (first <= n).expand(-1, len(rows), -1)))
        for n in MASS_LAST:
            near = distance < n if call.causal else distance.abs() < n
            self._add(f"last {n}", self._mass(weights, near.expand(batch, -1, -1)))

    def _mass(self, weights: Tensor, where: Tensor) -> Tensor:
        return self._per_head((weights * where[:, None, None]).sum(dim=-1))

    def _per_head(self, values: Tensor) -> Tensor:
        return values.mean(dim=2).sum(dim=(0, 2))

    def _add(self, name: str, values: Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0) + values.double()

    def statistics(self) -> list[HeadStatistics]:
        """The means so far, one entry per KV head."""
        means = {k: v / (self.tokens if k.endswith("_mean") else self.rows) for k, v in self.sums.items()}
        result = []
        for head in range(len(means["entropy"])):
            plain = {k: round(v[head].item(), 5) for k, v in (means | self.peaks).items()}
            first = {n: plain.pop(f"first {n}") for n in MASS_FIRST}
            last = {n: plain.pop(f"last {n}") for n in MASS_LAST}
            result.append(HeadStatistics(**plain, mass_first=first, mass_last=last))
        return result


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
    tallies = {name: Tally(torch.Generator().manual_seed(seed)) for name in sites}

    def look(call: AttentionCall, part: Sequence[int]) -> None:
        estimators[call.name].add(call, part)
        tallies[call.name].add(call)

    read_windows(model, sites, windows, batch_size, look, progress)
    layers = []
    for done, (name, site) in enumerate(sites.items(), start=1):
        spectra = estimators[name].spectra(site.scaling)
        shape = {k: getattr(site, k) for k in ("heads", "kv_heads", "head_dim", "value_dim", "scaling", "causal")}
        layers.append(LayerProfile(name, **shape, spectra=spectra, statistics=tallies[name].statistics()))
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
        positions=positions_of(model),
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
