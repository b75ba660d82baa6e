"""Make a BERT of the first layers of another one, with its tokenizer: `first_layers.py HF_DIR 3 OUT`."""

import argparse

from transformers import AutoTokenizer, BertModel


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", metavar="HF_DIR", help="folder of a BERT")
    parser.add_argument("layers", metavar="N", type=int, help="layers to keep")
    parser.add_argument("out", metavar="OUT", help="folder to make")
    args = parser.parse_args()
    BertModel.from_pretrained(args.source, num_hidden_layers=args.layers).save_pretrained(args.out)
    AutoTokenizer.from_pretrained(args.source).save_pretrained(args.out)


if __name__ == "__main__":
    main()
