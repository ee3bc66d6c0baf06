"""The demo's windows, which are bundled."""

from __future__ import annotations

import pytest
import torch

from dofla.errors import DoflaError
from dofla.runs.demo.data import demo_windows
from dofla.runs.recipe import demo_recipes


def test_the_demos_recipes_find_their_windows(tokenizer):
    for recipe in demo_recipes().values():
        for spec in (recipe.data, recipe.validation):
            ids = demo_windows(spec.windows, spec.length, split=spec.split).input_ids
            assert ids.shape == (spec.windows, spec.length)
            assert 0 <= int(ids.min()) <= int(ids.max()) < len(tokenizer)


def test_shorter_windows_are_pieces_and_splits_differ():
    whole, train = demo_windows(split="validation").input_ids, demo_windows().input_ids
    pieces = demo_windows(None, 200, split="validation").input_ids
    assert pieces.shape == (2 * len(whole), 200)
    assert torch.equal(pieces[:2].flatten(), whole[0, :400])
    assert demo_windows(10_000).input_ids.shape == train.shape
    assert not {tuple(row) for row in train.tolist()} & {tuple(row) for row in whole.tolist()}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split": "test"}, "unknown split 'test': choose one of train, validation"),
        ({"length": 513}, "length is 513: the demo's windows have 512 tokens"),
        ({"length": 0}, "length is 0"),
        ({"windows": 0}, "windows is 0"),
    ],
)
def test_bad_requests(options, words):
    with pytest.raises(DoflaError, match=words):
        demo_windows(**options)
