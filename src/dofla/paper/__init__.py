"""Parts that belong to the paper alone (arXiv 2507.03340): its theory, features drawn by leverage, errors against the
number of features, and its tables, on models that you can run.

Makes its students as ``runs`` does; nothing but the command line knows of it.
"""

from dofla.paper.run import TABLES, reproduce
from dofla.paper.sampled import sample_features
from dofla.paper.study import Study
from dofla.paper.table import Figure, Table

__all__ = ["TABLES", "Figure", "Study", "Table", "reproduce", "sample_features"]
