"""Runs of plug-ins: refused by name unless they declare what a class computes, and
then compared.
"""

import json
import sys
from pathlib import Path

import battery
import pytest

from metaseq_lm.cli import main
from metaseq_lm.core.registry import ALL

pytest.importorskip("transformers")

HEAD = '''"""A plug-in of a test."""

import torch
from dataclasses import replace
from functools import partial
from torch import nn

from metaseq_lm.core.batch import ALL_VISIBLE, Layout, Term
from metaseq_lm.core.registry import register_criterion, register_model, register_task
from metaseq_lm.criterions import Criterion, Exported
from metaseq_lm.criterions.masked_lm import MaskedLM
from metaseq_lm.models.layers import cross_entropy
from metaseq_lm.data.corpus.rows import Corpus
from metaseq_lm.config.transformer import TransformerConfig
from metaseq_lm.models.transformer.encoder import Embeddings, Encoder, TransformerLM
from metaseq_lm.tasks.language_modeling import _language_batch
from metaseq_lm.config.tasks import MaskedLMConfig
from metaseq_lm.tasks.masked_lm import MaskedLMTask, text_stream

LM = Exported(heads=("lm",))

'''
CAUSAL = '''
@register_criterion("next_token_lm")
class NextTokenLM(Criterion):
    """Each token from those before it."""

    exported = LM

    def __call__(self, model, batch):
        x = model.encoder(batch.tokens, replace(batch.layout, reach="causal"))
        logits = model.predict(x[:, :-1], None, "lm")
        targets = batch.tokens[:, 1:]
        if batch.padding is not None:
            targets = targets.masked_fill(batch.padding[:, 1:], -1)
        return {"causal": Term(cross_entropy(logits, targets).sum(), "targets")}


@register_task("causal", dataclass=MaskedLMConfig)
class Causal(MaskedLMTask):
    """Rows without masks."""

    exported = True

    def build_streams(self, split):
        options = self.config
        longest, mode = options.tokens_per_sample, options.sample_break_mode
        corpus = Corpus(self.data, split, self.vocabulary, longest, mode)

        def collate(samples, keys, width):
            return _language_batch(corpus, samples, width)

        return {split: text_stream(self.run_config, split, corpus, collate)}
'''
# Every weight has its usual name, and something else is computed with it.
LAST_FIRST = '''
class LastFirst(Embeddings):
    def forward(self, tokens, layout=None, segments=None):
        return super().forward(tokens.flip(-1)).flip(-1)


@register_model("last_first", dataclass=TransformerConfig)
class LastFirstLM(TransformerLM):
    """Positions count from the end of a row."""

    exported = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.encoder.embeddings.__class__ = LastFirst
'''
LOUDER = '''
class Louder(Encoder):
    def forward(self, tokens, layout=ALL_VISIBLE, segments=None):
        return super().forward(tokens, layout, segments) * 1.5


@register_task("louder", dataclass=MaskedLMConfig)
class LouderTask(MaskedLMTask):
    """A model with another encoder around the built-in one."""

    exported = True

    def build_model(self):
        model = super().build_model()
        model.encoder.__class__ = Louder
        return model
'''
OWN_HEAD = '''
@register_criterion("topic_lm")
class TopicLM(MaskedLM):
    """A topic of each row beside the masked LM."""

    exported = Exported(heads=("lm", "topic"))

    def __call__(self, model, batch):
        x = model.encoder(batch.tokens, batch.layout, batch.segments)
        topic = model.heads["topic"](x[:, 0]).square().sum()
        loss = cross_entropy(model.predict(x, batch.positions, "lm"), batch.targets)
        return {"mlm": Term(loss.sum(), "targets"), "topic": Term(topic, "rows")}


@register_task("topics", dataclass=MaskedLMConfig)
class Topics(MaskedLMTask):
    """A model with a head of its own."""

    exported = True

    def build_model(self):
        model = super().build_model()
        model.heads["topic"] = nn.Linear(self.run_config.model.encoder_embed_dim, 3)
        return model
'''
HALVED = '''
@register_criterion("halved_lm")
class HalvedLM(MaskedLM):
    """Half of the loss of masked LM."""

    exported = LM

    def __call__(self, model, batch):
        terms = super().__call__(model, batch)
        return {"mlm": Term(terms["mlm"].sum, "targets", 0.5)}
'''
BLIND = '''
@register_criterion("blind_lm")
class BlindLM(Criterion):
    """No attention to the other half of a row, of a built-in task."""

    exported = LM

    def __call__(self, model, batch):
        half = torch.zeros_like(batch.tokens, dtype=torch.bool)
        half[:, half.shape[1] // 2 :] = True
        x = model.encoder(batch.tokens, Layout(half))
        logits = model.predict(x, batch.positions, "lm")
        return {"mlm": Term(cross_entropy(logits, batch.targets).sum(), "targets")}
'''
# Plug-in; its options; what a refusal names where it declares nothing; what becomes of it if it
# does.
PLUG_INS = {
    "causal": (
        CAUSAL,
        ["task=causal", "criterion=next_token_lm"],
        "task causal",
        "criterion next_token_lm computes something else",
    ),
    "blind": (
        BLIND,
        ["task=masked_lm", "criterion=blind_lm"],
        "criterion blind_lm",
        "criterion blind_lm computes something else",
    ),
    "positions": (
        LAST_FIRST,
        ["task=masked_lm", "criterion=masked_lm", "model=last_first"],
        "model last_first",
        "criterion masked_lm computes something else",
    ),
    "encoder": (
        LOUDER,
        ["task=louder", "criterion=masked_lm"],
        "task louder",
        "criterion masked_lm computes something else",
    ),
    "head": (
        OWN_HEAD,
        ["task=topics", "criterion=topic_lm"],
        "task topics",
        "BertForMaskedLM has no place for its heads.topic",
    ),
    "loss": (HALVED, ["task=masked_lm", "criterion=halved_lm"], "criterion halved_lm", ""),
}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is registered for it alone."""
    for registry in ALL.values():
        monkeypatch.setattr(registry, "entries", dict(registry.entries))


@pytest.mark.parametrize("name", PLUG_INS)
def test_plug_ins(name: str, moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    code, options, undeclared, outcome = PLUG_INS[name]
    text = [o for o in battery.TEXT if not o.startswith("task.batch")]
    tiny = [*battery.TINY, *text, "model.encoder_normalize_before=false", "task.batch_size=4"]
    run, declared = tmp_path / "run", tmp_path / f"declared_{name}.py"
    silent = tmp_path / f"silent_{name}.py"
    declared.write_text(HEAD + code)
    silent.write_text(HEAD + "".join(f"{x}\n" for x in code.split("\n") if "exported =" not in x))
    words = ["train", str(moons), "--save-dir", str(run), "--user-dir", str(declared)]
    assert main([*words, *options, *tiny, "--max-update", "2", "--lr", "0.01"]) == 0
    out = ["--out", str(tmp_path / "out"), "--check"]

    def export(*more: str) -> tuple[int, str]:
        for registry in ALL.values():
            for known in [n for n, e in registry.entries.items() if e.origin.endswith(f"_{name}")]:
                del registry.entries[known]
        sys.modules.pop(declared.stem, None)
        capsys.readouterr()
        return main(["export", str(run), *out, *more]), capsys.readouterr().err

    status, error = export()
    assert status == 2 and error.startswith("metaseq-lm: ") and error.count("\n") == 1
    assert "--user-dir" in error and str(declared) in error
    assert not (tmp_path / "out").exists()
    status, error = export("--user-dir", str(silent))
    assert status == 1 and f"{undeclared} (of {silent.stem})" in error
    assert "declare `exported` in" in error
    assert not (tmp_path / "out").exists()
    status, error = export("--user-dir", str(declared))
    assert (status, outcome in error) == (1 if outcome else 0, True), error
    assert (tmp_path / "out").exists() == (not outcome)
    if not outcome:
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["architectures"] == ["BertForMaskedLM"]
