#!/usr/bin/env bash
# Binarise a corpus and the eight tasks of SuperGLUE as text: data.sh SUPERGLUE TRAIN.txt VALID.txt DATA
#
# SUPERGLUE holds a folder for each task (BoolQ, CB, ... or superglue-BoolQ, ...) with the files that SuperGLUE's
# combined.zip has, packed (.xz, .gz, .bz2) or not; a text file has a document (an article) on each line. A task
# without a folder is skipped and named. VOCAB=30000 is the size of the paper's vocabulary.
set -euo pipefail

[ $# -eq 4 ] || { echo "usage: data.sh SUPERGLUE TRAIN.txt VALID.txt DATA" >&2; exit 2; }
superglue=$1 train=$2 valid=$3 data=$4
metaseq() { python -m metaseq_lm "$@"; }

[ -f "$data/dict.txt" ] || metaseq preprocess --trainpref "$train" --validpref "$valid" \
    --vocab-size "${VOCAB:-30000}" --destdir "$data"
tasks=(BoolQ CB COPA MultiRC ReCoRD RTE WiC WSC)
names='' tokens='' tuned='' # what there is, the task tokens it has beside all eight, what has a valid split
for i in "${!tasks[@]}"; do
    task=${tasks[i]} source=''
    for folder in "$superglue/$task" "$superglue/superglue-$task"; do
        [ -n "$source" ] || [ ! -d "$folder" ] || source=$folder
    done
    if [ ! -d "$data/$task" ]; then
        if [ -z "$source" ]; then
            echo "skipped $task: no folder $task or superglue-$task in $superglue" >&2
            continue
        fi
        metaseq preprocess --benchmark "superglue/$task" --as-text --source "$source" --destdir "$data"
    fi
    names+=,$task tokens+=,$((i + 2))
    ! compgen -G "$data/$task/valid.*" > /dev/null || tuned+=,$task
done
[ -n "$names" ] || { echo "$superglue: holds none of the tasks ${tasks[*]}" >&2; exit 1; }
all=",$(IFS=,; echo "${tasks[*]}")"
[ "$names" = "$all" ] || echo "pre-train with: 'task.labelled=[${names#,}]' 'task.task_tokens=[${tokens#,}]'"
[ "$tuned" = "$all" ] || echo "fine-tune with: --stages ${tuned#,}"
