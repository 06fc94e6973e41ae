"""Train a Vision Transformer: `python train.py --help`."""

from vit.cli import train_main

if __name__ == "__main__":
    train_main()
