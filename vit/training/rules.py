"""Rules about a config that involve the data set or the number of processes."""

from vit.config import Config


def check_sizes(config: Config) -> None:
    pass


def check_batch(config: Config, processes: int) -> None:
    """Check that a batch can be divided among processes and parts.

    Raises:
        ValueError: It cannot.
    """
    train = config.train
    parts = train.accumulate * processes
    if train.batch_size % parts:
        raise ValueError(
            f"train.batch_size: {train.batch_size} cannot be shared by {processes} processes with "
            f"train.accumulate={train.accumulate}; it must be a multiple of {parts}"
        )
    if config.model.stem == "conv" and train.batch_size == parts:
        raise ValueError(
            f"train.batch_size: {train.batch_size} in {parts} parts (train.accumulate, "
            "processes) is one image at a time; the batch norm of model.stem=conv needs two"
        )
