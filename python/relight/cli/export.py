"""Copies the files of a checkpoint into a folder as plain torch.save files, verified on the way.

Each file is checked against the manifest while it is copied, written under a temporary name, made durable and renamed.
"""

import argparse
import os
import zlib
from pathlib import Path

from relight.cli.output import Output, Progress, size
from relight.cli.source import Json, find, opened
from relight.exceptions import CheckpointNotFound, CorruptCheckpoint, InvalidArgument

HELP = "copy a checkpoint's files out, verified on the way"
_PIECE = 8 << 20


def arguments(parser: argparse.ArgumentParser) -> None:
    """ROOT TAG DEST [--file]... [--force]."""
    parser.add_argument("root", metavar="ROOT", help="the directory that holds the tags")
    parser.add_argument("tag", metavar="TAG", help="the checkpoint")
    parser.add_argument("dest", metavar="DEST", help="the folder to copy into; it is made if it is not there")
    parser.add_argument("--file", metavar="NAME", action="append", help="only this file (may be repeated)")
    parser.add_argument("--force", action="store_true", help="replace files that are there already")


def run(args: argparse.Namespace, out: Output) -> int:
    """Copies; 0."""
    dest = Path(args.dest)
    with opened(args.root) as root:
        one = find(root, args.tag)
        chosen = _chosen(one, args.file)
        for record in chosen:
            target = dest / record["path"]
            if target.exists() and not args.force:
                raise InvalidArgument(f"{target} is there already; --force replaces it", path=target)
        dest.mkdir(parents=True, exist_ok=True)
        with out.progress(sum(record["bytes"] for record in chosen), "copying") as progress:
            for record in chosen:
                progress.now(record["name"])
                if one["foreign"]:
                    source = os.path.join(one["path"], record["path"])
                else:  # pinned to the disk: the image in memory has no file to copy
                    source = root.open_image(args.tag, record["name"], tier="persistent").path
                _copy(Path(source), dest / record["path"], record, one, progress)
    _sync_folder(dest)
    if out.as_json:
        out.document({"tag": args.tag, "dest": str(dest), "files": chosen})
    for record in chosen:
        out.line(f"{dest / record['path']}: {size(record['bytes'])}")
    return 0


def _chosen(one: Json, names: list[str] | None) -> list[Json]:
    files: list[Json] = one["files"]
    known = {record["name"] for record in files}
    for name in names or ():
        if name not in known:
            message = f"{one['tag']} has no file {name}; it has {', '.join(sorted(known))}"
            raise CheckpointNotFound(message, tag=one["tag"])
    return [record for record in files if names is None or record["name"] in names]


def _copy(source: Path, target: Path, record: Json, one: Json, progress: Progress) -> None:
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    crc = copied = 0
    try:
        with open(source, "rb") as reader, open(partial, "xb") as writer:
            while piece := reader.read(_PIECE):
                crc = zlib.crc32(piece, crc)
                copied += len(piece)
                writer.write(piece)
                progress.done(len(piece))
            writer.flush()
            os.fsync(writer.fileno())
        if not one["foreign"] and (copied, crc) != (record["bytes"], record["crc32"]):
            raise CorruptCheckpoint(
                f"{source} of {one['tag']} is not what was written: {copied} bytes with CRC-32 {crc:08x}, and the "
                f"manifest says {record['bytes']} with {record['crc32']:08x}; nothing was exported under its name",
                path=source,
                tag=one["tag"],
            )
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
