"""Logs on a disk without room: no line is lost, no line is torn, nothing waits for ever."""

import json
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.loading import load_config
from metaseq_lm.reporting.canvas import canvas
from metaseq_lm.runs.folder import RunFolder
from metaseq_lm.training.loggers import LoggedRun, LoggerGroup


@contextmanager
def room(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_lines_wait_for_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(load_config([f"save_dir={tmp_path}"]))
    for update in range(3):
        folder.log("train", update, 0.0, {"loss": 1.0})
    full = (tmp_path / "log.jsonl").stat().st_size
    capsys.readouterr()
    for spare in (0, 7):  # no byte of the line, a part of it
        with room(full + spare):
            folder.log("train", 3 + spare, 0.0, {"loss": 1.0})
        assert (tmp_path / "log.jsonl").stat().st_size == full
    assert capsys.readouterr().err.count("lines wait until") == 1
    folder.log("train", 20, 0.0, {"loss": 1.0})
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [0, 1, 2, 3, 10, 20]


def board_of(folder: Path) -> LoggerGroup:
    return LoggerGroup(["tensorboard"], LoggedRun(folder, RunConfig()))


def test_events_end_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    board = board_of(tmp_path)
    board.log("train", 1, {"loss": 1.0})
    (file,) = (tmp_path / "tb").iterdir()
    with room(file.stat().st_size):
        for update in range(2, 200):  # more than any queue holds
            board.log("train", update, {"loss": 1.0})
    assert capsys.readouterr().err.count("tensorboard: [Errno 27]") == 1
    board.close(failed=False)


def test_events_are_what_tensorboard_reads(tmp_path: Path) -> None:
    """Records of length, checksum, event, checksum; each value under its name."""
    board = board_of(tmp_path)
    for update in (1, 2):
        board.log("valid", update, {"loss": 0.5 / update, "accuracy": 1.0})
    board.close(failed=False)
    (file,) = (tmp_path / "tb").iterdir()
    version, *events = events_of(file.read_bytes())
    assert version.file_version == "brain.Event:2"
    scalars = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    wanted = [("valid/accuracy", 1.0), ("valid/loss", 0.5)]
    assert sorted(scalars[:2]) == [(1, *value) for value in wanted]
    assert sorted(scalars[2:]) == [(2, "valid/accuracy", 1.0), (2, "valid/loss", 0.25)]


def events_of(content: bytes) -> Iterator[Event]:
    """Read an event file as its format says, checksums (CRC-32C, masked) included."""
    at = 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        event = content[at + 12 : at + 12 + length]
        assert struct.unpack_from("<I", content, at + 8) == (masked_crc(content[at : at + 8]),)
        assert struct.unpack_from("<I", content, at + 12 + length) == (masked_crc(event),)
        yield Event.FromString(event)
        at += length + 16


def masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF


def test_picture_without_room_is_named_and_not_left_behind(tmp_path: Path) -> None:
    with pytest.raises(MetaseqError, match=r"scores\.png: .*[0-9,]+ bytes"):
        with room(100), canvas(1, tmp_path / "scores.png"):
            pass
    assert not list(tmp_path.iterdir())
