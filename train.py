"""Train a Vision Transformer: `python train.py --help`."""

import sys

from vit.cli import parse_train, user_errors

if __name__ == "__main__":
    with user_errors():
        config, options = parse_train(sys.argv[1:])
        # Here, because it imports torch: a mistyped flag is answered at once.
        from vit.training.trainer import train

        train(config, **options)
