"""The bundled model, opened, with text to try it on."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.data import read_documents
from dofla.runs.opening import open_original


def demo() -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """The bundled model, to try everything without a network: 3.5 million parameters, trained on children's stories.

        model, tokenizer, text = dofla.demo()
        windows = dofla.token_windows("sample", tokenizer, windows=12)

    It is in bfloat16, or float32 on processors that are slow in bfloat16. The text is that of the data source
    ``sample``, about 150,000 tokens, documents with a blank line between them.
    """
    model, tokenizer = open_original("demo")
    return model, tokenizer, "\n\n".join(read_documents("sample"))
