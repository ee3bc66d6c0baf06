"""A wheel with libraries of the CPU kernels (scripts/build_wheel.py) is one for their platform."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Platform(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if any(Path(self.root).glob("src/dofla/attention/compiled/prebuilt/*.so")):
            build_data |= {"pure_python": False, "tag": "py3-none-linux_x86_64"}
