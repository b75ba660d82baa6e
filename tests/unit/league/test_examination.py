"""The examination of objectives: all that are built in pass, and each planted cheat is refused."""

from collections.abc import Iterator
from pathlib import Path

import battery
import numpy as np
import pytest
import small_data
import torch
from battery import configure
from registrations import forgotten
from torch import Tensor
from torch.nn import functional as F

from metaseq_lm import plugins
from metaseq_lm.core.batch import ScoredBatch, Term
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.core.metric_names import CAUSAL_NLL, CLOZE_NLL
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions.language_modeling import CausalLM, next_tokens
from metaseq_lm.criterions.masked_lm import MaskedLM
from metaseq_lm.data.corpus.predictions import at_tokens
from metaseq_lm.league import examination
from metaseq_lm.league.examination import examine

FURTHER = [("prefix_lm", 1), ("masked_lm", 6), ("causal_lm", 2), ("mixture", 1), ("electra_rtd", 1)]


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """Load the plug-ins of the repository, and forget them and the cheats in the end."""
    with forgotten():
        plugins.load_all(str(battery.ROOT / "user_dir"))
        yield


@pytest.mark.parametrize(
    "case", [*battery.FIRST, *FURTHER], ids=lambda case: f"{case[0]}-{case[1]}"
)
def test_what_is_built_in_passes(moons: Path, tmp_path: Path, case: battery.Case) -> None:
    examine(configure(moons, tmp_path / "save", case))


class Peeking(CausalLM):
    """A causal LM over states that see both sides, which claims to be causal."""

    tasks = ("causal_lm",)

    def logits(self, model, batch) -> Tensor:
        return model(batch.tokens, batch.layout)


class PeekingOpenly(Peeking):
    """The same, which says that it sees both sides: its own targets, too."""

    reach = "both"


class PeekingAhead(CausalLM):
    """The loss of a token given those before it, with a look at the one after it."""

    tasks = ("causal_lm",)

    def logits(self, model, batch) -> Tensor:
        logits = super().logits(model, batch)
        later = F.one_hot(batch.tokens, logits.shape[-1]).to(logits).roll(-2, 1)
        return logits + later.roll(1, -1)


class PeekingInScores(CausalLM):
    """An honest loss, and scores that see what follows."""

    tasks = ("causal_lm",)

    @torch.no_grad()
    def token_log_probs(self, model, batch) -> Tensor:
        return super().token_log_probs(model, batch) * (1 + batch.tokens[:, -2:-1])


class Unnormalised(CausalLM):
    """Scores that are logits."""

    tasks = ("causal_lm",)

    @torch.no_grad()
    def token_log_probs(self, model, batch: ScoredBatch) -> Tensor:
        targets = next_tokens(batch)
        logits = self.logits(model, batch).gather(-1, targets.clamp(min=0).unsqueeze(-1))
        scores = logits.squeeze(-1).masked_fill(targets < 0, 0.0)
        return at_tokens(scores).masked_fill(~batch.scored, 0.0)


class UnnormalisedLoss(MaskedLM):
    """A cross-entropy of numbers that are no log-probabilities."""

    tasks = ("masked_lm",)

    def __call__(self, model, batch):
        logits = model(batch.tokens, batch.layout, batch.positions, segments=batch.segments)
        flat, targets = logits.flatten(0, -2), batch.targets.flatten()
        loss = F.nll_loss(flat, targets, ignore_index=-1, reduction="sum")
        return {"mlm": Term(loss, "targets", kind=CLOZE_NLL)}


class Crowded(CausalLM):
    """Logits that depend on the other rows of a batch."""

    tasks = ("causal_lm",)

    def logits(self, model, batch) -> Tensor:
        return super().logits(model, batch) * len(batch.tokens)


class Hidden(CausalLM):
    """A bounded term that is computed otherwise than by a cross-entropy."""

    tasks = ("causal_lm",)

    def __call__(self, model, batch):
        logits, targets = self.logits(model, batch), next_tokens(batch)
        chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        total = -(chosen * (targets >= 0)).sum()
        return {"next_token": Term(total, "targets", kind=CAUSAL_NLL)}


CHEATS = {
    Peeking: "token 1 depends on that token itself",
    PeekingOpenly: "token 1 depends on that token itself",
    PeekingAhead: "depends on token 2, which stands behind it",
    PeekingInScores: "scores before token",
    Unnormalised: "all symbols at token 1 sum to",
    UnnormalisedLoss: "probabilities that sum to one",
    Crowded: "the rows and the padding beside it",
    Hidden: "cross-entropy of torch",
}


def config_of(data: Path, folder: Path, criterion: type):
    """Return the configuration of a run with a criterion, which is registered."""
    name = criterion.__name__.lower()
    register_criterion(name)(criterion)
    choice = [f"task={criterion.tasks[0]}", f"criterion={name}", f"data={data}"]
    rows = ["task.sample_break_mode=eos", "task.tokens_per_sample=34"]
    return load_config([*choice, *rows, *battery.TINY, f"save_dir={folder}"])


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.__name__)
def test_a_cheat_is_refused_by_the_check_it_fails(moons: Path, tmp_path: Path, cheat: type) -> None:
    with pytest.raises(UsageError, match=CHEATS[cheat]) as refused:
        examine(config_of(moons, tmp_path, cheat))
    assert f"criterion {cheat.__name__.lower()} is refused" in str(refused.value)


@pytest.mark.parametrize("declared", ["normalised", "sees_targets"])
def test_a_check_that_a_criterion_declares_not_to_pass_is_left_out(
    moons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, declared: str
) -> None:
    cheat, value = {"normalised": (Unnormalised, False), "sees_targets": (PeekingOpenly, True)}[
        declared
    ]
    monkeypatch.setattr(cheat, declared, value)
    monkeypatch.setattr(PeekingOpenly, "normalised", False)
    examine(config_of(moons, tmp_path, cheat))


def test_documents_beside_each_other_do_not_see_each_other(
    moons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(moons, tmp_path, ("prefix_lm", 1))
    assert config.task.sample_break_mode == "documents"
    causal = load_config(
        [
            *("task=causal_lm", "criterion=causal_lm", f"data={moons}", f"save_dir={tmp_path}"),
            *("task.sample_break_mode=documents", "task.tokens_per_sample=34", *battery.TINY),
        ]
    )
    examine(causal)

    def unpacked(self, model, batch) -> Tensor:
        layout = batch.layout
        return model(batch.tokens, type(layout)(layout.padding, reach="causal"))

    monkeypatch.setattr(CausalLM, "logits", unpacked)
    with pytest.raises(UsageError, match="documents packed with"):
        examine(causal)


def test_symbols_of_a_large_vocabulary_sum_to_less_than_one(
    moons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "_MOST", 50)
    examine(config_of(moons, tmp_path, type("Honest", (CausalLM,), {"tasks": ("causal_lm",)})))
    with pytest.raises(UsageError, match="some symbols"):
        examine(config_of(moons, tmp_path, Unnormalised))


def test_data_that_are_no_corpus_have_nothing_to_examine(moons: Path, tmp_path: Path) -> None:
    assert not (small_data.ensure(moons, "words") / "dict.txt").exists()
    examine(configure(moons, tmp_path, ("tagging", 0)))
    rows = examination._make_room(moons, tmp_path, 8, False)
    assert [len(row) for row in rows] == [7] * 8 + [8]
    assert [int((row != rows[0]).sum()) for row in rows[1:8]] == [1] * 7 and np.ndim(rows[0]) == 1
