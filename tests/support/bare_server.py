"""Runs commands, read as lines of JSON, in forks; prints the exit code of each.

The interpreter of an installation without extras starts it; it imports nothing from the tests.
"""

import gc
import json
import os
import runpy
import sys
from pathlib import Path

import sklearn.metrics  # noqa: F401
import torch
import torch._dynamo

import metaseq_lm.cli.train
import metaseq_lm.training.run  # noqa: F401
from metaseq_lm import plugins
from metaseq_lm.cli import program


def be(words: list[str], folder: str, output: str) -> None:
    """Be a program."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    sys.argv = words
    if words[0] == "metaseq-lm":
        program()
    else:
        sys.argv = words[1:]
        sys.path.insert(0, str(Path(words[1]).parent))
        runpy.run_path(words[1], run_name="__main__")


plugins.load_all()
torch.set_num_threads(1)
os.fsync = lambda descriptor: None  # as conftest.py
gc.freeze()
answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    child = os.fork()
    if not child:
        be(**json.loads(line))
        sys.exit()
    answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
    answers.flush()
