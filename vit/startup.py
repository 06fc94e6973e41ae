"""Starting the commands, and faster imports of large libraries."""

import atexit
import gc
import importlib
import sys
from functools import partial


def import_quickly(*modules: str) -> None:
    """Import modules without collecting garbage, and exempt what is there then from collection.

    Importing torch makes a quarter of a million objects, nearly all of which stay. The garbage
    collector would go through them again and again, a fifth of the time of the import, and once
    more at the end of the program, as long again. Meant for the start of a program.
    """
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    atexit.register(_thaw_for_triton)


def _run(command: str) -> None:
    """Call a function of `vit.cli`. Importing it takes long enough for somebody to press Ctrl-C."""
    try:
        getattr(importlib.import_module("vit.cli"), command)()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


train_main, eval_main = partial(_run, "train_main"), partial(_run, "eval_main")


def _thaw_for_triton() -> None:
    """Let triton be freed at exit; what is left of it would be reported as leaks."""
    if "triton" in sys.modules:
        gc.unfreeze()
