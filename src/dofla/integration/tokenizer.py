"""The tokenizer beside a model's weights."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dofla.errors import DoflaError, first_line

_FILES = ("*token*", "vocab*", "*.model", "*.spm", "merges*")


def load_tokenizer(*places: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer from the first of the folders or hub names that has one; DoflaError if none has."""
    for place in places:
        if Path(place).is_dir() and not any(any(Path(place).glob(pattern)) for pattern in _FILES):
            reason = "the folder holds none: copy that of its base model there"  # transformers makes up an empty one
            continue
        try:
            # Said outright, for otherwise transformers asks on the terminal whether to run a repository's code.
            tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
            tokenizer("a")  # some damage shows in use only
            return tokenizer
        except Exception as error:  # a damaged file fails in any way
            reason = first_line(error)
    raise DoflaError(f"no tokenizer in {' or '.join(map(str, places))}: {reason}")
