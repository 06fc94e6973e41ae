"""Evaluate a trained Vision Transformer: `python eval.py --help`."""

import sys

from vit.cli import parse_eval, user_errors

if __name__ == "__main__":
    with user_errors():
        run, options = parse_eval(sys.argv[1:])
        from vit.reporting import (
            evaluate_run,
        )  # imports torch: after the flags are known to be right

        evaluate_run(run, options)
