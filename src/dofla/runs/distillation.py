"""A distillation: the original's profile and error curves, and students with feature maps trained towards it."""

import time
from pathlib import Path

from dofla.distillation import distill, measure_curves
from dofla.distillation.distributed import wait
from dofla.integration.profiler import profile
from dofla.integration.surgery import linearize
from dofla.plans.allocate import allocate
from dofla.plans.curves import Curves
from dofla.plans.hybrid import FEATURE_MAP
from dofla.plans.plan import Plan
from dofla.profiles.profile import Profile
from dofla.runs.models import Models, recorded_seconds
from dofla.runs.recipe import Distillation, StudentSpec
from dofla.storage.files import write_json

_PROFILED = "profiled.json"


class Students(Models[Distillation, StudentSpec]):
    """Makes the students of a distillation."""

    def profile(self) -> Profile:
        """The original's profile, measured once."""
        folder, options = self.folder / "profile", vars(self.recipe.profile).copy()
        if not folder.exists():
            some = self.opened.training.take(options.pop("windows"))
            kept_by_all = set.intersection(*(set(student.keep_softmax) for student in self.recipe.students))
            options |= {"keep_softmax": sorted(kept_by_all), "seed": self.recipe.seeds[0]}
            started = time.perf_counter()
            with self.view.progress("profile") as bar:
                measured = profile(self.opened.model, some, progress=bar.stage, **options)
            write_json(self.folder / _PROFILED, {"seconds": round(time.perf_counter() - started, 1)})
            measured.save(folder)  # last, for what is there counts as done
        wait()
        return Profile.load(folder)

    def profile_seconds(self) -> float:
        """The seconds that the profile took, text and model at hand."""
        return recorded_seconds(self.folder / _PROFILED)

    def curves(self, spec: StudentSpec) -> Curves:
        """The original's error curves for a student's feature map, around the recipe's budget, measured once."""
        feature_map, options = spec.feature_map or FEATURE_MAP, vars(self.recipe.curves).copy()
        kept_as = "" if spec.token_dtype is None else f"-{spec.token_dtype}"
        path = self.folder / f"curves-{feature_map}{kept_as}.json"
        if not path.exists():
            some = self.opened.training.take(options.pop("windows"))
            options |= {"feature_map": feature_map, "token_dtype": spec.token_dtype, "seed": self.recipe.seeds[0]}
            options["keep_softmax"] = sorted(x.name for x in self.profile().skipped)  # others may want the rest
            with self.view.progress(f"error curves, {feature_map}") as bar:
                measured = measure_curves(self.opened.model, some, self.recipe.budget, progress=bar.stage, **options)
            measured.save(path)
        wait()
        return Curves.load(path)

    def plan(self, spec: StudentSpec) -> Plan:
        """The plan of a student's layers."""
        measured = self.profile()
        skipped = {x.name for x in measured.skipped}
        same = ("normalization", "over_heads", "per_head", "context", "window", "sinks", "token_dtype")
        return allocate(
            measured,
            self.recipe.budget if spec.budget is None else spec.budget,
            spec.strategy,
            spec.feature_map,
            lam=self.recipe.lam if spec.lam is None else spec.lam,
            curves=self.curves(spec) if spec.strategy == "measured" else None,
            keep_softmax=[name for name in spec.keep_softmax if name not in skipped],
            **{name: getattr(spec, name) for name in same},
        )

    def convert(self, spec: StudentSpec, seed: int) -> None:
        linearize(self.opened.model, self.plan(spec), seed=seed)

    def train(self, spec: StudentSpec, seed: int, home: Path) -> None:
        if not spec.trained:
            return
        options = vars(self.recipe.distill) | {"loss": spec.loss or self.recipe.distill.loss}
        options |= {"from_data": spec.start == "data", "seed": seed, "folder": home / "distill"}
        with self.progress(f"distill {spec.name}, seed {seed}", home) as progress:
            history = distill(self.opened.model, self.opened.training, progress=progress, **options)
        self.record(history, home)
