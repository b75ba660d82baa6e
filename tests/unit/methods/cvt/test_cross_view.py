"""Cross-View Training on words: what modules see, who teaches, who learns, and in which order."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from battery import CVT
from cvt_bench import BOTH, SGD, batch_of, built, configure, gradients, scores

from metaseq_lm.core.batch import Batch
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.streams import Shard
from metaseq_lm.methods.cvt.criterion import _soft_cross_entropy
from metaseq_lm.methods.cvt.model import PARSING, TAGGING
from metaseq_lm.training.price import estimate_price
from metaseq_lm.training.run import TrainingRun

DRY = "criterion.unlabelled_dropout=0"


def with_another_word(batch: Batch, at: int) -> Batch:
    tokens, characters = batch.tokens.clone(), batch.characters.clone()
    tokens[:, at] = torch.where(tokens[:, at] == 7, 8, 7)
    characters[:, at, 2] = torch.where(characters[:, at, 2] == 5, 6, 5)
    return batch.replace(tokens=tokens, characters=characters)


def knows(view: str, position: int, word: int) -> bool:
    """Return whether states of a view at a position know a word."""
    return {"full": True, "ahead": word <= position, "back": word >= position}[view]


@pytest.mark.parametrize("module", TAGGING)
def test_tagging_modules_see_their_view_only(module, sentences):
    """And none of "future" and "past" the word whose label it predicts."""
    run = built(sentences, "criterion=cvt_aux")
    batch, at = batch_of(run), 5
    before = scores(run, batch, "chunk", module)
    moved = (scores(run, with_another_word(batch, at), "chunk", module) != before).any(-1)
    moved = (moved & ~batch.padding).any(0)  # padding means nothing
    length = batch.tokens.shape[1]
    view = TAGGING[module]["view"]
    assert moved.tolist() == [knows(view, t, at) for t in range(length)]
    predicted_at = at - TAGGING[module].get("shift", 0)  # where the label of the word is predicted
    assert moved[predicted_at] == (module not in ("future", "past"))


@pytest.mark.parametrize("module", PARSING)
def test_parsing_modules_see_their_views_only(module, sentences):
    run = built(sentences, "criterion=cvt_aux")
    batch, at = batch_of(run), 5
    before = scores(run, batch, "dep", module)
    changed = scores(run, with_another_word(batch, at), "dep", module)
    rows, length = before.shape[:2]
    moved = (before != changed).view(rows, length, 1 + length, -1).any(-1)  # row, dependent, head
    candidate, dependent = PARSING[module]["views"]
    for t in range(1, length - 1):
        assert moved[:, t, 0].any() == knows(dependent, t, at)  # ROOT
        for head in range(1, 11):
            wanted = knows(dependent, t, at) or knows(candidate, head, at)
            assert moved[:, t, 1 + head].any() == wanted, (t, head)


@pytest.mark.parametrize("sets", [BOTH, ["chunk"]], ids=["all", "one"])
def test_unlabelled_sentences_train_encoder_and_auxiliaries(sets, sentences):
    """Not the primary modules, nor modules of other sets, nor the averages, which nobody trains."""
    run = built(sentences, "criterion=cvt_aux")
    found, _ = gradients(run, batch_of(run).replace(learners=tuple(sets)))
    for name, gradient in found.items():
        own = any(name.startswith(f"heads.{s}.") for s in sets) and ".primary." not in name
        wanted = name.startswith("encoder.") or own
        assert (gradient is not None) == wanted, name
    assert not any(name.startswith("average.") for name in found)
    assert all(g.abs().sum() > 0 for n, g in found.items() if g is not None and "embedding" in n)


def test_momentum_moves_no_module_without_gradient(sentences):
    """A labelled step fills the momentum of the primary module; an unlabelled one does not."""
    run = built(sentences, "criterion=cvt_aux")
    engine = run.engine
    engine.step("main", gradients(run, batch_of(run, "chunk"))[1])
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    engine.step("main", gradients(run, batch_of(run))[1])
    moved = {n for n, p in run.model.named_parameters() if not torch.equal(p, before[n])}
    assert "heads.chunk.future.out.weight" in moved and "encoder.embedding.scale" in moved
    assert not [name for name in moved if ".primary." in name or name.startswith("average.")]


@pytest.mark.parametrize("mean_teacher", [False, True])
def test_the_teacher_is_the_primary_module_without_dropout(mean_teacher, sentences):
    run = built(sentences, "criterion=cvt_aux", f"criterion.mean_teacher={mean_teacher}")
    with torch.no_grad():
        for p in run.model.encoder.parameters():
            p.add_(0.3)  # the average is not there yet
    batch = batch_of(run)
    targets = run.task.criterion.targets(run.model, batch)
    assert run.model.encoder.dropout.p == 0.5 and run.model.training
    net = run.model.averaged if mean_teacher else run.model
    other = run.model if mean_teacher else run.model.averaged
    run.model.eval()
    for name in BOTH:
        wanted = net.scores(net.views(batch), batch.scored, name, "primary").softmax(-1)
        assert torch.equal(targets[name], wanted * batch.scored.unsqueeze(-1))
        assert not targets[name].requires_grad
        different = other.scores(other.views(batch), batch.scored, name, "primary").softmax(-1)
        assert (different - wanted).abs().max() > 1e-4


def test_losses_are_means_over_words_and_over_pairs(sentences):
    """By a loop: "future" at t learns what the teacher says of t + 1, both words; all weigh 1.

    Of trees all words of a sentence count, over pairs of head and relation.
    """
    run = built(sentences, "criterion=cvt_aux", "criterion.unlabelled_dropout=0")
    batch = batch_of(run)
    with torch.no_grad():
        terms = run.task.criterion(run.model, batch)
    assert set(terms) == {f"chunk_unlabelled_{m}" for m in TAGGING} | {
        f"dep_unlabelled_{m}" for m in PARSING
    }
    modules = [("chunk", m, o.get("shift", 0)) for m, o in TAGGING.items()]
    for name, module, shift in [*modules, *(("dep", m, 0) for m in PARSING)]:
        teacher = scores(run, batch, name, "primary").softmax(-1)
        given = scores(run, batch, name, module).log_softmax(-1)
        total, count = 0.0, 0
        for row, length in enumerate(batch.lengths.tolist()):
            for t in range(1, length + 1):
                if 1 <= t + shift <= length:
                    total -= float((teacher[row, t + shift] * given[row, t]).sum())
                    count += 1
        term = terms[f"{name}_unlabelled_{module}"]
        assert term.sum.item() == pytest.approx(total, rel=1e-12)
        assert term.weight == 1 and batch.sizes[term.per] == count


def test_cross_entropy_has_the_gradient_of_the_divergence():
    draw = torch.Generator().manual_seed(1)
    target = torch.randn(2, 3, 5, generator=draw).double().softmax(-1)
    both = []
    for divergence in (False, True):
        given = torch.arange(30.0).double().view(2, 3, 5).sin().requires_grad_(True)
        loss = _soft_cross_entropy(given, target).sum()
        if divergence:
            logs = given.log_softmax(-1)
            loss = torch.nn.functional.kl_div(logs, target, reduction="sum")
        both.append((loss.item(), torch.autograd.grad(loss, given)[0]))
    assert (both[0][1] - both[1][1]).abs().max() < 1e-15
    entropy = -(target * target.log()).sum().item()
    assert both[0][0] - both[1][0] == pytest.approx(entropy)


def test_hard_targets_and_confidence(sentences):
    run = built(sentences, "criterion=cvt_aux", "criterion.hard_targets=true")
    batch = batch_of(run)
    probabilities = scores(run, batch, "chunk", "primary").softmax(-1)
    hard = run.task.criterion.targets(run.model, batch)["chunk"]
    assert torch.equal(hard.sum(-1), batch.scored.double()) and hard.unique().tolist() == [0, 1]
    assert torch.equal(hard.argmax(-1)[batch.scored], probabilities.argmax(-1)[batch.scored])
    level = probabilities.amax(-1)[batch.scored].median().item()
    run = built(sentences, "criterion=cvt_aux", f"criterion.confidence={level}")
    kept = run.task.criterion.targets(run.model, batch)["chunk"].sum(-1) > 0.5
    assert torch.equal(kept, (probabilities.amax(-1) >= level) & batch.scored)
    assert 0 < kept.sum() < batch.scored.sum()


def test_words_weigh_as_much_as_the_teacher_is_sure_of_them(sentences):
    run = built(sentences, "criterion=cvt_aux", "criterion.weigh_confidence=true")
    batch = batch_of(run)
    probabilities = scores(run, batch, "chunk", "primary").softmax(-1)
    weights = probabilities.amax(-1, keepdim=True) * batch.scored.unsqueeze(-1)
    weighed = run.task.criterion.targets(run.model, batch)["chunk"]
    assert torch.equal(weighed, probabilities * weights)


def test_labels_come_first_then_the_weight_of_text_rises(sentences):
    """The gradient of an unlabelled update is the plain one times its weight."""
    more = ("criterion.unlabelled_weight=0.5", "criterion.unlabelled_warmup=4", DRY)
    run = built(sentences, "criterion=cvt_aux", "task.labelled_first=3", *more)
    turns = [next(iter(run.task.needs(update))) for update in range(8)]
    assert [turn == "unlabelled" for turn in turns] == [False] * 3 + [True, False] * 2 + [True]
    plain, _ = gradients(run, batch_of(run))
    for updates, weight in ((3, 0.125), (5, 0.25), (7, 0.5), (99, 0.5)):
        unlabelled = {"unlabelled": [[batch_of(run)]]}
        ((batches,),) = run.task.weighed(run.engine, updates, unlabelled).values()
        weighed, _ = gradients(run, batches[0])
        for name, gradient in plain.items():
            if gradient is not None:
                torch.testing.assert_close(weighed[name], weight * gradient)


def test_a_first_update_on_text_has_the_weight_that_its_number_gives(sentences, monkeypatch):
    run = built(sentences, "criterion=cvt_aux", "criterion.unlabelled_warmup=10")
    engine, weights = run.engine, []
    call = type(run.task.criterion).__call__

    def criterion(self: object, model: torch.nn.Module, batch: Batch) -> dict:
        weights.append(batch.weight)
        return call(self, model, batch)

    monkeypatch.setattr(type(run.task.criterion), "__call__", criterion)
    for update, stream in enumerate(["chunk", "unlabelled", "chunk", "unlabelled"]):
        engine.begin(update)
        run.task.update(engine, run.model, {stream: [[batch_of(run, stream)]]})
    assert weights == [1, 0.1, 1, pytest.approx(0.3)]


def test_auxiliaries_learn_from_gold_labels_if_asked(sentences):
    """Purely supervised: all updates are labelled, all modules of a set get gradients."""
    options = ("criterion.gold_auxiliaries=true", "criterion.use_unlabelled=false")
    run = built(sentences, "criterion=cvt_aux", *options)
    assert set(run.task.build_streams("train")) == set(BOTH)
    found, _ = gradients(run, batch_of(run, "chunk"))
    wanted = {n for n in found if n.startswith(("encoder.", "heads.chunk."))}
    assert {name for name, gradient in found.items() if gradient is not None} == wanted
    plain, _ = gradients(built(sentences, "criterion=cvt_aux"), batch_of(run, "chunk"))
    moved = {n for n, g in plain.items() if g is not None and n.startswith("heads.")}
    assert moved and all(".chunk.primary." in name for name in moved)


def test_updates_take_turns_and_sets_come_by_the_root_of_their_size(sentences):
    """And the draws follow from seed and number of the update alone."""
    run = built(sentences, "criterion=cvt_aux")
    sizes = {"chunk": 90, "dep": 10}
    run.task.chosen = lambda name: range(sizes[name])
    turns = [run.task.needs(update) for update in range(4000)]
    assert all(turns[n] == {"unlabelled": 1} for n in range(1, 4000, 2))
    counts = Counter(next(iter(turn)) for turn in turns[::2])
    assert counts["chunk"] / 2000 == pytest.approx(0.75, abs=0.03) and sum(counts.values()) == 2000
    assert turns == [run.task.needs(update) for update in range(4000)]
    labelled = built(sentences, "criterion=tagging").task
    assert {next(iter(labelled.needs(update))) for update in range(20)} == set(BOTH)
    assert labelled._shares.tolist() == pytest.approx([0.5, 1.0])


def test_one_set_at_a_time(sentences):
    """Drawn by the number of the update; together the sets go through the text once."""
    run = built(sentences, "criterion=cvt_aux", "criterion.all_sets=false")
    streams = {name: f"unlabelled:{name}" for name in BOTH}
    turns = Counter(next(iter(run.task.needs(update))) for update in range(1, 800, 2))
    assert set(turns) == set(streams.values()) and turns[streams["dep"]] == pytest.approx(200, 0.2)
    made = run.task.build_streams("train")
    assert set(made) == {*BOTH, *streams.values()}
    engine = run.engine
    for name, stream in streams.items():
        (batch,) = engine.to_device(made[stream].micro_batches(0, Shard()))
        engine.begin(1)
        logs = run.task.update(engine, run.model, {stream: [[batch]]})
        sets = {name.split("_")[0] for name in logs if name.endswith("unlabelled_full")}
        assert sets == {name} and logs["loss_unlabelled"] == logs["loss"]
    whole = built(sentences, "criterion=cvt_aux").task.build_streams("train")["unlabelled"].order
    assert whole.order.per_epoch == 10
    found = [made[stream].order.batch(n) for n in range(5) for stream in streams.values()]
    assert all((a == whole.batch(n)).all() for n, a in enumerate(found))


def spent(data: Path, folder: Path, *options: str) -> tuple[float, dict[str, int]]:
    """Train for 12 updates; return the FLOPs and how many updates each stream has had."""
    places = [f"data={data}", f"save_dir={folder}", "trainer.max_update=12"]
    run = TrainingRun(load_config([*places, *CVT, *SGD, *options]))
    run.train()
    return run.trainer.flops.total, run.trainer.positions


@pytest.mark.parametrize("seed", [1, 3])
def test_flops_are_those_of_the_sets_that_learn(seed, sentences, tmp_path):
    """Not of whichever was drawn first: 12 updates cost what their kinds cost one by one."""
    options = ["criterion=cvt_aux", "criterion.all_sets=false", f"seed={seed}"]
    options += ["task.batch_size=8", "task.unlabelled_longest=12"]
    text = [*options, "task.label_fraction=0.02"]  # one sentence: all batches of a kind are alike
    total, made = spent(sentences, tmp_path / "run", *text)
    estimate = estimate_price(configure(sentences, *text))
    kinds = [next(iter(needs)) for _, needs in estimate.parts.task.kinds()]
    costs = dict(zip(kinds, estimate.first_updates, strict=True))
    assert costs["unlabelled:chunk"] != costs["unlabelled:dep"]
    assert total == pytest.approx(sum(costs[name] * count for name, count in made.items()), 0.05)


def test_the_price_is_that_of_a_whole_cycle(sentences, tmp_path):
    """Each kind of update is made once in a dry run; the price is their mean by their shares."""
    run = built(sentences, "criterion=cvt_aux", "criterion.all_sets=false")
    run.task.chosen = lambda name: range({"chunk": 9, "dep": 1}[name])
    kinds = run.task.kinds()
    assert sum(share for share, _ in kinds) == pytest.approx(1)
    found = {next(iter(needs)): share for share, needs in kinds}
    assert found == pytest.approx(
        {"chunk": 0.375, "dep": 0.125, "unlabelled:chunk": 0.25, "unlabelled:dep": 0.25}
    )
    estimate = estimate_price(configure(sentences, "criterion=cvt_aux"))
    needs = [needs for _, needs in estimate.parts.task.kinds()]
    assert needs == [{"chunk": 1}, {"dep": 1}, {"unlabelled": 1}]
    chunk, dep, unlabelled = estimate.first_updates
    assert estimate.flops == pytest.approx((chunk + dep) / 4 + unlabelled / 2)
    supervised = built(sentences, "criterion=tagging")
    assert [share for share, _ in supervised.task.kinds()] == pytest.approx([0.5, 0.5])
    # What a budget pays for: so many updates of both kinds spend it.
    budget = [f"trainer.max_flops={12.5 * estimate.flops}", "engine.precision=fp64"]
    budget += ["criterion=cvt_aux", "trainer.valid_split=''"]
    places = [f"data={sentences}", f"save_dir={tmp_path}", "trainer.max_update=0"]
    paid = TrainingRun(load_config([*places, *CVT, *SGD, *budget]))
    assert paid.config.trainer.max_update == 12
    paid.train()
    assert paid.trainer.update == pytest.approx(12, abs=2)
