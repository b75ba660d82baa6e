"""Span corruption (Raffel et al. 2020, T5) and UL2's mixture of denoisers (Tay et al. 2023).

  metaseq-lm train DATA --task span_corruption --criterion span_corruption --model modern_nano

Start with corruption.py (texts to inputs and targets); task.py makes rows, criterion.py has the
loss, model.py the encoder-decoder.
"""

from metaseq_lm.methods.span_corruption import options
