"""Where students are made: one teacher, its profile and its text, and a folder in which nothing is made twice."""

from __future__ import annotations

import logging
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import PreTrainedModel

import dofla
from dofla.compression.plan import STRATEGY as COMPRESSED
from dofla.data import TokenWindows
from dofla.distillation import distill, distill_end_to_end, measure_curves, measure_head_budgets, tracked
from dofla.distillation.distributed import wait
from dofla.distillation.tracking import Progress
from dofla.errors import DoflaError
from dofla.evaluation.samples import Prompt, beginnings
from dofla.integration.checkpoint import apply_adapter, write_adapter
from dofla.integration.compressed import budget_of, compressed_plan, feature_bytes
from dofla.integration.directions import WINDOWS, measure_directions
from dofla.integration.profiler import profile
from dofla.integration.student import Student
from dofla.integration.surgery import linearize, restore
from dofla.plans.allocate import allocate
from dofla.plans.curves import Curves
from dofla.plans.head_budgets import HeadBudgets
from dofla.plans.hybrid import FEATURE_MAP
from dofla.plans.plan import Plan
from dofla.profiles.profile import Profile
from dofla.runs.demo.prompts import demo_prompts
from dofla.runs.recipe import DataSpec, Recipe, StudentSpec, read_yaml, slug
from dofla.runs.teacher import load_teacher, windows_of
from dofla.runs.view import View
from dofla.storage.files import new_folder, read_json, replacing, write_json

logger = logging.getLogger(__name__)
_MACHINE, _PROFILED, _TRAINED = "run.json", "profiled.json", "trained.json"
END_TO_END = "end_to_end"


