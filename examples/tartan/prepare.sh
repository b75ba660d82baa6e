#!/usr/bin/env bash
# Domain text and end tasks as one data folder.
#
#   prepare.sh DATA CS BIOMED citation_intent=DIR sciie=DIR chemprot=DIR
#
# CS and BIOMED are text files (.gz, .xz, .bz2 too) with a document on each line; a DIR holds
# train.jsonl, dev.jsonl and test.jsonl (packed or not) with "text" and "label". The splits of the corpus:
# train, both domains without every hundredth document, which are valid; domain_NAME of each end task, whose
# lines are pieces of at most WORDS=100 words, since those of the authors are paragraphs of about that size.
# The tokenizer is that of the folder TOKENIZER_FROM, or learnt from the domains (VOCAB=8000 word pieces).
set -euo pipefail

data=${1:?usage: prepare.sh DATA CS BIOMED NAME=DIR...} cs=$2 biomed=$3
shift 3
metaseq() { python -m metaseq_lm "$@"; }
unpacked() {
    case $1 in
        *.xz) xz -dc "$1" ;;
        *.gz) gzip -dc "$1" ;;
        *.bz2) bzip2 -dc "$1" ;;
        *) cat "$1" ;;
    esac
}
text=$(mktemp -d)
trap 'rm -rf "$text"' EXIT
{ unpacked "$cs"; unpacked "$biomed"; } | awk -v out="$text" '{ print > (out "/" (NR % 100 ? "train" : "valid") ".txt") }'

pieces() { # of a text file
    unpacked "$1" | awk -v most="${WORDS:-100}" '{
        for (i = 1; i <= NF; i++) printf "%s%s", $i, (i == NF || i % most == 0) ? "\n" : " " }'
}
pieces "$cs" > "$text/cs.txt"
pieces "$biomed" > "$text/biomed.txt"

splits=()
for pair in "$@"; do
    name=${pair%%=*}
    domain=$text/cs.txt
    [ "$name" = chemprot ] && domain=$text/biomed.txt
    splits+=(--split "domain_$name=$domain")
done
tokenizer=(--tokenizer wordpiece --vocab-size "${VOCAB:-8000}")
[ -z "${TOKENIZER_FROM:-}" ] || tokenizer=(--tokenizer-from "$TOKENIZER_FROM")
metaseq preprocess --trainpref "$text/train.txt" --validpref "$text/valid.txt" "${splits[@]}" \
    "${tokenizer[@]}" --destdir "$data" --workers "${JOBS:-1}"
for pair in "$@"; do
    folder=${pair#*=}
    file() { ls "$folder/$1".jsonl* | head -1; }
    metaseq preprocess --labelled "${pair%%=*}" --trainpref "$(file train)" --validpref "$(file dev)" \
        --testpref "$(file test)" --destdir "$data"
done
