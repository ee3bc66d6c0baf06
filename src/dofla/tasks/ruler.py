"""RULER (Hsieh et al. 2024, arXiv 2404.06654) by lm-evaluation-harness's generators, without a network: a text of the
caller's takes the place of essays, and nltk's rules without data that of its model of sentences."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transformers import set_seed

from dofla.data import read_documents
from dofla.errors import DoflaError
from dofla.storage.extras import extra
from dofla.tasks.harness import lm_eval, quiet

GROUP, METRIC = "ruler", "string_match"  # all tasks and their mean; the share of the answers that are written
TASKS = [f"niah_{kind}_{n}" for kind in ("single", "multikey") for n in (1, 2, 3)]
TASKS += ["niah_multivalue", "niah_multiquery", "ruler_vt", "ruler_cwe", "ruler_fwe"]
_MODULES = ("prepare_niah", "niah_utils", "vt_utils", "cwe_utils", "fwe_utils", "common_utils")


@quiet()
def ruler_tasks(names: list[str], tokenizer: Any, length: int, text: str | Path, count: int | None, seed: int) -> Any:
    """Tasks as :func:`dofla.tasks.harness.load_tasks` has them: those of :data:`TASKS` that are named, or all for
    :data:`GROUP`. A task has ``count`` contexts, at most 500, of about ``length`` tokens with question and answer, and
    words of the source ``text`` for essays. This seeds Python's and numpy's generators."""
    nltk, kinds = extra("nltk", "ruler", "RULER"), lm_eval("lm_eval.api.group")
    with patch.object(nltk.data, "find"):  # else data that it does not find is downloaded
        modules: dict[str, Any] = {x: extra(f"lm_eval.tasks.ruler.{x}", "ruler", "RULER") for x in _MODULES}
    noise, _ = modules["vt_utils"].generate_input_output(12, 1, 4)
    if length < (least := max(1024, len(tokenizer(noise).input_ids) + 530)):  # with a solved example, and the answer
        raise DoflaError(f"context_length is {length}: RULER's contexts need {least} tokens or more")
    hay, words = modules["prepare_niah"].get_haystack, " ".join(read_documents(text)).split()
    ours: dict[str, Any] = {"get_tokenizer": lambda *_: tokenizer, "tqdm": lambda samples, **_: samples[:count]}
    ours["get_haystack"] = lambda type_haystack: words if type_haystack == "essay" else hay(type_haystack)
    ours["sent_tokenize"] = nltk.tokenize.PunktSentenceTokenizer().tokenize
    mean = kinds.Group(GROUP, aggregate_metric_list=[kinds.AggMetricConfig(METRIC, weight_by_size=False)])
    tasks: dict[str, Any] = {}
    own: dict[str, Any] = {"metric_list": [{"metric": METRIC, "aggregation": "mean", "higher_is_better": True}]}
    own["process_results"] = lambda *of: {METRIC: modules["common_utils"].process_results(*of)[str(length)]}
    folder = str(Path(modules["common_utils"].__file__).parent)
    known = lm_eval("lm_eval.tasks").TaskManager(include_defaults=False, include_path=folder).task_index
    with ExitStack() as stack:
        for each in modules.values():
            stack.enter_context(patch.multiple(each, **{key: ours[key] for key in ours.keys() & vars(each).keys()}))
        for name in TASKS if GROUP in names else names:
            module, _, function = Path(known[name].cfg["custom_dataset"]).name.partition(".")
            set_seed(seed % 2**32)
            modules["cwe_utils"].RNG.seed(seed)
            data = getattr(modules[module], function)(max_seq_lengths=[length])
            if (shortest := min(data["test"]["length"])) < length // 2:
                raise DoflaError(f"{name} fills {shortest} tokens of {length}: give a longer haystack or other length")
            config = known[name].cfg | own | {"custom_dataset": lambda data=data, **_: data}
            tasks[name] = lm_eval("lm_eval.api.task").ConfigurableTask(config=config)
            mean.add(tasks[name])
    return {"tasks": tasks} | ({"groups": {GROUP: mean}, "group_map": {GROUP: [*tasks]}} if GROUP in names else {})
