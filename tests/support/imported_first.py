"""What the server of real_runs imports before it forks: all that a run needs."""

import hydra.core.override_parser.overrides_parser  # noqa: F401
import safetensors.torch  # noqa: F401
import torch
import torch._dynamo  # the first optimizer would import it

import metaseq_lm.cli.train
import metaseq_lm.distributed.launcher
import metaseq_lm.training.run  # noqa: F401
from metaseq_lm import plugins
from metaseq_lm.core import loading

plugins.load_all()
loading.load_config([])
torch.set_num_threads(1)