class Workshop:
    """Makes the students of a recipe.

    Args:
        recipe: of model, budget, text and training; its list of students is not looked at.
        folder: keeps the profile and every student; what is finished there is not made again.
        view: where progress goes.
    """

    def __init__(self, recipe: Recipe, folder: str | Path, view: View | None = None) -> None:
        self.recipe, self.folder, self.view = recipe, Path(folder), view or View(quiet=True)
        self.model, self.tokenizer = load_teacher(recipe.model, recipe.dtype, recipe.device)
        self._windows: dict[str, TokenWindows] = {}
        self._profile: Profile | None = None

    def training(self) -> TokenWindows:
        """Windows to train on, made when first needed."""
        return self._made("training", self.recipe.data)

    def validation(self) -> TokenWindows:
        """Held-out windows."""
        return self._made("validation", self.recipe.validation)

    def _made(self, name: str, spec: DataSpec) -> TokenWindows:
        if name not in self._windows:
            self._windows[name] = windows_of(
                spec, self.model, self.tokenizer, seed=self.recipe.seeds[0], view=self.view
            )
        return self._windows[name]

    def prompts(self, **sizes: int) -> list[Prompt]:
        """The prompts to be continued; ``sizes`` as for :func:`dofla.evaluation.samples.beginnings`."""
        if self.recipe.validation.source == "demo":
            return demo_prompts(self.tokenizer, sizes["new_tokens"])[: sizes["prompts"]]
        return beginnings(self.validation(), self.tokenizer, **sizes)

    def profile(self) -> Profile:
        """The teacher's profile, measured once."""
        folder, spec = self.folder / "profile", self.recipe.profile
        if not folder.exists():
            some = self.training().take(spec.windows)
            started = time.perf_counter()
            with self.view.progress("profile") as bar:
                measured = profile(
                    self.model,
                    some,
                    samples=spec.samples,
                    batch_size=spec.batch_size,
                    estimator=spec.estimator,
                    normalization=spec.normalization,
                    keep_softmax=sorted(self.recipe.kept_by_all()),
                    seed=self.recipe.seeds[0],
                    progress=bar.stage,
                )
            seconds = round(time.perf_counter() - started, 1)
            write_json(self.folder / _PROFILED, {"seconds": seconds})
            measured.save(folder)  # last, for what is there counts as done
        wait()
        self._profile = self._profile or Profile.load(folder)
        return self._profile

    def profile_seconds(self) -> float:
        """The seconds that the profile took, text and model at hand."""
        return _seconds(self.folder / _PROFILED)

    def curves(self, spec: StudentSpec) -> Curves:
        """The teacher's error curves for a student's feature map, around the recipe's budget, measured once."""
        feature_map, options = spec.feature_map or FEATURE_MAP, vars(self.recipe.curves).copy()
        kept_as = "" if spec.token_dtype is None else f"-{spec.token_dtype}"
        path = self.folder / f"curves-{feature_map}{kept_as}.json"
        if not path.exists():
            some = self.training().take(options.pop("windows"))
            with self.view.progress(f"error curves, {feature_map}") as bar:
                measured = measure_curves(
                    self.model,
                    some,
                    self.recipe.budget,
                    feature_map=feature_map,
                    token_dtype=spec.token_dtype,
                    keep_softmax=sorted(x.name for x in self.profile().skipped),  # other students may want the rest
                    seed=self.recipe.seeds[0],
                    progress=bar.stage,
                    **options,
                )
            measured.save(path)
        wait()
        return Curves.load(path)

    def head_budgets(self, spec: StudentSpec, size: int) -> HeadBudgets:
        """Head budgets of a compressed cache, measured once for students that differ in nothing that matters."""
        context = f"-context-{spec.context}" if spec.context else ""
        full_heads = f"-retrieval-{spec.retrieval_heads}" if spec.retrieval_heads else ""
        left_out = "".join(f"-without-{name}" for name in sorted(spec.keep_softmax))
        path = self.folder / f"head-budgets-{size}{context}{full_heads}{left_out}.json"
        if not path.exists():
            with self.view.progress(f"head budgets, {size} bytes") as bar:
                measured = measure_head_budgets(
                    self.model,
                    self._few(),
                    size,
                    context=spec.context,
                    retrieval_heads=spec.retrieval_heads or 0,
                    tokenizer=self.tokenizer,
                    keep_softmax=spec.keep_softmax,
                    batch_size=self.recipe.profile.batch_size,
                    progress=bar.stage,
                )
            measured.save(path)
        wait()
        return HeadBudgets.load(path)

    def _few(self) -> TokenWindows:
        """Calibration windows of a compressed cache."""
        return self.training().take(min(self.recipe.profile.windows, WINDOWS))

    def plan(self, spec: StudentSpec) -> Plan:
        """The plan of a student's layers."""
        budget = self.recipe.budget if spec.budget is None else spec.budget
        if spec.strategy == COMPRESSED:
            size = self._size(spec, budget)
            head_budgets = self.head_budgets(spec, size) if spec.head_budgets == "measured" else None
            features = budget_of(self.model, size, context=spec.context, keep_softmax=spec.keep_softmax)
            return compressed_plan(
                self.model,
                features,
                head_budgets=head_budgets,
                keep_softmax=spec.keep_softmax,
                context=spec.context,
            )
        measured = self.profile()
        skipped = {x.name for x in measured.skipped}
        return allocate(
            measured,
            budget,
            spec.strategy,
            spec.feature_map,
            lam=self.recipe.lam if spec.lam is None else spec.lam,
            normalization=spec.normalization,
            over_heads=spec.over_heads,
            per_head=spec.per_head,
            curves=self.curves(spec) if spec.strategy == "measured" else None,
            context=spec.context,
            window=spec.window,
            sinks=spec.sinks,
            token_dtype=spec.token_dtype,
            keep_softmax=[name for name in spec.keep_softmax if name not in skipped],
        )

    def _size(self, spec: StudentSpec, budget: int) -> int:
        """Bytes of a compressed cache: the student's size or ratio, the recipe's, or those of a budget in features."""
        unit = feature_bytes(self.model, spec.keep_softmax)
        known = self.recipe if (spec.size, spec.ratio, spec.budget) == (None, None, None) else spec
        if (known.size, known.ratio) == (None, None):
            return budget * unit
        features = budget_of(self.model, known.size, known.ratio, context=spec.context, keep_softmax=spec.keep_softmax)
        return round(features * unit)

    def home(self, spec: StudentSpec, seed: int) -> Path:
        """The student's folder."""
        return self.folder / "students" / f"{slug(spec.name)}-seed{seed}"

    def adapter(self, spec: StudentSpec, seed: int) -> Path:
        """The folder of the student's adapter."""
        return self.home(spec, seed) / (END_TO_END if spec.end_to_end else "") / "adapter"

    @contextmanager
    def student(self, spec: StudentSpec, seed: int) -> Iterator[PreTrainedModel]:
        """Within the block the teacher is this student: opened if it was made before, otherwise made and kept."""
        home, plan = self.home(spec, seed), self.plan(spec)
        home.mkdir(parents=True, exist_ok=True)
        plan.save(home / "plan.json")
        linearize(self.model, plan, seed=seed)
        try:
            logger.info("student %s of seed %d, in %s", spec.name, seed, home)
            if spec.end_to_end and (home / END_TO_END / "adapter").exists():
                apply_adapter(self.model, home / END_TO_END / "adapter")
            else:
                self._make(spec, seed, home)
            wait()
            yield self.model
        finally:
            restore(self.model)

    def seconds(self, spec: StudentSpec, seed: int) -> float:
        """The seconds that a student was trained, end-to-end training included."""
        home = self.home(spec, seed)
        return _seconds(home / _TRAINED) + _seconds(home / END_TO_END / _TRAINED)

    def _make(self, spec: StudentSpec, seed: int, home: Path) -> None:
        if (home / "adapter").exists():
            apply_adapter(self.model, home / "adapter")
        else:
            self._train(spec, seed, home)
            self._save(home / "adapter")
        if spec.end_to_end:
            self._train_end_to_end(spec, seed, home / END_TO_END)
            self._save(home / END_TO_END / "adapter")

    def _save(self, adapter: Path) -> None:
        with new_folder(adapter) as folder:
            write_adapter(self.model, folder)

    def _train(self, spec: StudentSpec, seed: int, home: Path) -> None:
        if spec.strategy == COMPRESSED:
            with self.view.progress(f"directions of {spec.name}, seed {seed}") as bar:
                measure_directions(
                    Student.of(self.model),
                    self._few(),
                    batch_size=self.recipe.profile.batch_size,
                    context=spec.context,
                    progress=bar,
                )
        elif spec.start not in ("data", "random"):
            raise DoflaError(f"student {spec.name}: start is {spec.start!r}: choose data or random")
        if not spec.trained:
            return
        options = vars(self.recipe.distill) | {"loss": spec.loss or self.recipe.distill.loss}
        with self._progress(f"distill {spec.name}, seed {seed}", home) as progress:
            history = distill(
                self.model,
                self.training(),
                from_data=spec.start == "data",
                seed=seed,
                folder=home / "distill",
                progress=progress,
                **options,
            )
        write_json(home / _TRAINED, {"seconds": round(history.seconds, 1), **history.settings})

    def _train_end_to_end(self, spec: StudentSpec, seed: int, home: Path) -> None:
        options = vars(self.recipe.end_to_end)
        with self._progress(f"distill {spec.name} end to end, seed {seed}", home) as progress:
            history = distill_end_to_end(
                self.model, self.training(), seed=seed, folder=home, progress=progress, **options
            )
        write_json(home / _TRAINED, {"seconds": round(history.seconds, 1), **history.settings})

    @contextmanager
    def _progress(self, label: str, home: Path) -> Iterator[Progress | bool]:
        """Yield the function to report a training's progress to, on the view and on the recipe's trackers."""
        run = "-".join(home.relative_to(self.folder / "students").parts)
        logs = self.folder / "track"
        with self.view.progress(label) as bar, tracked(self.recipe.track, logs, run, bar.losses) as progress:
            yield progress


