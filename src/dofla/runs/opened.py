"""A recipe, opened: the model, its tokenizer, text to train on and to be evaluated on, prompts."""

from functools import cached_property

from dofla.data import TokenWindows
from dofla.evaluation.samples import Prompt, beginnings, prompts_of
from dofla.runs.opening import open_original, windows_of
from dofla.runs.recipe import DataSpec, Recipe
from dofla.runs.view import View


class Opened:
    """The model of a recipe, which is converted in place, and its text."""

    def __init__(self, recipe: Recipe, view: View) -> None:
        self.recipe, self.view = recipe, view
        self.model, self.tokenizer = open_original(recipe.model, recipe.dtype, recipe.device)

    @cached_property
    def training(self) -> TokenWindows:
        """Windows to calibrate and to train on, made when first needed."""
        return self.windows(self.recipe.data)

    @cached_property
    def validation(self) -> TokenWindows:
        """Held-out windows."""
        return self.windows(self.recipe.validation)

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The prompts to continue; none if the model predicts no tokens."""
        spec = self.recipe.evaluate
        if not spec.prompts or not self.model.can_generate():
            return []
        if isinstance(spec.prompts, list):
            return prompts_of(spec.prompts, self.tokenizer, spec.new_tokens)
        sizes = {"prompts": spec.prompts, "prompt_tokens": spec.prompt_tokens, "new_tokens": spec.new_tokens}
        return beginnings(self.validation, self.tokenizer, **sizes)

    def windows(self, spec: DataSpec) -> TokenWindows:
        """Windows of other text."""
        return windows_of(spec, self.model, self.tokenizer, seed=self.recipe.seeds[0], view=self.view)
