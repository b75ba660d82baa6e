#!/usr/bin/env bash
# Two Moons: data, pre-training by every objective, fine-tuning, table and pictures.
#
#   run.sh OUT                          a tenth of the paper's schedule, n = 10 and 160, 3 seeds
#                                       (`untrained`, a student without pre-training, is the control)
#   UPDATES=40000 SIZES="10 20 40 80 160" run.sh OUT      the paper's schedule and sizes
#   UPDATES=40000 SIZES="10 20 40 80 160" OBJECTIVES=hard SEEDS=1 run.sh OUT      beside MLM only hard labels
#
# Everything is resumed or reused when run again. JOBS processes run side by side, one thread each.
set -euo pipefail

out=${1:?usage: run.sh OUT}
here=$(cd "$(dirname "$0")" && pwd)
updates=${UPDATES:-4000}   # of 4 micro-steps each
warmup=${WARMUP:-1000} lr=${LR:-0.08}
seeds=${SEEDS:-1 2 3} sizes=${SIZES:-10 160} jobs=${JOBS:-2}
log=${LOG:-500} objectives=${OBJECTIVES-hard soft_x soft_fixed_y_x}
data=$out/data
export OMP_NUM_THREADS=1 METASEQ_LM_NO_HINTS=1

metaseq() { python -m metaseq_lm "$@"; }

if [ ! -d "$data" ]; then
    echo "== data: Two Moons as text, binarised into $data"
    mkdir -p "$out"
    rm -rf "$data.part" # moved when it is whole
    python "$here/two_moons.py" "$out/text"
    metaseq preprocess --trainpref "$out/text/train.txt" --validpref "$out/text/valid.txt" \
        --tokenizer byte_bpe --vocab-size 512 --tokenizer-corpus "$out/text/tokenizer.txt" \
        --destdir "$data.part"
    for n in 10 20 40 80 160; do
        text=$out/text/which_moon_$n
        metaseq preprocess --labelled which_moon_$n --trainpref "$text/train.tsv" \
            --validpref "$text/valid.tsv" --testpref "$text/test.tsv" --split vis="$text/vis.tsv" \
            --destdir "$data.part"
    done
    mv "$data.part" "$data"
fi

finished() { # folder, updates: whether the run is there in full (`train` would say so too, slower)
    grep -qs '"status": "finished"' "$1/results.json" && grep -qs "\"max_update\": $2," "$1/results.json"
}
# One line per run that is not finished: the arguments of `metaseq-lm train`.
pretrain() { # seed, objective, n, folder
    local place=$out/pretrain/seed$1/$4
    finished "$place" "$updates" || echo "--config-name $2 --save-dir $place --seed $1" \
        "task.labelled=[which_moon_$3] --max-update $updates --lr $lr --warmup-updates $warmup" \
        "--log-interval $log"
}
untrained() { # seed: the control, a student as it is initialised
    local place=$out/pretrain/seed$1/untrained
    finished "$place" 1 || echo "--config-name untrained --save-dir $place --seed $1"
}
finetune() { # seed, label, n, batch, updates, checkpoint
    local place=$out/finetune/seed$1/$2_$3
    finished "$place" "$5" || echo "--config-name finetune --save-dir $place --seed $1 --label $2" \
        "--init-from $out/pretrain/seed$1/$6 task.labelled=which_moon_$3 --batch-size $4" \
        "--max-update $5 --log-interval 1000"
}
batch_of() { case "$1-$2" in MLM-20|MLM-40) echo 1;; *-10) echo 1;; *-20) echo 2;; *-40) echo 4;;
    *-80) echo 8;; *) echo 16;; esac; }

train_all() { # runs the lines of standard input, $jobs at a time; stops at the first failure
    xargs -P "$jobs" -I{} sh -c "exec python -m metaseq_lm train '$data' --config-dir '$here/config' {}"
}

echo "== pre-training, $updates updates each, $jobs at a time"
for seed in $seeds; do
    untrained "$seed"
    pretrain "$seed" mlm 10 mlm
    for n in $sizes; do
        for objective in $objectives; do pretrain "$seed" "$objective" "$n" "${objective}_$n"; done
    done
done | train_all

echo "== fine-tuning on n labelled points, 100 epochs each"
for seed in $seeds; do
    for n in $sizes; do
        b=$(batch_of MLM "$n") h=$(batch_of Hard "$n")
        finetune "$seed" untrained "$n" "$h" $((100 * n / h)) untrained/checkpoints/last
        finetune "$seed" MLM_latest "$n" "$b" $((100 * n / b)) mlm/checkpoints/last
        finetune "$seed" MLM_best_loss "$n" "$b" $((100 * n / b)) mlm/checkpoints/best
        for objective in $objectives; do
            finetune "$seed" "$objective" "$n" "$h" $((100 * n / h)) "${objective}_$n/checkpoints/last"
        done
    done
done | train_all

echo "== table and pictures in $out/report"
mkdir -p "$out/report"
metaseq report "$out/finetune" --x task.labelled --out "$out/report"
metaseq report "$out/pretrain" --metric valid.accuracy --curve valid.accuracy train.reward \
    --format png,md --out "$out/report/pretraining" > "$out/report/pretraining.txt"
python "$here/pictures.py" "$out"
