"""A prefix that is read once for several texts, whose continuations are padded in front, gives what each text gives."""

from __future__ import annotations

import copy

import pytest
import torch
from sizes import compress
from tiny_families import own_student, teacher, tokens
from transformers import DynamicCache

import dofla

LENGTHS = (20, 7, 13)


def students():
    yield "compressed", compress(teacher("llama").double(), tokens(4, 48), tokens=48, head_budgets="even")
    yield "hybrid", dofla.linear.linearize(teacher("llama").double(), budget=24)
    yield "ragged", own_student("llama", "ragged").double()
    yield "beside_softmax", own_student("llama", "softmax_first").double()
    yield "learned_positions", own_student("gpt2", "eight_bits")


STUDENTS = dict(students())


def continuations():
    """Padded in front to the longest, and their masks."""
    longest = max(LENGTHS)
    ids, mask = torch.zeros(len(LENGTHS), longest, dtype=torch.long), torch.zeros(len(LENGTHS), longest)
    for row, length in enumerate(LENGTHS):
        ids[row, longest - length :] = tokens(1, length, seed=row + 5)[0]
        mask[row, longest - length :] = 1
    return ids, mask.long()


def shared(student, prefix):
    with torch.no_grad():
        cache = student(prefix, past_key_values=DynamicCache(config=student.config)).past_key_values
    cache.batch_repeat_interleave(len(LENGTHS))
    return cache


@pytest.mark.parametrize("kind", STUDENTS)
@pytest.mark.parametrize("cuts", [[20], [9, 1, 10]])
@torch.no_grad()
def test_padded_continuations_of_a_shared_prefix_are_the_texts_alone(kind, cuts):
    student, prefix, (ids, mask) = STUDENTS[kind], tokens(1, 40), continuations()
    cache, whole = shared(student, prefix), torch.cat([torch.ones(len(LENGTHS), 40, dtype=torch.long), mask], 1)
    positions, seen, found = (whole.cumsum(-1) - 1)[:, 40:], 0, []
    for part, places in zip(ids.split(cuts, 1), positions.split(cuts, 1), strict=True):
        seen += part.shape[1]
        options = {"attention_mask": whole[:, : 40 + seen], "position_ids": places, "past_key_values": cache}
        found.append(student(part, **options).logits)
    found = torch.cat(found, 1)
    for row, length in enumerate(LENGTHS):
        text = torch.cat([prefix, ids[row : row + 1, -length:]], 1)
        alone = student(text).logits[0, 40:]
        torch.testing.assert_close(found[row, -length:], alone, rtol=0, atol=1e-9 * alone.abs().max().item())


@pytest.mark.parametrize("kind", STUDENTS)
def test_each_text_is_continued_as_alone(kind):
    student, prefix, (ids, mask) = STUDENTS[kind], tokens(1, 40), continuations()
    cache = shared(student, prefix)
    whole = torch.cat([prefix.expand(len(LENGTHS), -1), ids], 1)
    mask = torch.cat([torch.ones(len(LENGTHS), 40, dtype=torch.long), mask], 1)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    written = student.generate(whole, attention_mask=mask, past_key_values=copy.deepcopy(cache), **options)
    for row, length in enumerate(LENGTHS):
        text = torch.cat([prefix, ids[row : row + 1, -length:]], 1)
        alone = student.generate(text, attention_mask=torch.ones_like(text), **options)
        assert torch.equal(written[row, -6:], alone[0, -6:])


@torch.no_grad()
def test_padding_between_turns_and_behind_takes_no_place():
    student, text = STUDENTS["compressed"], tokens(1, 80)
    alone = student(text).logits
    padded = torch.cat([text[:, :60], torch.zeros(1, 40, dtype=torch.long), text[:, 60:]], 1)
    mask = torch.cat([torch.ones(1, 60), torch.zeros(1, 40), torch.ones(1, 20)], 1).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for cuts in ([120], [60, 40, 20], [100, 20], [70, 1, 49]):
        cache, found, seen = DynamicCache(config=student.config), [], 0
        for part, places in zip(padded.split(cuts, 1), positions.split(cuts, 1), strict=True):
            seen += part.shape[1]
            options = {"attention_mask": mask[:, :seen], "position_ids": places, "past_key_values": cache}
            found.append(student(part, **options).logits)
        found = torch.cat(found, 1)[:, mask[0].bool()]
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-9 * alone.abs().max().item())
