"""Whole models with linear attention beside softmax attention: prefill, decoding, peak memory and cache, by prompt.

    python benchmarks/speed/model.py
    python benchmarks/speed/model.py --compressed 1.5MiB --models smollm2-135m --batches 1   # what dofla.compress makes

Models in the shapes of GPT-2-small, SmolLM2-135M and Llama-3.2-1B, with random weights, once as they are (transformers'
"sdpa" attention and its default dynamic cache) and once linearized: the same number of prf features for every KV head
of every layer, or, with --compressed, a compressed cache of that size. For each model,
batch and prompt, in turn:

- prefill: prompt tokens per second, over all sequences, read through the cache --chunk tokens at a time (again over all
  sequences, for both kinds alike), so that activations do not dominate memory; logits of the last position only. From
  its second chunk on, softmax attention is given an explicit mask, as transformers does;
- decode: mean tokens per second over --new-tokens given tokens fed one by one after the prompt and one more token;
- peak: the largest memory while doing both, beyond that of the model ready to run. Every measurement has a process of
  its own. On a CPU it is resident memory, the pages of the libraries' code that first run then included;
- cache: keys and values, or states, after the prompt.

Ratios above 1 mean that linear attention is faster. A measurement over the time or the memory limit is stopped, and
longer prompts of its kind are then not run. What is timed is timed once, after a warm-up on a few tokens; a line below
the row tells of a measurement whose threads waited for a processor that others used, and which is therefore too slow.
"""

from __future__ import annotations

import ctypes
import json
import math
import platform
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

import dofla
from dofla.integration.cache import CACHE_ARGUMENT, cache_bytes
from dofla.plans.layers import FeatureLayer
from dofla.plans.plan import Plan

