#!/usr/bin/env bash
# ELECTRA, Electric and BERT at equal FLOPs on the documentation that every Python carries: pre-train,
# fine-tune, score sentences, plot. No download; made for at most 10 minutes on 2 cores.
#
#   quick.sh OUT                 SEEDS=1,2,3 FLOPS=1e12,4e12,1.6e13 JOBS=2 quick.sh OUT
set -euo pipefail

out=$(realpath -m "${1:?usage: quick.sh OUT}")
here=$(cd "$(dirname "$0")" && pwd)
flops=${FLOPS:-1e12,4e12} jobs=${JOBS:-2} seeds=${SEEDS:-1}
data=$out/data
export OMP_NUM_THREADS=1

metaseq() { python -m metaseq_lm "$@"; }

if [ ! -f "$data/done" ]; then
    echo "== data: the documentation of $(python --version) as text, binarised into $data"
    rm -rf "$data" && mkdir -p "$out"
    python "$here/documentation.py" "$out/text"
    metaseq preprocess --trainpref "$out/text/train.txt" --validpref "$out/text/valid.txt" \
        --documents blank --vocab-size 2000 --destdir "$data"
    metaseq preprocess --labelled package --trainpref "$out/text/train.tsv" \
        --validpref "$out/text/dev.tsv" --testpref "$out/text/test.tsv" --destdir "$data"
    touch "$data/done"
fi

echo "== pre-training: $flops FLOPs each, then fine-tuning"
metaseq sweep "$here/quick.yaml" "$data" --out "$out/runs" --grid "flops=$flops" --seeds "$seeds" \
    --max-parallel "$jobs"

echo "== which of two sentences is the real one? (pseudo-log-likelihood)"
for folder in "$out"/runs/pretrain/method={bert,electric}-*; do
    echo "$(basename "$folder") $(metaseq score "$folder" --pairs --input "$out/text/pairs.jsonl" \
        --too-long skip engine.threads=1 2> "$folder/score.log" | tee "$folder/pairs.json" | tr -d '\n')"
done

echo "== table and pictures in $out/report"
metaseq report "$out/runs" --metric test.accuracy --x pretraining.trainer.max_flops --out "$out/report"
