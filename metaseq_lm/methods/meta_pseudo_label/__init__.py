"""Meta-learned objective (Shen 2021): a teacher generates the student's training pairs.

The teacher turns unlabelled text x into a pair (input, target); the student pre-trains on it, takes
a virtual fine-tuning step on labelled data, and what that does to a second labelled batch trains
the teacher. Hard labels: pairs are sampled, REINFORCE. Soft labels: pairs are probabilities,
differentiated through.

  metaseq-lm train DATA --config-dir examples/meta_pseudo_label/config --config-name soft

Read model.py, criterion.py, episodes.py (data), task.py (the order of the updates).
"""

from metaseq_lm.methods.meta_pseudo_label import options
