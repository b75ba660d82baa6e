"""The commands of examples/cvt/README.md, on made-up data: what one makes, the next one finds."""

import shlex
from pathlib import Path

import parallel_data
import pytest
import word_data
from battery import WORDS

from metaseq_lm.cli import main
from metaseq_lm.core.loading import load_config
from metaseq_lm.training.parts import prepare_config
from metaseq_lm.training.price import estimate_price

CVT = Path(__file__).resolve().parents[3] / "examples" / "cvt"
PAGE = CVT / "README.md"
CONFIGS = str(CVT / "config")
HEADS = ["task.hidden_dim=6", "task.batch_size=8"]
LSTM = [option for option in WORDS if option.startswith("model.")]
TRANSFORMER = ["model.encoder_embed_dim=8", "model.encoder_ffn_embed_dim=8"]
LANGUAGE_MODEL = ["model.encoder_embed_dim=3", "model.encoder_hidden_dim=5", "task.batch_size=8"]
QUIET = ["engine.threads=1", "engine.tensorboard=false"]
ONCE = [*QUIET, "trainer.max_update=1", "trainer.final_splits=[]"]
# Files that the page names, and what is in them.
TEXTS = {"text.txt": "train.txt"}
TEXTS |= {
    f"{name}/{split}.txt": f"{split}.conll"
    for name in ("chunk", "ner")
    for split in ("train", "test")
}
TEXTS |= {"ner/dev.txt": "valid.conll"}
TEXTS |= {
    f"dep/{name}.conllu": f"{split}.conllu"
    for name, split in (("train", "train"), ("dev", "valid"), ("test", "test"))
}
PAIRS = ["train", "val", "tst2012", "tst2013", "test_2016_flickr"]
PAIRS += [f"raw.{name}" for name in ("dev2010", "tst2010", "tst2011", "tst2012", "tst2013")]


def commands(*begin: str) -> list[list[str]]:
    """Return the arguments of the page's commands that begin so."""
    lines = PAGE.read_text().replace("\\\n", " ").splitlines()
    found = [shlex.split(line)[1:] for line in lines if line.startswith("metaseq-lm ")]
    return [arguments for arguments in found if arguments[: len(begin)] == list(begin)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with these files, and the data that the page's commands make of them."""
    folder = tmp_path_factory.mktemp("readme")
    word_data.write(folder / "words", 40, 10)
    for name, source in TEXTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text((folder / "words" / source).read_text())
    parallel_data.write(folder / "pairs")
    for name in PAIRS:
        for ending, source in (("en", "en"), ("vi", "vi"), ("de", "vi")):
            text = (folder / "pairs" / f"train.{source}").read_text()
            (folder / f"{name}.{ending}").write_text(text)
    (folder / "news.en").write_text((folder / "pairs" / "mono.txt").read_text())
    made = commands("preprocess")
    assert len(made) == 8
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for arguments in made:
            arguments = ["5" if word == "1500" else word for word in arguments]
            assert main(arguments) == 0
    return folder


def scored(data: Path, name: str, *options: str) -> None:
    """Make an update of each kind and open all splits that a config scores."""
    config = load_config([f"data={data}", *options, *QUIET], CONFIGS, name)
    task = estimate_price(prepare_config(config)).parts.task
    for split in config.trainer.final_splits:
        task.build_streams(split)


@pytest.mark.parametrize(
    "name, options",
    [
        *((name, [*LSTM, *HEADS]) for name in ("supervised", "cvt", "one_at_a_time", "small")),
        *((name, [*LSTM, *HEADS]) for name in ("word_dropout", "vat", "supervised_auxiliaries")),
        *((name, [*TRANSFORMER, *HEADS]) for name in ("transformer_supervised", "transformer")),
        ("elmo_lm", LANGUAGE_MODEL),
    ],
)
def test_the_data_has_what_configs_ask_for(name, options, place):
    scored(place / "data" / "words", name, *options)


def test_runs_that_start_from_others_find_them(place, tmp_path, monkeypatch):
    """The page's training commands one after the other: several sets, a probe, a language model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(place / "data")
    (tmp_path / "examples").symlink_to(CVT.parent)
    trained = commands("train", "data/words")
    assert [c[c.index("--config-name") + 1] for c in trained] == ["cvt"] * 3 + ["probe", "elmo_lm"]
    for arguments in trained:
        kind = arguments[arguments.index("--config-name") + 1]
        sizes = {"cvt": [*LSTM, *HEADS], "probe": HEADS, "elmo_lm": LANGUAGE_MODEL}[kind]
        assert main([*arguments, *sizes, *ONCE]) == 0
    reader = f"task.elmo={tmp_path}/runs/elmo_lm"
    scored(place / "data" / "words", "elmo", reader, *LSTM, *HEADS)
    scored(place / "data" / "words", "elmo_frozen", reader, *HEADS)


@pytest.mark.parametrize("data", ["multi30k", "iwslt"])
def test_translation_of_raw_text(data, place):
    sizes = ["model.embed_dim=4", "model.hidden_dim=8", "model.output_dim=6", "task.beam_size=2"]
    more = ["task.unlabelled=rest", "task.labelled_share=0.5", "task.bleu_tokenizer=13a"]
    final = "trainer.final_splits=[test]"
    scored(place / "data" / data, "translation_small", *sizes, *more, final)
