"""Results that lm-evaluation-harness wrote, as results of suites of a run.

The form is that of `results_DATE.json` of lm_eval 0.4 (github.com/EleutherAI/lm-evaluation-harness
at 4e7e0d47, lm_eval/evaluator_utils.py and loggers/evaluation_tracker.py): `results` has for each
task and group its numbers as `METRIC,FILTER` and `METRIC_stderr,FILTER`, `group_subtasks` the
members of groups, `configs`, `versions` and `n-shot` how a task was run, `n-samples` its items.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import MetaseqError, UsageError, say
from metaseq_lm.core.files import COUNT, checksum, is_number, read_json, schema_error
from metaseq_lm.interop.model_card import weights_of
from metaseq_lm.runs import manifests
from metaseq_lm.runs.suite_results import COUNT as ITEMS
from metaseq_lm.runs.suite_results import LM_EVAL, OVERALL, SuiteResults, default_name

_FORM = {
    "results": {"*": dict},
    "group_subtasks?": {"*": [str, ...]},
    "configs": {"*": dict},
    "versions?": dict,
    "n-shot?": dict,
    "n-samples?": {"*": {"effective": COUNT}},
    "higher_is_better?": {"*": dict},
    "config?": dict,
    "lm_eval_version?": str,
    "model_name?": str,
}
# Options of all tasks, by their keys in `config` or beside it.
_SHARED = ("limit", "fewshot_seed", "gen_kwargs", "system_instruction_sha", "chat_template_sha")
_STDERR = "_stderr"


def read_results(file: Path, checkpoint: Path) -> list[SuiteResults]:
    """Return the results in a file of lm_eval, one for each task or group that is in no other.

    Raises:
        MetaseqError: The file has another form.
        UsageError: It has no metrics, or is of weights that are known not to be the checkpoint's.
    """
    manifest = manifests.read_manifest(checkpoint)
    try:
        content = read_json(file)
    except ValueError as error:
        raise MetaseqError(f"{file}: not the results_*.json of lm_eval ({error})") from error
    if problem := schema_error(content, _FORM):
        raise MetaseqError(f"{file}: not the results_*.json of lm_eval 0.4 ({problem})")
    _check_model(file, content, checkpoint, manifests.hash_of_weights(manifest))
    scored = [task for task, numbers in content["results"].items() if _metrics(numbers)]
    if not scored:
        raise UsageError(f"{file}: no task in it has a metric")
    inner: set[str] = set()
    for task in scored:
        inner.update(_members(task, content))
    results: dict[str, SuiteResults] = {}
    for task in scored:
        if task not in inner:
            result = _results_of(task, content, file, manifest)
            if result.name in results:
                raise UsageError(
                    f"{file}: {task} and {results[result.name].suite.partition('/')[2]} would both "
                    f"be called {result.name}; import a file with one of them"
                )
            results[result.name] = result
    return list(results.values())


def _results_of(
    task: str, content: Mapping[str, Any], file: Path, manifest: Mapping[str, Any]
) -> SuiteResults:
    """Return the results of a task, or of a group with its members as groups of items."""
    members = list(_members(task, content))
    leaves = [name for name in members or [task] if name in content["configs"]]
    groups, errors = {}, {}
    for name in [task, *members]:
        metrics = _metrics(content["results"].get(name, {}))
        if metrics:
            group = OVERALL if name == task else name
            groups[group] = {ITEMS: _items(name, content, file), "metrics": metrics}
            errors[group] = _metrics(content["results"][name], is_error=True)
    shared = content.get("config") or {}
    config = content["configs"][leaves[0]] if leaves else {}
    return SuiteResults(
        name=default_name(f"{LM_EVAL}-{task}"),
        suite=f"{LM_EVAL}/{task}",
        update=manifest["update"],
        weights=manifests.hash_of_weights(manifest),
        data=checksum([_task_of(content["configs"][name]) for name in leaves]),
        options={
            "version": (content.get("versions") or {}).get(task),
            "num_fewshot": [(content.get("n-shot") or {}).get(name) for name in leaves],
            "precision": shared.get("model_dtype"),
            **{key: shared.get(key, content.get(key)) for key in _SHARED},
        },
        groups=groups,
        facts={
            "folder": file.name,
            LM_EVAL: content.get("lm_eval_version"),
            "model": content.get("model_name"),
            "dataset": config.get("dataset_path"),
            "split": config.get("test_split") or config.get("validation_split"),
            "higher_is_better": (content.get("higher_is_better") or {}).get(task, {}),
            "standard_errors": errors,
        },
    )


def _task_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a task reads and asks, without the arguments of the model."""
    return {key: value for key, value in config.items() if key not in ("metadata", "model_args")}


def _metrics(numbers: Mapping[str, Any], is_error: bool = False) -> dict[str, float]:
    """Return the metrics of a task, or their standard errors, with the filter in the name."""
    metrics = {}
    for key, value in numbers.items():
        metric, comma, rule = key.partition(",")
        if comma and is_number(value) and metric.endswith(_STDERR) == is_error:
            metric = metric.removesuffix(_STDERR)
            if rule != "none":
                metric += f"-{rule}"
            metrics[metric] = value
    return metrics


def _members(task: str, content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tasks and groups below a group, each once."""
    subtasks = content.get("group_subtasks") or {}
    waiting, seen = list(subtasks.get(task, ())), {task}
    while waiting:
        name = waiting.pop(0)
        if name not in seen:
            seen.add(name)
            yield name
            waiting += subtasks.get(name, ())


def _items(task: str, content: Mapping[str, Any], file: Path) -> int:
    """Return the number of items of a task, or of the tasks below a group."""
    counts = content.get("n-samples") or {}
    names = [name for name in (task, *_members(task, content)) if name in counts]
    if not names:
        raise UsageError(
            f"{file}: does not say how many items {task} has (n-samples), as lm_eval 0.4.2 and "
            "later do; run it again"
        )
    return sum(counts[name]["effective"] for name in names)


def _check_model(file: Path, content: Mapping[str, Any], checkpoint: Path, weights: str) -> None:
    """Raise UsageError if the model of a file is an exported folder with other weights."""
    model = content.get("model_name") or ""
    exported = weights_of(Path(model)) if model else None
    # A model that is no folder here, or was not written by `export`, may be the checkpoint's.
    if exported is None:
        say(f"{file}: nothing tells whether its model, {model or 'unnamed'}, is {checkpoint}")
    elif exported != weights:
        raise UsageError(
            f"{file}: is of {model}, which was exported from other weights (hash "
            f"{exported[:12]}) than {checkpoint} has ({weights[:12]}); name by --run the run or "
            "checkpoint that they are of"
        )
