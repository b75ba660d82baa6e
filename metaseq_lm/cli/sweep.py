"""Run a grid of settings and seeds, on this machine or as a Slurm array, and follow it.

  metaseq-lm sweep DATA --out S --grid optimizer.lr=1e-3,5e-4 --seeds 1,2,3 --task masked_lm
  metaseq-lm sweep SWEEP.yaml --out S --executor slurm --max-parallel 4
  metaseq-lm sweep status S               the state of every run, by its folder and the scheduler
  metaseq-lm sweep resubmit --failed S    launch again what failed, timed out or was cancelled
  metaseq-lm sweep cancel S               stop what is pending or running; it saves first

The same command given again launches only what is neither finished nor active (and not diverged).
With the local executor it waits for the runs; exit codes: 0 all finished, 1 not all, 75
interrupted. Every configuration is composed, and its task, criterion and model put together, before
anything is launched. Runs are trained from a snapshot of the code in S/code, so editing the code
changes nothing; --new-code takes a new one.

With --search KEY=RANGE and --search-flops F each setting is tuned with the same FLOPs, and --seeds
are those of the runs with the best values (`search: {space: {...}, flops: F}` in a file):

  metaseq-lm sweep DATA --out S --search 'optimizer.lr=log 1e-4..1e-2' --search-flops 4e13 \\
      --max-flops 1e13 --max-update 0 --seeds 1,2,3 --task masked_lm

SWEEP.yaml (paths relative to the file):
  data: ../data
  config_dir: config                        # optional
  stages:                                   # optional: one job runs them one after the other
    - {name: pretrain, config_name: "{method}", overrides: [trainer.max_update=4000]}
    - {name: finetune, config_name: finetune, overrides: ["init_from={pretrain}/checkpoints/last"]}
  grid: {method: [mlm, hard], optimizer.lr: [0.1, 0.2]}   # every combination
  list: [{n: 10, batch: 1}, {n: 160, batch: 16}]          # values that go together
  seeds: [1, 2, 3]
  overrides: ["task.labelled=which_moon_{n}", "task.batch_size={batch}"]
  launch: {executor: slurm, max_parallel: 4, time: 60}
A value replaces its {key} wherever that stands; any other key is an option of every stage, or of
one as stage:key. {seed} and the folders of earlier stages, such as {pretrain}, can be used too. A
stage with `each: {set: [RTE, CoLA]}` and the name "tuned-{set}" is two stages, tuned-RTE and
tuned-CoLA. Each seed makes all its runs before the next begins. A sweep may grow: the command with
more seeds, values or stages continues what is there.
"""

import argparse
import contextlib
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from metaseq_lm.cli import JSON_HELP, NOT_OPTIONS
from metaseq_lm.cli.train import ConfigOptions, add_key_flags, flag_values
from metaseq_lm.core.documents import show_result
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import add_options, option, read_options
from metaseq_lm.core.output import count_text, show
from metaseq_lm.core.plain_yaml import naming_place

if TYPE_CHECKING:
    from metaseq_lm.sweeps.configs import Check
    from metaseq_lm.sweeps.definition import Definition

PROGRESS = True
HELP = "launch a grid of runs, locally or on Slurm; status, resubmit, cancel"
OVERRIDES = True
WORDS = True
_VERBS = {
    "status": "Show the state of every run of a sweep.",
    "resubmit": "Launch again runs that failed, timed out, were cancelled, interrupted or lost.",
    "cancel": "Stop every run that is pending or running. Local runs save and are waited for.",
}
_NOT_SWEPT = ("save-dir", "seed")
_MAX_LISTED = 200  # --dry-run lists at most this many runs


def positive(text: str) -> int:
    """Return a whole number above 0, such as 8 or 1e15; raises ArgumentTypeError."""
    with contextlib.suppress(ValueError, OverflowError):
        number = float(text)
        if number >= 1 and number.is_integer():
            return int(number)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")


