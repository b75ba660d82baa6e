"""Results in the forms of other sites, see docs/reference/files.md#records-for-other-sites.

`eval_records` makes records of Every Eval Ever, a JSON object for each setting and library that
scored it. `hub_entries` makes the entries of `.eval_results/*.yaml` in a model repository of the
Hugging Face Hub, which are of one run, since a repository has one checkpoint.
"""

import json
import math
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.files import checksum
from metaseq_lm.core.metric_names import is_fraction, lower_is_better
from metaseq_lm.core.registry import nearest
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import (
    Row,
    describe,
    finished,
    remedy,
    runs_of,
    scored_functions,
    seed_means,
)
from metaseq_lm.runs.suite_results import COUNT, LM_EVAL, OVERALL, SuiteResults

_SCHEMA = "0.3.0"
_OURS = "metaseq-lm"
_CONFIDENCE = 0.95
_MODEL = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_UNBOUNDED = {"share", "wer", "cer"}  # fractions that may leave 0 to 1
_BENCHMARK = re.compile(rf"([^=]+)=({_MODEL.pattern}):([^:\s]+)", re.ASCII)
_FACTS = ("task._name", "criterion._name", "model._name")


def check_model(name: str) -> None:
    """Raise UsageError for a name of a model of another form than ORG/NAME."""
    if not _MODEL.fullmatch(name):
        raise UsageError(f"--model {name}: write it as ORG/NAME, as on the Hugging Face Hub")


def parse_benchmark(text: str) -> tuple[str, str, str]:
    """Return metric, data set and task of METRIC=ORG/DATASET:TASK; UsageError for another form."""
    match = _BENCHMARK.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--benchmark {text}: write it as METRIC=ORG/DATASET:TASK, such as "
            "blimp.accuracy=nyu-mll/blimp:all"
        )
    return match[1], match[2], match[3]


