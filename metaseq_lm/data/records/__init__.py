"""Records of files of any kind: text, JSON, tables, Parquet and Arrow, CoNLL, and of plug-ins."""

from metaseq_lm.data.records.reading import records
from metaseq_lm.data.records.record import Reading, Record, register_reader
from metaseq_lm.data.records.text_files import TextFile

__all__ = ["Reading", "Record", "TextFile", "records", "register_reader"]
