"""Trains the small teacher that ships with dofla: children's stories mixed with documents that need long-range recall.

    python scripts/demo/train_teacher.py --stories data/stories-train.txt.gz

Story files hold documents separated by one blank line. The documents that need recall come from
`documents.py`.
"""

import gzip
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from enum import Enum, StrEnum
from itertools import chain
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import transformers
import typer
from documents import recall_documents, recall_prompts
from recall_initialization import initialize_for_recall
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

END = "<|endoftext|>"
LARGEST_FILE = 8_000_000
# The recall circuit appears far sooner when recall documents come first, short ones before long ones.
FIRST_RECALL_SHARE = 0.8
FIRST_MOST_VILLAGERS, MOST_VILLAGERS = 4, 9
LONGEST_FILLER = 240


class Arch(StrEnum):
    llama = "llama"
    gpt_neox = "gpt_neox"


def main(
    arch: Annotated[Arch, typer.Option(help="Model family.")] = Arch.llama,
    stories: Annotated[Path, typer.Option(help="Training stories.")] = Path("data/stories-train.txt.gz"),
    validation: Annotated[Path, typer.Option(help="Held-out stories.")] = Path("data/stories-val.txt.gz"),
    out: Annotated[Path, typer.Option(help="Folder to write; replaced when done.")] = Path("src/dofla/runs/demo/model"),
    vocabulary: int = 2048,
    hidden: int = 256,
    intermediate: int = 640,
    layers: int = 4,
    head_size: int = 32,
    context: int = 512,
    batch: int = 6,
    steps: int = 1200,
    learning_rate: float = 1e-3,
    warmup: int = 100,
    weight_decay: float = 0.1,
    recall_share: Annotated[float, typer.Option(help="Share of recall documents after the curriculum.")] = 0.2,
    curriculum: Annotated[float, typer.Option(help="Share of the steps that the curriculum takes.")] = 0.3,
    seed: int = 0,
    bf16: Annotated[bool, typer.Option(help="Autocast to bfloat16: quicker where the CPU has AMX.")] = True,
    report_every: int = 150,
) -> None:
    """Train a teacher and write model, tokenizer and training.json."""
    settings = {name: _plain(value) for name, value in locals().items()}
    started = time.perf_counter()
    torch.manual_seed(seed)

    tokenizer = train_tokenizer(read_documents(stories) + recall_documents(4000, seed), vocabulary, context)
    story_rows = cut_rows(tokenizer, read_documents(stories), context, count=None)
    held_out = {
        "stories": cut_rows(tokenizer, read_documents(validation), context, count=32),
        "recall": cut_rows(tokenizer, recall_documents(64, seed=seed + 1), context, count=12),
    }
    model = build_model(arch, tokenizer, hidden, intermediate, layers, head_size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters:,} parameters, {story_rows.numel():,} story tokens", flush=True)

    optimizer = torch.optim.AdamW(
        parameter_groups(model, weight_decay), lr=learning_rate, betas=(0.9, 0.98), fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, warmup, steps))
    batches = mixed_batches(tokenizer, story_rows, context, batch, steps, recall_share, curriculum, seed)
    figures: list[dict[str, float]] = []
    for step, rows in enumerate(batches, start=1):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = model(rows, labels=rows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % report_every == 0 or step == steps:
            seconds = time.perf_counter() - started
            figures.append(
                {"step": step, "seconds": round(seconds), "loss": loss.item(), **evaluate(model, tokenizer, held_out)}
            )
            print("  ".join(f"{name} {value:.4g}" for name, value in figures[-1].items()), flush=True)

    record = {
        "settings": settings,
        "parameters": parameters,
        "tokens": steps * batch * context,
        "seconds": round(time.perf_counter() - started),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "figures": figures,
    }
    save(model, tokenizer, record, out, held_out)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return value.name if isinstance(value, Path) else value


def read_documents(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [document.strip() for document in file.read().split("\n\n") if document.strip()]


def train_tokenizer(documents: list[str], vocabulary: int, context: int) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END, eos_token=END, pad_token=END, model_max_length=4 * context
    )


def cut_rows(tokenizer: PreTrainedTokenizerFast, documents: list[str], context: int, count: int | None) -> torch.Tensor:
    """Documents one after another, each behind an end-of-text token, cut into rows of ``context`` tokens."""
    encoded = tokenizer(documents, add_special_tokens=False).input_ids
    stream = torch.tensor(list(chain.from_iterable([tokenizer.bos_token_id, *ids] for ids in encoded)))
    return stream[: len(stream) // context * context].view(-1, context)[:count]


def build_model(
    arch: Arch, tokenizer: PreTrainedTokenizerFast, hidden: int, intermediate: int, layers: int, head_size: int
) -> torch.nn.Module:
    config = transformers.AutoConfig.for_model(
        arch.value,
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // head_size,
        max_position_embeddings=2048,
        initializer_range=0.03,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # The initialization tells neighbors apart by rotary phase, which GPT-NeoX gives a quarter of each head only.
        **({"rotary_pct": 1.0} if arch is Arch.gpt_neox else {}),
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    initialize_for_recall(model)
    return model


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Norm weights and biases go without weight decay."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def learning_rate_factor(step: int, warmup: int, steps: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))


def mixed_batches(
    tokenizer: PreTrainedTokenizerFast,
    story_rows: torch.Tensor,
    context: int,
    batch: int,
    steps: int,
    recall_share: float,
    curriculum: float,
    seed: int,
) -> Iterator[torch.Tensor]:
    """Rows of stories and rows of recall documents, as many of each as the curriculum says."""
    rng = Random(seed)
    story_order = endless_shuffle(len(story_rows), rng)
    for step in range(steps):
        progress = min(1.0, step / max(1, curriculum * steps))
        # Short rows first: nothing is lost on short documents, and more of them make a batch.
        length = context // 4 if progress < 0.5 else context
        count = batch * context // length
        recall_count = count * (FIRST_RECALL_SHARE + (recall_share - FIRST_RECALL_SHARE) * progress)
        recall_count = int(recall_count + rng.random())
        longest_filler = round(LONGEST_FILLER * progress)
        most_villagers = round(FIRST_MOST_VILLAGERS + (MOST_VILLAGERS - FIRST_MOST_VILLAGERS) * progress)
        rows = [recall_row(tokenizer, longest_filler, most_villagers, length, rng) for _ in range(recall_count)]
        rows += [story_rows[next(story_order)][:length] for _ in range(count - recall_count)]
        yield torch.stack(rows)


def endless_shuffle(count: int, rng: Random) -> Iterator[int]:
    while True:
        yield from rng.sample(range(count), count)


def recall_row(
    tokenizer: PreTrainedTokenizerFast, longest_filler: int, most_villagers: int, length: int, rng: Random
) -> torch.Tensor:
    """A row that begins where a document begins, so that its introductions are not cut off."""
    tokens: list[int] = []
    while len(tokens) < length:
        [document] = recall_documents(1, rng.getrandbits(48), (0, longest_filler), (3, most_villagers))
        tokens += [tokenizer.bos_token_id, *tokenizer.encode(document, add_special_tokens=False)]
    return torch.tensor(tokens[:length])


@torch.no_grad()
def evaluate(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, held_out: dict[str, torch.Tensor]
) -> dict[str, float]:
    model.eval()
    figures = {
        f"{name}_loss": sum(model(rows, labels=rows).loss.item() for rows in split.split(8)) / len(split.split(8))
        for name, split in held_out.items()
    }
    for distance in (60, 300):
        prompts = recall_prompts(32, distance, tokenizer, seed=distance)
        figures[f"recall_at_{distance}"] = sum(recalls(model, tokenizer, *prompt) for prompt in prompts) / len(prompts)
    model.train()
    return figures


def recalls(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, prompt: str, answer: str) -> bool:
    """Whether greedy decoding gives the answer: every one of its tokens is the likeliest after those before it."""
    asked = tokenizer.encode(END + prompt, add_special_tokens=False)
    expected = tokenizer.encode(" " + answer, add_special_tokens=False)
    logits = model(torch.tensor([asked + expected])).logits[0]
    return logits[len(asked) - 1 : -1].argmax(-1).tolist() == expected


def save(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    record: dict[str, Any],
    out: Path,
    held_out: dict[str, torch.Tensor],
) -> None:
    """Write everything to a folder beside ``out`` and rename it, having loaded it back and measured it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".teacher-") as scratch:
        folder = Path(scratch) / "teacher"
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        if size > LARGEST_FILE:
            raise typer.BadParameter(
                f"the weights take {size:,} bytes, more than {LARGEST_FILE:,}: choose a smaller shape"
            )
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        record["written"] = evaluate(loaded, AutoTokenizer.from_pretrained(folder), held_out)
        (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if out.exists():
            if (out / "README.md").exists():
                shutil.copy(out / "README.md", folder)  # written by hand; tests hold its figures against training.json
            shutil.rmtree(out)
        folder.rename(out)
    print(f"wrote {out} ({size:,} bytes of weights): {record['written']}")


if __name__ == "__main__":
    typer.run(main)
