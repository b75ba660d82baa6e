"""Compare objectives at equal compute, with controls, and say which differences are established.

  metaseq-lm league --out L
  metaseq-lm league --out L --with criterion=mine --user-dir my_plugin
  metaseq-lm league PLAN.yaml --out L --budgets 2e10,6e10 --objectives causal,masked_15
  metaseq-lm league --out L --text corpus.txt --probe train.conllu --probe-test test.conllu
  metaseq-lm league report L             print the standings again, write L/report
  metaseq-lm league report L --watch     the same, and again whenever results change
  metaseq-lm league report               print the rows of 'balanced', which ship with the package
  metaseq-lm league report laptop        the same for another plan, also: objectives, epochs, garden
  metaseq-lm league report L --json      the standings as one JSON document
  metaseq-lm league verify balanced --out V    train runs of two drawn rows again, and compare

Without PLAN.yaml the league follows the plan 'balanced', which ships with the package: labels of a
small language that need what precedes a word, what follows it, or both, with exact answers. A
league makes its data in L/data, tunes each objective on seeds of its own, trains and scores the
runs that are compared and their controls, and prints the standings: each objective at each budget
with the gates that flag it and the verdict against the baseline. With --with it runs only what is
new. Give the same command again to continue.

Each part of a league is an ordinary sweep, such as L/final/causal, so 'metaseq-lm sweep status'
works there. docs/how_to/league.md describes the plan.
"""

import argparse
import contextlib
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from metaseq_lm.core.documents import show_result
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import check_folder
from metaseq_lm.core.options import add_options, flag_of, option, read_options
from metaseq_lm.core.output import show, show_progress
from metaseq_lm.core.secrets import masked

if TYPE_CHECKING:
    from metaseq_lm.league.folder import Contents, LeagueFolder
    from metaseq_lm.league.plan import Plan
    from metaseq_lm.sweeps.configs import Check
    from metaseq_lm.sweeps.options import Launch

PROGRESS = True
WORDS = True
HELP = "compare objectives at equal compute, with controls and verdicts"
_REPORT, _PREDICT = "report", "predict"
_WITH = ("name", "grid", "control", "tune_by")  # options of the objective that --with adds
# The options that each of the command's own words uses; without one of them it runs a league.
_USED = {
    _REPORT: ("archive", "out", "budgets", "watch", "user_dir"),
    _PREDICT: ("budgets", "objectives", "user_dir"),
    "verify": ("out", "rows", "seed", "user_dir", "code"),
    "submit": ("out", "name", "user_dir", "added", *_WITH),
    "merge": ("archive",),
    "ledger": (),
}
# The numbers of words that follow each of them, at least and at most.
_PLACES = dict.fromkeys(_USED, (1, 1)) | {_REPORT: (0, 1), "ledger": (2, 2), "merge": (2, 1000)}
_TAKES = dict.fromkeys(_USED, "one league") | {"ledger": "a folder and a plan", "merge": "leagues"}
_ONLY = {"archive": _REPORT, "watch": _REPORT} | dict.fromkeys(("rows", "seed", "code"), "verify")


