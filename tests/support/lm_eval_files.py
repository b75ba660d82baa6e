"""Files in the form of those that lm-evaluation-harness 0.4 writes."""

import json
from pathlib import Path
from typing import Any


def write_results(file: Path, model: str = "me/model", **changes: Any) -> Path:
    """Write results of a group of two tasks, and of a task with two filters."""
    tasks = {"near": 30, "far": 10, "sums": 20}
    configs = {
        task: {"task": task, "dataset_path": f"me/{task}", "metadata": {"pretrained": model}}
        for task in tasks
    }
    content: dict[str, Any] = {
        "results": {
            "pairs": {"alias": "pairs", "acc,none": 0.7, "acc_stderr,none": 0.1},
            "near": {"alias": " - near", "acc,none": 0.75, "acc_stderr,none": 0.1},
            "far": {"alias": " - far", "acc,none": 0.55, "acc_stderr,none": "N/A"},
            "sums": {"exact_match,strict": 0.5, "exact_match,flexible": 0.6, "sample_len": 20},
        },
        "group_subtasks": {"pairs": ["near", "far"], "sums": []},
        "configs": {name: {**config, "test_split": "test"} for name, config in configs.items()},
        "versions": {"pairs": 1.0, "near": 1.0, "far": 1.0, "sums": 2.0},
        "n-shot": {"near": 0, "far": 0, "sums": 5},
        "higher_is_better": {"pairs": {"acc": True}, "sums": {"exact_match": True}},
        "n-samples": {name: {"original": n, "effective": n} for name, n in tasks.items()},
        "config": {"model_args": {"pretrained": model}, "limit": None, "model_dtype": "float32"},
        "lm_eval_version": "0.4.13",
        "model_name": model,
    }
    file.write_text(json.dumps(content | changes))
    return file
