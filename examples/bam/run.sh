#!/usr/bin/env bash
# BAM: data, encoder, the strategies as a sweep, tables and pictures.
#
#   METASEQ_LM_DATA=FOLDER run.sh OUT
#   METASEQ_LM_DATA=FOLDER SEEDS=1,2 STAGES='single-*,multi,single_multi' JOBS=2 ENCODER=RUN run.sh OUT
#
# FOLDER holds english-novels, wikitext-2, the glue-* sets and glue-nli-paraphrase-10k. Everything is resumed or
# reused when run again, also with more seeds and stages. ENCODER is a masked LM that is there already (of the
# same tokenizer); FLOPS are those of the one that is trained otherwise. SST-2 is cut to its first 8,000 phrases,
# so that no set is much larger than the others. JOBS processes run side by side, one thread each.
set -euo pipefail

out=$(realpath -m "${1:?usage: run.sh OUT}")
here=$(cd "$(dirname "$0")" && pwd)
source=${METASEQ_LM_DATA:?name the folder of the data sets}
seeds=${SEEDS:-1,2,3,4,5} jobs=${JOBS:-2} flops=${FLOPS:-6e13}
stages=${STAGES:-single-*,multi,single_single-*,multi_multi,single_multi}
data=$out/data text=$out/text
export OMP_NUM_THREADS=1

metaseq() { python -m metaseq_lm "$@"; }
found() { if [ -f "$1" ]; then echo "$1"; else echo "$1.xz"; fi; }

if [ ! -f "$data/done" ]; then
    echo "== data: novels and Wikipedia for the encoder, eight sets of GLUE"
    rm -rf "$data" "$text"
    python "$here/../electra/corpus.py" "$source" "$text"
    metaseq preprocess --trainpref "$text/train.txt" --validpref "$text/valid.txt" \
        --documents blank --vocab-size 2000 --destdir "$data"
    mkdir -p "$text/SST-2"
    cp "$source/glue-SST-2/"{dev,test}.tsv "$text/SST-2"
    whole=$(found "$source/glue-SST-2/train.tsv")
    # awk reads to the end: with head, xz would fail for a closed pipe.
    case $whole in *.xz) xz -dc "$whole" ;; *) cat "$whole" ;; esac |
        awk -v rows="${SST2_ROWS:-8000}" 'NR <= rows + 1' > "$text/SST-2/train.tsv"
    for name in CoLA MRPC STS-B RTE; do
        metaseq preprocess --benchmark glue/$name --source "$source/glue-$name" --destdir "$data"
    done
    metaseq preprocess --benchmark glue/SST-2 --source "$text/SST-2" --destdir "$data"
    for name in MNLI QQP QNLI; do
        place=$source/glue-nli-paraphrase-10k/$name
        metaseq preprocess --labelled $name --trainpref "$(found "$place.train.jsonl")" \
            --validpref "$(found "$place.dev.jsonl")" --destdir "$data"
    done
    touch "$data/done"
fi

encoder=$out/encoder
if [ ! -f "$encoder/results.json" ]; then
    words=${ENCODER:-}
    if [ -z "$words" ]; then
        echo "== a masked LM"
        metaseq sweep "$here/../electra/sweep.yaml" "$data" --out "$out/words" --grid method=bert --grid "flops=$flops"
        words=$(echo "$out"/words/*method=bert*)
    fi
    echo "== which goes on with rows of 64 tokens"
    metaseq train "$data" --config-dir "$here/../electra/config" --config-name longer_rows \
        "init_from='$words'" --save-dir "$encoder"
fi

echo "== teachers and students"
metaseq sweep "$here/sweep.yaml" "$data" --out "$out/runs" --init-from "$encoder" --seeds "$seeds" \
    --stages "$stages" --max-parallel "$jobs"

echo "== tables in $out/report"
cd "$out"
mkdir -p report
there() { for name in "$@"; do for folder in runs/$name; do [ ! -d "$folder" ] || echo "$folder"; done; done; }
strategies=('single-*' multi 'single_single-*' multi_multi single_multi 'tuned-*' 'single_multi_tuned-*')
python "$here/strategies.py" $(there "${strategies[@]}") | tee report/strategies.md
# All runs in one file: strategies.py and report read it, beside later runs too.
metaseq report $(there "${strategies[@]}" 'second_*' 'without_*' 'rte_*') --metric valid.score --archive report/runs.jsonl > report/runs.txt
compare() { # metric, folder of the table, stages: is any better than Multi?
    local metric=$1 place=$2
    shift 2
    [ -d runs/multi ] || return 0
    metaseq report $(there "$@") --metric "$metric" --spread range --test bootstrap --baseline label=Multi \
        --out "report/$place"
}
compare valid.score students multi multi_multi single_multi second_multi 'without_*'
for set in CoLA SST-2 MRPC STS-B MNLI RTE; do
    compare "valid.${set}_score" $set single-$set multi single_single-$set multi_multi single_multi
done
