"""``python -m dofla``."""

from dofla.cli import main

main()
