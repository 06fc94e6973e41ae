"""Tracing with torch.fx, by which torchvision's `create_feature_extractor` reads layers."""

from functools import wraps
from typing import Any

import torch.fx


def leaf_of_graphs(forward: Any) -> Any:
    """Keep a module as one node of a graph, because torch.fx cannot follow its branches."""

    @wraps(forward)
    def call(module: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, torch.fx.Proxy):
            return forward(module, x, *args, **kwargs)
        tracer: Any = x.tracer
        return tracer.create_proxy("call_module", tracer.path_of_module(module), (x, *args), kwargs)

    return call
