#!/usr/bin/env bash
# Pre-training as meta-learning: data, sweep, the start without further pre-training, tables, pictures.
#
#   METASEQ_LM_DATA=FOLDER run.sh OUT              SEEDS=1,2,3,4,5 FLOPS=6e13 JOBS=2 run.sh OUT
#
# FOLDER holds english-novels, wikitext-2, sst-trees and glue-nli-paraphrase-10k. Everything is resumed
# or reused when run again. FLOPS are those of the masked LM; JOBS processes run side by side, one thread each.
set -euo pipefail

out=$(realpath -m "${1:?usage: run.sh OUT}")
here=$(cd "$(dirname "$0")" && pwd)
source=${METASEQ_LM_DATA:?name the folder of the data sets}
seeds=${SEEDS:-1,2,3,4,5} jobs=${JOBS:-2} flops=${FLOPS:-6e13}
data=$out/data text=$out/text
export OMP_NUM_THREADS=1

metaseq() { python -m metaseq_lm "$@"; }
found() { if [ -f "$1" ]; then echo "$1"; else echo "$1.xz"; fi; }

if [ ! -d "$data" ]; then
    echo "== data: novels and Wikipedia for pre-training, SST-2, SST-5 and SNLI for fine-tuning"
    rm -rf "$data.part" # moved when it is whole
    python "$here/../electra/corpus.py" "$source" "$text"
    python "$here/sentiment.py" "$source" "$text"
    metaseq preprocess --trainpref "$text/train.txt" --validpref "$text/valid.txt" \
        --documents blank --vocab-size 2000 --destdir "$data.part"
    for name in SST-2 SST-5; do
        metaseq preprocess --labelled $name --trainpref "$text/$name/train.tsv" \
            --validpref "$text/$name/dev.tsv" --testpref "$text/$name/test.tsv" --destdir "$data.part"
    done
    for name in SNLI QQP QNLI; do
        place=$source/glue-nli-paraphrase-10k/$name
        metaseq preprocess --labelled $name --trainpref "$(found "$place.train.jsonl")" \
            --validpref "$(found "$place.dev.jsonl")" --destdir "$data.part"
    done
    mv "$data.part" "$data"
fi

echo "== a masked LM, which learns the next sentence; then k inner steps and the baselines"
metaseq sweep "$here/../electra/sweep.yaml" "$data" --out "$out/words" --grid method=bert --grid "flops=$flops"
metaseq sweep "$here/start_sweep.yaml" "$data" --out "$out/start" --seeds "$seeds" --max-parallel "$jobs" \
    "init_from='$(echo "$out"/words/*method=bert*)'"
metaseq sweep "$here/sweep.yaml" "$data" --out "$out/meta" --seeds "$seeds" --max-parallel "$jobs" \
    "init_from='$out/start/start/seed={seed}'"

echo "== tables and pictures in $out/report"
mkdir -p "$out/report"
python "$here/epochs.py" "$out/start" "$out/meta" | tee "$out/report/epochs.md"
tuned=("$out"/{start,meta}/{SST-2,SST-5,SNLI})
metaseq report "${tuned[@]}" --metric valid.accuracy --curve valid.accuracy --columns task.labelled \
    --out "$out/report"
for name in SST-2 SST-5 SNLI; do # is any better than going on as before?
    metaseq report "$out"/{start,meta}/$name --metric valid.accuracy --baseline label=k0 --sides 1 \
        --out "$out/report/$name"
done
