"""End-task-aware training (Dery et al. 2021): the end task is trained with the auxiliary tasks.

MT-TARTAN weighs the tasks equally; META-TARTAN learns the weights from the end task's development
set, through a separate head.

  metaseq-lm train DATA --config-dir examples/tartan/config --config-name meta

Read criterion.py (options, losses, similarity), data.py, update.py (the order of an update),
task.py (text) and vision.py (images).
"""

from metaseq_lm.methods.tartan import options
