"""Evaluate a trained Vision Transformer: `python eval.py --help`."""

import sys

from vit.cli import parse_eval, user_errors

if __name__ == "__main__":
    with user_errors():
        run, options = parse_eval(sys.argv[1:])
        # Here, because it imports torch: a mistyped flag is answered at once.
        from vit.reporting import evaluate_run

        evaluate_run(run, options)
