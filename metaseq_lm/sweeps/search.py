"""The definition of a search: its space, the FLOPs for tuning each setting, and its rules.

A search tunes each setting of a sweep's grid and list with the same FLOPs, including trials that
were stopped early. Trials stop at rungs, which are parts of a run's budget, unless they are among
the better half of the trials that reached the rung so far (asynchronous successive halving, Li et
al. 2020, with a factor of 2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.metric_names import lower_is_better
from metaseq_lm.core.options import option
from metaseq_lm.core.structured import read_structured
from metaseq_lm.sweeps.definition import check_seeds
from metaseq_lm.sweeps.space import Choice, Range, check_space, parse_distribution

FACTOR = 2  # trials that reach a rung for each one that goes on; also the ratio of rungs


@dataclass(frozen=True)
class Search:
    """The rules of a search.

    Each is also an option of `sweep`, such as --search-flops.

    Attributes:
        space: The distribution of each searched option, as a `space.Range` or `space.Choice`.
    """

    space: dict[str, Any] = field(default_factory=dict)
    flops: float = option(
        0.0, "FLOPs of the search for each setting, those of stopped trials among them", above=0
    )
    metric: str = option(
        "valid.loss", "metric of a run that chooses (default: valid.loss)", metavar="METRIC"
    )
    better: str | None = option(
        None, "which end of that metric is best (default: by its name)", choices=("higher", "lower")
    )
    seed: int = option(101, "seed of trials and of the sampler (default: 101)")
    sampler: str = option(
        "qmc",
        "qmc (a Sobol sequence), tpe or random (default: qmc)",
        choices=("qmc", "tpe", "random"),
    )
    prune: str = option(
        "halving",
        "halving: stop the worse half of the trials at each rung; none (default: halving)",
        choices=("halving", "none"),
    )
    # Halving is biased against slow starters, such as low rates and masked LMs on their plateau.
    first_rung: float = option(
        0.25,
        "part of a run before which no trial is stopped (default: 0.25)",
        at_least=0.25,
        below=1,
    )

    def __post_init__(self) -> None:
        for key, item in self.space.items():
            if not isinstance(item, Range | Choice):
                self.space[key] = parse_distribution(item, f"space.{key}")
        check_seeds([self.seed], "seed")
        if not self.flops:
            raise UsageError(
                "flops: say how many FLOPs the tuning of each setting may take (--search-flops), "
                "such as four times trainer.max_flops"
            )

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Search:
        """Return the checked search of the rules in a sweep file; raises UsageError."""
        return read_structured(cls, content, "search")

    def as_json(self) -> dict[str, Any]:
        """Return the rules for sweep.json."""
        space = {key: distribution.as_json() for key, distribution in self.space.items()}
        return {**vars(self), "space": space}

    def check(self, varied: set[str], seeds: list[int]) -> None:
        """Raise UsageError for a search that contradicts the sweep around it."""
        check_space(self.space, varied)
        if self.seed in seeds:
            raise UsageError(
                f"seed {self.seed} is that of the trials; values that were chosen by a seed's luck "
                "must be compared on other seeds, so give other --seeds, or another --search-seed"
            )

    def check_direction(self) -> None:
        """Raise UsageError if the direction of the metric is unknown."""
        if self.better is None and lower_is_better(self.metric) is None:
            raise UsageError(
                f"search: the name of {self.metric} does not say whether the higher or the lower "
                "value is the better one; give --search-better"
            )

    @property
    def lower_is_better(self) -> bool:
        """Whether a smaller value of the metric is better."""
        if self.better is not None:
            return self.better == "lower"
        return bool(lower_is_better(self.metric))

    @property
    def rungs(self) -> tuple[float, ...]:
        """Parts of a run at which a trial may be stopped, and 1 for its end."""
        shares = []
        share = self.first_rung if self.prune == "halving" else 1.0
        while share < 1:
            shares.append(share)
            share *= FACTOR
        return (*shares, 1.0)

    @property
    def is_independent(self) -> bool:
        """Whether trials are independent of each other's scores."""
        return self.prune == "none" and self.sampler != "tpe"
