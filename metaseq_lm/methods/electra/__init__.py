"""ELECTRA and Electric: a discriminator against a noise model (Clark et al. 2020; Clark 2021, ch. 5)."""

from metaseq_lm.methods.electra import criterion, model, strategic, task, wnli
