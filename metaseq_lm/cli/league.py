"""Compare objectives at equal compute, with controls, and say which differences are established.

  metaseq-lm league --out L
  metaseq-lm league --out L --with criterion=mine --user-dir my_plugin
  metaseq-lm league PLAN.yaml --out L --budgets 2e10,6e10 --objectives causal,masked_15
  metaseq-lm league report L             print the standings again, write L/report

Without PLAN.yaml it is the laptop division, which ships with the package: a small language with
exact answers, and a few seconds a run. A league makes its data in L/data, tunes each objective on
seeds of its own, trains and scores the runs that are compared and their controls, and prints the
standings: each objective at each budget with what the gates say of it and the verdict beside the
baseline. With --with it runs only what is new. The same command given again goes on.

Each part of a league is an ordinary sweep, such as L/final/causal, so 'metaseq-lm sweep status'
works there. docs/how_to/league.md describes the plan.
"""

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metaseq_lm.core.arguments import add_options, read_options
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import option
from metaseq_lm.core.output import show

if TYPE_CHECKING:
    from metaseq_lm.league.folder import Added, LeagueFolder
    from metaseq_lm.league.plan import Objective, Plan
    from metaseq_lm.league.runner import Request
    from metaseq_lm.sweeps.configs import Check

PROGRESS = True
WORDS = True
HELP = "compare objectives at equal compute, with controls and verdicts"
REPORT = "report"


@dataclass(frozen=True)
class LeagueOptions:
    """What is compared, and where."""

    out: str | None = option(None, "folder of the league; one that is there goes on", metavar="L")
    name: str = option("mine", "name of the objective that --with adds", metavar="NAME")
    grid: tuple[str, ...] = option(
        (),
        "values that the objective of --with is tuned on; can be repeated (default: the grid of "
        "the plan)",
        metavar="KEY=A,B",
        repeated=True,
    )
    control: str | None = option(
        None, "matched control of the objective of --with", metavar="OBJECTIVE"
    )
    budgets: tuple[float, ...] = option(
        (), "FLOPs of a run, of those of the plan (default: its usual ones)", metavar="A,B"
    )
    objectives: tuple[str, ...] = option(
        (), "only these objectives (default: all, or the one of --with)", metavar="A,B"
    )
    user_dir: str | None = option(None, "plug-in folder or file to load")
    dry_run: bool = option(
        False, "show runs, FLOPs, hours and the effect that they can show, and run nothing"
    )
    archive: Path | None = option(
        None, "report: keep all runs in a file that stands beside a plan as PLAN.jsonl"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    from metaseq_lm.sweeps.options import Launch

    parser.usage = (
        "metaseq-lm league [PLAN.yaml] --out L [options]\n"
        "       metaseq-lm league report L [--archive FILE]"
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
        help="add an objective: options of train, beside those that the plan has for all",
    )
    add_options(parser.add_argument_group("launch"), Launch)


def run(args: argparse.Namespace) -> int:
    """Run a league, or report on one."""
    from metaseq_lm.league.folder import LeagueFolder

    options = read_options(LeagueOptions, vars(args))
    words = [*args.words, *args.overrides]
    if words[:1] == [REPORT]:
        if len(words) != 2:
            raise UsageError("give one folder of a league: metaseq-lm league report L")
        return report(LeagueFolder(Path(words[1])), options.archive)
    if options.archive:
        raise UsageError("--archive goes with 'metaseq-lm league report L'")
    return run_league(args, options, words)


def report(folder: "LeagueFolder", archive: Path | None) -> int:
    """Print the standings and write L/report."""
    from metaseq_lm.league.assembly import Shelf, write_archive, write_report

    plan, added = folder.read()
    shelf = Shelf(plan, added, folder)
    if archive is not None:
        write_archive(archive, shelf)
    show(write_report(shelf))
    return 0


def run_league(args: argparse.Namespace, options: LeagueOptions, words: list[str]) -> int:
    """Run what is open of a league, then report."""
    from metaseq_lm.league.folder import LeagueFolder
    from metaseq_lm.league.runner import Runner
    from metaseq_lm.sweeps.options import Launch, check_out, launch_from
    from metaseq_lm.sweeps.submit import need_slurm

    if not options.out and not options.dry_run:
        raise UsageError("no --out given; it is the folder of the league")
    named = {item.name: getattr(args, item.name) for item in fields(Launch)}
    launch = launch_from({}, {name: value for name, value in named.items() if value is not None})
    folder = LeagueFolder(Path(options.out or "league"))
    check_out(folder.path, launch.executor)
    if launch.executor == "slurm" and not options.dry_run:
        need_slurm()
    plan, added, content = plan_of(words, args.added, options, folder)
    load_plugins(options.user_dir)
    if options.dry_run:
        from metaseq_lm.league.forecast import forecast

        chosen = request_of(plan, added, options, bool(args.added))
        show(forecast(plan, chosen, folder, launch.max_parallel or 1, check_of(options)))
        return 0
    chosen = request_of(plan, added, options, bool(args.added), folder)
    runner = Runner(extended(plan, added), chosen, folder.path, launch, check_of(options))
    runner.check_all()
    folder.write(content, plan, added)
    over = runner.run()
    report(folder, None)
    return 0 if over else 1
