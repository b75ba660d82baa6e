"""One message for running out of memory: of a GPU, of this machine, or of a limit set for it."""

from __future__ import annotations

import errno
import re

from metaseq_lm.core.errors import MetaseqError

# Texts of other types of errors: by torch, the loader of shared objects, threads.
_SIGNS = re.compile(
    r"can't allocate memory|cannot allocate memory|not enough memory|bad_alloc|can't start new "
    r"thread|failed to map segment|unable to mmap|paging file is too small",
    re.IGNORECASE,
)
_OF_GPU = (
    "the memory of the GPU is full; compute fewer rows at a time (engine.micro_batch_size=N "
    "changes no result), or a smaller task.batch_size"
)
_OF_HOST = (
    "the memory of this machine, or the limit on that of this process, is full; compute fewer rows "
    "at a time (engine.micro_batch_size=N changes no result), take fewer workers and processes, a "
    "smaller model, or more memory (ulimit -v shows the limit)"
)


def memory_error(error: BaseException) -> MetaseqError | None:
    """Return an error with a remedy if `error` says that memory ran out, else None."""
    text = (str(error).splitlines() or [""])[0]
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
        return MetaseqError(f"{_OF_GPU}: {text}")
    is_full = isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    )
    is_said = isinstance(error, (RuntimeError, OSError, ImportError)) and _SIGNS.search(str(error))
    if isinstance(error, MetaseqError) or not (is_full or is_said):
        return None
    return MetaseqError(f"{_OF_HOST}{f': {text}' * bool(text)}")
