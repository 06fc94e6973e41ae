"""An image in a tar file, read by its place."""

import io
from pathlib import Path
from typing import NamedTuple


class TarMember(NamedTuple):
    """An image file in a tar file that is not compressed.

    Attributes:
        shard: The tar file.
        name: Name of the member, for messages.
        offset: Where its content starts in the tar file, in bytes.
        size: Length of its content, in bytes.
    """

    shard: str
    name: str
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.name} in {self.shard}"

    def open(self) -> io.BytesIO:
        """Read the content.

        The tar file is opened anew for each image: next to decoding, that takes no time, and no
        process has to count and close handles.

        Raises:
            OSError: The tar file is gone, or has become shorter.
        """
        with Path(self.shard).open("rb") as file:
            file.seek(self.offset)
            content = file.read(self.size)
        if len(content) < self.size:
            raise OSError(f"{self.shard} has become shorter")
        return io.BytesIO(content)
