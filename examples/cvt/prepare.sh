#!/usr/bin/env bash
# Unlabelled text with word vectors of its own, tagged sets and a treebank: OUT/general, OUT/ncbi and OUT/jnlpba.
#
#   METASEQ_LM_DATA=FOLDER prepare.sh OUT [general] [ncbi] [jnlpba]         without names all of them
#
# FOLDER holds english-novels and wikitext-2 (text), conll2000-chunking (set chunk) and ud-english-ewt (sets pos and
# dep) for OUT/general; biomedical-text, scibert-ner-NCBI-disease (ncbi) and scibert-ner-JNLPBA (jnlpba) for the
# others. The abstracts of GENIA are left out of the text, since JNLPBA is made of them. Sentences of the text, and
# training sentences of a set, that occur in a set's evaluation splits are left out; word vectors are of the whole
# text. Text and sets are made to spell alike: quotation marks of the treebank as `` and '', hyphens apart in the
# text of ncbi as in that set.
set -euo pipefail

out=$(realpath -m "${1:?usage: prepare.sh OUT [FOLDER...]}")
shift
[ $# -gt 0 ] || set -- general ncbi jnlpba
here=$(cd "$(dirname "$0")" && pwd)
source=${METASEQ_LM_DATA:?name the folder of the data sets}
metaseq() { python -m metaseq_lm "$@"; }
found() { if [ -f "$source/$1" ]; then echo "$source/$1"; else echo "$source/$1.xz"; fi; }
unpacked() { case $1 in *.xz) xz -dc "$1" ;; *) cat "$1" ;; esac }

words() { # folder, file of its text, further options
    python "$here/vectors.py" "$2" "$1/text/vectors.txt"
    metaseq preprocess --words --split-text raw --documents blank --trainpref "$2" --min-frequency 3 \
        --word-vectors "$1/text/vectors.txt" --destdir "$1" "${@:3}"
}

quoted() { # split, file: the treebank with the quotation marks that its tags of the Penn Treebank name
    unpacked "$(found "ud-english-ewt/en_ewt-ud-$1.conllu")" | awk -F '\t' -v OFS='\t' \
        '$2 == "\"" && ($5 == "``" || $5 == "\047\047") { $2 = $5 } { print }' > "$2"
}

general() {
    local data=$1 chunk=conll2000-chunking
    local train=$data/text/dep.train.conllu dep=("$data/text/dep.dev.conllu" "$data/text/dep.test.conllu")
    quoted train "$train"
    quoted dev "${dep[0]}"
    quoted test "${dep[1]}"
    # 1,500 sentences of the chunks' training file are their development set, so all of it counts.
    local chunks=("$(found $chunk/train.txt)" "$(found $chunk/test.txt)")
    python "$here/../electra/corpus.py" "$source" "$data/text"
    words "$data" "$data/text/train.txt" --labelled-corpus "${chunks[0]}" "$train" \
        --drop-overlap-with "${chunks[@]}" "${dep[@]}"
    metaseq preprocess --tagged chunk --trainpref "${chunks[0]}" --testpref "${chunks[1]}" --hold-out 1500 \
        --drop-overlap-with "${dep[@]}" --destdir "$data"
    metaseq preprocess --tagged pos --tag-column upos --trainpref "$train" \
        --validpref "${dep[0]}" --testpref "${dep[1]}" --drop-overlap-with chunk --destdir "$data"
    metaseq preprocess --treebank dep --trainpref "$train" \
        --validpref "${dep[0]}" --testpref "${dep[1]}" --drop-overlap-with chunk --destdir "$data"
}

biomed() { # folder, set, folder of its files, its training file, what sed changes in the text
    local data=$1 name=$2 files=$3 train held
    train=$(found "$files/$4") held=("$(found "$files/dev.txt")" "$(found "$files/test.txt")")
    unpacked "$(found biomedical-text/documents.tsv)" | awk -F '\t' '$1 !~ /^genia:/ { print $2 "\n" }' |
        sed -E "$5" > "$data/text/train.txt"
    words "$data" "$data/text/train.txt" --labelled-corpus "$train" --drop-overlap-with "${held[@]}"
    metaseq preprocess --tagged "$name" --trainpref "$train" --validpref "${held[0]}" --testpref "${held[1]}" \
        --destdir "$data"
}
ncbi() { biomed "$1" ncbi scibert-ner-NCBI-disease train.txt ':a; s/([[:alnum:]])-([[:alnum:]])/\1 - \2/; ta'; }
jnlpba() { biomed "$1" jnlpba scibert-ner-JNLPBA train.rebuilt.txt ''; }

for folder in "$@"; do
    case $folder in general | ncbi | jnlpba) ;; *) echo "prepare.sh: no folder '$folder'" >&2; exit 2 ;; esac
    [ ! -d "$out/$folder" ] || continue
    echo "== $out/$folder"
    rm -rf "$out/$folder.part"
    mkdir -p "$out/$folder.part/text"
    $folder "$out/$folder.part"
    rm -r "$out/$folder.part/text"
    mv "$out/$folder.part" "$out/$folder" # whole
done
