"""Cross-View Training on words: its baselines, averaged weights, another encoder, and mistakes."""

import pytest
import torch
from cvt_bench import BOTH, EXAMPLES, NORMALISED, batch_of, built, configure, gradients
from torch import Tensor

from metaseq_lm.core.batch import Batch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.words.vocabulary import REMOVED
from metaseq_lm.models.layers import Dropout, dropout_at
from metaseq_lm.models.words.word_model import Views
from metaseq_lm.training.price import estimate_price
from metaseq_lm.training.run import TrainingRun


def test_word_dropout_removes_words(sentences):
    """A tenth of the words with their characters, never <start> or <end>."""
    run = built(sentences, "criterion=word_dropout")
    batch = batch_of(run)
    batches = [run.task.criterion.remove_words(batch_of(run, number=n)) for n in range(10)]
    gone = torch.cat([(b.tokens == REMOVED)[b.scored] for b in batches])
    assert gone.double().mean().item() == pytest.approx(0.1, abs=0.04)
    for changed in batches:
        removed = changed.tokens == REMOVED
        assert not (removed & ~changed.scored).any()
        assert (changed.characters[removed] == 0).all()
        assert (changed.characters[changed.scored & ~removed] != 0).any(-1).all()
    grads, _ = gradients(run, batch)
    assert all(gradient is not None for gradient in grads.values())


@pytest.mark.parametrize("name", ["word_dropout", "vat"])
def test_the_student_reads_what_was_changed(name, sentences, monkeypatch):
    """And before it the teacher the sentences as they are."""
    run = built(sentences, f"criterion={name}", NORMALISED)
    criterion, batch, read = run.task.criterion, batch_of(run), []
    shift = torch.ones_like(run.model.views(batch)[0])[..., :1]
    removed = batch.replace(tokens=batch.tokens.clone().fill_(REMOVED))
    monkeypatch.setattr(criterion, "remove_words", lambda given: removed, raising=False)
    monkeypatch.setattr(criterion, "perturbation", lambda *given: shift, raising=False)
    views = run.model.views

    def reading(given: Batch, *more: Tensor) -> Views:
        read.append((given, *more))
        return views(given, *more)

    monkeypatch.setattr(run.model, "views", reading)
    criterion(run.model, batch)
    changed = [(removed,)] if name == "word_dropout" else [(batch, shift)] * len(BOTH)
    assert len(read) == 1 + len(changed)
    for found, wanted in zip(read, [(batch,), *changed]):
        assert len(found) == len(wanted) and all(f is w for f, w in zip(found, wanted))


@pytest.mark.parametrize(("name", "rate"), [("cvt_aux", 0.2), ("word_dropout", 0.5), ("vat", 0.5)])
def test_the_students_have_a_dropout_of_their_own(name, rate, sentences, monkeypatch):
    """A primary module as student has that of labelled sentences; less led to one class."""
    run = built(sentences, f"criterion={name}", NORMALISED, "model.dropout=0.5")
    criterion, batch, found = run.task.criterion, batch_of(run), []
    monkeypatch.setattr(
        criterion,
        "student_terms",
        lambda model, *_: found.append({m.p for m in model.modules() if isinstance(m, Dropout)}),
    )
    criterion(run.model, batch)
    assert found == [{rate}]


def test_the_perturbation_is_adversarial_and_of_its_norm(sentences):
    """More harmful than a random one, on words only; finding it leaves no gradient anywhere."""
    options = ("criterion=vat", NORMALISED, "criterion.xi=0.01")
    run = built(sentences, *options, "criterion.unlabelled_dropout=0")
    criterion, batch = run.task.criterion, batch_of(run)
    targets = criterion.targets(run.model, batch)

    def harm(name: str, shift: Tensor) -> float:
        with torch.no_grad(), dropout_at(run.model, 0.0):
            views = run.model.views(batch, shift)
            (term,) = criterion.term(
                run.model, views, batch, name, "primary", targets[name]
            ).values()
        return term.sum.item()

    for name, norm in (("chunk", 0.5), ("dep", 1.0)):
        shift = criterion.perturbation(run.model, batch, name, targets[name])
        rows = shift.flatten(1).norm(dim=1)
        assert torch.allclose(rows, torch.full_like(rows, norm)) and not shift.requires_grad
        assert not shift[~batch.scored].any()
        assert all(p.grad is None for p in run.model.parameters())
        random = torch.randn_like(shift) * batch.scored.unsqueeze(-1)
        random *= norm / random.flatten(1).norm(dim=1)[:, None, None]
        clean = harm(name, torch.zeros_like(shift))
        assert harm(name, shift) - clean > 3 * abs(harm(name, random) - clean)