@dataclass(frozen=True)
class _DefinitionOptions(ConfigOptions):
    """The options that define a sweep."""

    out: str | None = option(
        None, "folder of the sweep; an existing sweep is continued", metavar="S"
    )
    grid: tuple[str, ...] = option(
        (), "values to combine; can be repeated", metavar="KEY=A,B", repeated=True
    )
    seeds: tuple[str, ...] = option((), "seeds of every setting (default: 1)", metavar="1,2,3")
    stages: tuple[str, ...] = option(
        (), "only these stages, such as A*, and the ones they start from", metavar="A,B"
    )
    dry_run: bool = option(False, "show the runs and launch nothing")
    plan: Path | None = option(
        None,
        "show the runs, FLOPs and hours of a league's plan and the smallest effect that it can "
        "detect, and launch nothing (as 'league PLAN.yaml --dry-run')",
        metavar="PLAN.yaml",
    )
    estimate: bool = option(
        False, "with --dry-run: run one update of every setting and print FLOPs and hours"
    )
    divide: int = option(
        1,
        "with --estimate: measure this part of each batch, 1/N, and multiply",
        converter=positive,
    )
    rate: int = option(
        0,
        "with --estimate: hours at this many FLOPs a second (default: measured on this machine)",
        metavar="FLOPS",
        converter=positive,
    )


@dataclass(frozen=True)
class _SearchOptions:
    """The option that makes a sweep a search; `_search_rules` has the others."""

    search: tuple[str, ...] = option(
        (),
        "draw this option from 'log 1e-4..1e-2', 1..4 or A,B, and run the seeds with the best "
        "value; can be repeated",
        metavar="KEY=RANGE",
        repeated=True,
    )


@dataclass(frozen=True)
class _ResubmitOptions:
    """The options that choose runs to launch again."""

    failed: bool = option(False, "resubmit: launch what did not end well (required)")
    diverged: bool = option(False, "launch diverged runs too; they will diverge again")
    new_code: bool = option(False, "take a new snapshot of the code")


@dataclass(frozen=True)
class _SweepOptions(_DefinitionOptions, _SearchOptions, _ResubmitOptions):
    """The options of `sweep`, except for launching."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = (
        "metaseq-lm sweep [SWEEP.yaml] [DATA] --out S [options] [key=value ...]\n"
        "       metaseq-lm sweep {status,resubmit,cancel} S [options]"
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    group = parser.add_argument_group("definition")
    add_options(group, _DefinitionOptions)
    add_key_flags(group, _NOT_SWEPT)
    group = parser.add_argument_group("search")
    add_options(group, _SearchOptions)
    add_options(group, _search_rules())
    add_options(parser.add_argument_group("launching again"), _ResubmitOptions)
    _add_launch(parser)
    # Not argparse's own help, because `sweep status --help` shows only the options of status.
    parser.add_argument("-h", "--help", action="store_true", help="show this help")


def _search_rules() -> type:
    """Return a dataclass of the rules of a search as options, None where none is given."""
    from metaseq_lm.sweeps.search import Search

    hints = get_type_hints(Search)
    rules = []
    for item in fields(Search):
        if item.name != "space":
            default = field(default=None, metadata=item.metadata)
            rules.append((f"search_{item.name}", hints[item.name], default))
    return make_dataclass("SearchRules", rules)


def _add_launch(parser: argparse.ArgumentParser) -> None:
    from metaseq_lm.sweeps.options import Launch

    add_options(parser.add_argument_group("launch"), Launch)


def run(args: argparse.Namespace) -> int:
    """Run the verb in the first word; without a verb, launch a sweep."""
    args.words += args.overrides  # argparse splits words if options are in between
    verb = next((word for word in args.words[:1] if word in _VERBS), "")
    if args.help:
        show((_verb_parser(verb) if verb else args.parser).format_help(), end="")
        return 0
    options = read_options(_SweepOptions, vars(args))
    if not verb:
        return _launch_sweep(args, options)
    from metaseq_lm.sweeps.folder import SweepFolder
    from metaseq_lm.sweeps.searching import status_lines
    from metaseq_lm.sweeps.states import format_summary, lines, read_states, states_document
    from metaseq_lm.sweeps.submit import cancel

    allowed = {a.dest for a in _verb_parser(verb)._actions}
    for name, value in vars(args).items():
        named = value and value != args.parser.get_default(name)
        if named and name not in {*allowed, *NOT_OPTIONS, "words"}:
            raise UsageError(f"'{name}' does not go with 'sweep {verb}'; see 'sweep {verb} --help'")
    if len(args.words) != 2:
        raise UsageError(f"give one sweep folder: metaseq-lm sweep {verb} S")
    folder = SweepFolder(Path(args.words[1]))
    folder.read()
    if verb == "resubmit":
        return resubmit(folder, args, options)
    if verb == "status":
        rows = read_states(folder)
        text = "\n".join([*status_lines(folder), *lines(rows), format_summary(rows)])
        show_result("sweep-status", states_document(rows), text)
    else:
        names = cancel(folder)
        output = [f"cancelled {name}" for name in names] or ["nothing was pending or running"]
        show_result("sweep-cancel", {"cancelled": names}, "\n".join(output))
    return 0


def _verb_parser(verb: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"metaseq-lm sweep {verb}", description=_VERBS[verb])
    parser.add_argument("folder", metavar="S", help="folder of the sweep (its --out)")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    if verb == "resubmit":
        add_options(parser, _ResubmitOptions)
        parser.add_argument("--user-dir", help="plug-in of the sweep; it must be named again")
        _add_launch(parser)
    return parser


def resubmit(folder: Any, args: argparse.Namespace, options: _SweepOptions) -> int:
    """Launch the runs that did not end well again, with stored definition and launch options."""
    from metaseq_lm.sweeps.options import check_out, launch_from
    from metaseq_lm.sweeps.states import RETRYABLE
    from metaseq_lm.sweeps.submit import need_slurm

    if not options.failed:
        raise UsageError("say what to launch again: metaseq-lm sweep resubmit --failed S")
    content = folder.read()
    if content["out"] != str(folder.path):
        raise UsageError(f"this sweep was moved from {content['out']}; move it back to go on")
    launch = launch_from(content["launch"], vars(args))
    _check_named(content, args)
    check_out(folder.path, launch.executor)
    if launch.executor == "slurm":
        need_slurm()
    runs, definition = folder.runs(), folder.definition()
    if not runs:
        raise UsageError("its search is not over; the 'sweep' command given again goes on with it")
    copies = {} if options.new_code else _copied_code(folder, definition)
    check(runs, replace(definition, **copies))
    return _launch_runs(folder, definition, runs, launch, options, RETRYABLE)


def _copied_code(folder: Any, definition: "Definition") -> dict[str, Any]:
    """Return the paths of the last jobs' plug-in and configs, {} before any job."""
    from metaseq_lm.sweeps.job import code_at

    last = folder.last_code()
    if last is None:
        return {}
    code = code_at(folder.path / "code" / last, definition.user_dir, definition.config_dir)
    return {"user_dir": code.user_dir, "config_dir": code.config_dir}


