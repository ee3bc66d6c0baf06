"""Whole pipelines: a YAML file and a model's name in, models and their figures in a folder out.

Recipes, the opening of what they name, the models that are made by them, the check of a model, the frontier, the
bundled model, and what a terminal shows of it all. Knows all rooms but the paper's tables, the page and the verbs.
"""

from pathlib import Path

RECIPES = Path(__file__).parent / "recipes"
"""The bundled recipes, ``NAME.yaml``."""
DEMO = ("compression", "distillation")
"""The kinds of the demo's recipes, ``demo-KIND.yaml``."""
