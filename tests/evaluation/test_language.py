"""Next-token figures against the model's own loss."""

import math

import pytest
import torch
from students import student_of

import dofla
from dofla.data import TokenWindows
from dofla.errors import DoflaError
from dofla.evaluation.language import LEAST_WINDOWS, bootstrap_interval, next_token_figures

LENGTH = 20


def own_loss(model, batch):
    labels = batch["input_ids"]
    if "attention_mask" in batch:
        labels = labels.masked_fill(batch["attention_mask"] == 0, -100)
    with torch.no_grad():
        return model(**batch, labels=labels).loss.item()


@pytest.mark.parametrize(("padded", "batch_size"), [(False, 2), (True, 5)])
def test_losses_are_those_the_models_report_themselves_of_tokens_that_are_no_padding(tiny, padded, batch_size):
    batch = tiny.padded(5, LENGTH, "right") if padded else {"input_ids": tiny.tokens(5, LENGTH)}
    original, student = own_loss(tiny.llama(), batch), student_of(tiny)
    figures = next_token_figures(student, TokenWindows.of(batch), batch_size=batch_size)
    real = batch["attention_mask"] if padded else torch.ones(5, LENGTH)
    assert figures["tokens"] == int((real.sum(1) - 1).sum())
    assert figures["original_loss"] == pytest.approx(original, rel=1e-5)
    assert figures["loss"] == pytest.approx(own_loss(student, batch), rel=1e-5)
    assert figures["loss_increase"] == pytest.approx(figures["loss"] - figures["original_loss"])
    assert abs(figures["loss_increase"]) > 1e-3


def test_texts_padded_on_the_left_give_the_loss_of_the_texts_alone(tiny):
    batch = tiny.padded(4, LENGTH, "left")
    student = student_of(tiny)
    figures = next_token_figures(student, TokenWindows.of(batch), batch_size=4)
    texts = [ids[mask.bool()].unsqueeze(0) for ids, mask in zip(*batch.values(), strict=True)]
    alone = [next_token_figures(student, TokenWindows.of(text)) for text in texts]
    assert figures["tokens"] == sum(text["tokens"] for text in alone)
    # Only the teacher's: rotary scores know distances, while features also see how far the padding shifts a text.
    expected = sum(text["tokens"] * text["original_loss"] for text in alone) / figures["tokens"]
    assert figures["original_loss"] == pytest.approx(expected, rel=1e-5)


def test_divergence_and_agreement_are_means_over_positions(tiny):
    tokens = tiny.tokens(3, LENGTH)
    student = student_of(tiny)
    with torch.no_grad():
        ours = student(tokens).logits[:, :-1].double().log_softmax(-1)
        with dofla.original(student):
            theirs = student(tokens).logits[:, :-1].double().log_softmax(-1)
    figures = next_token_figures(student, TokenWindows.of(tokens))
    kl = (theirs.exp() * (theirs - ours)).sum(-1).mean().item()
    assert figures["kl"] == pytest.approx(kl, rel=1e-4)
    agreement = (ours.argmax(-1) == theirs.argmax(-1)).double().mean().item()
    assert figures["top1_agreement"] == pytest.approx(agreement)
    assert 0 < agreement < 1


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_batch_size_plays_no_part(tiny, side):
    student, windows = student_of(tiny), TokenWindows.of(tiny.padded(5, LENGTH, side))
    reference, *others = (next_token_figures(student, windows, batch_size=size) for size in (3, 1, 2, 5))
    for figures in others:
        for name, value in reference.items():
            assert figures[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_the_interval_of_the_gap_is_that_of_the_windows(tiny):
    student, tokens = student_of(tiny), tiny.tokens(6, LENGTH)
    windows = [next_token_figures(student, TokenWindows.of(tokens[n : n + 1])) for n in range(6)]
    gaps = torch.tensor([figures["loss_increase"] for figures in windows], dtype=torch.float64)
    figures = next_token_figures(student, TokenWindows.of(tokens), seed=4)
    counts = torch.full((6,), float(LENGTH - 1), dtype=torch.float64)
    expected = bootstrap_interval(gaps * counts, counts, seed=4)
    assert figures["loss_increase_interval"] == pytest.approx(expected, rel=1e-4)
    assert figures["loss_increase_interval"][0] < figures["loss_increase"] < figures["loss_increase_interval"][1]
    few = next_token_figures(student, TokenWindows.of(tokens[: LEAST_WINDOWS - 1]))
    assert few["loss_increase_interval"] is None


def test_windows_of_one_token_and_a_student_that_returns_nan_are_refused(tiny):
    student = student_of(tiny)
    with pytest.raises(DoflaError, match="windows of one token"):
        next_token_figures(student, TokenWindows.of(tiny.tokens(2, 1)))
    with torch.no_grad():
        student.model.layers[0].self_attn.dofla.maps[0].z.fill_(torch.nan)
    with pytest.raises(DoflaError, match="NaN or infinity"):
        next_token_figures(student, TokenWindows.of(tiny.tokens(2, LENGTH)))


# --- the bootstrap ----------------------------------------------------------------------------------------------------


def gaussian(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_interval_brackets_the_mean_and_shrinks_with_more_windows():
    widths = []
    for count in (25, 400):
        totals = 3 + gaussian(count)
        low, high = bootstrap_interval(totals, torch.ones(count, dtype=torch.float64))
        assert low < totals.mean() < high
        # The interval of the mean of a sample with a known deviation.
        assert high - low == pytest.approx(2 * 1.96 * totals.std().item() / math.sqrt(count), rel=0.15)
        widths.append(high - low)
    assert widths[1] < widths[0] / 3


def test_windows_weigh_as_many_tokens_as_they_hold_and_the_seed_decides():
    counts = torch.tensor([1.0, 99.0], dtype=torch.float64)
    low, high = bootstrap_interval(torch.tensor([1.0, 0.0], dtype=torch.float64), counts)
    assert (low, high) == (0.0, 1.0)
    assert bootstrap_interval(2 * counts, counts) == pytest.approx([2.0, 2.0])
    totals, counts = gaussian(30), torch.ones(30, dtype=torch.float64)
    first, same, other = (bootstrap_interval(totals, counts, seed=seed) for seed in (1, 1, 2))
    assert first == same != other
