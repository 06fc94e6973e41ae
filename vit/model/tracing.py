"""Tracing with torch.fx, by which torchvision's `create_feature_extractor` reads layers."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch.fx

Forward = TypeVar("Forward", bound=Callable[..., Any])


def leaf_of_graphs(forward: Forward) -> Forward:
    """Keep a module as one node of a graph, because torch.fx cannot follow its branches."""

    @wraps(forward)
    def call(module: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, torch.fx.Proxy):
            tracer: Any = x.tracer
            path = tracer.path_of_module(module)
            return tracer.create_proxy("call_module", path, (x, *args), kwargs)
        return forward(module, x, *args, **kwargs)

    return call  # type: ignore[return-value]
