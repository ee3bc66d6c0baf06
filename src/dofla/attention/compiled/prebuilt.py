"""Libraries of the kernels that a wheel brings along, one for each level of instruction sets."""

import platform
from pathlib import Path

FOLDER = Path(__file__).with_name("prebuilt")
_AVX2 = "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"
_AVX512 = *_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"
LEVELS = {
    "x86-64-v4-bf16": (
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
        frozenset((*_AVX512, "avx512_vnni", "avx512_bf16")),
    ),
    "x86-64-v4": (("-march=x86-64-v4",), frozenset(_AVX512)),
    "x86-64-v3": (("-march=x86-64-v3",), frozenset(_AVX2)),
}
"""Compiler flags, and the flags of /proc/cpuinfo that are needed, by name; the best first."""


def prebuilt() -> Path | None:
    """The best library for this processor; None if there is none, as in a clone."""
    if not FOLDER.exists():
        return None
    here = set(flags_of_processor())
    found = (FOLDER / f"{name}.so" for name, (_, needed) in LEVELS.items() if needed <= here)
    return next((library for library in found if library.exists()), None)


def flags_of_processor() -> list[str]:
    """Its instruction sets, and on ARM, what it is, sorted."""
    names = ("flags", "Features", "CPU implementer", "CPU part")  # the first on x86-64, the others on ARM
    lines = (line.partition(":") for line in _cpuinfo().splitlines() if line.startswith(names))
    return sorted({word for _, _, value in lines for word in value.split()})


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return f"flags : {platform.processor()}"