def _check_named(content: dict[str, Any], args: argparse.Namespace) -> None:
    """Raise UsageError unless the command line names the code in a sweep.json."""
    from metaseq_lm.sweeps.definition import plugin_path

    # Code only runs if the command line names it, never because a file does.
    user_dir = plugin_path(args.user_dir, Path.cwd()) if args.user_dir else None
    stored = content["definition"]["user_dir"]
    if stored != user_dir:
        has, remedy = "no plug-in", "leave --user-dir out"
        if stored:
            has, remedy = f"the plug-in {stored!r}", "give --user-dir with its path"
        raise UsageError(
            f"the sweep has {has}; a plug-in is loaded only if the command line names it: {remedy}"
        )
    setup = content["launch"].get("setup")
    if setup and (args.executor or content["launch"].get("executor")) == "slurm" and not args.setup:
        raise UsageError(
            f"the sweep has lines for the job's shell, {setup!r}, which are run only if the "
            "command line names them: give them with --setup"
        )


def _launch_sweep(args: argparse.Namespace, options: _SweepOptions) -> int:
    from metaseq_lm import plugins
    from metaseq_lm.runs.conditions import count_conditions
    from metaseq_lm.sweeps.configs import conditions_of_runs
    from metaseq_lm.sweeps.folder import SweepFolder
    from metaseq_lm.sweeps.options import slurm_parameters
    from metaseq_lm.sweeps.states import RETRYABLE
    from metaseq_lm.sweeps.submit import need_slurm

    if options.plan is not None:
        from metaseq_lm.cli import main

        user_dir = ["--user-dir", args.user_dir] if args.user_dir else []
        json = ["--json"] if args.json else []
        return main(["league", str(options.plan), "--dry-run", *user_dir, *json])
    if options.failed:
        raise UsageError("--failed goes with 'metaseq-lm sweep resubmit'")
    plugins.load_all(args.user_dir)
    _check_each_value(args, options)
    content = _content_of(args, options)
    if rules := _search_of(content, args):
        return _launch_search(content, rules, args, options)
    runs, definition, launch, out = plan(content, args, options)
    if SweepFolder(out).stored_search():
        raise UsageError(f"{out} holds a search; go on with it (--search), or give another --out")
    check(runs, definition)
    stages = len(definition.stages)
    of_stages = f" of {stages} stages" * (stages > 1)
    show(f"{count_text(len(runs), 'run')}{of_stages}")
    if options.estimate and not options.dry_run:
        raise UsageError("--estimate goes with --dry-run")
    if (options.divide > 1 or options.rate) and not options.estimate:
        raise UsageError("--divide and --rate go with --dry-run --estimate")
    if options.estimate:
        _show_estimate(runs, definition, launch.max_parallel or 1, options.divide, options.rate)
        return 0
    if options.dry_run:
        planned = _show_plan(runs, definition)
        conditions = count_conditions(conditions_of_runs(runs, definition))
        for sentence in conditions:
            show(sentence)
        parameters: dict[str, Any] = {}
        if launch.executor == "slurm":
            parameters = slurm_parameters(launch, out)
            show("sbatch: " + "  ".join(f"{key}={value}" for key, value in parameters.items()))
        content = {"runs": planned, "conditions": conditions, "sbatch": parameters}
        show_result("sweep-plan", content)
        return 0
    if launch.executor == "slurm":
        need_slurm()
    out.mkdir(parents=True, exist_ok=True)
    return _launch_runs(
        SweepFolder(out), definition, runs, launch, options, (*RETRYABLE, "waiting")
    )


