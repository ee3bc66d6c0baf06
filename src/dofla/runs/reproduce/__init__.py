"""The tables of arXiv 2507.03340, on models that you can run: the studies, the measures, the tables.

Makes its students in the workshop of ``runs``; nothing but the command line knows of it.
"""

from dofla.runs.reproduce.run import TABLES, reproduce
from dofla.runs.reproduce.study import Study
from dofla.runs.reproduce.table import Figure, Table

__all__ = ["TABLES", "Figure", "Study", "Table", "reproduce"]
