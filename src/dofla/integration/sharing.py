"""Giving a converted model to others: its adapter on the hub, and what its model card is to say."""

import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers import PreTrainedModel

from dofla.display import Result
from dofla.errors import DoflaError, about
from dofla.integration.checkpoint import ADAPTER, LORA, base_of, save_adapter
from dofla.integration.checksums import checksums_of, with_checksums
from dofla.integration.converted import Converted
from dofla.integration.hub import hub_name, upload
from dofla.integration.model_card import write_card
from dofla.integration.quantizer import METHOD, DoflaConfig
from dofla.integration.record import RECORD, Record
from dofla.plans.plan import Plan
from dofla.storage.files import read_json, write_json


def note(
    model: PreTrainedModel | str | Path,
    *,
    figures: Result | Mapping[str, Any] | str | Path | None = None,
    command: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
) -> None:
    """Put on record what a model card is to say; saving the model writes record and card.

    Args:
        model: a converted model; or the folder of one, whose card is written anew at once.
        figures: what :func:`dofla.evaluate` or tasks returned; or the JSON file that they were written to.
            They take the place of earlier ones of the same metric on the same text.
        command: that measures them again; default the command line of dofla that this process was started with, or
            the call in Python.
        base_model: name on the hub of the model it was made from. An adapter is then opened with that one.
        license: of the base model, and so of the model: an identifier of the hub (``apache-2.0``).

    Raises:
        DoflaError: not a converted model; no figures in what was given; a name that no repository can have; a damaged
            file.
    """
    source: AbstractContextManager[None] = nullcontext()
    found: Mapping[str, Any] | None
    if isinstance(figures, (str, Path)):
        source, found = about(Path(figures)), read_json(figures, "figures of a converted model")
    else:
        found = figures.to_dict() if isinstance(figures, Result) else figures
    if base_model is not None and not hub_name(base_model):
        raise DoflaError(f"base_model is {base_model!r}: give a name on the hub, like owner/name")

    def add(record: Record) -> Record:
        if found is not None:
            with source:
                record.add_figures(found, command)
        record.base_model = base_model or record.base_model
        record.license = {"license": license} if license else record.license
        return record

    if isinstance(model, PreTrainedModel):
        add(Converted.of(model).record)
        if base_model is not None:
            model.config._name_or_path = base_model
    elif (Path(model) / ADAPTER).exists():
        folder = Path(model)
        record = add(Record.load(folder / RECORD))
        record.save(folder / RECORD)
        if base_model is not None:
            write_json(folder / ADAPTER, read_json(folder / ADAPTER, "a dofla adapter") | {"base_model": base_model})
        write_card(folder, Plan.load(folder), record, adapter=True)
    else:
        path = Path(model) / "config.json"
        config = read_json(path, "the config of a converted model")
        ours = config.get("quantization_config")
        if not isinstance(ours, dict) or ours.get("quant_method") != METHOD:
            raise DoflaError(f"{model} is not a converted model: {path.name} has no quantization_config of {METHOD}")
        plan_and_record, checksums = DoflaConfig(**ours), checksums_of(path, config)
        add(plan_and_record.record)
        config["quantization_config"] = plan_and_record.to_dict()
        write_json(path, config if checksums is None else with_checksums(config, checksums))
        write_card(path.parent, plan_and_record.plan, plan_and_record.record, adapter=False)


def push_adapter(
    model: PreTrainedModel,
    name: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str = "Upload dofla adapter",
    revision: str | None = None,
    create_pr: bool = False,
) -> str:
    """Put the adapter of a converted model on the hub, in one commit; :func:`dofla.load` opens it by its name.

    A README.md there that a person has written stays. ``model.push_to_hub`` puts the whole model there instead.

    Args:
        model: a converted model whose base model is on the hub.
        name: of the repository, which is made if need be.
        private, token, commit_message, revision, create_pr: as for ``push_to_hub`` of transformers.

    Returns:
        The address of the commit.

    Raises:
        DoflaError: not converted, or its base model is not on the hub, as far as its name tells.
    """
    plan, base = Converted.of(model).plan, base_of(model)
    if not hub_name(base):
        raise DoflaError(
            f"the adapter's base model is {base or 'nameless'!r}, which others do not have: "
            "dofla.note(model, base_model='owner/name') says where it is, push_to_hub puts the whole model there"
        )
    with tempfile.TemporaryDirectory() as temporary:
        folder = save_adapter(model, Path(temporary) / "adapter")
        write_card(folder, plan, Converted.of(model).record, adapter=True, name=name)
        api = HfApi(token=token)
        name = api.create_repo(name, private=private, exist_ok=True).repo_id
        if revision is not None and not create_pr:
            api.create_branch(name, branch=revision, exist_ok=True)
        asked: dict[str, Any] = {"commit_message": commit_message, "create_pr": create_pr}
        return upload(api, folder, name, [LORA], revision=revision, **asked)
