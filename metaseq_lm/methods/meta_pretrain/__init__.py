"""Pre-training as meta-learning (Lv et al. 2020): first-order MAML with k inner steps.

  metaseq-lm train DATA --task meta_pretrain --criterion bert_pretraining task.inner_steps=5

Start with update.py (one meta update); task.py has the tasks, criterion.py and model.py serve
labelled sets.
"""

from metaseq_lm.methods.meta_pretrain import options
