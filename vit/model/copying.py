"""Copies of modules that may store what they compute."""

import copy
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Module = TypeVar("Module", bound=nn.Module)


def copy_module(module: Module) -> Module:
    """Return a copy of a module, without the graphs of tensors that a user's attention stores."""
    with _WithoutGraphs():
        return copy.deepcopy(module)


class _WithoutGraphs(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and args[0].grad_fn is not None:
            args = args[0].detach(), *args[1:]
        return func(*args, **(kwargs or {}))
