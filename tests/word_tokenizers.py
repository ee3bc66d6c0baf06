"""A tokenizer of whole words for tiny models, and words for it."""

from collections.abc import Iterable

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{n}" for n in range(60)]
VOCABULARY = ["<end>", "<unk>", *WORDS]


def word_tokenizer(
    vocabulary: Iterable[str] = VOCABULARY, unknown: str = "<unk>", **special: str
) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are these words, in their order, and ``unknown`` for all others."""
    raw = Tokenizer(models.WordLevel({word: n for n, word in enumerate(vocabulary)}, unk_token=unknown))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token=unknown, **special)
