#!/usr/bin/env bash
# Cross-View Training: data, the sweeps of this folder, tables and pictures, one experiment after another.
#
#   METASEQ_LM_DATA=FOLDER run.sh OUT                               all of them
#   METASEQ_LM_DATA=FOLDER SEEDS=1 JOBS=1 run.sh OUT chunk ncbi     some
#
# chunk, ncbi, pos, dep: methods by share of the labels; then multitask, ablations, probe, transformer, elmo (a language
# model of its own), multi30k, iwslt, cifar. FOLDER holds what prepare.sh names, and multi30k, iwslt15-en-vi and
# cifar10-subset. Everything is resumed or reused when run again. JOBS processes run side by side, one thread each.
set -euo pipefail

out=$(realpath -m "${1:?usage: run.sh OUT [EXPERIMENT...]}")
shift
here=$(cd "$(dirname "$0")" && pwd)
source=$(realpath "${METASEQ_LM_DATA:?name the folder of the data sets}")
seeds=${SEEDS:-1,2,3} jobs=${JOBS:-2}
[ $# -gt 0 ] || set -- chunk ncbi pos dep multitask ablations probe transformer elmo multi30k iwslt cifar
general=$out/data/general runs=$out/runs report=$out/report
failed=0
export OMP_NUM_THREADS=1

metaseq() { python -m metaseq_lm "$@"; }
sweep() { # definition, data, folder of the runs, more
    local ended=0
    metaseq sweep "$here/$1.yaml" "$2" --out "$runs/$3" --seeds "$seeds" --max-parallel "$jobs" "${@:4}" || ended=$?
    [ $ended -le 1 ] || exit $ended
    [ $ended -eq 0 ] || failed=1 # some run; the tables name it
}
words() { [ -d "$out/data/jnlpba" ] || bash "$here/prepare.sh" "$out/data"; }
table() { # folder of the table, metric, baseline, runs and more
    metaseq report "${@:4}" --metric "$2" --baseline "label=$3" --out "$report/$1"
}
by_share() { # name, data, set
    words
    sweep sweep "$2" "$1" "task.labelled=[$3]"
    for share in 0.05 0.25 1; do
        table "$1-$share" test.score supervised "$runs/$1" --where task.label_fraction=$share
    done
    metaseq report "$runs/$1" --metric test.score --x task.label_fraction --curve valid.score --out "$report/$1"
}

chunk() { by_share chunk "$general" chunk; }
pos() { by_share pos "$general" pos; }
dep() { by_share dep "$general" dep; }
ncbi() { by_share ncbi "$out/data/ncbi" ncbi; }
multitask() {
    words
    sweep multitask "$general" multitask
    for score in chunk_f1 pos_accuracy dep_las; do
        table "multitask-$score" "test.$score" supervised "$runs/multitask"
    done
}
ablations() {
    words
    [ -f "$runs/chunk/sweep.json" ] || # `chunk` adds the other methods and shares
        sweep sweep "$general" chunk "task.labelled=[chunk]" --grid share=0.05 --grid method=supervised,cvt
    sweep ablations "$general" ablations
    table ablations test.score CVT "$runs/chunk" "$runs/ablations" --where task.label_fraction=0.05
}
probe() {
    words
    sweep probe "$general" probe
    metaseq report "$runs/probe" --metric test.score --rows label --columns task.labelled --out "$report/probe"
}
transformer() {
    words
    sweep transformer "$general" transformer
    metaseq report "$runs/transformer" --metric test.score --x task.label_fraction --out "$report/transformer"
}
elmo() {
    words
    metaseq train "$general" --config-dir "$here/config" --config-name elmo_lm --save-dir "$runs/elmo_lm" \
        task.vocab_size=10000 model.encoder_embed_dim=128 model.encoder_hidden_dim=256 task.batch_size=32 \
        trainer.max_update=10000 engine.threads=1
    sweep sweep "$general" elmo --grid method=elmo "task.elmo='$runs/elmo_lm'"
    metaseq report "$runs/elmo" --metric test.score --rows label --columns task.label_fraction --out "$report/elmo"
}
multi30k() {
    local pairs=$source/multi30k
    [ -f "$out/data/multi30k/manifest.json" ] || metaseq preprocess --parallel multi30k --trainpref "$pairs/train" \
        --validpref "$pairs/val" --testpref "$pairs/test_2016_flickr" --source-lang en --target-lang de \
        --tokenizer byte_bpe --vocab-size 8000 --destdir "$out/data"
    sweep translation "$out/data/multi30k" multi30k
    table multi30k test.bleu translation "$runs/multi30k"
}
iwslt() {
    local pairs=$source/iwslt15-en-vi
    [ -f "$out/data/iwslt/manifest.json" ] || metaseq preprocess --parallel iwslt \
        --trainpref "$pairs"/raw.{dev2010,tst2010,tst2011} --validpref "$pairs/raw.tst2012" \
        --testpref "$pairs/raw.tst2013" --source-lang en --target-lang vi --tokenizer byte_bpe --vocab-size 4000 \
        --destdir "$out/data"
    sweep translation "$out/data/iwslt" iwslt --grid share=0.5
    table iwslt test.bleu translation "$runs/iwslt"
}
cifar() {
    local images=$source/cifar10-subset
    [ -f "$out/data/cifar/manifest.json" ] || python "$here/../tartan/images.py" "$out/data/cifar" --train "$images/train.npz" \
        --test "$images/test.npz" --names airplane,automobile,bird,cat,deer,dog,frog,horse,ship,truck
    sweep vision "$out/data/cifar" cifar
    for share in 0.05 0.25; do
        table "cifar-$share" test.accuracy supervised "$runs/cifar" --where task.labelled_share=$share
    done
    metaseq report "$runs/cifar" --metric test.accuracy --x task.labelled_share --out "$report/cifar"
}

for name in "$@"; do
    case $name in
        chunk | ncbi | pos | dep | multitask | ablations | probe | transformer | elmo | multi30k | iwslt | cifar) ;;
        *) echo "run.sh: no experiment '$name'; the beginning of $here/run.sh lists them" >&2; exit 2 ;;
    esac
done
for name in "$@"; do
    echo "== $name: tables and pictures in $report"
    "$name"
done
exit $failed
