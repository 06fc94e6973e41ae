"""Evaluate a trained Vision Transformer and look into it: `python eval.py --help`."""

import sys

from vit.cli import parse_eval, user_errors

if __name__ == "__main__":
    with user_errors():
        run, options = parse_eval(sys.argv[1:])
        # Here, because they import torch: a mistyped flag is answered at once.
        if options.attention:
            from vit.reporting.attention import explain_run

            explain_run(run, options)
        elif options.image:
            from vit.reporting.photos import classify_photos

            classify_photos(run, options)
        elif options.compare is not None:
            from vit.reporting.comparison import compare_runs

            compare_runs(run, options)
        else:
            from vit.reporting.report import evaluate_run

            evaluate_run(run, options)
