"""Optional packages."""

import importlib.util


def require_package(data_name: str, module: str, package: str) -> None:
    """Check that a data set can be read.

    Args:
        data_name: The data set.
        module: The module that reads it.
        package: The package to install.

    Raises:
        ValueError: The package is not installed.
    """
    if importlib.util.find_spec(module) is None:
        raise ValueError(
            f"data.name: {data_name} needs {package}, which is not installed; "
            f"install it with `pip install {package}`"
        )
