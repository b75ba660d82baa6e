"""Connections between the nodes of a run, only for processes that know its secret.

torch's store does not authenticate clients. It listens on the loopback address of the first node,
and a gate listens on each other node. Connections there are forwarded to the gate of the first
node, after both ends have proved that they know the secret, by an HMAC of a number that the other
end has drawn.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

from metaseq_lm.core.errors import MetaseqError

SECRET = "METASEQ_LM_SECRET"  # environment variable with the secret of a run
FILE = ".secret"  # in the folder of a run
PATIENCE = 5.0  # seconds for a proof

_FIRST, OTHER = b"first", b"other"


def key_of(secret: bytes, meeting: str) -> bytes:
    """Return the key of one meeting, so that different steps of a run cannot join each other."""
    return hmac.digest(secret, meeting.encode(), "sha256")


def read_secret(folder: str, create: bool) -> bytes | None:
    """Return the secret of a run, from the environment or a file in its folder that only the owner
    can read; None if there is no such file yet and this process may not `create` it.

    Raises MetaseqError for a file that is a link, is somebody else's, or can be read by others.
    """
    if value := os.environ.get(SECRET):
        return value.encode()
    if not folder:
        raise MetaseqError(
            "processes of several nodes need a secret to find each other; there is no run folder "
            f"to keep it in, so set {SECRET} to the same random text for all of them"
        )
    path = Path(folder, FILE)
    if create:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(path, flags, 0o600), "wb") as file:
                file.write(secrets.token_hex(32).encode())
    # List the folder, because NFS caches for a while that a file does not exist.
    if not path.parent.is_dir() or FILE not in os.listdir(path.parent):
        return None
    try:
        # A link may lead to a file of somebody else, and opening a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise MetaseqError(f"{path}: {error.strerror}; remove it, or set {SECRET}") from error
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        mine = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
        if not mine or status.st_mode & 0o077:
            raise MetaseqError(
                f"{path}: has to be a file that only you can read (mode 600), because who reads it "
                f"can join the run; remove it, or set {SECRET}"
            )
        secret = file.read(1024)
    if len(secret) != 64:  # it is still being written
        return None
    return secret


class Gate:
    """Forwards connections from a listening socket to another address, in its own thread.

    Args:
        listening: The socket; on the first node for other nodes, elsewhere for local processes.
        target: The store, or the gate of the first node.
        key: The key that both gates must know.
        is_first: Whether this is the gate of the first node.
    """

    def __init__(
        self, listening: socket.socket, target: tuple[str, int], key: bytes, is_first: bool
    ) -> None:
        self.listening, self.target, self.key, self.is_first = listening, target, key, is_first
        self.port: int = listening.getsockname()[1]
        threading.Thread(target=asyncio.run, args=(self._serve(),), daemon=True).start()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._carry, sock=self.listening)
        await server.serve_forever()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        # Hang up on clients that do not know the secret, or are gone.
        with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError):
            if self.is_first:
                await _prove(reader, writer, self.key, _FIRST)
            far_reader, far_writer = await asyncio.open_connection(*self.target)
            writers.append(far_writer)
            if not self.is_first:
                await _prove(far_reader, far_writer, self.key, OTHER)
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        for each in writers:
            each.close()


async def _prove(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, role: bytes
) -> None:
    """Prove to the other side that this one knows the key; PermissionError unless both do."""
    size = hashlib.sha256().digest_size
    mine = secrets.token_bytes(size)
    writer.write(mine)
    theirs = await asyncio.wait_for(reader.readexactly(size), PATIENCE)
    # With the role, a stranger cannot send us our own proof back.
    writer.write(hmac.digest(key, role + mine + theirs, "sha256"))
    proof = await asyncio.wait_for(reader.readexactly(size), PATIENCE)
    other = OTHER if role == _FIRST else _FIRST
    if not hmac.compare_digest(proof, hmac.digest(key, other + theirs + mine, "sha256")):
        raise PermissionError("the other side does not know the secret")


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


def find(host: str, ports: Sequence[int], key: bytes) -> int | None:
    """Return the port of a host with a gate that knows the key; None if there is none."""

    async def answers(port: int) -> bool:
        with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError):
            reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), PATIENCE)
            try:
                await _prove(reader, writer, key, OTHER)
            finally:
                writer.close()
            return True
        return False

    async def search() -> list[bool]:
        return await asyncio.gather(*map(answers, ports))

    answering = asyncio.run(search())
    return next((port for port, answer in zip(ports, answering) if answer), None)
