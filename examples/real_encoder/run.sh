#!/usr/bin/env bash
# Real weights: import, fine-tune on four sets of GLUE, evaluate, export, compare with transformers.
#
#   METASEQ_LM_MINILM=HF_DIR METASEQ_LM_DATA=FOLDER run.sh OUT
#   METASEQ_LM_MINILM=HF_DIR METASEQ_LM_DATA=FOLDER SEEDS=1 STAGES=CoLA,RTE JOBS=2 run.sh OUT
#
# HF_DIR is a BERT of the transformers library: config.json, model.safetensors and vocab.txt of
# all-MiniLM-L6-v2, or another one. FOLDER holds glue-RTE, glue-MRPC, glue-STS-B and glue-CoLA. Everything is
# resumed or reused when run again, also with more seeds. JOBS processes run side by side, one thread each.
# PEER=1 also trains in transformers, batch by batch beside ours: the seeds of CoLA, and updates in float64.
set -euo pipefail

out=$(realpath -m "${1:?usage: run.sh OUT}")
here=$(cd "$(dirname "$0")" && pwd)
source=${METASEQ_LM_DATA:?name the folder of the data sets}
weights=${METASEQ_LM_MINILM:?name the folder of the weights}
seeds=${SEEDS:-1,2,3} stages=${STAGES:-CoLA,RTE,MRPC,STS-B} jobs=${JOBS:-1}
export OMP_NUM_THREADS=1

metaseq() { python -m metaseq_lm "$@"; }

if [ ! -d "$out/pretrained" ]; then
    echo "== the weights"
    metaseq import "$weights" --out "$out/pretrained" --check
fi
if [ ! -d "$out/untrained" ]; then
    echo "== the same sizes, untrained"
    python "$here/untrained.py" "$weights" "$out/hf_untrained"
    metaseq import "$out/hf_untrained" --out "$out/untrained"
fi
for set in ${stages//,/ }; do
    if [ ! -f "$out/data/$set/manifest.json" ]; then
        echo "== $set"
        once=() # RTE and CoLA are not doubled anyway
        case $set in MRPC | STS-B) once=(--no-double) ;; esac
        metaseq preprocess --benchmark "glue/$set" --source "$source/glue-$set" "${once[@]}" \
            --tokenizer-from "$out/pretrained" --destdir "$out/data"
    fi
done

echo "== fine-tuning, of the untrained model too"
ended=0
sweep() { # folder, start, seeds
    metaseq sweep "$here/sweep.yaml" "$out/data" --out "$out/$1" --init-from "$out/$2" "label=$2" --seeds "$3" \
        --stages "$stages" --max-parallel "$jobs" || ended=$?
    [ $ended -le 1 ] || exit $ended # 1: some run failed; the tables name it
}
sweep runs pretrained "$seeds"
sweep control untrained "$seeds"

report=$out/report folders=() pretrained=()
for set in ${stages//,/ }; do
    folders+=("$out/runs/$set" "$out/control/$set")
    pretrained+=("$out/runs/$set/seed="*)
done
echo "== scores, exports and what transformers makes of them, in $report"
metaseq report "${folders[@]}" --metric valid.score --rows label --columns task.labelled --mean \
    --archive "$report/runs.jsonl" --out "$report"
python "$here/exported.py" "${pretrained[@]}" --source "$source" --out "$out/exported" --results "$report/exported.jsonl"
if [ -n "${PEER:-}" ]; then
    echo "== transformers on the same batches"
    rm -f "$report/peer.jsonl"
    peer() { python "$here/peer.py" "$@" --source "$weights" --out "$report/peer.jsonl"; }
    peer "$out/runs/CoLA/seed=1" --float64 --updates 535 # an epoch
    peer "$out/runs/STS-B/seed=1" --float64 --updates 100
    peer "$out/runs/CoLA/seed="*
    peer "$out/runs/"{RTE,STS-B}/seed=1 --updates 40 # for their speed
    python "$here/peer.py" --table "$report/peer.jsonl"
fi
exit $ended
