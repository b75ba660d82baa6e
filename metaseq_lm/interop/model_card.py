"""The README.md of an exported model: what it is, how it was trained and scored, how to load it."""

import json
import re
from pathlib import Path
from typing import Any

from metaseq_lm import __version__
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.output import escape_markdown
from metaseq_lm.runs.checkpoint import Checkpoint
from metaseq_lm.runs.manifests import hash_of_weights

CARD_FILE = "README.md"
_LARGEST_CARD = 1 << 20
_WEIGHTS = "Weights"  # the hash of the exported checkpoint's
# The suffix of a class's name, the pipeline for it, and the class that opens any such folder.
_PIPELINES = {
    "ForMaskedLM": ("fill-mask", "AutoModelForMaskedLM"),
    "ForCausalLM": ("text-generation", "AutoModelForCausalLM"),
    "LMHeadModel": ("text-generation", "AutoModelForCausalLM"),
    "ForPreTraining": ("", "AutoModelForPreTraining"),
    "ForSequenceClassification": ("text-classification", "AutoModelForSequenceClassification"),
    "ForMultipleChoice": ("multiple-choice", "AutoModelForMultipleChoice"),
    "ForTokenClassification": ("token-classification", "AutoModelForTokenClassification"),
    "ForQuestionAnswering": ("question-answering", "AutoModelForQuestionAnswering"),
    "Model": ("feature-extraction", "AutoModel"),
}


def model_card(
    stored: Checkpoint,
    config: RunConfig,
    model: dict[str, Any],
    labelled: str = "",
    longest: str = "",
    has_pipeline: bool = True,
) -> str:
    """Return the model card of a checkpoint; `model` is the content of its `config.json`.

    `labelled` is the set of the chosen head, if there are several; `longest` describes the longest
    input; without `has_pipeline` no pipeline of transformers performs the trained task.
    """
    name = model["architectures"][0]
    pipeline, opener = next(p for end, p in _PIPELINES.items() if name.endswith(end))
    task, criterion = config.task._name, config.criterion._name
    labels = [json.dumps(label, ensure_ascii=False) for label in model.get("label2id", ())]
    title = config.label or Path(config.save_dir).name or task
    facts = {
        "Class": f"`{name}`",
        "Trained by": f"metaseq-lm {__version__}, task `{task}`, criterion `{criterion}`",
        "Updates": str(stored.manifest.get("update", "")),
        "Labelled set": escape_markdown(labelled or str(getattr(config.task, "labelled", ""))),
        "Started from": escape_markdown(Path(config.init_from or "").name),
        "Labels": escape_markdown(", ".join(labels)),
        "Longest input": longest,
        "Seed": str(config.seed),
        _WEIGHTS: f"`{hash_of_weights(stored.manifest)}`",
    }
    lines = ["---", "library_name: transformers", "tags: [metaseq-lm]"]
    lines += [f"pipeline_tag: {pipeline}"] * bool(pipeline and has_pipeline)
    lines += ["---", "", f"# {escape_markdown(title)}", ""]
    lines += [f"* {key}: {value}" for key, value in facts.items() if value]
    scores = stored.manifest.get("valid") or {}
    if scores:
        lines += ["", "| validation | |", "|---|---|"]
        lines += [f"| {escape_markdown(name)} | {value:.4g} |" for name, value in scores.items()]
    lines += ["", "```python", f"from transformers import {opener}, AutoTokenizer", ""]
    lines += [f'model = {opener}.from_pretrained("FOLDER")']
    lines += ['tokenizer = AutoTokenizer.from_pretrained("FOLDER")', "```", ""]
    return "\n".join(lines)


def weights_of(folder: Path) -> str | None:
    """Return the hash of the weights that a folder was exported from; None if no card says so."""
    if not (folder / CARD_FILE).is_file():
        return None
    # The folder may be anybody's, with a README.md of any size and encoding.
    with open(folder / CARD_FILE, encoding="utf-8", errors="replace") as file:
        card = file.read(_LARGEST_CARD)
    line = re.search(rf"^\* {_WEIGHTS}: `([0-9a-f]{{64}})`$", card, re.MULTILINE)
    if line is None:
        return None
    return line[1]