def test_each_weight_has_an_average_that_moves_before_the_step(sentences):
    """In an unlabelled update too: a tenth towards the earlier weights, trained or not."""
    run = built(sentences, "criterion=cvt_aux", "task.average_decay=0.9")
    model, engine = run.model, run.engine
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.average.net.named_parameters()}
    with torch.no_grad():
        for p in engine.parameters("main"):
            p.add_(0.1)
    before, average = (
        {name: p.detach().clone() for name, p in net.named_parameters() if name in trained}
        for net in (model, model.average.net)
    )
    engine.begin(1)
    run.task.update(engine, model, {"unlabelled": [[batch_of(run)]]})
    for name, now in model.average.net.named_parameters():
        torch.testing.assert_close(
            now, 0.9 * average[name] + 0.1 * before[name], rtol=0, atol=1e-14
        )
    moved = {n for n in trained if not torch.equal(model.get_parameter(n), before[n])}
    assert moved == {name for name in trained if ".primary." not in name}


@pytest.mark.parametrize("more", [[], ["criterion.unlabelled_dropout=0.2"]], ids=["", "paper"])
def test_the_encoder_can_be_a_transformer(more, sentences, tmp_path):
    """As in the example: without an unlabelled rate its dropouts stay."""
    sizes = [f"model.encoder_{part}=8" for part in ("embed_dim", "ffn_embed_dim")]
    sizes += [
        "model.encoder_attention_heads=2",
        "model.attention_dropout=0.05",
        "task.batch_size=8",
    ]
    places = [f"data={sentences}", f"save_dir={tmp_path}", "task.labelled=[chunk,dep]"]
    places += ["trainer.max_update=2", "schedule.warmup_updates=0", "trainer.final_splits=[]"]
    options = [*places, *sizes, "engine.tensorboard=false", *more]
    run = TrainingRun(load_config(options, str(EXAMPLES), "transformer"))
    rates: list[set[float]] = [set(), set()]
    for module in run.model.modules():
        if isinstance(module, Dropout):
            module.register_forward_hook(
                lambda m, *_: rates[run.trainer.update].add(m.p) if m.training else None
            )
    before = run.model.encoder.merge.weight.clone()
    run.train()
    assert (run.folder.path / "checkpoints" / "last").exists()
    assert not torch.equal(run.model.encoder.merge.weight, before)
    rates_of_model = {0.3, 0.05}  # activation_dropout, which is 0, is passed over
    assert rates == [
        rates_of_model,
        {0.2, 0.0} if more else rates_of_model | {0.0},
    ]  # 0: the teacher's


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["criterion=vat"], "normalize_words=true"),
        (["criterion=cvt_aux", "criterion.tagging_auxiliaries=[futur]"], "Did you mean 'future'"),
        (["criterion=cvt_aux", "criterion.parsing_auxiliaries=[full,full]"], "twice"),
        (["criterion=cvt_aux", "criterion.confidence=2"], "confidence"),
        (["criterion=word_dropout", "criterion.rate=2"], "criterion.rate"),
        (["criterion=vat", "criterion.xi=0"], "criterion.xi"),
        (["criterion=masked_lm"], "needs criterion=cvt_aux or .*tagging.* derives from WordLabels"),
        (["criterion=cvt_aux", "task.labelled=[chunk,chunk]"], "different labelled sets"),
        (["criterion=cvt_aux", "criterion.tagging_auxiliaries=[]"], "tagging_auxiliaries is empty"),
        (["criterion=cvt_aux", "criterion.parsing_auxiliaries=[]"], "parsing_auxiliaries is empty"),
        (["criterion=cvt_aux", "criterion.unlabelled_dropout=1"], "unlabelled_dropout .*below 1"),
        (["criterion=word_dropout", "criterion.unlabelled_dropout=-0.1"], "unlabelled_dropout"),
        (
            ["criterion=vat", "criterion.mean_teacher=true", "task.average_decay=0", NORMALISED],
            "mean_teacher needs averaged",
        ),
        (["criterion=cvt_aux", "criterion.unlabelled_weight=0"], "unlabelled_weight .*above 0"),
        (["criterion=vat", "criterion.unlabelled_warmup=-1", NORMALISED], "unlabelled_warmup must"),
        (["criterion=cvt_aux", "task.labelled_first=-1"], "task.labelled_first .*at least 0"),
        (["criterion=cvt_aux", "criterion.label_smoothing=-1"], "criterion.label_smoothing"),
        (["criterion=cvt_aux", "task.unlabelled_longest=-1"], "task.unlabelled_longest must be"),
        (["criterion=cvt_aux", "trainer.valid_split=train"], "the best checkpoint"),
        (["criterion=cvt_aux", "task.unlabelled_longest=2"], "no sentence"),
        (["criterion=cvt_aux", "task.labelled=[chunk,train]"], "cannot have heads"),
    ],
)
def test_mistakes_are_told(options, message, sentences):
    with pytest.raises(UsageError, match=message):
        estimate_price(configure(sentences, *options))


def test_auxiliaries_may_be_missing_where_nothing_learns_from_text(sentences):
    """Of a form of which there is no set, and without unlabelled sentences."""
    for more in (["task.labelled=[dep]"], ["criterion.use_unlabelled=false"]):
        built(sentences, "criterion=cvt_aux", "criterion.tagging_auxiliaries=[]", *more)
