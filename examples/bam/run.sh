#!/usr/bin/env bash
# BAM: data, encoder, the strategies as a sweep, tables and pictures.
#
#   METASEQ_LM_DATA=FOLDER run.sh OUT
#   METASEQ_LM_DATA=FOLDER SEEDS=1,2 STAGES='single-*,multi,single_multi' JOBS=2 ENCODER=RUN run.sh OUT
#
# FOLDER holds english-novels, wikitext-2, the glue-* sets and glue-nli-paraphrase-10k, of which MNLI, QQP and QNLI are
# 8,999 rows of the official training sets and 1,000 others of them to score. Everything is resumed or reused
# when run again, also with more seeds and stages. ENCODER is a masked LM that is there already (of the
# same tokenizer); FLOPS are those of the one that is trained otherwise. SST-2 is cut to its first 8,000 phrases,
# so that no set is much larger than the others. JOBS processes run side by side, one thread each.
set -euo pipefail

out=$(realpath -m "${1:?usage: run.sh OUT}")
here=$(cd "$(dirname "$0")" && pwd)
source=${METASEQ_LM_DATA:?name the folder of the data sets}
seeds=${SEEDS:-1,2,3,4,5} jobs=${JOBS:-2} flops=${FLOPS:-6e13}
stages=${STAGES:-single-*,multi,single_single-*,multi_multi,single_multi}
data=$out/data
export OMP_NUM_THREADS=1 METASEQ_LM_NO_HINTS=1

metaseq() { python -m metaseq_lm "$@"; }
found() { if [ -f "$1" ]; then echo "$1"; else echo "$1.xz"; fi; }

if [ ! -d "$data" ]; then
    echo "== data: novels and Wikipedia for the encoder, eight sets of GLUE"
    part=$data.part text=$data.part/text # moved when it is whole
    rm -rf "$part"
    python "$here/../electra/corpus.py" "$source" "$text"
    metaseq preprocess --trainpref "$text/train.txt" --validpref "$text/valid.txt" \
        --documents blank --vocab-size 4000 --destdir "$part"
    mkdir -p "$text/SST-2"
    cp "$source/glue-SST-2/"{dev,test}.tsv "$text/SST-2"
    whole=$(found "$source/glue-SST-2/train.tsv")
    # awk reads to the end: with head, xz would fail for a closed pipe.
    case $whole in *.xz) xz -dc "$whole" ;; *) cat "$whole" ;; esac |
        awk -v rows="${SST2_ROWS:-8000}" 'NR <= rows + 1' > "$text/SST-2/train.tsv"
    for name in CoLA MRPC STS-B RTE; do
        metaseq preprocess --benchmark glue/$name --source "$source/glue-$name" --destdir "$part"
    done
    metaseq preprocess --benchmark glue/SST-2 --source "$text/SST-2" --destdir "$part"
    for name in MNLI QQP QNLI; do
        place=$source/glue-nli-paraphrase-10k/$name
        metaseq preprocess --labelled $name --trainpref "$(found "$place.train.jsonl")" \
            --validpref "$(found "$place.dev.jsonl")" --destdir "$part"
    done
    rm -rf "$text"
    mv "$part" "$data"
fi

words=${ENCODER:-}
if [ -z "$words" ]; then
    echo "== a masked LM"
    metaseq sweep "$here/../electra/sweep.yaml" "$data" --out "$out/words" --grid method=bert --grid "flops=$flops"
    words=$(echo "$out"/words/*method=bert*)
fi
echo "== which goes on with rows of 64 tokens"
metaseq train "$data" --config-dir "$here/../electra/config" --config-name longer_rows \
    "init_from='$words'" --save-dir "$out/encoder"

echo "== teachers and students"
ended=0
metaseq sweep "$here/sweep.yaml" "$data" --out "$out/runs" --init-from "$out/encoder" --seeds "$seeds" \
    --stages "$stages" --max-parallel "$jobs" || ended=$?
[ $ended -le 1 ] || exit $ended # 1: some run failed; the tables name it

report=$out/report runs=$out/runs
echo "== tables and pictures in $report"
mkdir -p "$report"
there() { # the folders of these stages that there are, in the array `folders`
    folders=()
    for name in "$@"; do for folder in "$runs"/$name; do [ ! -d "$folder" ] || folders+=("$folder"); done; done
}
strategies=('single-*' multi 'single_single-*' multi_multi single_multi 'tuned-*' 'single_multi_tuned-*')
there "${strategies[@]}"
[ ${#folders[@]} -eq 0 ] || python "$here/strategies.py" "${folders[@]}" | tee "$report/strategies.md"
# All runs in one file: strategies.py and report read it, beside later runs too.
there "${strategies[@]}" 'further-*' 'second_*' 'without_*' 'weak_*' 'rte_*'
metaseq report "${folders[@]}" --metric valid.loss --archive "$report/runs.jsonl" > "$report/runs.txt"
compare() { # metric, folder of the table, stage and label of the baseline, others, --better to ask which are worse
    local metric=$1 place=$2 stage=$3 label=$4 names
    read -ra names <<< "$stage $5"
    there "${names[@]}"
    [ -d "$runs/$stage" ] && [ ${#folders[@]} -gt 1 ] || return 0
    metaseq report "${folders[@]}" --metric "$metric" --spread range --test mann-whitney --sides 1 --baseline "label=$label" \
        --out "$report/$place" "${@:6}"
}
compare valid.score students multi Multi 'multi_multi single_multi second_multi'
compare valid.score ablations single_multi 'Single->Multi' 'without_*' --better lower
compare valid.score weak weak_annealing annealing 'weak_teacher weak_half weak_alone' --better lower
compare valid.RTE_score rte single_single-RTE 'Single->Single' 'rte_*'
exit $ended
