"""A plug-in whose task `recorded_masked_lm` writes down the rows of every batch, and can be killed.

BATCHES is the folder to which each process appends its lines; at batch number KILL_AT, if that is
set, a process kills itself with SIGKILL.
"""

import json
import os
import signal
import zlib
from pathlib import Path

from metaseq_lm.config.tasks import MaskedLMConfig
from metaseq_lm.core.batch import Batch
from metaseq_lm.core.registry import register_task
from metaseq_lm.data.streams import Shard, Stream
from metaseq_lm.tasks.masked_lm import MaskedLMTask


class RecordedStream(Stream):
    """Batches whose rows are recorded: each sample's number and a checksum of its tokens."""

    def micro_batches(self, number: int, shard: Shard) -> list[Batch]:
        if number == int(os.environ.get("KILL_AT", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)
        batches = super().micro_batches(number, shard)
        rows = [
            [int(sample), zlib.crc32(tokens.numpy().tobytes())]
            for batch in batches
            for sample, tokens in zip(batch.samples, batch.tokens)
        ]
        with open(Path(os.environ["BATCHES"]) / f"{shard.rank}.jsonl", "a") as file:
            file.write(json.dumps({"number": number, "rows": rows}) + "\n")
        return batches


@register_task("recorded_masked_lm", dataclass=MaskedLMConfig)
class RecordedMaskedLM(MaskedLMTask):
    """masked_lm, with its batches written down."""

    def build_streams(self, split: str) -> dict[str, Stream]:
        return {name: RecordedStream(**vars(s)) for name, s in super().build_streams(split).items()}
