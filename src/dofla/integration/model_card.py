"""The model card of a converted model: README.md, made from its plan and its record."""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers.models.auto import modeling_auto

import dofla
from dofla.display import factor, size
from dofla.integration.record import Figure, Record
from dofla.plans.plan import Plan, held_out_line
from dofla.storage.files import replacing

README = "README.md"
_TEMPLATE = Path(__file__).with_suffix(".md")
_MARK = "<!-- dofla wrote this card and keeps it up to date, as long as nothing above is changed by hand. {} -->\n"
_TASKS = (
    ("AutoModelForCausalLM", "text-generation", "FOR_CAUSAL_LM_"),
    ("AutoModelForMaskedLM", "fill-mask", "FOR_MASKED_LM_"),
    ("AutoModelForSequenceClassification", "text-classification", "FOR_SEQUENCE_CLASSIFICATION_"),
    ("AutoModelForImageClassification", "image-classification", "FOR_IMAGE_CLASSIFICATION_"),
    ("AutoModel", "image-feature-extraction", "FOR_IMAGE_"),
    ("AutoModel", "feature-extraction", ""),
)
_CONTEXT = 1024
logger = logging.getLogger(__name__)


def write_card(
    folder: Path, plan: Plan, record: Record, *, adapter: bool, name: str | None = None, tags: Sequence[str] = ()
) -> None:
    """Write the README.md of a converted model's folder, which holds an ``adapter`` or a standalone model, unless there
    is one that a person has written or changed. Others will load it by ``name``, default the folder's."""
    path = folder / README
    if by_hand(path):
        logger.info("%s was written or changed by hand, and stays as it is", path)
        return
    card = model_card(plan, record, adapter=adapter, name=name or folder.name, tags=tags)
    # Once there and back, so that a copy which passes through huggingface_hub is the same to the byte.
    text = str(ModelCard(str(card))).rstrip() + "\n\n"
    with replacing(path) as partial:
        partial.write_text(text + _MARK.format(_digest(text)), encoding="utf-8", newline="\n")


def by_hand(path: Path) -> bool:
    """True if the file is there and is not, to the letter, what :func:`write_card` wrote."""
    try:
        *lines, last = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return False
    except ValueError:
        return True
    return last != _MARK.format(_digest("".join(lines)))


def model_card(plan: Plan, record: Record, *, adapter: bool, name: str, tags: Sequence[str] = ()) -> ModelCard:
    """The card itself; see :func:`write_card`."""
    auto_class, task = _task(record.model_class)
    causal = task == "text-generation"
    base = record.base_model or Path(plan.model).name
    title = f"{base.rpartition('/')[2] or 'model'}-dofla"
    dtype = getattr(torch, record.dtype, torch.float32)
    state = plan.cache_bytes(_CONTEXT, dtype)
    data = ModelCardData(
        base_model=record.base_model or None,
        license=record.license.get("license"),
        license_name=record.license.get("license_name"),
        license_link=record.license.get("license_link"),
        library_name="dofla",
        pipeline_tag=task,
        tags=list(dict.fromkeys(["dofla", "kv-cache" if plan.compressed else "linear-attention", *tags])),
        datasets=record.datasets or None,
        metrics=list(dict.fromkeys(figure.metric for figure in record.figures)) or None,
    )
    if record.figures:  # whose index alone says the name
        data.model_name = title
        data.eval_results = [
            EvalResult(
                task_type=task or "other",
                dataset_type=figure.source.partition(",")[0],
                dataset_name=figure.source,
                metric_type=figure.metric,
                metric_name=figure.label,
                metric_value=round(figure.model, 4),
            )
            for figure in record.figures
        ]
    commands = list(dict.fromkeys(_cell(figure.command) for figure in record.figures))
    return ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        title=title,
        base=f"`{base}`" if base else "A model",
        name=name,
        adapter=adapter,
        auto_class=auto_class,
        causal=causal,
        compressed=bool(plan.compressed),
        bits=_range([layer.bits for layer in plan.compressed]) if plan.compressed else "",
        record=record,
        measured="head_budgets" in plan.made_by,
        state=size(state),
        cache=size(plan.softmax_bytes(_CONTEXT, dtype)),
        grows=len(plan.converted) < len(plan.layers) or plan.growing,
        evicts=plan.evicts,
        factor=factor(plan.softmax_bytes(_CONTEXT, dtype), state),
        plan=list(_plan_lines(plan)),
        context=plan.context,
        new_weights=any(training.weights for training in record.training),
        trained_length=max([x.positions for x in record.training if x.positions], default=None),
        figures=[_figure_row(figure, commands) for figure in record.figures],
        commands=commands,
        versions=f"dofla {dofla.__version__}, transformers {transformers.__version__}, torch {torch.__version__}",
    )


