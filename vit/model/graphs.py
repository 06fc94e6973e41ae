"""Modules that torch.fx cannot look into.

torchvision's `create_feature_extractor` reads layers from a graph that torch.fx traces. Tracing
cannot follow branches on shapes or on arguments, so some modules are one node of the graph.
"""

from functools import wraps
from typing import Any

import torch.fx


def leaf_of_graphs(forward: Any) -> Any:
    """Keep a module, whose forward this decorates, as one node of torch.fx's graphs."""

    @wraps(forward)
    def call(module: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, torch.fx.Proxy):
            return forward(module, x, *args, **kwargs)
        tracer: Any = x.tracer
        return tracer.create_proxy("call_module", tracer.path_of_module(module), (x, *args), kwargs)

    return call
