"""Whole pipelines: a YAML file and a model's name in, students and their figures in a folder out.

Recipes, the opening of what they name, the workshop that makes every student once, fine-tuning from files to files, the
bundled demonstration, the paper's tables, and what a terminal shows of it all. Knows all rooms but the page and the
verbs.
"""
