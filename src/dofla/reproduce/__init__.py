"""The tables of arXiv 2507.03340, on models that you can run: the studies, the measures, the tables."""

from dofla.reproduce.run import TABLES, reproduce
from dofla.reproduce.study import Study
from dofla.reproduce.table import Figure, Table

__all__ = ["TABLES", "Figure", "Study", "Table", "reproduce"]
