"""transformers' Trainer and peft on a compressed model: LoRA on a multiple-choice task, merged, saved, opened.

    pip install 'dofla[finetune]'
    python examples/finetune.py [MODEL] [TRAIN.jsonl TEST.jsonl]

The task files are those of `dofla evaluate --tasks`. Without them, questions made here: what does the animal say?
"""

from __future__ import annotations

import random
import sys
import tempfile

from opening import open_converted
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from dofla.tasks import STYLES, Item, Task, load_task, score

SOUNDS = {"dog": "woof", "cat": "meow", "cow": "moo", "duck": "quack", "pig": "oink", "sheep": "baa"}


def made(count: int, seed: int) -> Task:
    """Questions about two animals in a story; the answer does not stand in it."""
    rng, items = random.Random(seed), []
    for _ in range(count):
        (one, sound), (other, _) = rng.sample(sorted(SOUNDS.items()), 2)
        choices = rng.sample(sorted(SOUNDS.values()), len(SOUNDS))
        text = f"There was a {one} and a {other}. They liked to play in the park. The {one} said"
        items.append(Item(text, tuple(choices), choices.index(sound)))
    return Task("animals", "plain", items)


def rows(task: Task, tokenizer) -> list[dict[str, list[int]]]:
    """Questions with their right answers, whose tokens alone are labels."""
    found = []
    for item in task.items:
        question, answer = STYLES[task.style](item)[item.answer]
        before, whole = tokenizer.encode(question), tokenizer.encode(question + answer)
        found.append({"input_ids": whole, "labels": [-100] * len(before) + whole[len(before) :]})
    return found


def main(name: str = "demo", train: str | None = None, test: str | None = None) -> tuple[float, float]:
    model, tokenizer = open_converted(name)
    learned, tested = (load_task(train), load_task(test)) if train and test else (made(64, 0), made(32, 1))

    def accuracy(model) -> float:
        return score(model, tokenizer, [tested])[0].metrics["acc"].value

    before = accuracy(model)
    learner = get_peft_model(model.float(), LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    with tempfile.TemporaryDirectory() as folder:
        options = {"num_train_epochs": 4, "per_device_train_batch_size": 8, "learning_rate": 3e-3, "warmup_steps": 2}
        options |= {"save_strategy": "no", "logging_steps": 8, "use_cpu": model.device.type == "cpu"}
        arguments = TrainingArguments(folder, disable_tqdm=True, **options)
        Trainer(learner, arguments, DataCollatorForSeq2Seq(tokenizer), rows(learned, tokenizer)).train()
        learner.merge_and_unload().save_pretrained(folder)
        after = accuracy(AutoModelForCausalLM.from_pretrained(folder))
    print(f"accuracy {before:.1%}; fine-tuned, merged, saved and opened {after:.1%}")
    return before, after


if __name__ == "__main__":
    main(*sys.argv[1:])
