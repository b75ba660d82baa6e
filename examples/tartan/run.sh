#!/usr/bin/env bash
# End-task-aware training: data, encoder, all systems as a sweep, tables and pictures.
#
#   METASEQ_LM_DATA=FOLDER run.sh OUT              SEEDS=1,2 JOBS=1 run.sh OUT
#
# FOLDER holds arxiv-cs-abstracts, biomedical-text, scibert-citation_intent, scibert-sciie-relation-extraction and
# scibert-chemprot. Everything is resumed or reused when run again. FLOPS are those of the masked LM in short
# rows; JOBS processes run side by side, one thread each.
set -euo pipefail

out=$(realpath -m "${1:?usage: run.sh OUT}")
here=$(cd "$(dirname "$0")" && pwd)
source=${METASEQ_LM_DATA:?name the folder of the data sets}
seeds=${SEEDS:-1,2,3,4,5} jobs=${JOBS:-2} flops=${FLOPS:-6e13}
data=$out/data
export OMP_NUM_THREADS=1 METASEQ_LM_NO_HINTS=1

metaseq() { python -m metaseq_lm "$@"; }
column() { # of a table that may be packed
    if [ -f "$1" ]; then cut -f "$2" "$1"; else xz -dc "$1.xz" | cut -f "$2"; fi
}

if [ ! -d "$data" ]; then
    echo "== data: abstracts of computer science and biomedicine, three end tasks"
    mkdir -p "$out"
    rm -rf "$data.part" # moved when it is whole
    column "$source/arxiv-cs-abstracts/abstracts.tsv" 4 > "$out/cs.txt"
    column "$source/biomedical-text/documents.tsv" 2 > "$out/biomed.txt"
    WORDS=60 bash "$here/prepare.sh" "$data.part" "$out/cs.txt" "$out/biomed.txt" \
        citation_intent="$source/scibert-citation_intent" sciie="$source/scibert-sciie-relation-extraction" \
        chemprot="$source/scibert-chemprot"
    rm "$out/cs.txt" "$out/biomed.txt"
    mv "$data.part" "$data"
fi

echo "== an encoder: rows of 32 tokens, then of 96"
metaseq sweep "$here/../electra/sweep.yaml" "$data" --out "$out/words" --grid method=bert --grid "flops=$flops" \
    task.sample_break_mode=none
metaseq train "$data" --config-dir "$here/../electra/config" --config-name longer_rows --save-dir "$out/encoder" \
    "init_from='$(echo "$out"/words/*method=bert*)'" task.sample_break_mode=none task.tokens_per_sample=96 \
    trainer.max_update="${UPDATES:-2000}"

echo "== TAPT, DAPT, MT- and META-TARTAN, fine-tuning"
ended=0
metaseq sweep "$here/sweep.yaml" "$data" --out "$out/runs" --init-from "$out/encoder" --seeds "$seeds" \
    --max-parallel "$jobs" || ended=$?
[ $ended -le 1 ] || exit $ended # 1: some run failed; the tables name it

echo "== tables and pictures in $out/report"
systems=("$out/runs"/{finetuned{,_3_epochs,_longer},{tapt,dapt,dapt_tapt}_finetuned,{mt,meta,meta_same_head}_final})
for pair in citation_intent:f1_macro sciie:f1_macro chemprot:accuracy; do
    set=${pair%:*} metric=test.${pair#*:}
    for baseline in "tapt" "dapt_tapt" "'fine-tuned, 3 epochs'"; do
        name=${baseline//[^a-z0-9]/_}
        metaseq report "${systems[@]}" --metric "$metric" --where task.labelled=$set --baseline "label=$baseline" --sides 1 \
            --out "$out/report/$set-$name"
    done
    metaseq report "$out/runs"/{meta,meta_same_head} --metric "$metric" --where task.labelled=$set --curve 'train.alpha_*' \
        --out "$out/report/$set-weights"
done
exit $ended
