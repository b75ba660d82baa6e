"""Gates on the data: is the valid split of the domain of train, without sharing its text?"""

from collections.abc import Iterator

from metaseq_lm.data.doctor.findings import MANY_SHARED
from metaseq_lm.data.doctor.likeness import SHIFTED
from metaseq_lm.data.doctor.passages import WINDOW
from metaseq_lm.league.gate import DATA, gate
from metaseq_lm.league.standings import FLAG, NOTE, Context, GateFinding
from metaseq_lm.reporting.settings import Row
from metaseq_lm.runs.conditions import KEY, count_conditions

_LEAKED = 0.1  # share of the tokens of valid from which its losses are training losses


@gate(DATA, {"domain": "what is validated is of another domain than what is trained on"})
def domain(row: Row, context: Context) -> Iterator[GateFinding]:
    """The valid split is of another domain than train."""
    corpus = context.corpus
    if corpus and corpus.valid and corpus.valid.shift > SHIFTED:
        reason = f"valid is of another domain than train{', as the plan says' * corpus.shifted}: "
        reason += f"token frequencies diverge by {corpus.valid.divergence:.3f} nats, of documents "
        reason += f"drawn from train by {corpus.valid.usual:.3f}"
        yield GateFinding("domain", NOTE if corpus.shifted else FLAG, reason)


@gate(DATA, {"leak": "text that is validated stands in train, too"})
def leak(row: Row, context: Context) -> Iterator[GateFinding]:
    """Documents or passages of the valid split are in train, too."""
    valid = context.corpus.valid if context.corpus else None
    documents, passages = (valid.shared, valid.passages or 0.0) if valid else (0.0, 0.0)
    shares = {"documents": documents, f"passages of {WINDOW} tokens": passages}
    most = max(shares.values())
    if most > MANY_SHARED:
        texts = (f"{100 * share:.1f} % in {noun}" for noun, share in shares.items() if share)
        reason = f"tokens of valid also stand in train: {' and '.join(texts)}"
        yield GateFinding("leak", FLAG if most >= _LEAKED else NOTE, reason)


@gate(DATA)
def epochs(row: Row, context: Context) -> Iterator[GateFinding]:
    """The runs see their text more than once."""
    words = context.corpus.words if context.corpus else None
    counts = [run.costs["words"] or 0.0 for run in row.scored]
    if words and min(counts, default=0.0) > words:
        times = sum(counts) / len(counts) / words
        yield GateFinding("epochs", NOTE, f"the runs see their text {times:.1f} times")


@gate(DATA, {"conditions": "rates, batches, rows or tokens are not what was asked"})
def conditions(row: Row, context: Context) -> Iterator[GateFinding]:
    """What the runs did is not what was asked: [UNK], rows that are cut, rates, batches."""
    for sentence in count_conditions(run.recorded.get(KEY) for run in row.scored):
        yield GateFinding("conditions", NOTE, sentence)


@gate(DATA)
def not_judged(row: Row, context: Context) -> Iterator[GateFinding]:
    """Gates on the data cannot judge, as in archives of earlier versions. It is said once."""
    corpus, unknown = context.corpus, []
    if corpus is None or corpus.valid is None:
        unknown.append("domain and leak, as it is not known how valid compares with train")
    words = [run.costs["words"] for run in context.scored]
    if corpus is None or corpus.words is None:
        unknown.append("epochs, as it is not known how many words train has")
    elif None in words:
        count = f"{words.count(None)} of {len(words)} runs"
        unknown.append(f"epochs of {count}, as it is not known how many words they saw")
    if unknown and row is context.rows[0]:
        yield GateFinding("not judged", NOTE, f"not judged: {'; '.join(unknown)}")
