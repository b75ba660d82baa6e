"""Fine-tune with transformers and torch beside a run, from the same weights and batches.

    peer.py RUN... --source HF_DIR --out FILE            whole runs: scores, rows per CPU second
    peer.py RUN... --source HF_DIR --out FILE --float64  without dropout: differences of losses
    peer.py --table FILE                                 what was measured

RUN is a fine-tuned run that started from the import of HF_DIR. It is trained again; each batch goes
to our model and to that of transformers in turn, in one process. FILE gets a line of JSON for each
RUN.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm import plugins
from metaseq_lm.core.errors import run_script, say
from metaseq_lm.core.stored import override_config
from metaseq_lm.data.streams import Shard
from metaseq_lm.interop.check import import_transformers
from metaseq_lm.runs import checkpoint, manifests
from metaseq_lm.tasks.finetuning import labelled_metrics
from metaseq_lm.training.parts import Parts, build_parts, prepare_config
from metaseq_lm.training.restore import initialise_from, stored_config

FLOAT64 = ["engine.precision=fp64", "model.dropout=0", "model.attention_dropout=0"]
NAMES = {
    "heads.sentence.pooler.": "bert.pooler.dense.",
    "heads.sentence.out.": "classifier.",
    "heads.span.out.": "qa_outputs.",
}
OUTSIDE = 1000.0  # our span head takes this off the scores of positions that no answer can have


class Update(NamedTuple):
    """One update of both: losses and CPU seconds."""

    loss: float
    peer_loss: float
    seconds: float
    peer_seconds: float


def reopen(run: str, overrides: Sequence[str] = ()) -> Parts:
    """Return the parts of a run as they were before its first update."""
    plugins.load_all()
    config = stored_config(checkpoint.load(manifests.resolve(run)))
    config = override_config(config, overrides)
    parts = build_parts(prepare_config(config), dry_run=True)
    initialise_from(parts, parts.config.init_from)
    parts.model.train()
    return parts


def peer_of(parts: Parts, source: str) -> nn.Module:
    """Return the model of transformers in `source`; its head gets the first weights of ours."""
    transformers = import_transformers("the comparison")
    weights, options = parts.model.state_dict(), parts.config.model
    settings: dict[str, Any] = {
        "hidden_dropout_prob": options.dropout,
        "attention_probs_dropout_prob": options.attention_dropout,
        "classifier_dropout": getattr(parts.config.task, "head_dropout", None),
    }
    kind = transformers.AutoModelForQuestionAnswering
    if "heads.sentence.out.bias" in weights:
        kind = transformers.AutoModelForSequenceClassification
        settings["num_labels"] = len(weights["heads.sentence.out.bias"])
    model: nn.Module = kind.from_pretrained(source, **settings)
    model = model.to(next(parts.model.parameters()).dtype)
    with torch.no_grad():
        for prefix, peer_prefix in NAMES.items():
            for name in (n for n in weights if n.startswith(prefix)):
                model.get_parameter(name.replace(prefix, peer_prefix)).copy_(weights[name])
    return model.train()


def outputs_of(model: nn.Module, batch: Any) -> Any:
    """Return what the model of transformers makes of a batch."""
    padding = torch.zeros_like(batch.tokens) if batch.padding is None else batch.padding
    return model(
        input_ids=batch.tokens,
        attention_mask=(padding == 0).long(),
        token_type_ids=batch.segments,
    )


def loss_of(model: nn.Module, batch: Any, label_range: Tensor | None) -> Tensor:
    """Return the mean loss of the model of transformers on a batch."""
    outputs = outputs_of(model, batch)
    if "start_logits" in outputs:
        scores = [outputs.start_logits, outputs.end_logits]
        scores = [s - OUTSIDE * (~batch.answer_mask).to(s.dtype) for s in scores]
        ends = zip(scores, (batch.starts, batch.ends))
        return torch.stack([F.cross_entropy(s, gold) for s, gold in ends]).mean()
    if label_range is None:
        return F.cross_entropy(outputs.logits, batch.targets)
    least, scale = label_range
    return F.mse_loss(outputs.logits.squeeze(-1), (batch.targets - least) / scale)


def optimizer_of(model: nn.Module, parts: Parts) -> tuple[torch.optim.AdamW, Any]:
    """Return AdamW, with weight decay on matrices only, and a linear schedule with warm-up."""
    options, updates = parts.config.optimizer, parts.config.trainer.max_update
    spared = [p for p in model.parameters() if p.dim() < 2]
    decayed = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups,
        lr=options.lr,
        betas=tuple(options.betas),
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=True,
    )
    warmup = max(parts.config.schedule.warmup_ratio * updates, parts.config.schedule.warmup_updates)

    def rate(n_done: int) -> float:
        step = n_done + 1
        return min(step / max(warmup, 1.0), (updates - step) / (updates - warmup))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def train_both(parts: Parts, model: nn.Module, updates: int) -> Iterator[Update]:
    """Train our model and that of transformers in turn, and yield what each update gave."""
    ((name, stream),) = parts.task.build_streams("train").items()
    optimizer, schedule = optimizer_of(model, parts)
    label_range = parts.model.state_dict().get("label_range")
    for number in range(updates):
        batches = parts.to_device({name: [stream.micro_batches(number, Shard())]})
        start = time.process_time()
        parts.engine.begin(number)
        loss = float(parts.task.update(parts.engine, parts.model, batches)["loss"])
        middle = time.process_time()
        peer_loss = loss_of(model, batches[name][0][0], label_range)
        peer_loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), parts.config.optimizer.clip_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        end = time.process_time()
        yield Update(loss, peer_loss.item(), middle - start, end - middle)


@torch.no_grad()
def peer_score(parts: Parts, model: nn.Module) -> float:
    """Return the score of the model of transformers on the validation split."""
    (stream,) = parts.task.build_streams("valid").values()
    data = parts.task.labelled("valid").data  # type: ignore[attr-defined]
    samples, rows = [], []
    for batch in (micro for batches in stream.one_epoch(Shard()) for micro in batches):
        logits = outputs_of(model.eval(), batch).logits.double()
        rows.append(logits if data.regression else logits.softmax(-1))
        samples.append(np.asarray(batch.samples))
    return labelled_metrics(data, np.concatenate(samples), torch.cat(rows).numpy())["score"]


def measure(run: str, source: str, float64: bool, updates: int) -> dict[str, Any]:
    """Return the losses of both models and, without `float64`, scores and rows per CPU second."""
    overrides = FLOAT64 if float64 else []
    parts = reopen(run, [*overrides, *["task.head_dropout=0"] * float64])
    model, config = peer_of(parts, source), parts.config
    count = min(updates or config.trainer.max_update, config.trainer.max_update)
    done = []
    for update in train_both(parts, model, count):
        done.append(update)
        if len(done) % 20 == 0 or len(done) == count:
            say(f"{run}: {len(done)}/{count}  loss {update.loss:.6f}, peer {update.peer_loss:.6f}")
    result = {
        "set": config.task.labelled,
        "seed": config.seed,
        "precision": config.engine.precision,
        "updates": count,
        "largest_difference": max(abs(u.loss - u.peer_loss) for u in done),
        "losses": [done[0].loss, done[-1].loss],
    }
    if float64:
        return result
    rows = count * config.task.batch_size
    result["rows_per_cpu_second"] = rows / sum(u.seconds for u in done)
    result["peer_rows_per_cpu_second"] = rows / sum(u.peer_seconds for u in done)
    if count == config.trainer.max_update:
        result |= {"score": parts.score("valid")[0]["score"]}
        result |= {"peer_score": peer_score(parts, model)}
    return result


def table(file: Path) -> str:
    """Return what was measured as tables in Markdown."""
    groups = defaultdict(list)
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        groups[row["precision"] == "fp64", row["set"]].append(row)
    exact = [
        "| set | updates | first and last loss | largest difference of a loss |",
        "|---|---|---|---|",
    ]
    trained = [
        "| set | score here | transformers | rows per CPU second here | transformers | ratio |"
    ]
    trained += ["|---|---|---|---|---|---|"]
    for (float64, name), rows in groups.items():
        if float64:
            for row in rows:
                first, last = row["losses"]
                cells = (
                    f"{row['updates']} | {first:.4f}, {last:.4f} | {row['largest_difference']:.1e}"
                )
                exact.append(f"| {name} | {cells} |")
            continue
        speeds = [[r[f"{who}rows_per_cpu_second"] for r in rows] for who in ("", "peer_")]
        ratio = [a / b for a, b in zip(*speeds)]
        scores = [[100 * r[f"{who}score"] for r in rows if "score" in r] for who in ("", "peer_")]
        cells = [spread(values) for values in (*scores, *speeds)]
        trained.append(f"| {name} | {' | '.join(cells)} | {statistics.median(ratio):.2f} |")
    return "\n".join([*exact, "", *trained])


def spread(values: Sequence[float]) -> str:
    """Return mean and range of some values, and how many there are."""
    if not values:
        return "-"
    mean = math.fsum(values) / len(values)
    return f"{mean:.1f} [{min(values):.1f}, {max(values):.1f}] ({len(values)})"


def main() -> None:
    """Measure the runs, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="fine-tuned run folders")
    parser.add_argument("--source", metavar="HF_DIR", help="what the runs' start was imported from")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file that gets the results")
    parser.add_argument("--float64", action="store_true", help="compare losses without dropout")
    parser.add_argument("--updates", type=int, default=0, help="updates (default: as the run)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print what FILE holds")
    args = parser.parse_args()
    if args.table:
        print(table(args.table))
        return
    if not (args.runs and args.source and args.out):
        parser.error("give RUN, --source and --out, or --table")
    import_transformers("the comparison")
    for run in args.runs:
        result = measure(run, args.source, args.float64, args.updates)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with open(args.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    run_script(main)
