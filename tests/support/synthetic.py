"""Run folders in the form of training, with chosen numbers."""

import json
from pathlib import Path

import yaml

from metaseq_lm.core.files import with_checksum


def make_run(
    folder: Path,
    score: float | None = 0.85,
    curve: list[tuple[int, float]] | None = None,
    config: dict | None = None,
    results: dict | None = None,
    sources: dict[str, str] | None = None,
    **top,
) -> Path:
    """Write a run folder; `score=None` omits results.json, `top` are keys of the config.

    `sources` are the options of its task that name other runs, as recorded by training.
    """
    folder.mkdir(parents=True)
    base = {
        "label": "",
        "seed": 1,
        "data": "data/moons",
        "save_dir": str(folder),
        "task": {"_name": "label_tokens", "labelled": "which_moon_10"},
        "criterion": {"_name": "cross_entropy"},
        "optimizer": {"lr": 1e-3},
        "trainer": {"max_update": 400},
        "engine": {"device": "cpu"},
        "init_from": None,
    }
    base.update(top)
    for key, value in (config or {}).items():
        group, _, name = key.partition(".")
        base[group][name] = value
    if sources:
        (folder / "sources.json").write_text(json.dumps(sources))
    (folder / "config.yaml").write_text(yaml.safe_dump(base, sort_keys=False))
    lines = []
    for update, value in curve or [(100, 0.5), (200, 0.6), (400, 0.8)]:
        seconds = update / 100
        common = {"update": update, "seconds": seconds}
        lines.append(json.dumps({"kind": "train", **common, "loss": 1 - value, "lr_main": 1e-3}))
        lines.append(json.dumps({"kind": "valid", **common, "accuracy": value}))
    lines.append(json.dumps({"kind": "event", "update": 400, "message": "end"}))
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    if score is not None:
        whole = {
            "status": "finished",
            "seed": base["seed"],
            "updates": base["trainer"]["max_update"],
            "seconds": 60.0,
            "flops": 1e12,
            "peak_memory": 10**8,
            "parameters": {"trained": 100, "all": 100},
            "metrics": {
                "valid": {"accuracy": score, "loss": 1 - score},
                "test": {"accuracy": score},
            },
            "data": "d1",
            "code": "c1",
            "pretraining": None,
        }
        whole.update(results or {})
        (folder / "results.json").write_text(json.dumps(with_checksum(whole)))
    return folder
