"""List registered names with the module that each comes from, or the checkpoints of runs.

Criterions that fit only some tasks name them. Sizes are models with their options set, and are
chosen like a model (--model NAME). Recipes are whole configurations (train --config NAME).

examples:
  metaseq-lm list criterion
  metaseq-lm list --checkpoints runs/mlm
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from metaseq_lm.core.config import FOLDER, RECIPES
from metaseq_lm.core.documents import show_result
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.files import human_bytes
from metaseq_lm.core.registry import ALL, TASKS, Entry, Registry, nearest, tasks_for
from metaseq_lm.runs import manifests
from metaseq_lm.runs.manifests import CheckpointError

HELP = "list registered tasks, criterions, models and other names, or the checkpoints of a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add("kind", nargs="?", help="only one kind, such as task or criterion")
    add("--user-dir", help="plug-in folder or file to load")
    add(
        "--checkpoints",
        metavar="RUN",
        help=(
            "the checkpoints of a run: update, size, metrics, and which is the best, the last, "
            "or at a number of words"
        ),
    )
    add(
        "--verify",
        action="store_true",
        help="with --checkpoints: compare every byte with the manifests' checksums",
    )


def run(args: argparse.Namespace) -> int:
    """Print the registries or the checkpoints."""
    if args.verify and args.checkpoints is None:
        raise UsageError("--verify goes with --checkpoints RUN")
    if args.checkpoints is not None:
        if args.kind is not None or args.user_dir is not None:
            raise UsageError("--checkpoints RUN lists a run; leave the kind and --user-dir out")
        rows = list(checkpoints(Path(args.checkpoints), args.verify))
        show_result("checkpoints", rows, "\n".join(map(_checkpoint_line, rows)))
        return int(any(row["damage"] for row in rows))
    rows = _list_registered(args.kind, args.user_dir)
    show_result("list", rows, "\n".join(_registered_lines(rows)))
    return 0


def _list_registered(kind: str | None, user_dir: str | None) -> list[dict[str, Any]]:
    from metaseq_lm import plugins
    from metaseq_lm.data.preprocess.pipeline import DATASET_KINDS
    from metaseq_lm.league.columns import COLUMNS, title_of
    from metaseq_lm.league.gates import GATES

    plugins.load_all(user_dir)
    further = {"dataset_kind": DATASET_KINDS, "gate": GATES, "column": COLUMNS}
    rows = _rows_of({**ALL, **further}, kind)
    for row in rows:
        if row["kind"] == "column":
            row["title"] = title_of(row["name"])
    return rows


def _rows_of(registries: Mapping[str, Registry[Any]], kind: str | None) -> list[dict[str, Any]]:
    registries = {name.replace("_", "-"): registry for name, registry in registries.items()}
    requested = kind.rstrip("s") if kind else None
    kinds = [*registries, RECIPES.rstrip("s")]
    if requested is not None and requested not in kinds:
        hint = nearest(requested, kinds)
        raise UsageError(f"unknown kind '{kind}'.{hint} Kinds: {', '.join(kinds)}")
    rows: list[dict[str, Any]] = []
    for name in [requested] if requested else kinds:
        if name not in registries:
            rows += [
                {"kind": name, "name": f"{RECIPES}/{file.stem}", "summary": _summary_of(file)}
                for file in sorted((FOLDER / RECIPES).glob("*.yaml"))
            ]
            continue
        for entry in (registries[name].entries[key] for key in registries[name].names()):
            row: dict[str, Any] = {"kind": name, "name": entry.name, "summary": entry.summary}
            row["module"] = entry.origin
            if name == "criterion":
                row["tasks"] = _tasks_of(entry)
            rows.append(row)
        for file in sorted((FOLDER / name).glob("*.yaml")):
            kind = f"{name}, {'sizes' if name == 'model' else 'presets'}"
            rows.append({"kind": kind, "name": file.stem, "summary": _summary_of(file)})
    return rows


def _summary_of(preset: Path) -> str:
    """Return the first line of the comment of a preset or recipe."""
    return preset.read_text(encoding="utf-8").split("\n")[0].removeprefix("# ")


def _tasks_of(criterion: Entry[Any]) -> list[str]:
    if criterion.is_imported:
        return tasks_for(criterion.value)
    return [name for name in TASKS.names() if criterion.name in TASKS.entry(name).takes]


def _registered_lines(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the name of each kind, followed by a line for each of its rows."""
    for kind, members in groupby(rows, lambda row: row["kind"]):
        yield f"{kind}:"
        for row in members:
            tasks = f" (task {', '.join(row['tasks'])})" if row.get("tasks") else ""
            module = f"  [{row['module']}]" if "module" in row else ""
            title = f"{row['title']}: " if "title" in row else ""
            yield f"  {row['name']:<28}{title}{row['summary']}{tasks}{module}"


def checkpoints(run: Path, verify: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each checkpoint of a run folder, oldest first.

    Its key "damage" describes the damage, "" if there is none.
    """
    folder = next((f for f in (run / "checkpoints", run) if manifests.all_updates(f)), None)
    if folder is None:
        reason = "has no checkpoint" if run.is_dir() else "there is no such run folder"
        raise UsageError(f"--checkpoints {run}: {reason}")
    links = {name: (folder / name).resolve() for name in ("best", "last")}
    words = manifests.word_links(folder)
    for path in manifests.all_updates(folder):
        row: dict[str, Any] = {"path": str(path), "update": None, "bytes": None}
        row |= {name: path.resolve() == target for name, target in links.items()}
        row["words"] = [name for name, target in words.items() if path.resolve() == target]
        row |= {"metrics": {}, "damage": "", "verified": False}
        try:
            manifest = manifests.read_manifest(path)
            row |= {"update": manifest["update"], "metrics": manifest.get("valid") or {}}
            names = manifests.file_names(manifest)
            row["bytes"] = sum((path / name).stat().st_size for name in names)
            if verify:
                manifests.verify(path, names, manifest)
            row["verified"] = verify
        except CheckpointError as error:
            row["damage"] = str(error)
        except OSError as error:
            row["damage"] = f"{error.filename}: {error.strerror}"
        yield row


def _checkpoint_line(row: dict[str, Any]) -> str:
    names = [name for name in ("best", "last") if row[name]] + row["words"]
    marks = ", ".join([*names, *["verified"] * row["verified"]])
    size = "" if row["bytes"] is None else human_bytes(row["bytes"])
    metrics = "  ".join(f"{name} {value:.6g}" for name, value in row["metrics"].items())
    damage = f"damaged: {row['damage']}" if row["damage"] else ""
    return f"{Path(row['path']).name}  {size:>9}  {marks:<20}  {damage or metrics}".rstrip()
