"""Exported language models score sentences and completions as the run does, elsewhere, too.

The rules are those of the BabyLM pipeline of 2025, written out here: it opens the tokenizer by
AutoProcessor, and of a text it scores the tokens that end after the first character of the
completion. lm-eval and minicons, where they are installed, score by their own code.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from battery import ROOT
from imported import imported

from metaseq_lm.cli import main
from metaseq_lm.data.tokenizers.base import Tokenizer
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.evaluation.suites import build_suite
from metaseq_lm.runs.manifests import resolve
from metaseq_lm.training.restore import open_scored
from metaseq_lm.training.scoring import PLL_RULES, SentenceScorer

pytest.importorskip("transformers")
from hf_folders import transformers

SUITES = ROOT / "examples" / "suites"
NATS = 1e-4
SIZES = """
    task.tokens_per_sample=160 model.max_positions=160 model.encoder_layers=2
    model.encoder_embed_dim=32 model.encoder_ffn_embed_dim=48 model.encoder_attention_heads=2
    optimizer.lr=0.01 trainer.max_update=12 trainer.valid_split='' engine.tensorboard=false
    engine.threads=1
""".split()
CASES = {
    "causal": ("causal_lm", "byte_bpe"),
    "causal, sentencepiece": ("causal_lm", "sentencepiece_unigram"),
    "causal, modern": ("causal_lm", "wordpiece", "model=modern"),
    "mlm": ("masked_lm", "wordpiece"),
    "mlm, byte BPE": ("masked_lm", "byte_bpe"),
    "mntp": ("masked_next_token", "byte_bpe"),
}


@dataclass
class Export:
    """A run, and the folder and rule of its export."""

    run: Path
    folder: Path
    rule: str

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's own."""
        return load_tokenizer(self.folder)

    @property
    def processor(self) -> Any:
        """The tokenizer as the BabyLM pipeline opens it."""
        return transformers.AutoProcessor.from_pretrained(self.folder, padding_side="right")

    @property
    def scorer(self) -> SentenceScorer:
        """The run's scores."""
        return SentenceScorer(open_scored(str(resolve(str(self.run)))))


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the made-up suites of the example."""
    folder = tmp_path_factory.mktemp("items")
    imported(SUITES / "items.py").write(folder)
    return folder


def texts_of(items: Path) -> list[str]:
    """Return all texts of the items, that of a completion with what stands before it."""
    texts = [
        text
        for pair in build_suite("blimp").read(items / "blimp")
        for text in (pair.good.text, pair.bad.text)
    ]
    for name in ("comps", "ewok", "entity_tracking"):
        choices = build_suite(name).read(items / name)
        texts += [completion.sentence.text for item in choices for completion in item.completions]
    return list(dict.fromkeys(texts))


@pytest.fixture(scope="module", params=CASES)
def export(
    request: pytest.FixtureRequest, items: Path, tmp_path_factory: pytest.TempPathFactory
) -> Export:
    """A language model of the items' words, hardly trained, exported."""
    folder = tmp_path_factory.mktemp("export")
    criterion, kind, *more = CASES[request.param]
    (folder / "text").write_text("\n".join(texts_of(items)) + "\n", encoding="utf-8")
    size = "80" if kind.startswith("sentencepiece") else "400"
    words = ["--tokenizer", kind, "--vocab-size", size, "--destdir", str(folder / "data")]
    assert main(["preprocess", "--trainpref", str(folder / "text"), *words]) == 0
    words = ["--task", criterion, "--criterion", criterion, "--save-dir", str(folder / "run")]
    assert main(["train", str(folder / "data"), *words, *SIZES, *more]) == 0
    out = folder / "out"
    assert main(["export", str(folder / "run"), "--out", str(out), "--check"]) == 0
    return Export(folder / "run", out, request.param.partition(",")[0])


class Elsewhere:
    """Scores by the rules of the BabyLM pipeline, a text at a time."""

    def __init__(self, export: Export) -> None:
        self.processor, self.rule = export.processor, export.rule
        causal, masked = transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM
        kind = causal if self.rule == "causal" else masked
        self.model = kind.from_pretrained(export.folder).eval()

    @torch.no_grad()
    def token_scores(self, text: str, first: int = 0) -> np.ndarray:
        """Return the log-probability of each token that ends after character `first`."""
        encoding = self.processor(text=text, return_offsets_mapping=True)
        ids = torch.tensor(encoding["input_ids"])
        scored = [i for i, (_, end) in enumerate(encoding["offset_mapping"]) if end > first]
        if self.rule == "causal":
            rows, read = ids[None].expand(len(scored), -1), [i - 1 for i in scored]
        else:
            rows = ids.repeat(len(scored), 1)
            rows[range(len(scored)), scored] = self.processor.mask_token_id
            read = [i - (self.rule == "mntp") for i in scored]
        logits = self.model(input_ids=rows, attention_mask=torch.ones_like(rows)).logits
        log_probs = logits[range(len(scored)), read].log_softmax(-1)
        return log_probs[range(len(scored)), ids[scored]].double().numpy()


