"""peft's LoRA on a student: train, merge, save, open. The feature maps stay as they are; the state does not grow.

pip install 'dofla[finetune]'
python examples/lora.py [STUDENT]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from opening import open_student, some_text
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM


def main(name: str = "demo") -> tuple[list[float], float]:
    model, tokenizer = open_student(name)
    tokens = some_text(tokenizer, windows=4, length=128, seed=7)
    torch.manual_seed(0)
    learner = get_peft_model(model.float(), LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    optimizer = torch.optim.AdamW((p for p in learner.parameters() if p.requires_grad), lr=3e-3)
    losses = []
    for _ in range(4):
        loss = learner(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print("loss", " ".join(f"{loss:.3f}" for loss in losses))

    merged = learner.merge_and_unload()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        merged.save_pretrained(Path(folder) / "tuned")
        opened = AutoModelForCausalLM.from_pretrained(Path(folder) / "tuned")
        after = opened(input_ids=tokens, labels=tokens).loss.item()
    print(f"merged, saved and opened: {after:.3f}")
    return losses, after


if __name__ == "__main__":
    main(*sys.argv[1:])
