"""Another rule of eviction in a compressed model, by the readable cache."""

import pytest
import torch

from dofla.attention.naive_cache import HeavyHitters
from dofla.compression.retention import retention
from dofla.errors import DoflaError


class Newest:
    """Nothing scores: of several tokens the oldest goes."""

    def decay(self, score):
        return score

    def score(self, weights):
        return torch.zeros_like(weights[:, 0])


@torch.no_grad()
def test_the_kernels_rule_gives_the_models_own_answers_and_another_gives_others(tiny):
    model, ids = tiny.compressed(tiny.llama()).double(), tiny.tokens(2, 40)
    own = model(ids, use_cache=False).logits
    with retention(model, HeavyHitters) as same:
        # Both attend in float64 to decoded tokens in float32.
        torch.testing.assert_close(same(ids, use_cache=False).logits, own, rtol=1e-4, atol=1e-4)
    with retention(model, Newest):
        other = model(ids, use_cache=False).logits
    held = 4 + 2 + 5 + 6  # until that many tokens nothing is evicted
    torch.testing.assert_close(other[:, :held], own[:, :held], rtol=1e-4, atol=1e-4)
    assert (other - own)[:, held:].abs().max() > 0.01
    assert torch.equal(model(ids, use_cache=False).logits, own)


def test_padding_is_refused(tiny):
    model = tiny.compressed(tiny.llama())
    with retention(model, Newest), pytest.raises(DoflaError, match="is tried on text without padding"):
        model(**tiny.padded(2, 30, side="left"), use_cache=False)