def _task(model_class: str) -> tuple[str, str | None]:
    """The class that opens a model, an Auto class if one does, and the pipeline it is for."""
    for auto_class, task, kind in _TASKS:
        if model_class in getattr(modeling_auto, f"MODEL_{kind}MAPPING_NAMES").values():
            return auto_class, task
    return model_class or "AutoModel", None


def _made_by(plan: Plan) -> Iterator[str]:
    for key, value in plan.made_by.items():
        if key == "head_budgets":  # plan.json has them all
            head_budgets = [share for own in value.values() for share in own]
            yield f"KV heads have {min(head_budgets):.2f} to {max(head_budgets):.2f} times the bytes of an even split"
        elif key == "size":
            yield f"size {size(value)}"
        elif key == "retrieval_heads":
            yield f"{sum(map(len, value.values()))} retrieval heads"
        elif key not in ("normalization", "held_out", "evict"):
            yield f"{key} {value}"


def _plan_lines(plan: Plan) -> Iterator[str]:
    """The plan in a few lines; ranges are over all KV heads."""
    kept = len(plan.layers) - len(plan.converted)
    kind = "have a compressed cache" if plan.compressed else "have linear attention"
    yield f"Attention layers: {len(plan.layers)}, of which {len(plan.converted)} {kind}" + (
        f" and {kept} keep softmax attention." if kept else "."
    )
    bounded = [size for layer in plan.compressed for size in layer.sizes if not size.grows]
    counts = {
        "features": [count for layer in plan.linear for count in layer.features_per_head],
        "tokens in the local window": [size[-2] for layer in plan.linear for size in layer.sizes]
        + [size.window for layer in plan.compressed for size in layer.sizes],
        "attention sinks": [size[-1] for layer in plan.linear for size in layer.sizes]
        + [size.sinks for layer in plan.compressed for size in layer.sizes],
        "older tokens": [size.newest + size.heavy_hitters for size in bounded],
        "of these heavy hitters": [size.heavy_hitters for size in bounded],
    }
    ranges = [f"{_range(numbers)} {name}" for name, numbers in counts.items() if any(numbers)]
    if ranges:
        yield f"Per KV head: {', '.join(ranges)}."
    if plan.growing:
        yield f"{plan.growing} KV heads hold every token."
    kinds = {layer.feature_map for layer in plan.linear if any(layer.features_per_head)}
    if kinds:
        yield f"Feature map: {', '.join(sorted(kinds))}."
    if made_by := _cell(", ".join(_made_by(plan))):
        yield f"Made with {made_by}."
    if plan.compressed and "held_out" in plan.made_by:
        yield f"{held_out_line(plan.made_by['held_out'])}."


def _range(numbers: Sequence[float]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _figure_row(figure: Figure, commands: list[str]) -> list[str]:
    original = "" if figure.original is None else f"{figure.original:.4g}"
    interval = f" ({' to '.join(f'{end:.4g}' for end in figure.interval)})" if figure.interval else ""
    number = commands.index(_cell(figure.command)) + 1
    cells = (figure.label, f"{figure.model:.4g}{interval}", original, figure.source, f"command {number}")
    return [_cell(cell) for cell in cells]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
