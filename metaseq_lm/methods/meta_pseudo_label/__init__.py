"""Meta-learned objective (Shen 2021): a teacher generates the student's training pairs.

The teacher turns unlabelled text x into a pair (input, target). The student pre-trains on it and
takes a virtual fine-tuning step on labelled data; the effect on a second labelled batch trains the
teacher. With hard labels, pairs are sampled and the teacher learns by REINFORCE. With soft labels,
pairs are probabilities to differentiate through.

  metaseq-lm train DATA --config-dir examples/meta_pseudo_label/config --config-name soft

Read model.py, criterion.py, episodes.py (data), task.py (the order of the updates).
"""

from metaseq_lm.methods.meta_pseudo_label import options
