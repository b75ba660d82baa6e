"""Checks of untrusted files before torch or safetensors reads them."""

import io
import json
import pickletools
import re
import zipfile
from typing import Any

# Names that a pickle of plain data and tensors imports. torch allows more; some of these need much
# memory for a small file.
_HARMLESS = re.compile(
    r"torch\._utils\._rebuild_(tensor_v[23]|meta_tensor_no_storage|parameter)|"
    r"torch\.(storage\.)?\w*Storage|torch\.Size|"
    r"torch\.u?(float|bfloat|int|complex|bool)\w*|collections\.OrderedDict|_codecs\.encode|"
    r"(builtins|__builtin__)\.(set|complex)"
)


def check_header(data: bytes) -> dict[str, Any]:
    """Return the header of a safetensors file from its first bytes, or all of them.

    Raises ValueError if it names a tensor twice; the library would take the last.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a name occurs twice in its header")
        return dict(pairs)

    content = data[8 : 8 + int.from_bytes(data[:8], "little")]
    header: dict[str, Any] = json.loads(content, object_pairs_hook=unique)
    return header


def check_archive(data: bytes) -> None:
    """Raise ValueError unless `data` is a zip as torch.save writes it for plain data and tensors.

    Each member must be stored uncompressed and only once, with nothing else in the file, because
    torch has its own zip reader. Pickles may import only HARMLESS names.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        names = [member.filename for member in members]
        if len({name.lower() for name in names}) < len(names):
            raise ValueError("a member of the archive occurs twice")
        if any(name.startswith("/") or ".." in name.split("/") for name in names):
            raise ValueError("a member of the archive leaves it")
        # Compressed members, or many names for one piece, add up to more than the file holds.
        links = any(member.external_attr >> 28 == 0xA for member in members)
        if links or sum(member.file_size for member in members) > len(data):
            raise ValueError("a member of the archive is a link or larger than the file")
        if archive.comment or min((m.header_offset for m in members), default=1):
            raise ValueError("there is something before or behind the archive")
        for name in (name for name in names if name.lower().endswith(".pkl")):
            for operation, value, _ in pickletools.genops(archive.read(name)):
                if operation.name == "GLOBAL":
                    imported = str(value).replace(" ", ".", 1)
                    if not _HARMLESS.fullmatch(imported):
                        raise ValueError(f"{name} asks for {imported}, which is not plain data")