MODELS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "gpt2": (GPT2Config, {}),
    "smollm2-135m": (
        LlamaConfig,
        {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
        | {"intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True},
    ),
    "llama-3.2-1b": (
        LlamaConfig,
        {"num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True},
    ),
}
PROMPTS = [1024, 2048, 4096, 8192, 16384, 32768, 65536]
KINDS = ("linear", "softmax")
SPEEDS = {"prefill": "prefill_tokens_per_second", "decode": "decode_tokens_per_second"}
WARM_UP = 64
BUSY = 0.05
"""Share of the time spent waiting for a processor above which a measurement is reported as disturbed."""
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Job:
    """One measurement, in words that a child process can be given."""

    model: str
    kind: str
    batch: int
    tokens: int
    new_tokens: int
    chunk: int
    dtype: str
    device: str
    seconds: float
    memory_gib: float
    features: int = 0
    window: int = 0
    sinks: int = 0
    compressed: str = ""


def main(
    models: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODELS)}; default all.")] = None,
    prompts: Annotated[list[int] | None, typer.Option(help="Prompt lengths; default 1024 to 65536.")] = None,
    batches: Annotated[list[int] | None, typer.Option(help="Sequences at once; default 1 and 16.")] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded.")] = 16,
    chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens read at once, over all sequences.")] = 4096,
    features: Annotated[int, typer.Option(help="Per KV head.")] = 64,
    window: int = 0,
    sinks: int = 0,
    compressed: Annotated[str, typer.Option(help="Size of a compressed cache, instead of features: 1.5MiB.")] = "",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16 (bf16).")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="Limit of one measurement, building the model not included.")] = 60,
    memory_gib: Annotated[float, typer.Option(help="Limit of one measurement, the model not included.")] = 16,
    out: Annotated[str | None, typer.Option(help="JSON file to write.")] = None,
    job: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    if job is not None:
        return run(Job(**json.loads(job)))
    if unknown := set(models or ()) - MODELS.keys():
        raise typer.BadParameter(f"no model {sorted(unknown)[0]!r}: there are {', '.join(MODELS)}")
    dtype = {"bf16": "bfloat16", "fp32": "float32"}.get(dtype, dtype)
    shared = {"new_tokens": new_tokens, "chunk": chunk, "features": features, "window": window, "sinks": sinks}
    shared |= {"compressed": compressed, "dtype": dtype, "device": device, "seconds": seconds, "memory_gib": memory_gib}
    report: dict[str, Any] = {"machine": machine(device), "settings": shared, "rows": [], "crossings": []}
    print(", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    for model in models or MODELS:
        for batch in batches or [1, 16]:
            print_head(Job(model, KINDS[0], batch, 0, **shared))
            rows = []
            for tokens in sorted(prompts or PROMPTS):
                jobs = {kind: Job(model, kind, batch, tokens, **shared) for kind in KINDS}
                results = {kind: next_result(jobs[kind], rows) for kind in KINDS}
                rows.append({"model": model, "batch": batch, "tokens": tokens, **results})
                print_row(rows[-1])
                report["rows"].append(rows[-1])
                save(report, out)
            report["crossings"].append(
                {"model": model, "batch": batch} | {what: crossing(rows, what) for what in SPEEDS}
            )
            for what in SPEEDS:
                print(sentence(rows, what))
            save(report, out)


def machine(device: str) -> dict[str, Any]:
    """What the numbers were measured on."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
    if device.startswith("cuda"):
        name = f"{torch.cuda.get_device_name(device)} on {name}"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "dofla": dofla.__version__}
    return {"processor": name, "threads": torch.get_num_threads(), **versions}


# The parent: one child for each measurement.


def next_result(job: Job, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The measurement, or why it is not made: a shorter prompt was over a limit already, or memory cannot suffice."""
    for row in rows:
        if "note" in row[job.kind]:
            return {"note": f"not run: {row['tokens']} tokens were {row[job.kind]['note']}"}
    dtype = getattr(torch, job.dtype)
    plan = uniform_plan(config_of(job), job)
    cache = job.batch * (plan.softmax_bytes(job.tokens, dtype) if job.kind == "softmax" else plan.state_bytes(dtype))
    if cache > job.memory_gib * GIB:
        return {"note": f"out of memory (over {job.memory_gib:g} GiB: the cache alone takes {cache / GIB:.1f})"}
    return measure(job)


def measure(job: Job) -> dict[str, Any]:
    """Run the job in a process of its own; ``note`` in the result says why it did not end well."""
    command = [sys.executable, __file__, "--job", json.dumps(asdict(job))]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    result: dict[str, Any] = {}
    for line in child.stdout.splitlines():
        if line.startswith("{"):
            result |= json.loads(line)
    if child.returncode == -signal.SIGALRM:
        result["note"] = f"over {job.seconds:g} s"
    elif child.returncode == -signal.SIGKILL:
        result["note"] = "out of memory (killed by the system)"
    elif child.returncode:
        result["note"] = f"stopped by an error (exit status {child.returncode})"
    return result


def config_of(job: Job) -> PretrainedConfig:
    """The model's shape, with room for the prompt and the new tokens."""
    config_class, shape = MODELS[job.model]
    return config_class(**shape, max_position_embeddings=max(2048, job.tokens + job.new_tokens + 1))


def uniform_plan(config: PretrainedConfig, job: Job) -> Plan:
    """The same number of prf features for every KV head."""
    name = "transformer.h.{}.attn" if config.model_type == "gpt2" else "model.layers.{}.self_attn"
    heads = config.num_attention_heads
    kv_heads, dim = getattr(config, "num_key_value_heads", heads), config.hidden_size // heads
    sizes = (kv_heads, dim, dim, job.features, job.window, job.sinks)
    return Plan([FeatureLayer(name.format(i), *sizes) for i in range(config.num_hidden_layers)])


# The child.


def run(job: Job) -> None:
    """Measure, printing what is known as a line of JSON at once; SIGALRM ends the process at the time limit."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = build(job)
    with torch.inference_mode():
        decode(model, prefill(model, job, 2 * WARM_UP * job.batch, WARM_UP * job.batch)[0], job, 1)
        try:
            limit = job.memory_gib
            base, limit = start_counting(job)
            signal.setitimer(signal.ITIMER_REAL, job.seconds)
            before = time.perf_counter(), waiting()
            cache, taken = prefill(model, job, job.batch * job.tokens, job.chunk)
            speed = job.batch * job.tokens / taken
            say(prefill_tokens_per_second=speed, cache_bytes=cache_bytes(cache))
            say(peak_bytes=peak(job) - base, waited_share=waited_share(*before))
            speed = job.batch * job.new_tokens / decode(model, cache, job, job.new_tokens)
            signal.setitimer(signal.ITIMER_REAL, 0)
            say(decode_tokens_per_second=speed, peak_bytes=peak(job) - base, waited_share=waited_share(*before))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            say(note=f"out of memory (over {limit:.3g} GiB)")


def say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def build(job: Job) -> PreTrainedModel:
    """The model with random weights, repeating one block of them: drawing them all would take longer than most runs."""
    config = config_of(job)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, job.dtype), attn_implementation="sdpa"
        ).eval()
    block = 0.02 * torch.randn(2**20)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
                continue
            for part in parameter.view(-1).split(len(block)):
                part.copy_(block[: len(part)])
    model.to(job.device)
    if job.kind == "softmax":
        return model
    if job.compressed:
        return dofla.compress(
            model, random_tokens(model, job, 256)[:1], job.compressed, head_budgets="even", retrieval_heads=0
        )
    return dofla.linear.linearize(model, uniform_plan(config, job))


def prefill(model: PreTrainedModel, job: Job, total: int, chunk: int) -> tuple[DynamicCache, float]:
    """The cache after ``total`` tokens over all sequences, ``chunk`` at a time, and the seconds it took."""
    tokens = random_tokens(model, job, total // job.batch)
    cache = DynamicCache(config=model.config)
    started = now(job)
    for part in tokens.split(max(chunk // job.batch, 1), dim=1):
        feed(model, part, cache)
    return cache, now(job) - started


def decode(model: PreTrainedModel, cache: DynamicCache, job: Job, steps: int) -> float:
    """Seconds of that many single tokens; one more goes ahead untimed."""
    first, *rest = random_tokens(model, job, steps + 1).split(1, dim=1)
    feed(model, first, cache)
    started = now(job)
    for token in rest:
        feed(model, token, cache)
    return now(job) - started


def random_tokens(model: PreTrainedModel, job: Job, length: int) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (job.batch, length), device=job.device)


def feed(model: PreTrainedModel, tokens: torch.Tensor, cache: DynamicCache) -> None:
    model(tokens, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})


def now(job: Job) -> float:
    if job.device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def start_counting(job: Job) -> tuple[int, float]:
    """Memory now, from which the peak counts, and the GiB that may come on top, which from here on are enforced."""
    if job.device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        base, total = torch.cuda.memory_allocated(), torch.cuda.get_device_properties(job.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min((base + job.memory_gib * GIB) / total, 1.0))
        return base, min(job.memory_gib, (total - base) / GIB)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what is free but kept would be used unseen
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten: it was building's
    limit = job.memory_gib
    if Path("/proc/self/status").exists():
        limit = min(limit, kibibytes("/proc/meminfo", "MemAvailable") / MIB - 0.5)  # leave the machine some
        most = kibibytes("/proc/self/status", "VmData") * 1024 + int(limit * GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        return kibibytes("/proc/self/status", "VmRSS") * 1024, limit
    return peak(job), limit


def peak(job: Job) -> int:
    """The most memory so far."""
    if job.device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def waiting() -> float:
    """Seconds for which threads of this process were ready to run and had no processor (0 where Linux does not say)."""
    seconds = 0.0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):
            seconds += int(file.read_text().split()[1]) / 1e9
    return seconds


def waited_share(started: float, waited: float) -> float:
    """The share of the time since ``started`` that threads spent waiting, ``waited`` before not counted."""
    return (waiting() - waited) / (time.perf_counter() - started)


def kibibytes(file: str, field: str) -> int:
    return next(int(line.split()[1]) for line in Path(file).read_text().splitlines() if line.startswith(f"{field}:"))


def is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "memory" in text or "bad_alloc" in text


# What is printed.


def print_head(job: Job) -> None:
    beside = f", window {job.window}, {job.sinks} sinks" if job.window or job.sinks else ""
    state = f"a compressed cache of {job.compressed}" if job.compressed else f"{job.features} features{beside}"
    print(f"\n{job.model}, batch {job.batch}, {job.dtype}, {state}")
    print(f"{'':6}{'prefill, tokens/s':>22}{'decode, tokens/s':>22}{'peak, MiB':>15}{'cache, MiB':>15}")
    titles = f"{'linear':>7}{'softmax':>8}{'ratio':>7}"
    print(f"{'tokens':>6}{titles * 2}{'linear':>7}{'softm.':>8}{'linear':>7}{'softm.':>8}", flush=True)


def print_row(row: dict[str, Any]) -> None:
    line = f"{row['tokens']:>6}"
    for what, key in SPEEDS.items():
        ratio = ratio_of(row, what)
        line += f"{number(row['linear'].get(key)):>7}{number(row['softmax'].get(key)):>8}"
        line += f"{'-' if ratio is None else f'{ratio:.2f}x':>7}"
    for key in ("peak_bytes", "cache_bytes"):
        line += f"{number(row['linear'].get(key), MIB):>7}{number(row['softmax'].get(key), MIB):>8}"
    print(line)
    for kind in KINDS:
        if "note" in row[kind]:
            print(f"{'':6} {kind}: {row[kind]['note']}")
        if (share := row[kind].get("waited_share", 0)) > BUSY:
            print(f"{'':6} {kind}: disturbed: threads waited {share:.0%} of the time for a processor")
    sys.stdout.flush()


def number(value: float | None, unit: int = 1) -> str:
    if value is None:
        return "-"
    return f"{value / unit:.0f}" if value / unit >= 99.95 else f"{value / unit:.1f}"


def ratio_of(row: dict[str, Any], what: str) -> float | None:
    """How many times as fast linear attention is, if both were measured."""
    linear, softmax = (row[kind].get(SPEEDS[what]) for kind in KINDS)
    return linear / softmax if linear and softmax else None


def crossing(rows: list[dict[str, Any]], what: str) -> dict[str, Any]:
    """From where on linear attention is faster in every longer row measured with both kinds.

    Returns:
        ``from_tokens``: the first such prompt, or None. ``interpolated``: the length between it and the one before at
        which the ratio is 1, the ratio's logarithm taken to be straight in the logarithm of the length; None without a
        row before. ``shortest`` and ``longest``: the prompts measured with both kinds.
    """
    ratios = [(row["tokens"], ratio) for row in rows if (ratio := ratio_of(row, what)) is not None]
    first = len(ratios)
    while first and ratios[first - 1][1] > 1:
        first -= 1
    between = None
    if 0 < first < len(ratios):
        (low, slower), (high, faster) = ratios[first - 1 : first + 1]
        between = low * (high / low) ** (math.log(1 / slower) / math.log(faster / slower))
    ends = {"shortest": ratios[0][0], "longest": ratios[-1][0]} if ratios else {"shortest": None, "longest": None}
    return {"from_tokens": ratios[first][0] if first < len(ratios) else None, "interpolated": between, **ends}


def sentence(rows: list[dict[str, Any]], what: str) -> str:
    """The crossing in words."""
    found = crossing(rows, what)
    tokens, between = found["from_tokens"], found["interpolated"]
    if found["longest"] is None:
        return f"{what}: no prompt was measured with both kinds"
    if tokens is None:
        text = f"linear is not faster up to {found['longest']} tokens, the longest measured with both"
    elif between is None:
        text = f"from {tokens} tokens on, the shortest measured with both, linear is faster"
    else:
        text = f"from {tokens} tokens on, linear is faster (about {between:.0f} by interpolation in log-length)"
    alone = [row["tokens"] for row in rows if SPEEDS[what] in row["linear"] and SPEEDS[what] not in row["softmax"]]
    return f"{what}: {text}" + (f"; from {alone[0]} on, only linear stayed within the limits" if alone else "")


def save(report: dict[str, Any], out: str | None) -> None:
    if out:
        Path(out).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