def eval_records(rows: Sequence[Row], model: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return records by path, and the names of metrics left out as neither end is known as better.

    `model` is ORG/NAME; with several settings the name gets that of the setting as a suffix. Equal
    results have equal paths, because the UUID is a hash of them.

    Raises UsageError if no setting has such a metric, or its runs were scored as other functions.
    """
    records: dict[str, dict[str, Any]] = {}
    omitted: dict[str, None] = {}
    for row in rows:
        names = [model]
        if len(rows) > 1:
            names.append(re.sub(r"[^A-Za-z0-9.]+", "-", row.name).strip("-."))
        identity = "-".join(filter(None, names))
        by_library: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for metric, (suite, group, short) in _metrics_of(row).items():
            if result := _result_of(row, metric, suite, group, short):
                by_library.setdefault(_library_of(row.scored, suite), []).append(result)
            else:
                omitted[metric.rpartition(".")[2]] = None
        for (library, version), results in by_library.items():
            model_info = _model_info(row, identity)
            if library == _OURS:
                model_info["inference_engine"] = {"name": library, "version": version}
            record = {
                "model_info": model_info,
                "eval_library": {"name": library, "version": version},
                "evaluation_results": results,
            }
            digest = checksum([_SCHEMA, record])
            origin = {
                "source_name": _OURS,
                "source_type": "evaluation_run",
                "source_organization_name": model.partition("/")[0],
                "evaluator_relationship": "first_party",
            }
            path = f"data/{_OURS}/{identity}/{uuid.UUID(hex=digest, version=4)}.json"
            records[path] = {
                "schema_version": _SCHEMA,
                "evaluation_id": f"{_OURS}/{identity}/{digest}",
                "retrieved_timestamp": str(time.time()),
                "source_metadata": origin,
                **record,
            }
    if not records:
        raise UsageError(
            "--format eee: no finished run has results of a suite; 'score RUN --suite', "
            "trainer.final_suites or 'import FILE --run RUN' give some"
        )
    return records, list(omitted)


def _metrics_of(row: Row) -> dict[str, tuple[SuiteResults, str, str]]:
    """Return suite, group and short name of the metrics of the finished runs of a setting."""
    metrics: dict[str, tuple[SuiteResults, str, str]] = {}
    for run in row.scored:
        for suite in run.suites:
            for group, content in suite.groups.items():
                prefix = suite.name if group == OVERALL else f"{suite.name}.{group}"
                for short in content["metrics"]:
                    if run.suite_of(metric := f"{prefix}.{short}") is suite:
                        metrics.setdefault(metric, (suite, group, short))
    return metrics


def _library_of(runs: Sequence[Run], suite: SuiteResults) -> tuple[str, str]:
    if suite.suite.startswith(f"{LM_EVAL}/"):
        return LM_EVAL, str(suite.facts.get(LM_EVAL) or "unknown")
    versions = {(run.recorded.get("versions") or {}).get(_OURS) for run in runs}
    return _OURS, "unknown" if len(versions) > 1 else versions.pop() or "unknown"


def _model_info(row: Row, identity: str) -> dict[str, Any]:
    first = row.scored[0]
    results = first.recorded
    facts = {key.removesuffix("._name"): first.values.get(key) for key in _FACTS}
    facts |= {key: results.get(key) for key in ("updates", "words_seen", "flops")}
    facts["init_from"] = Path(first.values.get("init_from") or "").name or None
    facts["parameters"] = (results.get("parameters") or {}).get("all")
    facts["seeds"] = sorted({run.seed for run in row.scored if run.seed is not None})
    details = {"deployment_type": "self_deployed", "model_availability": "unknown", **_texts(facts)}
    developer = identity.partition("/")[0]
    return {"name": row.name, "id": identity, "developer": developer, "additional_details": details}


def _result_of(
    row: Row, metric: str, suite: SuiteResults, group: str, short: str
) -> dict[str, Any] | None:
    """Return the result of a metric over the seeds of a setting; None if no end of it is better."""
    is_higher = (suite.facts.get("higher_is_better") or {}).get(short.partition("-")[0])
    lower = lower_is_better(short) if is_higher is None else not is_higher
    means = seed_means(row.runs, metric)
    if lower is None or not means:
        return None
    if differing := scored_functions(metric, [row]):
        raise UsageError(f"--format eee: {describe(metric, differing)}; {remedy(differing)}")
    items = suite.groups[group][COUNT]
    references = suite.references.get(short if group == OVERALL else f"{group}.{short}", {})
    return {
        "evaluation_result_id": metric,
        "evaluation_name": suite.name if group == OVERALL else f"{suite.name}.{group}",
        "source_data": _source_of(suite, items),
        "metric_config": {
            "metric_id": short,
            "metric_name": short,
            "lower_is_better": lower,
            **_bounds_of(short, list(means.values())),
            **({"additional_details": _texts(references)} if references else {}),
        },
        "score_details": {
            **_score_of(list(means.values())),
            "details": _texts({"items": items, **{f"seed {key}": x for key, x in means.items()}}),
        },
        "generation_config": {"additional_details": _texts(suite.options)},
    }


def _source_of(suite: SuiteResults, items: int) -> dict[str, Any]:
    """Return where the items of a suite are from: a data set of the Hub for some of lm_eval."""
    source: dict[str, Any] = {"dataset_name": suite.suite, "source_type": "other"}
    source["additional_details"] = _texts({"files": suite.facts.get("folder"), "hash": suite.data})
    dataset = suite.facts.get("dataset")
    if not isinstance(dataset, str) or not _MODEL.fullmatch(dataset):
        return source
    split = suite.facts.get("split")
    source |= {"source_type": "hf_dataset", "hf_repo": dataset, "samples_number": items}
    return source | ({"hf_split": split} if isinstance(split, str) else {})


def _bounds_of(metric: str, scores: Sequence[float]) -> dict[str, Any]:
    """Return the bounds of a fraction; {} for metrics whose bounds the name does not tell."""
    is_bounded = is_fraction(metric) and _UNBOUNDED.isdisjoint(re.split("[._-]", metric))
    if not is_bounded or not all(0 <= score <= 1 for score in scores):
        return {}
    form = {"metric_unit": "proportion", "score_type": "continuous"}
    return form | {"min_score": 0.0, "max_score": 1.0}


def _score_of(scores: Sequence[float]) -> dict[str, Any]:
    from scipy.stats import t as student_t

    mean, count = math.fsum(scores) / len(scores), len(scores)
    if count < 2:
        return {"score": mean}
    sd = float(np.std(scores, ddof=1))
    error = sd / math.sqrt(count)
    reach = error * float(student_t.ppf((1 + _CONFIDENCE) / 2, count - 1))
    interval = {"lower": mean - reach, "upper": mean + reach, "confidence_level": _CONFIDENCE}
    uncertainty = {
        "standard_error": {"value": error, "method": "over training seeds"},
        "confidence_interval": {**interval, "method": "Student's t over training seeds"},
        "standard_deviation": sd,
        "num_samples": count,
    }
    return {"score": mean, "uncertainty": uncertainty}


def _texts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return facts as texts, which is all that the schema takes; None is left out."""
    texts = {}
    for key, value in facts.items():
        if value is not None:
            texts[key] = value if isinstance(value, str) else json.dumps(value)
    return texts


def hub_entries(rows: Sequence[Row], benchmarks: Sequence[str]) -> list[dict[str, Any]]:
    """Return the entries of a model repository, one for each METRIC=DATASET:TASK.

    Raises UsageError if there are several runs, or the run has no such metric.
    """
    runs = finished(runs_of(rows))
    if len(runs) != 1:
        raise UsageError(
            f"--format hf: a model repository has one checkpoint, and these are {len(runs)} "
            "finished runs; choose one, as by --where seed=1"
        )
    (run,) = runs
    entries = []
    for metric, dataset, task in map(parse_benchmark, benchmarks):
        value = run.metrics.get(metric, math.nan)
        if not math.isfinite(value):
            known = [name for name, score in run.metrics.items() if math.isfinite(score)]
            raise UsageError(f"--benchmark {metric}: the run has none.{nearest(metric, known)}")
        suite = run.suite_of(metric)
        library = _library_of(runs, suite) if suite else (_OURS, "")
        notes = f"{metric} by {' '.join(library).strip()}, seed {run.seed}"
        place = {"id": dataset, "task_id": task}
        entries.append({"dataset": place, "value": value, "notes": notes})
    return entries