def _seconds(path: Path) -> float:
    return read_json(path, "a record of seconds")["seconds"] if path.exists() else 0.0


def claim(folder: str | Path, name: str, data: dict[str, Any]) -> None:
    """Give ``folder``, which is locked, ``data`` as its file ``name``, or see that it holds the same.

    Raises:
        DoflaError: if it holds something else.
    """
    folder = Path(folder)
    if (folder / name).exists():
        if _essence(read_yaml(folder / name)) != _essence(data):
            raise DoflaError(f"{folder} exists already, with another recipe: choose another folder or remove it")
        return
    folder.mkdir(parents=True, exist_ok=True)
    if any(path.name != _MACHINE and not path.name.startswith(".") for path in folder.iterdir()):
        raise DoflaError(f"{folder} exists already, and is no run's: choose another folder or remove it")
    write_json(folder / _MACHINE, machine())
    with replacing(folder / name) as partial:
        partial.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")


def _essence(recipe: dict[str, Any]) -> dict[str, Any]:
    """All of a recipe but where it is computed and recorded; nor what is not given, which versions before may not have
    known."""
    return _given({key: value for key, value in recipe.items() if key not in ("track", "device")})


def _given(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _given(value) for key, value in data.items() if value is not None}
    return [_given(value) for value in data] if isinstance(data, list) else data


def machine() -> dict[str, Any]:
    """Versions and hardware, for the record."""
    return {
        "dofla": dofla.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": _processor(),
        "cpu_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _processor() -> str:
    """Its name, which Python does not know on Linux."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
