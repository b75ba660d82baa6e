"""Imports of the server of real_runs before it forks: all modules that a run and its test need."""

import gc
import os

import numpy.ma  # noqa: F401
import real_runs
import safetensors.torch  # noqa: F401
import sentencepiece.sentencepiece_model_pb2  # noqa: F401
import sklearn.metrics  # noqa: F401
import torch
import torch._dynamo  # the first optimizer would import it

import metaseq_lm.cli.train
import metaseq_lm.distributed.launcher
import metaseq_lm.interop.exporting
import metaseq_lm.sweeps.server
import metaseq_lm.training.run  # noqa: F401
from metaseq_lm import plugins
from metaseq_lm.core import loading

plugins.load_all()
loading.load_config(["criterion=masked_lm", *real_runs.CASES["masked_lm"][0], *real_runs.TINY])
torch.set_num_threads(1)
os.fsync = lambda descriptor: None  # as conftest.py
gc.freeze()  # a collection would write into pages that the processes share
