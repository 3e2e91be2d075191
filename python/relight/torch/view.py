"""Views: the tensors of one file by name, without reading them.

Owns: the flat names of the tensors in a nested state; the mapping and its end.
Must not: read or verify data unasked; write to the file.
Invariant: a tensor taken from a view stays valid after the view is closed, and after the file is replaced or deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from types import TracebackType
from typing import Any

import torch
from relight.exceptions import CorruptCheckpoint, InvalidArgument, NotPicklable
from relight.torch import paths, unpickling
from relight.torch.archive import ImageLike
from relight.torch.safe_unpickler import Refused

__all__ = ["View"]


class View(Mapping[str, torch.Tensor]):
    """A file of tensors by name: `relight.open(path)` makes one.

    The names are the keys and indexes from the outermost container to the tensor, joined by dots, in the order of the
    file. Where two tensors would have one name, the later ones get `#2`, `#3` and so on.

    A tensor lies over a private copy-on-write mapping of the file: its bytes are read when they are used, a page at a
    time, and are not verified (`verify()` does that for all). What is written to it stays in this process. It stays
    valid after the view is closed and after the file is replaced.

    Attributes:
        path: the file.
        metadata: name and value of everything in the file that is no tensor and no container.
        refused: name and type of what is not allowed, and is therefore left out.
    """

    def __init__(self, image: ImageLike, *, allow: Iterable[object] = ()) -> None:
        self.path = image.path
        self._image: ImageLike | None = image
        self._tensors: dict[str, torch.Tensor] = {}
        self.metadata: dict[str, Any] = {}
        self.refused: dict[str, str] = {}
        root = unpickling.load_leniently(image, mmap=True, allow=allow)
        for name, part in paths.walk(root):
            if isinstance(part, torch.Tensor):
                self._tensors[_free(name, self._tensors)] = part
            elif type(part) is Refused:
                self.refused[_free(name, self.refused)] = part.name
            elif isinstance(part, (str, bytes, int, float, complex, type(None))):
                self.metadata[_free(name, self.metadata)] = part

    def __getitem__(self, name: str) -> torch.Tensor:
        tensors = self._open()
        found = tensors.get(name)
        if found is None:
            close = get_close_matches(name, tensors, n=3)
            hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else f"; it has {len(tensors)} tensors"
            raise KeyError(f"{self.path} has no tensor {name!r}{hint}")
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._open())

    def __len__(self) -> int:
        return len(self._open())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name to shape; reads no data."""
        return {name: tuple(tensor.shape) for name, tensor in self._open().items()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Name to dtype; reads no data."""
        return {name: tensor.dtype for name, tensor in self._open().items()}

    def verify(self) -> None:
        """Reads the whole file and compares it with its checksums.

        Raises:
            CorruptCheckpoint: names what differs.
        """
        self._open()
        assert self._image is not None  # an open view has one
        problems = self._image.verify()
        if problems:
            raise CorruptCheckpoint(f"{self.path}: {'; '.join(problems)}", path=self.path)

    def close(self) -> None:
        """Lets the file go, once no tensor of it is left. Idempotent."""
        self._image = None
        self._tensors = {}

    def _open(self) -> dict[str, torch.Tensor]:
        if self._image is None:
            raise InvalidArgument(f"the view of {self.path} is closed; open the file again", path=self.path)
        return self._tensors

    def __enter__(self) -> View:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise NotPicklable(
            f"the view of {self.path} belongs to its process and cannot be pickled; pass the path instead, and open it "
            "with relight.open there"
        )

    def __repr__(self) -> str:
        state = "closed" if self._image is None else f"{len(self._tensors)} tensors"
        return f"<relight.View of {self.path}: {state}>"


def _free(name: str, taken: Mapping[str, object]) -> str:
    if name not in taken:
        return name
    number = 2
    while f"{name}#{number}" in taken:
        number += 1
    return f"{name}#{number}"
