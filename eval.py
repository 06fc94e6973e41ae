"""Evaluate a trained Vision Transformer: `python eval.py --help`."""

from vit.cli import eval_main

if __name__ == "__main__":
    eval_main()
