#!/usr/bin/env bash
# Binarise a corpus and the eight tasks of SuperGLUE as text: data.sh SUPERGLUE TRAIN.txt VALID.txt DATA
#
# SUPERGLUE holds a folder for each task (BoolQ, CB, ...) as SuperGLUE's combined.zip has them; a text file
# has a document (an article) on each line. VOCAB=30000 and STRIDE tokens are the paper's.
set -euo pipefail

[ $# -eq 4 ] || { echo "usage: data.sh SUPERGLUE TRAIN.txt VALID.txt DATA" >&2; exit 2; }
superglue=$1 train=$2 valid=$3 data=$4
metaseq() { python -m metaseq_lm "$@"; }

[ -f "$data/dict.txt" ] || metaseq preprocess --trainpref "$train" --validpref "$valid" \
    --vocab-size "${VOCAB:-30000}" --destdir "$data"
for task in BoolQ CB COPA MultiRC ReCoRD RTE WiC WSC; do
    [ -d "$data/$task" ] || metaseq preprocess --benchmark "superglue/$task" --as-text \
        --source "$superglue/$task" --destdir "$data"
done
