"""Tables 4, 5 and 12: seconds of generating, of a training sample, and of all the feature training."""

import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from dofla.distillation import distill
from dofla.integration.sites import attention_sites
from dofla.integration.surgery import linearize, restore
from dofla.paper import published
from dofla.paper.bench import Bench
from dofla.paper.methods import LOSSES, STRATEGIES, baselines, trained
from dofla.paper.table import Figure, Table
from dofla.plans.layers import FeatureLayer
from dofla.plans.plan import Plan
from dofla.runs.recipe import StudentSpec

_PROMPT, _REPEATS = 16, 2
_CONTEXTS = (1_000, 16_000)


def generation_time(bench: Bench) -> Table:
    """Table 4: seconds for a sequence; and the operations of attention, which reviewers asked for."""
    tokens = bench.study.cost.tokens
    shown = [("Original", None), *((label, trained(label, "softmax")) for label in STRATEGIES)]
    shown += [(spec.name, spec) for spec in baselines()]
    record = bench.measured(bench.folder / "cost" / "generation.json", lambda: _generation(bench, shown, tokens))
    timed = record["rows"]
    rows = []
    for name, row in timed.items():
        relative = Figure.of(row["seconds"] / timed["Original"]["seconds"], 2)
        operations = [Figure.of(n / 1e6, 2) for n in row["operations"]]
        rows.append([name, Figure.of(row["seconds"], 2), relative, *operations])
    what = f"a sequence of {tokens} tokens" if bench.is_language_model else "reading the held-out windows"
    return Table(
        f"Table 4: seconds for {what}",
        ["model", "seconds", "× original", *(f"MFLOP a token at {n:,}" for n in _CONTEXTS)],
        rows,
        ["GPT-2, 1,000 tokens", "seconds"],
        [list(row) for row in published.GENERATION.items()],
        [
            f"best of {_REPEATS}, greedy, with cache, batch 1, {record['threads']} thread(s); students untrained, "
            "which changes no time",
            "MFLOP: of attention alone (scores or features, state and read-out), by count; reading a prompt is where "
            "linear attention gains most, see docs/results/speed.md",
        ],
    )


def _generation(bench: Bench, shown: list[tuple[str, StudentSpec | None]], tokens: int) -> dict[str, Any]:
    model, rows = bench.students.opened.model, {}
    sites = attention_sites(model)
    for name, spec in shown:
        plan = None if spec is None else bench.students.plan(spec)
        with bench.view.progress(f"generate, {name}"), _linearized(model, plan):
            seconds = _seconds(bench, model, tokens)
        rows[name] = {"seconds": seconds, "operations": [_operations(sites, plan, n) for n in _CONTEXTS]}
    return {"rows": rows, "tokens": tokens, "threads": torch.get_num_threads()}


@contextmanager
def _linearized(model: PreTrainedModel, plan: Plan | None) -> Iterator[None]:
    """Within the block a model is linearized, and untrained; without a plan it stays as it is."""
    with ExitStack() as stack:
        if plan is not None:
            linearize(model, plan)
            stack.callback(restore, model)
        yield


def _seconds(bench: Bench, model: PreTrainedModel, tokens: int) -> float:
    windows, times = bench.students.opened.validation, []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        with torch.inference_mode():
            if bench.is_language_model:
                prompt = windows.input_ids[:1, :_PROMPT].to(model.device)
                options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
                model.generate(  # type: ignore[operator] # of their GenerationMixin
                    prompt, attention_mask=torch.ones_like(prompt), **options
                )
            else:
                for part in torch.arange(len(windows)).split(bench.study.evaluate.batch_size):
                    model(**{k: v.to(model.device) for k, v in windows.batch(part).items()})
        times.append(time.perf_counter() - started)
    return min(times)


def _operations(sites: dict, plan: Plan | None, context: int) -> int:
    """Floating-point operations of attention for one more token, a multiplication and an addition each counted."""
    total = 0
    for name, site in sites.items():
        layer = None if plan is None else plan[name]
        if not isinstance(layer, FeatureLayer):
            total += 2 * site.heads * context * (site.head_dim + site.value_dim)
            continue
        share = site.heads // site.kv_heads
        for features in layer.features_per_head:
            maps, state, read = (share + 1) * site.head_dim, site.value_dim, share * site.value_dim
            total += 2 * features * (maps + state + read)
    return total


def sample_time(bench: Bench) -> Table:
    """Table 5: milliseconds per training sample."""
    record = bench.measured(bench.folder / "cost" / "sample.json", lambda: _sample(bench))
    base = record["milliseconds"]["softmax"]
    rows = [[loss, Figure.of(value, 1), Figure.of(value / base, 2)] for loss, value in record["milliseconds"].items()]
    options = bench.study.distill
    return Table(
        "Table 5: milliseconds per training sample",
        ["loss", "ms", "× softmax"],
        rows,
        ["GPT-2, 4 A100", "ms"],
        [list(row) for row in published.SAMPLE.items()],
        [
            f"windows of {bench.students.opened.training.length} tokens, {options.batch_size} at a time, "
            f"{options.rows or 'all'} query rows in the layerwise losses, median of {bench.study.cost.steps} steps, "
            f"{record['threads']} thread(s)"
        ],
    )


def _sample(bench: Bench) -> dict[str, Any]:
    # The first step warms up.
    options: dict[str, Any] = vars(bench.study.distill) | {"steps": bench.study.cost.steps + 1}
    model, plan = bench.students.opened.model, bench.students.plan(trained("Fix", "softmax"))
    milliseconds = {}
    for loss in bench.losses:
        times: list[float] = []

        def keep(*_: Any, times: list[float] = times) -> None:
            times.append(time.perf_counter())

        with bench.view.progress(f"time a sample, {loss}"), _linearized(model, plan):
            distill(model, bench.students.opened.training, progress=keep, **options | {"loss": loss})
        steps = [b - a for a, b in itertools.pairwise(times)]
        milliseconds[loss] = 1000 * statistics.median(steps) / (options["batch_size"] * options["accumulate"])
    return {"milliseconds": milliseconds, "threads": torch.get_num_threads()}


def training_time(bench: Bench) -> Table:
    """Table 12: seconds of feature training per method, and of Algorithm 1."""
    losses = bench.losses
    rows: list[list] = []
    for label in STRATEGIES:
        students = [trained(label, loss) for loss in losses]
        for spec in students:
            bench.evaluations(spec)
        seconds = [[bench.students.seconds(spec, seed) for seed in bench.study.seeds] for spec in students]
        rows.append([label, *(Figure.of(own, 0) for own in seconds)])
    bench.profiled()
    rows.append(["Algorithm 1", Figure.of(bench.students.profile_seconds(), 0), *[None] * (len(losses) - 1)])
    options, length = bench.study.distill, bench.students.opened.training.length
    many = f"{options.steps} steps" if options.steps else f"{options.epochs} epoch(s)"
    return Table(
        "Table 12: seconds of feature training",
        ["model", *losses],
        rows,
        ["GPT-2, 4 A100", *LOSSES],
        [[name, *times] for name, times in published.TRAINING_TIME.items()]
        + [[f"Algorithm 1, {name}", seconds, None, None] for name, seconds in published.ALGORITHM_1.items()],
        [f"{many} of {options.batch_size * options.accumulate} windows of {length} tokens; ± half the range of seeds"],
    )
