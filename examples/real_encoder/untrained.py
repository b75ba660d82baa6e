"""Make a BERT of the sizes of another one, with untrained weights and its tokenizer: `untrained.py HF_DIR OUT`."""

import argparse

from transformers import AutoTokenizer, BertConfig, BertModel, set_seed


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", metavar="HF_DIR", help="folder of a BERT")
    parser.add_argument("out", metavar="OUT", help="folder to make")
    args = parser.parse_args()
    set_seed(1)
    BertModel(BertConfig.from_pretrained(args.source)).save_pretrained(args.out)
    AutoTokenizer.from_pretrained(args.source).save_pretrained(args.out)


if __name__ == "__main__":
    main()
