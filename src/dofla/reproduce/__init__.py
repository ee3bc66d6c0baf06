"""The tables of arXiv 2507.03340, on models that you can run: the studies, the measures, the tables.

Makes its students in the workshop of ``runs``; nothing but the command line knows of it.
"""

from dofla.reproduce.run import TABLES, reproduce
from dofla.reproduce.study import Study
from dofla.reproduce.table import Figure, Table

__all__ = ["TABLES", "Figure", "Study", "Table", "reproduce"]