def test_tokens_have_the_same_characters(export, items):
    ours, theirs = export.tokenizer, export.processor
    vocabulary = ours.vocabulary
    ends = [] if export.rule == "causal" else [vocabulary.sep]
    for text in [*texts_of(items), "  Two  spaces, a\ttab and 東京", "\U0001f600x ½"]:
        ids, starts, stops = ours.encode_with_offsets(text)
        encoding = theirs(text=text, return_offsets_mapping=True)
        assert encoding["input_ids"] == [vocabulary.cls(), *ids, *ends], text
        spans = encoding["offset_mapping"]
        specials = [spans[0], *spans[len(ids) + 1 :]]
        assert all(tuple(span) == (0, 0) for span in specials)
        for start, stop, (_, end) in zip(starts, stops, spans[1:]):
            assert end == stop or start == stop, text  # a mark alone has no characters here
    assert theirs.pad_token_id == vocabulary.pad and theirs.mask_token_id == vocabulary.mask


def test_the_tokens_of_sentences_have_the_same_scores(export, items, tmp_path):
    elsewhere = Elsewhere(export)
    pairs = build_suite("blimp").read(items / "blimp")
    texts = [text for pair in pairs[:12] for text in (pair.good.text, pair.bad.text)]
    (tmp_path / "texts").write_text("\n".join(texts) + "\n", encoding="utf-8")
    words = ["--input", str(tmp_path / "texts"), "--tokens", "--out", str(tmp_path / "scores")]
    assert main(["score", str(export.run), *words]) == 0
    lines = (tmp_path / "scores").read_text(encoding="utf-8").splitlines()
    for text, line in zip(texts, lines, strict=True):
        record = json.loads(line)
        theirs = elsewhere.token_scores(text)
        assert record["text"] == text
        assert record["log_probs"] == pytest.approx(theirs, abs=NATS / 10)
        assert record["pll"] == pytest.approx(theirs.sum(), abs=NATS)


def completions_elsewhere(name: str, fields: dict[str, Any]) -> list[tuple[str, int]]:
    """Return the texts of a line of a file, and where the pipeline begins to score each."""
    if name == "comps":
        phrase = fields["property_phrase"]
        prefixes = fields["prefix_acceptable"], fields["prefix_unacceptable"]
        return [(f"{prefix} {phrase}", len(prefix) + 1) for prefix in prefixes]
    if name == "ewok":
        before = fields["Context1"]
        return [(f"{before} {fields[key]}", len(before)) for key in ("Target1", "Target2")]
    before = fields["input_prefix"]
    return [(before + option, len(before)) for option in fields["options"]]


@pytest.mark.parametrize("name", ["comps", "ewok", "entity_tracking"])
def test_completions_have_the_same_scores(export, items, name):
    elsewhere, scorer = Elsewhere(export), export.scorer
    suite = build_suite(name, ["first=12"])
    choices = suite.read(items / name)
    (file,) = (items / name).iterdir()
    right = 0
    for item, line in zip(choices, file.read_text(encoding="utf-8").splitlines()):
        texts = completions_elsewhere(name, json.loads(line))
        theirs = [elsewhere.token_scores(text, first).sum() for text, first in texts]
        compared = item.completions[: len(texts)]
        parts = [completion.parts for completion in compared]
        ours = scorer.score_parts([completion.sentence for completion in compared], parts)
        assert np.concatenate(ours) == pytest.approx(theirs, abs=NATS)
        # The first of equal scores is taken, which is the right one here.
        right += int(np.argmax(theirs)) == 0
    metrics = suite.score(choices, scorer)["overall"].metrics
    kind = "target_" if name == "ewok" else ""
    ties = metrics[f"{kind}ties"]
    assert ties >= (name != "entity_tracking")  # where a third option may be the best
    assert right == metrics[f"strict_{kind}accuracy"] * len(choices) + ties


def others(name: str) -> ModuleType:
    """Return the example that compares programs; skip the test if one is not installed."""
    pytest.importorskip(name, reason=f"{name} is not installed: pip install {name}")
    return imported(SUITES / "against_others.py")


@pytest.mark.parametrize("export", ["causal", "causal, modern"], indirect=True)
@pytest.mark.parametrize("name", ["blimp", "comps", "ewok", "entity_tracking"])
def test_lm_eval_has_the_same_scores(export, items, name, tmp_path):
    program = others("lm_eval")
    files = program.read_files(name, items / name)
    completions = [completion for file in files for completion in file.completions]
    theirs, accuracy = program.lm_eval_scores(export.folder, files, tmp_path)
    ours = program.package_scores(export.run, completions, PLL_RULES[0])
    assert ours == pytest.approx(theirs, abs=NATS)
    metrics = program.metrics_of(files, ours)
    assert metrics["ties"] > 0 or name == "entity_tracking"
    assert accuracy == pytest.approx(metrics["strict_accuracy"] + metrics["ties"])


@pytest.mark.parametrize("export", ["mlm", "mlm, byte BPE"], indirect=True)
@pytest.mark.parametrize("pll", PLL_RULES)
def test_minicons_has_the_same_scores(export, items, pll):
    program = others("minicons")
    (file,) = program.read_files("blimp", items / "blimp")
    ours = program.package_scores(export.run, file.completions, pll)
    theirs = program.minicons_scores(export.folder, file.completions, pll)
    assert ours == pytest.approx(theirs, abs=NATS)
