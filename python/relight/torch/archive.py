"""Archives through file objects: the same image that the engine writes, and a reader, where there is no path.

Owns: writing entries to anything with `write`, and reading an archive from anything seekable.
Must not: be used for paths (the engine does those, in parallel and durably).
Invariant: the bytes written are those of the engine for the same entries; every byte read is checked against its
CRC-32.

Source: zip64 as in APPNOTE.TXT 6.3.10; the layout is that of docs/design/format.md.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Protocol

from relight.exceptions import CorruptCheckpoint, InvalidArgument, StorageFull

if TYPE_CHECKING:
    from relight.torch.pickling import Entry
    from typing_extensions import Buffer

__all__ = ["EntryLike", "FileImage", "ImageLike", "write_archive"]

PIECE_BYTES = 4 << 20
PAGE_ALIGN_MIN = 64 << 10  # entries from here on are aligned to pages, smaller ones to 64


class EntryLike(Protocol):
    """An entry of an image: `relight._core.ImageEntry` and the one of this module."""

    @property
    def name(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def stored(self) -> bool: ...


class ImageLike(Protocol):
    """An archive that can be read: `relight._core.Image`, or `FileImage`."""

    @property
    def tier(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def length(self) -> int: ...
    @property
    def entries(self) -> Sequence[EntryLike]: ...
    def read(self, index: int, /) -> bytes: ...
    def read_into(self, targets: Sequence[tuple[int, int, Buffer]], /) -> None: ...
    def verify(self) -> list[str]: ...


# ---- reading ----


@dataclass(frozen=True, slots=True)
class _FileEntry:
    name: str
    offset: int  # not known without reading the local header, and not needed without mmap
    length: int
    stored: bool
    info: zipfile.ZipInfo


class FileImage:
    """An archive in a seekable file object.

    Raises:
        CorruptCheckpoint: it is no archive of torch.save.
    """

    tier = "object"

    def __init__(self, file: IO[bytes], name: str, start: int = 0) -> None:
        self.path = name
        try:
            self._zip = zipfile.ZipFile(file)
            infos = self._zip.infolist()
            if infos and min(info.header_offset for info in infos) != start:
                raise zipfile.BadZipFile(f"no archive begins at byte {start}; seek to where it begins")
        except (zipfile.BadZipFile, OSError, ValueError, struct.error) as error:
            raise CorruptCheckpoint(f"{name}: not a whole torch.save archive ({error})", path=name) from error
        if not any(info.CRC for info in infos):
            for info in infos:  # torch.serialization.set_crc32_options(False): there is nothing to compare with
                info.CRC = None  # type: ignore[assignment]
        stems = {info.filename.partition("/")[0] for info in infos}
        if len(stems) > 1:
            raise InvalidArgument(
                f"{name} is a zip archive that torch.save did not write: its entries have no common folder; give a "
                "file that torch.save or relight wrote",
                path=name,
            )
        if not stems:
            raise CorruptCheckpoint(f"{name} is an archive without entries; use another checkpoint", path=name)
        self.stem = stems.pop()
        cut = len(self.stem) + 1
        stored = zipfile.ZIP_STORED
        self.entries = [_FileEntry(i.filename[cut:], 0, i.file_size, i.compress_type == stored, i) for i in infos]
        self.length = sum(entry.length for entry in self.entries)

    def read(self, index: int, /) -> bytes:
        """One entry, checked against its CRC-32."""
        target = bytearray(self.entries[index].length)
        self.read_into([(index, 0, target)])
        return bytes(target)

    def read_into(self, targets: Sequence[tuple[int, int, Buffer]], /) -> None:
        """Fills writable buffers with (entry index, offset in the entry, buffer). Whole entries are checked."""
        for index, offset, target in targets:
            entry = self.entries[index]
            view = memoryview(target).cast("B")
            try:
                with self._zip.open(entry.info) as opened:
                    source: Any = opened
                    source.seek(offset)
                    done = 0
                    while done < len(view):
                        count = source.readinto(view[done : done + PIECE_BYTES])
                        if not count:
                            raise CorruptCheckpoint(f"{self.path}: {entry.name} is cut short", path=self.path)
                        done += count
                    source.read(1)  # at the end of an entry zipfile compares the CRC-32
            except (zipfile.BadZipFile, EOFError, ValueError, RuntimeError, struct.error, zlib.error) as error:
                raise CorruptCheckpoint(f"{self.path}: {entry.name}: {error}", path=self.path) from error

    def verify(self) -> list[str]:
        """Reads everything; one sentence per problem."""
        problems = []
        for index in range(len(self.entries)):
            try:
                self.read(index)
            except CorruptCheckpoint as error:
                problems.append(str(error))
        return problems


# ---- writing ----

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR = struct.Struct("<IIQI")
_DESCRIPTOR = struct.Struct("<IIQQ")
_MAX32 = 0xFFFFFFFF
_ZIP64_VERSION = 45
_FLAGS = 1 << 3 | 1 << 11  # a data descriptor follows; the name is UTF-8
_ZIP64_FIELD = 1
_PADDING_FIELD = 0x4246  # "FB", the field with which torch pads
_DOS_DATE = 0x21  # 1980-01-01: no clock in the file, so that the same object gives the same bytes


def write_archive(write: Callable[[bytes], Any], entries: Iterable[Entry], stem: str) -> int:
    """Writes the image of `entries` in pieces of at most 4 MiB.

    Args:
        write: takes bytes, and may take less than all if it returns how many (as a raw file does).

    Returns:
        Length of the image.
    """
    out = _Out(write)
    directory: list[bytes] = []
    count = 0
    for name, data in entries:
        full = f"{stem}/{name}".encode()
        pieces: Sequence[bytes | memoryview] = [data] if isinstance(data, bytes) else data
        length = sum(map(len, pieces))
        header = out.position
        out.put(_local_header(full, header, length))
        crc = 0
        for piece in pieces:
            crc = out.put_checked(piece, crc)
        out.put(_DESCRIPTOR.pack(0x08074B50, crc, length, length))
        directory.append(_central_record(full, header, length, crc))
        count += 1
    start = out.position
    for record in directory:
        out.put(record)
    size, end = out.position - start, out.position
    out.put(_END64.pack(0x06064B50, 44, _ZIP64_VERSION, _ZIP64_VERSION, 0, 0, count, count, size, start))
    out.put(_LOCATOR.pack(0x07064B50, 0, end, 1))
    short = min(count, 0xFFFF)
    out.put(_END.pack(0x06054B50, 0, 0, short, short, min(size, _MAX32), min(start, _MAX32), 0))
    out.flush()
    return out.position


def _local_header(name: bytes, position: int, length: int) -> bytes:
    align = 4096 if length >= PAGE_ALIGN_MIN else 64
    zip64 = struct.pack("<HHQQ", _ZIP64_FIELD, 16, length, length)
    padding = -(position + _LOCAL.size + len(name) + len(zip64) + 4) % align
    extra = zip64 + struct.pack("<HH", _PADDING_FIELD, padding) + b"Z" * padding
    fields = (0x04034B50, _ZIP64_VERSION, _FLAGS, 0, 0, _DOS_DATE, 0, _MAX32, _MAX32, len(name), len(extra))
    return _LOCAL.pack(*fields) + name + extra


def _central_record(name: bytes, header: int, length: int, crc: int) -> bytes:
    wide = [value for value in (length, length, header) if value >= _MAX32]
    extra = struct.pack(f"<HH{len(wide)}Q", _ZIP64_FIELD, 8 * len(wide), *wide) if wide else b""
    short = min(length, _MAX32)
    fields = (
        *(0x02014B50, _ZIP64_VERSION, _ZIP64_VERSION, _FLAGS, 0, 0, _DOS_DATE, crc, short, short),
        *(len(name), len(extra), 0, 0, 0, 0, min(header, _MAX32)),
    )
    return _CENTRAL.pack(*fields) + name + extra


class _Out:
    """Gathers small writes, and sees to it that all is taken."""

    def __init__(self, write: Callable[[bytes], Any]) -> None:
        self._write = write
        self._waiting = bytearray()
        self.position = 0

    def put(self, data: bytes | memoryview) -> None:
        self.position += len(data)
        self._waiting += data
        if len(self._waiting) >= PIECE_BYTES:
            self.flush()

    def put_checked(self, data: bytes | memoryview, crc: int) -> int:
        for start in range(0, len(data), PIECE_BYTES):
            # A copy: the receiver may keep what it is given, and the checksum must be that of what was written.
            piece = bytes(data[start : start + PIECE_BYTES])
            crc = zlib.crc32(piece, crc)
            if len(piece) < PIECE_BYTES // 4:
                self.put(piece)
            else:
                self.flush()
                self.position += len(piece)
                self._all(piece)
        return crc

    def flush(self) -> None:
        waiting, self._waiting = bytes(self._waiting), bytearray()
        if waiting:
            self._all(waiting)

    def _all(self, data: bytes) -> None:
        while data:
            taken = self._write(data)
            if isinstance(taken, int) and taken <= 0:
                raise StorageFull(f"the file object takes no more bytes after {self.position - len(data)}")
            data = data[taken:] if isinstance(taken, int) else b""
