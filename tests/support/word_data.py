"""A made-up language for tests: sentences with parts of speech, chunks and dependency trees."""

import random
from dataclasses import dataclass
from pathlib import Path

from metaseq_lm.cli import main
from metaseq_lm.core.config import as_dict
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.storage.manifest import tokenizer_hash
from metaseq_lm.runs import checkpoint
from metaseq_lm.training.parts import build_model, build_task

NOUNS = ["cat", "dog", "tree", "car", "bird", "House"]
RELATIONS = {"D": "det", "A": "amod"}


@dataclass
class Word:
    """A word; `head` counts from 1, 0 is the root."""

    form: str
    pos: str
    chunk: str
    head: int
    relation: str


def add_noun_phrase(draw: random.Random, words: list[Word], head: int, relation: str) -> None:
    """Add a determiner, an adjective and a noun; the noun heads the others."""
    noun = len(words) + 3
    begin = [(draw.choice(["the", "a", "my"]), "D"), (draw.choice(["red", "old", "Big"]), "A")]
    for form, pos in begin:
        words.append(Word(form, pos, "B-NP" if pos == "D" else "I-NP", noun, RELATIONS[pos]))
    words.append(Word(draw.choice(NOUNS), "N", "I-NP", head, relation))


def sentence(draw: random.Random) -> list[Word]:
    """Return a sentence: subject, verb, object, preposition, noun phrase, usually a full stop.

    There are only two lengths, because every batch shape costs the tests time.
    """
    words: list[Word] = []
    add_noun_phrase(draw, words, 0, "nsubj")
    verb = len(words) + 1
    words[-1].head = verb
    words.append(Word(draw.choice(["sees", "likes", "hits"]), "V", "B-VP", 0, "root"))
    add_noun_phrase(draw, words, verb, "obj")
    words.append(Word(draw.choice(["in", "on", "near"]), "P", "B-PP", verb, "prep"))
    add_noun_phrase(draw, words, len(words), "pobj")
    if draw.random() < 0.8:
        words.append(Word(".", ".", "O", verb, "punct"))
    return words


def columns(words: list[Word]) -> str:
    """Return a sentence in CoNLL columns: word, part of speech, chunk."""
    return "".join(f"{w.form} {w.pos} {w.chunk}\n" for w in words) + "\n"


def tree(words: list[Word]) -> str:
    """Return a sentence in CoNLL-U."""
    rows = [
        f"{i}\t{w.form}\t_\t{w.pos}\t_\t_\t{w.head}\t{w.relation}\t_\t_\n"
        for i, w in enumerate(words, 1)
    ]
    return "".join(rows) + "\n"


def write(folder: Path, train: int, other: int) -> None:
    """Write SPLIT.txt, SPLIT.conll and SPLIT.conllu; the text is longer than labelled splits."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(1)
    for split, count in (("train", train), ("valid", other), ("test", other)):
        drawn = [sentence(draw) for _ in range(count)]
        (folder / f"{split}.conll").write_text("".join(map(columns, drawn)))
        (folder / f"{split}.conllu").write_text("".join(map(tree, drawn)))
        drawn += [sentence(draw) for _ in range(count)]
        lines = [" ".join(w.form for w in words) + "\n" for words in drawn]
        (folder / f"{split}.txt").write_text("".join(lines))


def binarise(text: Path, data: Path, train: int = 40, other: int = 10) -> None:
    """Make a data folder with text, the tagged sets "chunk" and "pos", and the treebank "dep"."""
    write(text / "words", train, other)
    place = ["--destdir", str(data)]

    def files(ending: str) -> list[str]:
        splits = ("train", "valid") if ending == "txt" else ("train", "valid", "test")
        return [f"--{split}pref={text}/words/{split}.{ending}" for split in splits]

    assert main(["preprocess", "--words", *files("txt"), *place]) == 0
    assert main(["preprocess", "--tagged", "chunk", *files("conll"), *place]) == 0
    tags = ["--tagged", "pos", "--tag-column", "1"]
    assert main(["preprocess", *tags, *files("conll"), *place]) == 0
    assert main(["preprocess", "--treebank", "dep", *files("conllu"), *place]) == 0


def language_model(data: Path, folder: Path, *options: str) -> Path:
    """Write an untrained language model of `data`'s words as a checkpoint; return its folder.

    It has 2 layers of width 3 with 5 cells and dropout 0.5; `options` are further options.
    """
    sizes = ["model.encoder_embed_dim=3", "model.encoder_hidden_dim=5", "model.dropout=0.5"]
    names = ["task=word_language_modeling", "criterion=language_modeling", "model=bilstm_lm"]
    places = [f"data={data}", f"save_dir={folder}"]
    config = load_config([*names, *sizes, *places, *options])
    model = build_model(build_task(config), config, "cpu")
    about = {"config": as_dict(config), "tokenizer": tokenizer_hash(data)}
    return checkpoint.save(folder, 1, model.state_dict(), {}, about)
