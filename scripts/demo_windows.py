"""Draws the windows that the demo trains on and is judged by, which are bundled: run it when the teacher changes.

python scripts/demo_windows.py
"""

import torch

from dofla.runs.demo.data import bundled_path, drawn_windows
from dofla.runs.recipe import Recipe
from dofla.runs.teacher import load_teacher
from dofla.storage.tensors import write_tensors


def main() -> None:
    recipe = Recipe.load("recipes/demo.yaml")
    model, tokenizer = load_teacher(recipe.model)
    for spec in (recipe.data, recipe.validation):
        size, seed = (spec.windows, spec.length), recipe.seeds[0]
        drawn = drawn_windows(model, tokenizer, *size, split=spec.split, seed=seed)
        path = bundled_path(*size, spec.split, seed)
        write_tensors(path, {"input_ids": drawn.input_ids.to(torch.int16)})
        print(path)


if __name__ == "__main__":
    main()
