# What `dofla.paper` exports, and where it lives: read by dofla itself, by editors and by type checkers.
from .run import TABLES, reproduce
from .sampled import sample_features
from .study import Study
from .table import Figure, Table

__all__ = ["TABLES", "Figure", "Study", "Table", "reproduce", "sample_features"]
