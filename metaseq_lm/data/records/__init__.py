"""Records of files of any kind: text, JSON, tables, Parquet and Arrow, CoNLL, and of plug-ins."""

from metaseq_lm.data.records.reading import records as records
from metaseq_lm.data.records.record import Reading as Reading
from metaseq_lm.data.records.record import Record as Record
from metaseq_lm.data.records.record import register_reader as register_reader
from metaseq_lm.data.records.text_files import TextFile as TextFile
