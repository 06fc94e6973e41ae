"""Train a Vision Transformer: `python train.py --help`."""

import sys

from vit.cli import parse_train, user_errors

if __name__ == "__main__":
    with user_errors():
        config, overwrite = parse_train(sys.argv[1:])
        from vit.training.trainer import (
            train,
        )  # imports torch: after the flags are known to be right

        train(config, overwrite=overwrite)
