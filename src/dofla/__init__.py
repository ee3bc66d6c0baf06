"""A small KV cache for Hugging Face models, and linear attention distilled from softmax attention.

    model, tokenizer, text = dofla.demo()
    windows = dofla.token_windows("sample", tokenizer, windows=12)
    dofla.compress(model, windows, size="128KiB")
    model.save_pretrained("out")

Or, in place of ``compress``, feature maps that are trained layer by layer:

    dofla.linear.linearize(model, budget=64)
    dofla.linear.distill(model, windows)

After ``import dofla`` the stock ``AutoModelForCausalLM.from_pretrained("out")`` loads either.
"""

import importlib
import os
import sys

import lazy_loader
import wrapt

__version__ = "0.2.0"

# Threads of OpenMP that have done their part spin about as long as it takes to wake one, and then sleep. To sleep at
# once takes twice the time on an idle machine; to spin far longer, as they would, twice the time on a busy one. torch
# reads this once, when it is imported.
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# What is exported stands in __init__.pyi. Each name is imported when it is first used, so that `import dofla` costs
# nothing; transformers learns of dofla as soon as it can hold a model, whoever imports it.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


@wrapt.when_imported("transformers.modeling_utils")
def _register(_: object) -> None:
    importlib.import_module("dofla.integration")
