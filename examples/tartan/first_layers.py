"""Make a BERT of another's first layers, with its tokenizer: `first_layers.py HF_DIR 3 OUT`."""

import argparse

from metaseq_lm.core.errors import run_script
from metaseq_lm.interop.check import import_transformers


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", metavar="HF_DIR", help="folder of a BERT")
    parser.add_argument("layers", metavar="N", type=int, help="layers to keep")
    parser.add_argument("out", metavar="OUT", help="folder to make")
    args = parser.parse_args()
    transformers = import_transformers("this program")
    model = transformers.BertModel.from_pretrained(args.source, num_hidden_layers=args.layers)
    model.save_pretrained(args.out)
    transformers.AutoTokenizer.from_pretrained(args.source).save_pretrained(args.out)


if __name__ == "__main__":
    run_script(main)
