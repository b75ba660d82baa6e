#!/usr/bin/env bash
# Cross-View Training: data, the sweeps of this folder, tables and pictures, one experiment after another.
#
#   METASEQ_LM_DATA=FOLDER run.sh OUT                               all of them
#   METASEQ_LM_DATA=FOLDER SEEDS=1 JOBS=1 run.sh OUT chunk ncbi     some
#   METASEQ_LM_DATA=FOLDER SHARES=0.05 run.sh OUT chunk pos dep     5 % of the labels; later more, SHARES=0.05,0.25
#
# chunk, ncbi, pos, dep: methods by share of the labels; then longer_chunk and so on (four times the updates), multitask,
# ablations, probe, transformer, elmo and elmo_frozen (with language models of their own), multi30k, iwslt, cifar, figure_4_7. FOLDER
# holds what prepare.sh names, and multi30k, iwslt15-en-vi and cifar10-subset. Everything is resumed or reused when run again. JOBS
# processes run side by side, one thread each. report/NAME.jsonl keeps the runs of an experiment, claims.md compares the methods over
# all sets that are there; sets/ has pictures of them side by side.
set -euo pipefail

out=$(realpath -m "${1:?usage: run.sh OUT [EXPERIMENT...]}")
shift
here=$(cd "$(dirname "$0")" && pwd)
source=$(realpath "${METASEQ_LM_DATA:?name the folder of the data sets}")
seeds=${SEEDS:-1,2,3} jobs=${JOBS:-2} shares=${SHARES:-0.05,0.25,1}
known=(chunk ncbi pos dep longer_{chunk,ncbi,pos,dep} multitask ablations probe transformer elmo{,_frozen} multi30k iwslt cifar
    figure_4_7)
