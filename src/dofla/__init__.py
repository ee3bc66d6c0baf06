"""Turn pretrained softmax transformers into linear-attention models.

    student = dofla.linearize(model, budget=64)
    dofla.distill(student, tokens)
    student.save_pretrained("out")

or, with every layer given the state that it needs,

    profile = dofla.profile(model, tokens)
    curves  = dofla.measure_curves(model, tokens)
    plan    = dofla.allocate(profile, budget=64, strategy="measured", curves=curves)
    student = dofla.linearize(model, plan)

After ``import dofla`` the stock ``AutoModelForCausalLM.from_pretrained("out")`` loads the student.
"""

import importlib

import lazy_loader
import wrapt

__version__ = "0.2.0"

# What is exported stands in __init__.pyi. Each name is imported when it is first used, so that `import dofla` costs
# nothing; transformers learns of dofla as soon as it can hold a model, whoever imports it.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


@wrapt.when_imported("transformers.modeling_utils")
def _register(_: object) -> None:
    importlib.import_module("dofla.integration")