@dataclass(frozen=True)
class LeagueOptions:
    """What to compare, and where."""

    out: str | None = option(
        None,
        "folder of the league; an existing league is continued. report: folder of the page",
        metavar="L",
    )
    name: str = option("mine", "name of the objective to add (--with) or to submit", metavar="NAME")
    grid: tuple[str, ...] = option(
        (),
        "values to tune the objective of --with on; can be repeated (default: the grid of the "
        "plan)",
        metavar="KEY=A,B",
        repeated=True,
    )
    control: str | None = option(
        None, "matched control for the objective of --with", metavar="OBJECTIVE"
    )
    tune_by: str | None = option(
        None,
        "metric to tune the objective of --with by (default: the plan's)",
        metavar="METRIC",
    )
    budgets: tuple[float, ...] = option(
        (),
        "FLOPs per run, from the budgets of the plan (default: its usual ones; report: all; "
        "predict: the first without runs)",
        metavar="A,B",
    )
    objectives: tuple[str, ...] = option(
        (), "only these objectives (default: all, or the one of --with)", metavar="A,B"
    )
    text: str | None = option(
        None, "the text arm: objectives on this text, a document a line, instead of the small world"
    )
    probe: str | None = option(
        None,
        "with --text: labelled data, .conllu, .conll, or a table with the columns text and label",
    )
    probe_test: str | None = option(
        None, "with --text: labelled data for the score (default: a fifth of --probe)"
    )
    user_dir: str | None = option(None, "plug-in folder or file to load")
    watch: bool = option(
        False,
        "report: write the page again whenever results change, until the league is over; the "
        "page reloads itself",
    )
    dry_run: bool = option(
        False, "show runs, FLOPs, hours and the smallest detectable effect; run nothing"
    )
    archive: Path | None = option(
        None,
        "report, merge: keep all runs in a file, which replaces their folders if it lies beside "
        "a plan as PLAN.jsonl.gz",
    )
    rows: int | None = option(
        None, "verify: rows to draw, whose runs are trained again (default: 2)", at_least=0
    )
    seed: int | None = option(None, "verify: the seed that draws them (default: any)", at_least=0)
    code: Path | None = option(
        None,
        "verify: checkout or wheel of the code that trained the runs (default: this one)",
        metavar="PATH",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    from metaseq_lm.sweeps.options import Launch

    parser.usage = (
        "metaseq-lm league [PLAN.yaml] --out L [options]\n"
        "       metaseq-lm league report [L | PLAN.yaml] [--budgets A,B] [--out FOLDER] "
        "[--archive FILE] [--watch]\n"
        "       metaseq-lm league predict L [--budgets A,B] [--objectives A,B]\n"
        "       metaseq-lm league verify L | PLAN.yaml | SUBMISSION --out FOLDER [--rows N] "
        "[--seed S]\n"
        "       metaseq-lm league submit L | PLAN.yaml --name NAME --out SUBMISSION\n"
        "       metaseq-lm league merge A B ... --archive FILE\n"
        "       metaseq-lm league ledger FOLDER PLAN.yaml"
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    add_options(parser, LeagueOptions)
    parser.add_argument(
        "--with",
        dest="added",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="add an objective: its options of train, on top of those that the plan gives to all",
    )
    add_options(parser.add_argument_group("launch"), Launch)


def run(args: argparse.Namespace) -> int:
    """Run a league, report on one, or predict its results."""
    options = read_options(LeagueOptions, vars(args))
    words = [*args.words, *args.overrides]
    if words and words[0] in _USED:
        names = ["added", *(item.name for item in fields(LeagueOptions))]
        _check_unused(args, names, words[0], _USED[words[0]])
        return _run_word(args, options, *words)
    if not args.added:
        _check_unused(args, _WITH, "a league without --with")
    for name, word in _ONLY.items():
        if getattr(options, name) not in (None, False):
            raise UsageError(f"--{name} goes with 'metaseq-lm league {word} L'")
    return _run_league(args, options, words)


def _run_word(args: argparse.Namespace, options: LeagueOptions, word: str, *places: str) -> int:
    least, most = _PLACES[word]
    if not least <= len(places) <= most:
        raise UsageError(f"'league {word}' takes {_TAKES[word]}, got {len(places)} words")
    if word == _REPORT:
        return _report_of(args, options, *places)
    if word == _PREDICT:
        if options.user_dir:
            _plugin_check(options.user_dir)
        return predict(Path(places[0]), options)
    from metaseq_lm.cli import referee

    if word == "verify":
        return referee.verify(
            places[0],
            options.out,
            options.rows,
            options.seed,
            options.user_dir,
            args.max_parallel,
            options.code,
        )
    if word == "submit":
        if not args.added:
            _check_unused(args, ("user_dir", *_WITH[1:]), "submit without --with")
            return referee.submit(places[0], options.name, options.out)
        if Path(places[0]).is_dir():
            raise UsageError(f"{places[0]}: a folder; to register an objective, name the plan")
        contents = _contents_of(list(places), args.added, options)
        return referee.register(
            contents, Path(places[0]), options.name, options.out, options.user_dir
        )
    if word == "merge":
        return referee.merge(places, options.archive)
    return referee.ledger(*places)


def _report_of(args: argparse.Namespace, options: LeagueOptions, place: str | None = None) -> int:
    from metaseq_lm.league.plan_files import named_plan

    if options.user_dir:  # to register its gates
        _plugin_check(options.user_dir)
    path = named_plan(place) if place is not None else None
    command = masked(["metaseq-lm", *args.argv])
    if not options.watch:
        return report(path, options, command)
    if args.json:
        raise UsageError("--watch prints the standings again and again: no --json")
    return watch(path, options, command)


def _check_unused(
    args: argparse.Namespace, names: Iterable[str], command: str, used: Sequence[str] = ()
) -> None:
    """Raise UsageError for a given option that `command` does not use."""
    for name in names:
        if name not in used and getattr(args, name) not in (None, False, []):
            flag = "--with" if name == "added" else flag_of(name)
            raise UsageError(f"{flag}: {command} does not use it")


def watch(path: Path | None, options: LeagueOptions, command: str) -> int:
    """Report on a league whenever its results change, as long as a command runs it."""
    from metaseq_lm.league.folder import LeagueFolder
    from metaseq_lm.reporting.watch import follow

    if path is None or options.archive:
        raise UsageError("--watch follows a league that runs: metaseq-lm league report L --watch")
    folder = LeagueFolder(path)
    folder.read()
    follow(lambda reload: report(path, options, command, reload), [folder.path], folder.is_running)
    return 0


def report(
    source: Path | None,
    options: LeagueOptions,
    command: str = "",
    reload: int = 0,
    about: Sequence[str] = (),
) -> int:
    """Print the standings of a folder, or those shipped with a plan, and write the page.

    The page goes into L/report or into --out; without both it is not written. It names the command,
    and reloads itself after `reload` seconds, 0 for never. Objectives in `about` get a sentence on
    kinds of labels if the plan has these.
    """
    from metaseq_lm.league.assembly import show_report, write_archive
    from metaseq_lm.league.plan_files import BALANCED
    from metaseq_lm.referee.ledger import read_place, write_standings

    plan_or_folder = source or BALANCED
    runs = read_place(plan_or_folder)
    folder = Path(options.out) if options.out else None
    if folder is None and not plan_or_folder.is_file():
        folder = plan_or_folder.resolve() / _REPORT
        check_folder(folder)
    _check_budgets(runs.contents.plan, options.budgets)
    if options.archive is not None:
        write_archive(options.archive, runs)
    show_report(runs, folder, options.budgets, command, reload, about)
    write_standings(plan_or_folder, runs)
    return 0


def predict(path: Path, options: LeagueOptions) -> int:
    """Record predictions for the next budget of each objective, and print all predictions.

    Raises UsageError with the reasons if nothing can be predicted.
    """
    from metaseq_lm.league.assembly import predict_rungs, read_league_runs
    from metaseq_lm.league.folder import LeagueFolder
    from metaseq_lm.league.ladder_tables import predictions_table
    from metaseq_lm.league.predictions import add_predictions
    from metaseq_lm.reporting.formats import to_text

    folder = LeagueFolder(path)
    contents = folder.read()
    _check_budgets(contents.plan, options.budgets)
    with folder.lock():
        runs = read_league_runs(folder, contents)
        predictions, reasons = predict_rungs(runs, options.objectives, options.budgets)
        if not predictions:
            raise UsageError("nothing is predicted: " + "; ".join(reasons))
        add_predictions(folder.path, predictions)
        runs = replace(runs, predictions=(*runs.predictions, *predictions))
    table = predictions_table(runs.standings())
    show(to_text(table))
    for reason in reasons:
        show(f"Not predicted: {reason}.")
    content = {"predictions": table.records, "not_predicted": reasons}
    show_result("league-predictions", content)
    return 0


def _run_league(args: argparse.Namespace, options: LeagueOptions, words: list[str]) -> int:
    folder, stored = open_folder(options)
    launch = launch_of(args, folder.path, options.dry_run)
    contents = _contents_of(words, args.added, options, folder, stored)
    contents = _with_chosen(contents, options)
    return run_contents(args, options, launch, folder, contents, stored)


def open_folder(options: LeagueOptions) -> "tuple[LeagueFolder, Contents | None]":
    """Return the folder of --out and its contents; UsageError if it cannot be one."""
    from metaseq_lm.league.folder import LeagueFolder

    if not options.out and not options.dry_run:
        raise UsageError("no --out given; name the folder of the league")
    folder = LeagueFolder(Path(options.out or "league"))
    if folder.path.exists() and not folder.path.is_dir():
        raise UsageError(f"--out {options.out}: is a file; name the folder of the league")
    return folder, folder.read() if folder.exists() else None


def check_same_plan(folder: "LeagueFolder", stored: "Contents", plan: "Plan") -> None:
    """Raise UsageError for another plan than that of the folder's contents."""
    if stored.plan.hash != plan.hash:
        raise UsageError(
            f"{folder.path} holds a league of another plan ({stored.plan.hash} there, {plan.hash} "
            "here); a plan is fixed before its runs: choose another --out"
        )


def run_contents(
    args: argparse.Namespace,
    options: LeagueOptions,
    launch: "Launch",
    folder: "LeagueFolder",
    contents: "Contents",
    stored: "Contents | None",
) -> int:
    """Run the open part of a league, then report; or show its cost.

    `stored` are the contents of the folder so far.
    """
    from metaseq_lm.league.corpus import check_domain, read_corpus
    from metaseq_lm.league.expansion import DataSource
    from metaseq_lm.league.forecast import check_tuning, forecast, measure_prices, measure_updates
    from metaseq_lm.league.runner import LeagueRequest, Runner

    names = _names_of(contents, options, bool(args.added))
    _check_budgets(contents.plan, options.budgets)
    budgets = tuple(sorted(set(options.budgets))) or contents.plan.ladder.usual
    check_tuning(contents, budgets)
    check = _plugin_check(options.user_dir)
    with data_of(contents.plan, folder, options.dry_run) as data:
        source = DataSource(data, _user_dir_of(options))
        objectives = tuple(map(contents.extended.objective, names))
        request = LeagueRequest(objectives, budgets, source)
        plan_hash = contents.plan.hash
        runner = Runner(contents.extended, request, folder.path, launch, plan_hash, check)
        runner.check_all()
        runner.examine_all()
        check_domain(read_corpus(data, contents.plan.controls.shifted_valid), data)
        if options.dry_run:
            show_result("league-plan", *forecast(runner, contents, measure_updates(runner)))
            return 0
        prices = measure_prices(runner, contents.prices)
        contents = replace(contents, prices=prices)
        for sentence in runner.excluded(prices):
            show_progress(sentence)
        runner = runner.with_prices(prices)
    with folder.lock():
        # Another command may have had the folder while this one measured prices.
        if (folder.read() if folder.exists() else None) != stored:
            raise MetaseqError(f"{folder.file}: changed in the meantime; give the command again")
        folder.check_plans(plan_hash)
        folder.write(contents)
        over = runner.run()
    command = masked(["metaseq-lm", *args.argv])
    about = [options.name] if args.added else []
    report(folder.path, replace(options, out=None), command, about=about)
    return 0 if over else 1


def launch_of(args: argparse.Namespace, out: Path, dry_run: bool) -> "Launch":
    """Return the launch options; raises UsageError without Slurm."""
    from metaseq_lm.sweeps.options import check_out, launch_from
    from metaseq_lm.sweeps.submit import need_slurm

    launch = launch_from({}, vars(args))
    check_out(out, launch.executor)
    if launch.executor == "slurm" and not dry_run:
        need_slurm()
    return launch


def _contents_of(
    words: list[str],
    added: list[str],
    options: LeagueOptions,
    folder: "LeagueFolder | None" = None,
    stored: "Contents | None" = None,
) -> "Contents":
    """Return the plan of command line, folder or package, with added objectives.

    Objectives added in the archive of the plan are included. Raises UsageError for another plan
    than the folder's.
    """
    from metaseq_lm.league.assembly import with_archived
    from metaseq_lm.league.folder import Contents
    from metaseq_lm.league.plan import FILES, PROBE, TEXT
    from metaseq_lm.league.plan_files import (
        BALANCED,
        SHIPPED,
        TEXT_ARM,
        named_plan,
    )

    files = {key: value for key in FILES if (value := getattr(options, key)) is not None}
    if files and (words or not {TEXT, PROBE} <= files.keys()):
        raise UsageError("--text and --probe go together, perhaps with --probe-test, no PLAN.yaml")
    if len(words) > 1:
        raise UsageError(f"give one PLAN.yaml, got {' '.join(words)}; options go with --with")
    if stored is not None and not words and not files:
        contents = stored
    else:
        file = TEXT_ARM if files else BALANCED
        if words:
            file = named_plan(words[0])
        contents = Contents.of_file(file, files)
        if file in (*SHIPPED, TEXT_ARM):
            # The package, and so its path, may be another one when the league goes on.
            contents = replace(contents, archive=None)
        if folder and stored is not None:
            check_same_plan(folder, stored, contents.plan)
            contents = replace(contents, added=stored.added, prices=stored.prices)
    contents = with_archived(contents)
    if added:
        return _with_objective(contents, added, options)
    return contents


def _with_objective(contents: "Contents", added: list[str], options: LeagueOptions) -> "Contents":
    """Return the contents with the objective of --with, which may already be there."""
    from metaseq_lm.core.loading import split_overrides
    from metaseq_lm.league.folder import Added
    from metaseq_lm.sweeps.definition import parse_grid

    words, overrides = split_overrides(added)
    if words:
        raise UsageError(f"--with {words[0]}: options are key=value, such as criterion=mine")
    content: dict[str, Any] = {"options": overrides}
    if options.grid:
        content["grid"] = dict(map(parse_grid, options.grid))
    if options.control:
        content["control"] = options.control
    if options.tune_by:
        content["metric"] = options.tune_by
    objective = Added(options.name, content, _user_dir_of(options))
    for other in contents.added:
        if other.name == objective.name and other != objective:
            raise UsageError(
                f"the league has another objective {other.name!r} ({masked(other.words)}); "
                "name this one: --name NAME"
            )
    if objective in contents.added:
        return contents
    return replace(contents, added=(*contents.added, objective))


def _with_chosen(contents: "Contents", options: LeagueOptions) -> "Contents":
    """Return contents that include the archive's objectives that are chosen to run here."""
    # The archive has the name of their plug-in, the command line its path.
    chosen = [
        replace(item, user_dir=(_user_dir_of(options) or item.user_dir) if item.user_dir else None)
        for item in contents.additions
        if item not in contents.added and item.name in options.objectives
    ]
    return replace(contents, added=(*contents.added, *chosen))


def _names_of(contents: "Contents", options: LeagueOptions, adds: bool) -> list[str]:
    """Return the names of the objectives to run.

    Raises UsageError for an unknown objective, or if the command line does not name its plug-in.
    """
    from metaseq_lm.league.folder import objective_of

    plan = contents.extended
    names = [objective.name for objective in contents.plan.objectives]
    if adds:
        names = [options.name]
    names = list(dict.fromkeys(options.objectives)) or names
    user_dir = _user_dir_of(options)
    plugins_of = {item.name: item.user_dir for item in contents.additions}
    for name in names:
        objective_of(plan, name)
        needed = plugins_of.get(name, user_dir)
        if needed != user_dir:
            plug_in = f"the plug-in {needed!r}" if needed else "no plug-in"
            raise UsageError(
                f"objective {name} has {plug_in}; a plug-in is loaded only if the command line "
                "names it: give --user-dir accordingly"
            )
    return names


def _plugin_check(user_dir: str | None) -> "Check | None":
    """Load all plug-ins; return a check that no configuration names another plug-in."""
    from metaseq_lm import plugins

    plugins.load_all(user_dir)
    if user_dir:
        return None
    return lambda config: plugins.check_named(config, None)


@contextlib.contextmanager
def data_of(plan: "Plan", folder: "LeagueFolder", dry_run: bool) -> Iterator[Path]:
    """Yield the data folder of a plan, made if missing; a small one for a dry run."""
    from metaseq_lm.league.data import has_data, make_data

    if not dry_run or has_data(plan, folder.data):
        yield make_data(plan, folder.data)
        return
    with TemporaryDirectory(prefix="metaseq-lm-") as scratch:
        # What is printed of small data is not true of those that the league would make.
        with contextlib.redirect_stdout(io.StringIO()):
            data = make_data(plan, Path(scratch) / "data", small=True)
        yield data


def _check_budgets(plan: "Plan", budgets: tuple[float, ...]) -> None:
    for budget in budgets:
        if budget not in plan.ladder.budgets:
            listed = ", ".join(f"{b:g}" for b in plan.ladder.budgets)
            raise UsageError(f"--budgets {budget:g}: not one of the plan, {listed}")


def _user_dir_of(options: LeagueOptions) -> str | None:
    """Return the plug-in of the command line as an absolute path; a module stays unchanged."""
    from metaseq_lm.sweeps.definition import plugin_path

    return plugin_path(options.user_dir, Path.cwd()) if options.user_dir else None