def _search_of(content: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Take the rules of the search out of a sweep's content; override them by the command line."""
    from metaseq_lm.core.structured import read_values
    from metaseq_lm.sweeps.search import Search, parse_axis

    rules = read_values(Search, content.pop("search", {}), "search")
    typed = {}
    for name, value in vars(args).items():
        if name.startswith("search_") and value is not None:
            typed[name.removeprefix("search_")] = value
    if not rules and not args.search:
        if typed:
            raise UsageError("give --search KEY=LOW..HIGH as well: nothing is searched")
        return {}
    space = {key: item.as_json() for key, item in map(parse_axis, args.search or ())}
    return {**rules, **typed, "space": {**rules.get("space", {}), **space}}


def _launch_search(
    content: dict[str, Any], rules: dict[str, Any], args: argparse.Namespace, options: _SweepOptions
) -> int:
    """Start or continue a search, then launch the runs with the chosen values."""
    from metaseq_lm.sweeps.expansion import expand
    from metaseq_lm.sweeps.folder import SweepFolder
    from metaseq_lm.sweeps.search import Search
    from metaseq_lm.sweeps.searching import Searched, again_text
    from metaseq_lm.sweeps.states import RETRYABLE, read_states, states_document
    from metaseq_lm.sweeps.submit import need_slurm

    _, definition, launch, out = plan(content, args, options)
    searched = Searched(definition, Search.from_json(rules), out, launch, _check_for(definition))
    settings = searched.check_all()
    folder = SweepFolder(out)
    searched.require_same(folder)
    searched.check_metric()
    if options.dry_run:
        searched.show_plan(settings, options.divide, options.rate)
        return 0
    if launch.executor == "slurm":
        need_slurm()
    out.mkdir(parents=True, exist_ok=True)
    with folder.lock():
        is_over = searched.run(folder, settings, options.new_code)
        if not is_over:
            show(again_text(out))
            show_result("sweep-status", states_document(read_states(folder)))
            return 0 if launch.executor == "slurm" else 1
        chosen = searched.choose()
        tuned = searched.definition_of(chosen, definition.seeds)
        runs = expand(tuned, out)
        folder.check_inside(runs)
        searched.record_tuning(runs)
    return _launch_runs(folder, tuned, runs, launch, options, (*RETRYABLE, "waiting"))


def plan(
    content: dict[str, Any], args: argparse.Namespace, options: _SweepOptions
) -> tuple[list[Any], "Definition", Any, Path]:
    """Return the runs, definition, launch options and folder of a sweep's content."""
    from metaseq_lm.sweeps.definition import normalise
    from metaseq_lm.sweeps.expansion import expand
    from metaseq_lm.sweeps.options import check_out, launch_from

    launch = launch_from(content.get("launch", {}), vars(args))
    if not options.out:
        raise UsageError("no --out given; name the folder of the sweep")
    # Before links are followed, which fails for a name with a NUL in it.
    check_out(Path(os.path.abspath(options.out)), launch.executor)
    out = Path(options.out).resolve()
    check_out(out, launch.executor)
    definition = normalise(content, options.stages)
    return expand(definition, out), definition, launch, out


def _sweep_files(args: argparse.Namespace) -> list[Path]:
    from metaseq_lm.core.config import TOP
    from metaseq_lm.core.loading import split_overrides

    paths, _ = split_overrides(args.words, TOP)
    return [Path(path) for path in paths if path.endswith((".yaml", ".yml"))]


def _content_of(args: argparse.Namespace, options: _SweepOptions) -> dict[str, Any]:
    """Return the content of the sweep file, if given, overridden by the command line."""
    from metaseq_lm.core.config import TOP, names_runs
    from metaseq_lm.core.loading import quote, split_overrides
    from metaseq_lm.sweeps.definition import (
        absolute_path,
        absolute_sources,
        parse_grid,
        plugin_path,
        read_file,
    )

    paths, overrides = split_overrides(args.words, TOP)
    files = _sweep_files(args)
    data = [path for path in paths if Path(path) not in files]
    if len(files) > 1 or len(data) > 1:
        raise UsageError(f"give one SWEEP.yaml and one DATA at most, got {' '.join(paths)}")
    content = read_file(files[0]) if files else {}
    working_dir = Path.cwd()
    if data:
        content["data"] = absolute_path(data[0], working_dir)
    config_dir, config_name = options.primary()
    if config_dir:
        content["config_dir"] = absolute_path(config_dir, working_dir)
    if args.user_dir:
        content["user_dir"] = plugin_path(args.user_dir, working_dir)
    if config_name:
        content["config_name"] = config_name
    if options.seeds:
        content["seeds"] = list(options.seeds)
    values = flag_values(args)
    grid = list(options.grid)
    if "," in values.get("objective", ""):
        grid.append(f"objective={values.pop('objective')}")
    typed = absolute_sources({"grid": dict(map(parse_grid, grid))}, working_dir)
    if grid:
        content["grid"] = {**content.get("grid", {}), **typed["grid"]}
    flags = []
    for key, value in values.items():
        # A job, or the same command given again, may run elsewhere.
        path = absolute_path(value, working_dir) if names_runs(key) else value
        flags.append(f"{key}={quote(path)}")
    overrides = absolute_sources({"overrides": overrides}, working_dir)["overrides"]
    content["overrides"] = [*flags, *content.get("overrides", []), *overrides]
    return content


def _show_estimate(
    runs: list[Any], definition: "Definition", max_parallel: int, divisor: int, rate: float
) -> None:
    """Print FLOPs and hours of every setting, and of all runs, on a process like this one."""
    from metaseq_lm.core.errors import MetaseqError
    from metaseq_lm.runs.conditions import count_conditions
    from metaseq_lm.sweeps.configs import compose_runs
    from metaseq_lm.training.price import price_of_run

    settings: dict[str, Any] = {}  # the first run of each setting
    for run in runs:
        settings.setdefault(str(run.values), run)
    seeds = len(runs) / len(settings)
    flops, seconds, conditions = 0.0, 0.0, []
    rows: list[dict[str, Any]] = []
    for run, stage, config in compose_runs(list(settings.values()), definition):
        name = ", ".join(
            [run.name.rpartition("-seed=")[0] or run.name, *filter(None, [stage.name])]
        )
        try:
            spent, took, condition = price_of_run(config, divisor, rate)
        except MetaseqError as error:
            show(f"{name}: not estimated: {error}")
            rows.append({"name": name, "flops": None, "seconds": None, "error": str(error)})
            continue
        rows.append({"name": name, "flops": spent, "seconds": took, "error": None})
        flops, seconds = flops + seeds * spent, seconds + seeds * took
        conditions.append(condition)
        show(f"{name}: {spent:.2g} FLOPs, {took / 3600:.2g} hours")
    at_rate = f" at {rate:.2g} FLOPs a second" if rate else ""
    show(
        f"{len(runs)} runs: {flops:.2g} FLOPs, {seconds / 3600:.2g} hours of one process{at_rate} "
        f"without validations, {seconds / 3600 / max_parallel:.2g} with --max-parallel "
        f"{max_parallel}"
    )
    sentences = count_conditions(conditions, "settings")
    for sentence in sentences:
        show(sentence)
    content = {"settings": rows, "runs": len(runs), "flops": flops, "seconds": seconds}
    content |= {"max_parallel": max_parallel, "conditions": sentences}
    show_result("sweep-estimate", content)


def _show_plan(runs: list[Any], definition: "Definition") -> list[dict[str, Any]]:
    from metaseq_lm.sweeps.job import Code

    code = Code(Path(), definition.user_dir, definition.config_dir)
    rows = [asdict(run) for run in runs]
    for row in rows:
        for stage in row["stages"]:
            stage["command"] = ["metaseq-lm", "train", *stage.pop("arguments"), *code.arguments()]
    for row in rows[:_MAX_LISTED]:
        show(row["name"])
        for stage in row["stages"]:
            show(f"  {shlex.join(stage['command'])}")
    if len(rows) > _MAX_LISTED:
        show(f"... and {len(rows) - _MAX_LISTED} more")
    return rows


def _launch_runs(
    folder: Any,
    definition: "Definition",
    runs: list[Any],
    launch: Any,
    options: _SweepOptions,
    again: Sequence[str],
) -> int:
    """Launch the runs with a state in `again`; with the local executor, wait for them."""
    from metaseq_lm.sweeps.launching import adopt, run_locally, take_code
    from metaseq_lm.sweeps.progress import Progress
    from metaseq_lm.sweeps.states import format_summary, lines, read_states, states_document
    from metaseq_lm.sweeps.submit import RunBatch, submit_slurm

    again = [*again, "diverged"] if options.diverged else again
    with folder.lock():
        current = adopt(folder, definition, runs, launch)
        names = {state.run for state in current if state.state in again}
        todo = [run for run in runs if run.name in names]
        if reasons := [s for s in current if s.run in names and s.reason]:
            show("\n".join(lines(reasons)))
        show(format_summary(current))
        if not todo:
            show("nothing to launch")
            show_result("sweep-status", states_document(current))
            over = all(state.state == "finished" for state in current)
            return 0 if over or launch.executor == "slurm" else 1
        code = take_code(folder, options.new_code)
        if launch.executor == "slurm":
            jobs = submit_slurm(folder, todo, launch, code)
            show("\n".join(f"submitted {run.name}  job {job}" for run, job in zip(todo, jobs)))
            show(f"follow it with: metaseq-lm sweep status {shlex.quote(str(folder.path))}")
            show_result("sweep-status", states_document(read_states(folder)))
            return 0
        try:
            run_locally([RunBatch(folder, todo, code)], launch, Progress(len(todo)).report)
        finally:
            current = read_states(folder)
            show(format_summary(current))
        show_result("sweep-status", states_document(current))
        return 0 if all(state.state == "finished" for state in current) else 1


def _check_each_value(args: argparse.Namespace, options: _SweepOptions) -> None:
    """Compose runs until every value of every key has been used; UsageError names the run."""
    from metaseq_lm.sweeps.configs import check_each_value
    from metaseq_lm.sweeps.search import Search
    from metaseq_lm.sweeps.searching import Searched

    content = _content_of(args, options)
    with naming_place(next(iter(_sweep_files(args)), None)):
        rules = _search_of(content, args)
        runs, definition, launch, out = plan(content, args, options)
        if rules:
            searched = Searched(definition, Search.from_json(rules), out, launch)
            searched.check_rules()
            runs = list(chain.from_iterable(runs for _, runs in searched.corner_runs()))
    check_each_value(runs, definition, _check_for(definition))


def check(runs: list[Any], definition: "Definition") -> None:
    """Load the plug-ins and raise UsageError naming the first run that could not start."""
    from metaseq_lm import plugins
    from metaseq_lm.sweeps.configs import check_configs

    plugins.load_all(definition.user_dir)
    check_configs(runs, definition, _check_for(definition))


def _check_for(definition: "Definition") -> "Check":
    """Return a check that no configuration of a sweep names another plug-in."""
    from metaseq_lm import plugins

    return lambda config: plugins.check_named(config, definition.user_dir)
