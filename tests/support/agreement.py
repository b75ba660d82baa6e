"""A toy language with agreement of subject and verb in number, and a tiny masked LM of it."""

import json
from pathlib import Path

import numpy as np

from metaseq_lm.cli import main

NOUNS = ("cat", "dog", "bird", "child")
VERBS = ("sleep", "run", "eat", "sing")
SIZES = [
    "task=masked_lm",
    "task.sample_break_mode=eos",
    "task.tokens_per_sample=12",
    "task.mask_prob=0.25",
    "model.encoder_layers=2",
    "model.encoder_embed_dim=32",
    "model.encoder_ffn_embed_dim=64",
    "model.encoder_attention_heads=2",
    "model.max_positions=12",
    "optimizer.lr=0.01",
    "schedule.warmup_updates=20",
    "trainer.valid_split=''",
    "engine.tensorboard=false",
    "engine.threads=1",
]


def sentences(count: int, seed: int, grammatical: bool = True) -> list[str]:
    """Return sentences such as "the old cats sleep here", or ungrammatical ones.

    With the same seed these differ only in the form of the verb.
    """
    rng = np.random.default_rng(seed)
    found = []
    for noun, verb, adverb, adjective, plural in rng.integers(
        0, (4, 4, 3, 3, 2), (count, 5)
    ).tolist():
        subject = NOUNS[noun] + "s" * plural
        action = VERBS[verb] + "s" * bool(plural != grammatical)
        adjective = ("", "old ", "small ")[adjective]
        found.append(f"the {adjective}{subject} {action} {('here', 'there', 'now')[adverb]}")
    return found


def make_data(folder: Path, valid: int = 0) -> Path:
    """Binarise 2,000 grammatical sentences, and `valid` more, with a word tokenizer."""
    data = folder / "data"
    command = ["preprocess", "--tokenizer", "word", "--destdir", str(data)]
    for split, count, seed in (("train", 2000, 1), ("valid", valid, 2)):
        if count:
            text = folder / f"{split}.txt"
            text.write_text("\n".join(sentences(count, seed)) + "\n")
            command += [f"--{split}pref", str(text)]
    assert main(command) == 0
    return data


def make_run(data: Path, save: Path, updates: int, *more: str) -> Path:
    """Train a masked LM on the toy language; without dropout it learns in seconds."""
    calm = ["model.dropout=0", "model.attention_dropout=0", f"trainer.max_update={updates}"]
    command = ["train", str(data), "--save-dir", str(save), "--criterion", "masked_lm"]
    assert main([*command, *SIZES, *calm, *more]) == 0
    return save


def make_pairs(path: Path, count: int, seed: int) -> Path:
    """Write minimal pairs; the verb of the wrong sentence has the other number."""
    pairs = zip(sentences(count, seed), sentences(count, seed, grammatical=False))
    rows = [json.dumps({"sentence_good": good, "sentence_bad": bad}) for good, bad in pairs]
    path.write_text("\n".join(rows) + "\n")
    return path


def write_labelled_pairs(file: Path, count: int, seed: int, labels: tuple[object, object]) -> None:
    """Write pairs of sentences; one in three has an ungrammatical second sentence."""
    good, bad = (sentences(count, seed, grammatical) for grammatical in (True, False))
    first = sentences(count, seed + 100)
    rows = []
    for i, pair in enumerate(zip(good, bad)):
        is_bad = int(i % 3 == 0)
        rows.append({"sentence1": first[i], "sentence2": pair[is_bad], "label": labels[is_bad]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