[ $# -gt 0 ] || set -- "${known[@]}"
general=$out/data/general runs=$out/runs report=$out/report
buckets=[3,6,9,12,15,18,21,24,27,30,33,36,40,45,50,60] # those of sweep.yaml
failed=0
export OMP_NUM_THREADS=1 METASEQ_LM_NO_HINTS=1

metaseq() { python -m metaseq_lm "$@"; }
sweep() { # definition, data, folder of the runs, more
    local ended=0
    metaseq sweep "$here/$1.yaml" "$2" --out "$runs/$3" --seeds "$seeds" --max-parallel "$jobs" "${@:4}" || ended=$?
    [ $ended -le 1 ] || exit $ended
    [ $ended -eq 0 ] || failed=1 # some run; the tables name it
}
swept() { # names: of which there are runs, in `folders`
    local name
    folders=()
    for name in "$@"; do [ ! -f "$runs/$name/sweep.json" ] || folders+=("$runs/$name"); done
    [ ${#folders[@]} -gt 0 ]
}
words() { # general or ncbi
    [ -d "$out/data/$1" ] || bash "$here/prepare.sh" "$out/data" "$1"
}
table() { # folder of the table, metric, label of the baseline, runs and more
    metaseq report "${@:4}" --metric "$2" --baseline "label=$3" --sides 1 --out "$report/$1"
}
keep() { # name, metric, options: all runs of an experiment, as a table and in one file
    mkdir -p "$report"
    metaseq report "$runs/$1" --metric "$2" --out "$report/$1" --archive "$report/$1.jsonl" "${@:3}"
}
by_share() { # name, data, set, more
    words "$2"
    sweep sweep "$out/data/$2" "$1" "task.labelled=[$3]" --grid "share=$shares" "${@:4}"
    for share in ${shares//,/ }; do
        table "$1-$share" test.score supervised "$runs/$1" --where task.label_fraction=$share
    done
    keep "$1" test.score --x task.label_fraction --curve valid.score
}

chunk() { by_share chunk general chunk; }
pos() { by_share pos general pos; }
dep() { by_share dep general dep task.parser_dim=32; } # a quarter of the default, as hidden_dim and the encoder
ncbi() { by_share ncbi ncbi ncbi; }
longer() { # data, set, more; labels alone have given what they can long before the end, text has not
    words "$1"
    sweep sweep "$out/data/$1" "longer_$2" "task.labelled=[$2]" trainer.max_update=16000 \
        trainer.validate_interval_updates=1000 --grid share=0.05 --grid method=supervised,cvt "${@:3}"
    table "longer_$2-0.05" test.score supervised "$runs/longer_$2"
    keep "longer_$2" test.score --curve valid.score
}
longer_chunk() { longer general chunk; }
longer_ncbi() { longer ncbi ncbi; }
longer_pos() { longer general pos; }
longer_dep() { longer general dep task.parser_dim=32; }
multitask() {
    words general
    sweep multitask "$general" multitask --grid "share=$shares"
    sweep multitask "$general" one_at_a_time --grid method=one_at_a_time --grid share=0.05
    sweep multitask "$general" multitask_labels --grid method=supervised --grid share=0.05 # what the sets' labels bring
    keep multitask test.score --curve valid.score
    keep one_at_a_time test.score
    keep multitask_labels test.score
}
compared() { # the runs that ablations are compared with; `chunk` adds the other methods and shares
    local seed
    if [ ! -d "$runs/chunk" ]; then
        sweep sweep "$general" chunk "task.labelled=[chunk]" --grid share=0.05 --grid method=supervised,cvt
        return
    fi
    for seed in ${seeds//,/ }; do
        [ -d "$runs/chunk/method=cvt-share=0.05-seed=$seed" ] ||
            { echo "run.sh: $runs/chunk lacks seed $seed; run 'chunk' with SEEDS=$seeds first" >&2; exit 2; }
    done
}
ablations() {
    words general
    compared
    sweep ablations "$general" ablations
    local both=("$runs/chunk" "$runs/ablations" --where task.label_fraction=0.05)
    # Each module is missed, and those of the neighbours more than those of the directions; the rest brings nothing.
    table ablations-modules test.score CVT "${both[@]}" label=CVT label=no-{direction,neighbour,full} --better lower
    table ablations-others test.score CVT "${both[@]}" label=CVT label={hard,confident,mean-teacher}
    table ablations-labels test.score supervised "${both[@]}" label=supervised label=labels-only
    keep ablations test.score
}
probe() {
    words general
    sweep probe "$general" probe
    keep probe test.score --rows label --columns task.labelled
}
transformer() {
    words general
    sweep transformer "$general" transformer --grid "share=$shares"
    for share in ${shares//,/ }; do
        table "transformer-$share" test.score "Transformer, supervised" "$runs/transformer" \
            --where task.label_fraction=$share
    done
    keep transformer test.score --x task.label_fraction
}
elmo() {
    words general
    metaseq train "$general" --config-dir "$here/config" --config-name elmo_lm --save-dir "$runs/elmo_lm" \
        task.vocab_size=10000 model.encoder_embed_dim=128 model.encoder_hidden_dim=256 task.batch_size=32 "task.buckets=$buckets" \
        trainer.max_update=10000 engine.threads=1
    sweep sweep "$general" elmo --grid method=elmo --grid "share=$shares" "task.elmo='$runs/elmo_lm'"
    keep elmo test.score --rows label --columns task.label_fraction
}
elmo_frozen() {
    words general
    sweep elmo_frozen "$general" elmo_frozen
    table elmo_frozen-control test.score untrained "$runs/elmo_frozen" --test t --detectable
    keep elmo_frozen test.score
}
multi30k() {
    local pairs=$source/multi30k
    [ -f "$out/data/multi30k/manifest.json" ] || metaseq preprocess --parallel multi30k --trainpref "$pairs/train" \
        --validpref "$pairs/val" --testpref "$pairs/test_2016_flickr" --source-lang en --target-lang de \
        --tokenizer byte_bpe --vocab-size 4000 --destdir "$out/data"
    sweep translation "$out/data/multi30k" multi30k
    table multi30k-test test.bleu translation "$runs/multi30k"
    keep multi30k test.bleu --curve valid.bleu
}
iwslt() {
    local pairs=$source/iwslt15-en-vi
    [ -f "$out/data/iwslt/manifest.json" ] || metaseq preprocess --parallel iwslt \
        --trainpref "$pairs"/raw.{dev2010,tst2010,tst2011} --validpref "$pairs/raw.tst2012" \
        --testpref "$pairs/raw.tst2013" --source-lang en --target-lang vi --tokenizer byte_bpe --vocab-size 4000 \
        --destdir "$out/data"
    # Half the updates: labels alone pass their 1,772 pairs 54 times in them.
    sweep translation "$out/data/iwslt" iwslt --grid share=0.5 trainer.max_update=1500 task.labelled_first=500 \
        trainer.validate_interval_updates=250
    table iwslt-test test.bleu translation "$runs/iwslt"
    keep iwslt test.bleu --curve valid.bleu
}
images() {
    local images=$source/cifar10-subset
    [ -f "$out/data/cifar/manifest.json" ] || python "$here/../tartan/images.py" "$out/data/cifar" --train "$images/train.npz" \
        --test "$images/test.npz" --names airplane,automobile,bird,cat,deer,dog,frog,horse,ship,truck
}
cifar() {
    images
    sweep vision "$out/data/cifar" cifar
    for share in 0.05 0.25; do
        table "cifar-$share" test.accuracy supervised "$runs/cifar" --where task.labelled_share=$share
    done
    keep cifar test.accuracy --x task.labelled_share
}
figure_4_7() {
    images
    sweep vision "$out/data/cifar" figure_4_7 --grid share=0.25 --grid method=supervised,cvt model.width=0.125 \
        trainer.max_update=1000
    keep figure_4_7 test.accuracy --baseline label=supervised --test t --sides 1 --detectable
    python "$here/figure_4_7.py" "$runs/figure_4_7" --out "$report"
}

for name in "$@"; do
    [[ " ${known[*]} " == *" $name "* ]] ||
        { echo "run.sh: no experiment '$name'; there are ${known[*]}" >&2; exit 2; }
done
for name in "$@"; do
    echo "== $name: tables and pictures in $report"
    "$name"
done
if swept chunk ncbi pos dep; then # a panel for each set
    metaseq report "${folders[@]}" --metric test.score --rows label --columns task.labelled --x task.label_fraction \
        --format png --out "$report/sets"
fi
if swept chunk ncbi pos dep multitask{,_labels} one_at_a_time ablations probe transformer elmo; then
    python "$here/claims.py" "${folders[@]}" > "$report/claims.part"
    mv "$report/claims.part" "$report/claims.md"
    cat "$report/claims.md"
fi
exit $failed
