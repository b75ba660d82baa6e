#!/usr/bin/env bash
# Unlabelled text, tagged sets and a treebank as two data folders, OUT/general and OUT/biomed.
#
#   METASEQ_LM_DATA=FOLDER prepare.sh OUT
#
# FOLDER holds english-novels and wikitext-2 (text), conll2000-chunking (set chunk) and ud-english-ewt (sets pos and
# dep) for OUT/general; biomedical-text, scibert-ner-NCBI-disease (ncbi) and scibert-ner-JNLPBA (jnlpba) for
# OUT/biomed. The abstracts of GENIA are left out of the text, since JNLPBA is made of them. Sentences of the
# text, and training sentences of a set, that occur in a set's evaluation splits are left out.
set -euo pipefail

out=$(realpath -m "${1:?usage: prepare.sh OUT}")
here=$(cd "$(dirname "$0")" && pwd)
source=${METASEQ_LM_DATA:?name the folder of the data sets}
metaseq() { python -m metaseq_lm "$@"; }
found() { if [ -f "$source/$1" ]; then echo "$source/$1"; else echo "$source/$1.xz"; fi; }
unpacked() { case $1 in *.xz) xz -dc "$1" ;; *) cat "$1" ;; esac }

general() {
    local data=$1 chunk=conll2000-chunking ewt=ud-english-ewt/en_ewt-ud
    local test=$chunk/test.txt dep=("$(found $ewt-dev.conllu)" "$(found $ewt-test.conllu)")
    # 1,500 sentences of the chunks' training file are their development set, so all of it counts.
    local chunks=("$(found $chunk/train.txt)" "$(found $test)")
    python "$here/../electra/corpus.py" "$source" "$data/text"
    metaseq preprocess --words --split-text raw --documents blank --trainpref "$data/text/train.txt" --min-frequency 3 \
        --labelled-corpus "${chunks[0]}" "$(found $ewt-train.conllu)" \
        --drop-overlap-with "${chunks[@]}" "${dep[@]}" --destdir "$data"
    metaseq preprocess --tagged chunk --trainpref "${chunks[0]}" --testpref "${chunks[1]}" --hold-out 1500 \
        --drop-overlap-with "${dep[@]}" --destdir "$data"
    metaseq preprocess --tagged pos --tag-column upos --trainpref "$(found $ewt-train.conllu)" \
        --validpref "${dep[0]}" --testpref "${dep[1]}" --drop-overlap-with chunk --destdir "$data"
    metaseq preprocess --treebank dep --trainpref "$(found $ewt-train.conllu)" \
        --validpref "${dep[0]}" --testpref "${dep[1]}" --drop-overlap-with chunk --destdir "$data"
}

biomed() {
    local data=$1 ncbi=scibert-ner-NCBI-disease jnlpba=scibert-ner-JNLPBA train=train.rebuilt.txt
    local held=("$(found $ncbi/dev.txt)" "$(found $ncbi/test.txt)" "$(found $jnlpba/dev.txt)" "$(found $jnlpba/test.txt)")
    unpacked "$(found biomedical-text/documents.tsv)" | awk -F '\t' '$1 !~ /^genia:/ { print $2 }' > "$data/text/biomed.txt"
    metaseq preprocess --words --split-text raw --trainpref "$data/text/biomed.txt" --min-frequency 2 \
        --labelled-corpus "$(found $ncbi/train.txt)" "$(found $jnlpba/$train)" \
        --drop-overlap-with "${held[@]}" --destdir "$data"
    metaseq preprocess --tagged ncbi --trainpref "$(found $ncbi/train.txt)" --validpref "${held[0]}" \
        --testpref "${held[1]}" --drop-overlap-with "${held[@]:2}" --destdir "$data"
    metaseq preprocess --tagged jnlpba --trainpref "$(found $jnlpba/$train)" --validpref "${held[2]}" \
        --testpref "${held[3]}" --drop-overlap-with ncbi --destdir "$data"
}

for folder in general biomed; do
    [ ! -d "$out/$folder" ] || continue
    echo "== $out/$folder"
    rm -rf "$out/$folder.part"
    mkdir -p "$out/$folder.part/text"
    $folder "$out/$folder.part"
    rm -r "$out/$folder.part/text"
    mv "$out/$folder.part" "$out/$folder" # whole
done
