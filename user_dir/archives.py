"""A kind of input file: tar archives of texts, packed or not, a record for each file inside."""

import tarfile
from collections.abc import Iterator

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.records import Reading, Record, TextFile, register_reader
from metaseq_lm.data.records.text_files import check_length, decode


def is_archive(file: TextFile, head: bytes) -> bool:
    """Return whether a file is an archive, by its first bytes on the disk or its name."""
    return head[257:262] == b"ustar" or ".tar" in file.path.suffixes


@register_reader("tar", is_archive)
def archived_texts(file: TextFile, reading: Reading) -> Iterator[Record]:
    """Yield the texts, each with the name of its file; MetaseqError for a damaged archive."""
    try:
        with tarfile.open(file.path) as archive:
            for number, member in enumerate(filter(tarfile.TarInfo.isreg, archive), 1):
                where = f"{file}: {member.name}"
                check_length(member.size, "file", where)
                content = archive.extractfile(member)
                assert content is not None
                text, is_bad = decode(content.read(), where, file.on_bad_utf8)
                fields = {"text": text, "name": member.name}
                yield Record(fields, where, reading.counts, is_bad=is_bad, line=number)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise MetaseqError(f"{file}: damaged: {error}; copy or pack the archive again") from error
