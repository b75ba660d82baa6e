"""Cross-view training of translation: who sees what, who learns when, and from what."""

from pathlib import Path

import parallel_data
import pytest
import torch
from cvt_bench import average_moves_before_the_step

from metaseq_lm.config.tasks import UNLABELLED
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.streams import Shard, mean_over_first
from metaseq_lm.models.layers import cross_entropy
from metaseq_lm.training.parts import build_parts
from metaseq_lm.training.price import estimate_price
from metaseq_lm.training.run import TrainingRun

TINY = """
    task=cvt_translation model=lstm_encoder_decoder model.layers=2 model.embed_dim=6
    model.hidden_dim=8 model.output_dim=8 model.dropout=0.5 schedule=constant optimizer.lr=0.01
    task.batch_size=8 task.beam_size=2 task.bleu=false trainer.log_interval=1 engine.device=cpu
    engine.threads=1 engine.tensorboard=false
""".split()

EXACT = ["engine.precision=fp64"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pairs")
    return parallel_data.binarise(place / "text", place / "data")


def configure(data: Path, save: Path, *more: str, criterion: str = "cvt_translation") -> RunConfig:
    places = [f"data={data}", f"save_dir={save}", f"criterion={criterion}"]
    return load_config([*TINY, *places, *more])


def build(data: Path, save: Path, *more: str, criterion: str = "cvt_translation") -> TrainingRun:
    run = TrainingRun(configure(data, save, *more, criterion=criterion))
    run.model.train()
    return run


def scrambled(run: TrainingRun) -> TrainingRun:
    """Draw large weights, so that every input matters."""
    for parameter in run.model.net.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return run


def batches(run: TrainingRun, stream: str) -> list:
    return run.task.build_streams("train")[stream].micro_batches(0, Shard())


def taught(run: TrainingRun, parts: list | None = None) -> list:
    """Return unlabelled micro-batches with the translations of the teacher."""
    engine = run.engine
    engine.begin(1)
    parts = parts or engine.to_device(batches(run, UNLABELLED))
    return run.task.with_translations(engine, run.model, parts)


def reached(run: TrainingRun, parts: list) -> set[str]:
    """Return the names of the parameters that a gradient reaches."""
    engine = run.engine
    grads, _ = engine.gradients(
        lambda batch: run.task.criterion(run.model, batch), parts, engine.parameters("main")
    )
    names = [n for n, p in run.model.named_parameters() if p.requires_grad]
    return {name for name, grad in zip(names, grads, strict=True) if grad is not None}


def heads(names: set[str]) -> set[str]:
    return {name.split(".")[2] for name in names if name.startswith("net.heads.")}


def test_labels_teach_the_primary_head_and_translations_the_others(pairs, tmp_path):
    run = build(pairs, tmp_path, "criterion.auxiliary=[attention,future,full]")
    labelled = reached(run, batches(run, "train"))
    unlabelled = reached(run, taught(run))
    assert heads(labelled) == {"primary"}
    assert heads(unlabelled) == {"attention", "future", "full"}
    shared = {name for name in labelled if not name.startswith("net.heads.")}
    assert shared == {name for name in unlabelled if not name.startswith("net.heads.")}
    assert {name.split(".")[1] for name in shared} == {
        *("source", "target", "ahead", "back", "decoder")
    }


def test_a_step_leaves_the_other_heads_where_they_are(pairs, tmp_path):
    """With momentum, too: a head without a gradient is not moved (trap 21)."""
    more = ["optimizer=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.1"]
    run = build(pairs, tmp_path, *more)
    engine = run.engine
    streams = run.task.build_streams("train")
    for update in range(4):
        before = {n: w.clone() for n, w in run.model.state_dict().items()}
        engine.begin(update)
        needed = run.task.needs(update)
        made = {n: [streams[n].micro_batches(update // 2, Shard())] for n in needed}
        logs = run.task.update(engine, run.model, made)
        moved = {n for n, w in run.model.state_dict().items() if not torch.equal(w, before[n])}
        wanted = {"attention", "future"} if update % 2 else {"primary"}
        assert heads(moved) == wanted
        assert ("cvt_future" in logs) == bool(update % 2) == ("loss_unlabelled" in logs)


def test_future_sees_the_attention_vector_before(pairs, tmp_path):
    """What future says of word t does not depend on word t - 1, what the others say does."""
    run = scrambled(build(pairs, tmp_path, "criterion.auxiliary=[future,full]", *EXACT))
    run.model.eval()
    (batch,) = taught(run)
    net, word = run.model.net, 3
    other = batch.inputs.clone()
    other[:, word] = (other[:, word] + 1) % 7 + 5  # what was said at word - 1
    losses = []
    for inputs in (batch.inputs, other):
        memory = net.encode(batch.tokens, batch.layout)
        states, _ = net.decode(inputs, memory.first)
        later = batch.targets[:, 1:].clamp(min=0)
        future = cross_entropy(net.heads["future"](states[:, :-1], memory), later)
        full = cross_entropy(net.heads["full"](states, memory), batch.targets.clamp(min=0))
        losses.append((future, full))
    (future, full), (changed_future, changed_full) = losses
    # Column j of the future's losses is of word j + 1, which it predicts from states up to j.
    assert torch.equal(future[:, :word], changed_future[:, :word])
    assert not torch.isclose(full[:, word], changed_full[:, word]).any()
    assert not torch.isclose(future[:, word], changed_future[:, word]).any()


def test_the_losses_are_those_of_the_formula(pairs, tmp_path):
    """Without dropout: smoothed cross-entropy per token; future's over all tokens but the first."""
    more = ["criterion.unlabelled_dropout=0", "criterion.attention_dropout=0", "model.dropout=0"]
    run = scrambled(build(pairs, tmp_path, *more, *EXACT))
    (batch,) = taught(run)
    terms = run.task.criterion(run.model, batch)
    net = run.model.net
    memory = net.encode(batch.tokens, batch.layout)
    states, _ = net.decode(batch.inputs, memory.first)
    size = len(run.task.tokenizers[1].vocabulary)
    for name, shift in (("attention", 0), ("future", 1)):
        length = states.shape[1] - shift
        log_probs = net.heads[name](states[:, :length], memory).log_softmax(-1)
        targets = batch.targets[:, shift:]
        smooth = torch.full_like(log_probs, 0.1 / size)
        smooth.scatter_add_(
            2, targets.clamp(min=0).unsqueeze(-1), torch.full_like(smooth[..., :1], 0.9)
        )
        each = -(smooth * log_probs).sum(-1)[targets >= 0]
        torch.testing.assert_close(terms[f"cvt_{name}"].sum, each.sum())
        assert len(each) == batch.sizes[terms[f"cvt_{name}"].per]


def test_the_teacher_is_the_primary_head_without_dropout(pairs, tmp_path):
    """Its translations are those of evaluation mode, in any parts; dropout is back."""
    run = scrambled(build(pairs, tmp_path, *EXACT))
    parts = run.engine.to_device(batches(run, UNLABELLED))
    (batch,) = taught(run, parts)
    assert run.model.net.dropout.p == 0.5 and run.model.training
    run.model.eval()
    ids = run.task.search(run.model.net, parts[0])
    run.model.train()
    said = batch.targets.masked_fill(batch.targets < 0, 0)
    assert torch.equal(said[:, : ids.shape[1]], ids[:, : said.shape[1]])
    stream = run.task.build_streams("train")[UNLABELLED]
    pieces = taught(run, stream.micro_batches(0, Shard(micro_batch_size=3)))
    assert torch.equal(torch.cat([p.targets for p in pieces]), batch.targets)
    assert sum(p.sizes["targets"] for p in pieces) == batch.sizes["targets"]
    assert batch.sizes["targets"] == int((batch.targets >= 0).sum())


def test_attention_dropout_hides_from_the_first_head_only(pairs, tmp_path):
    """Source positions in an unlabelled update, others by word; none from the teacher."""
    run = scrambled(build(pairs, tmp_path, "criterion.auxiliary=[attention,future,full]", *EXACT))
    seen: dict[str, list] = {}
    for name, head in run.model.net.heads.items():
        head.attention_dropout.register_forward_hook(
            lambda _, given, out, name=name: seen.setdefault(name, []).append((given[0], out))
        )
    end = run.task.tokenizers[1].vocabulary.sep
    with torch.no_grad():  # long translations
        run.model.net.heads["primary"].out.bias[end] = -99.0
    parts = taught(run)
    assert set(seen) == {"primary"}
    assert all(torch.equal(weights, kept) for weights, kept in seen.pop("primary"))
    reached(run, parts)
    assert set(seen) == {"attention", "future", "full"}
    ((weights, kept),) = seen.pop("attention")
    at = weights > 0
    hidden = at & (kept == 0)
    assert hidden[at].double().mean().item() == pytest.approx(0.5, abs=0.1)
    torch.testing.assert_close(kept, 2 * weights.masked_fill(hidden, 0))
    assert not torch.equal(hidden[:, 0], hidden[:, 1])
    assert all(torch.equal(*pair) for (pair,) in seen.values())


def test_word_dropout_hides_words_only(pairs, tmp_path):
    more = ["criterion.rate=1", "criterion.unlabelled_dropout=0"]
    run = build(pairs, tmp_path, *more, criterion="word_dropout_translation")
    (batch,) = taught(run)
    assert heads(reached(run, [batch])) == {"primary"}
    hidden = batch.words
    vocabulary = run.task.tokenizers[0].vocabulary
    special = (batch.tokens == vocabulary.sep) | (batch.tokens == vocabulary.pad)
    assert torch.equal(hidden, ~special) and batch.mask_id == vocabulary.mask
    read = []
    run.model.net.source.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    run.task.criterion(run.model, batch)
    assert len(read) == 1 and torch.equal(read[0] == vocabulary.mask, hidden)


def test_turns_and_streams(pairs, tmp_path):
    task = build(pairs, tmp_path, "task.labelled_first=3").task
    kinds = [next(iter(task.needs(update))) for update in range(6)]
    assert kinds == ["train", "train", "train", UNLABELLED, "train", UNLABELLED]
    more = ["task.unlabelled=rest", "task.labelled_share=0.25"]
    task = build(pairs, tmp_path / "rest", *more).task
    used, others = task.labelled_pairs()
    assert task.unlabelled_rows().chosen.tolist() == others.tolist() and len(others) == 36
    supervised = build(pairs, tmp_path / "s", criterion="translation")
    assert supervised.task.needs(1) == {"train": 1}
    assert list(supervised.task.build_streams("train")) == ["train"]
    assert list(supervised.model.net.heads) == ["primary"]


def test_the_average_is_scored_and_saved(pairs, tmp_path):
    more = ["trainer.max_update=6", "task.average_decay=0.5", "task.score_raw=true"]
    run = build(pairs, tmp_path, *more)
    start = {n: w.clone() for n, w in run.model.net.state_dict().items()}
    run.train()
    logs = run.trainer.last_valid
    assert logs["loss"] != logs["raw_loss"] and logs["perplexity"] != logs["raw_perplexity"]
    name = "source.weight"
    now, average = run.model.net.state_dict(), run.model.average.net.state_dict()
    assert not torch.equal(now[name], average[name]) and not torch.equal(start[name], average[name])
    assert average.keys() == now.keys()
    plain = build(pairs, tmp_path / "plain", "task.average_decay=0")
    assert plain.model.average is None and plain.model.averaged is plain.model.net


@pytest.mark.parametrize("kind", ["train", UNLABELLED])
def test_the_average_moves_once_and_before_the_step(kind, pairs, tmp_path):
    run = build(pairs, tmp_path, "task.average_decay=0.9", *EXACT)
    parts = run.engine.to_device(batches(run, kind))
    average_moves_before_the_step(run, {kind: [parts]})


@pytest.mark.parametrize(
    "more, words",
    [
        (["criterion.auxiliary=[past]"], "auxiliary has 'past'.*attention, future"),
        (["criterion.auxiliary=[]"], "one or more different heads"),
        (["criterion.auxiliary=[future,future]"], "one or more different heads"),
        (["task.unlabelled=rest"], "labelled_share=1.0 leaves no pair"),
        (["task.unlabelled=rest", "task.labelled_share=0.999"], "leaves no pair"),
        (["criterion.unlabelled_dropout=1"], "criterion.unlabelled_dropout .*below 1"),
        (["criterion.attention_dropout=-1"], "criterion.attention_dropout .*at least 0"),
        (["criterion.label_smoothing=1"], "criterion.label_smoothing .*below 1"),
        (["task.unlabelled_batch_size=-1"], "task.unlabelled_batch_size .*at least 0"),
    ],
)
def test_cvt_translation_refuses_options_that_do_not_fit(more, words, pairs, tmp_path):
    with pytest.raises(UsageError, match=words):
        build(pairs, tmp_path, *more, "trainer.max_update=1").train()
    assert not (tmp_path / "log.jsonl").exists()


def test_kinds(pairs, tmp_path):
    """Both kinds are priced, whenever the first unlabelled batch comes."""
    estimate = estimate_price(configure(pairs, tmp_path, "task.labelled_first=9"))
    task = estimate.parts.task
    assert [needs for _, needs in task.kinds()] == [{"train": 1}, {UNLABELLED: 1}]
    labelled, unlabelled = estimate.first_updates
    streams = task.build_streams("train")
    scales = [mean_over_first(streams, {name: 1}) for name in ("train", UNLABELLED)]
    assert estimate.flops == pytest.approx((labelled * scales[0] + unlabelled * scales[1]) / 2)
    supervised = build_parts(configure(pairs, tmp_path, criterion="translation"))
    assert supervised.task.kinds() == [(1.0, {"train": 1})]


def test_a_refused_step_leaves_the_average_alone(pairs, tmp_path):
    run = build(pairs, tmp_path, "trainer.on_nonfinite=skip")
    engine = run.engine
    with torch.no_grad():
        for parameter in run.model.net.parameters():
            parameter.add_(0.1)
        run.model.net.source.weight[9] = float("nan")
    before = {n: w.clone() for n, w in run.model.average.state_dict().items()}
    batch = batches(run, "train")[0]
    for token, refused in ((9, True), (8, False)):
        batch.tokens[:, 0] = token
        batch.tokens[batch.tokens == 9] = token
        run.trainer._update(0, {"train": [[batch]]})
        assert bool(engine.finite_check.refused) == refused
        now = run.model.average.state_dict()
        assert all(torch.equal(w, before[n]) for n, w in now.items()) == refused
