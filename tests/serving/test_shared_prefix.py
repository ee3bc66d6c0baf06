"""A prefix that is read once for several texts, whose continuations are padded in front, gives what each text gives."""

import copy
from functools import cache

import pytest
import torch
from tiny_families import own_student, padded, tokens
from transformers import DynamicCache

LENGTHS = (20, 7, 13)


STUDENTS = [("llama", kind) for kind in ("compressed", "ragged", "softmax_first")] + [("gpt2", "eight_bits")]


@cache
def student_of(family, kind):
    return own_student(family, kind).double()


def shared(student, prefix):
    with torch.no_grad():
        cache = student(prefix, past_key_values=DynamicCache(config=student.config)).past_key_values
    cache.batch_repeat_interleave(len(LENGTHS))
    return cache


@pytest.mark.parametrize(("family", "kind"), STUDENTS)
@pytest.mark.parametrize("cuts", [[20], [9, 1, 10]])
@torch.no_grad()
def test_padded_continuations_of_a_shared_prefix_are_the_texts_alone(family, kind, cuts):
    student, prefix, (_, ids, mask) = student_of(family, kind), tokens(1, 40), padded(LENGTHS, "left")
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


@pytest.mark.parametrize(("family", "kind"), STUDENTS)
def test_each_text_is_continued_as_alone(family, kind):
    student, prefix, (_, ids, mask) = student_of(family, kind), tokens(1, 40), padded(LENGTHS, "left")
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
    student, text = student_of("llama", "compressed"), tokens(1, 80)
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
