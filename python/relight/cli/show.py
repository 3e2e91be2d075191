"""Shows what is in a checkpoint, or in one file of it: names, types, shapes and sizes. Needs no torch and runs no code.

relight show ROOT TAG          the files of a checkpoint, who wrote them and when
relight show ROOT TAG --file F the contents of one of them
relight show FILE              the contents of any file that torch.save or relight wrote
"""

import argparse
import os

from relight import _core
from relight.cli import contents
from relight.cli.ls import notes
from relight.cli.output import Output, size
from relight.cli.source import find, opened
from relight.exceptions import InvalidArgument

HELP = "show what is in a checkpoint or a file"


def arguments(parser: argparse.ArgumentParser) -> None:
    """ROOT TAG [--file], or FILE."""
    parser.add_argument("path", metavar="ROOT|FILE", help="the directory that holds the tags, or one file")
    parser.add_argument("tag", metavar="TAG", nargs="?", help="the checkpoint")
    parser.add_argument("--file", metavar="NAME", help="show the contents of this file of the checkpoint")


def run(args: argparse.Namespace, out: Output) -> int:
    """Prints it; 0."""
    if args.tag is None:
        if os.path.isdir(args.path):
            raise InvalidArgument(f"{args.path} is a directory: name a tag too (`relight ls {args.path}` lists them)")
        return _show_image(_core.open_image(args.path), args.path, out)
    with opened(args.path) as root:
        one = find(root, args.tag)
        if args.file is not None:
            return _show_image(root.open_image(args.tag, args.file), f"{args.tag}/{args.file}", out)
        latest = root.latest()
    if out.as_json:
        out.document(one)
        return 0
    out.line(f"{one['tag']}  {notes(one, latest)}".rstrip())
    facts = [
        ("step", one["step"]),
        ("where", one["path"]),
        ("tiers", "foreign" if one["foreign"] else ", ".join(one["tiers"])),
        ("staged", one["staged_at"]),
        ("committed", one["committed_at"]),
        ("run, sequence", None if one["foreign"] else f"{one['run']}, {one['sequence']}"),
        ("generation", one["generation"] or None),
        ("ranks", None if one["foreign"] else one["world_size"]),
        ("size", size(one["bytes"])),
        ("meta", one["meta"] or None),
    ]
    for name, value in facts:
        if value is not None:
            out.line(f"  {name:14} {value}")
    rows = [[f["name"], size(f["bytes"]), f["rank"], crc_text(f["crc32"]), f["codec"]] for f in one["files"]]
    out.table(["file", "bytes", "rank", "crc32", "codec"], rows)
    return 0


def crc_text(crc: int | None) -> str | None:
    """As `unzip -v` and the log write it; a foreign file has none."""
    return None if crc is None else f"{crc:08x}"


def _show_image(image: _core.Image, called: str, out: Output) -> int:
    leaves = contents.leaves(image)
    if out.as_json:
        entries = [{"name": e.name, "offset": e.offset, "bytes": e.length, "crc32": e.crc32} for e in image.entries]
        document = {"file": called, "tier": image.tier, "bytes": image.length, "entries": entries}
        out.document({**document, "contents": [leaf.as_json() for leaf in leaves]})
        return 0
    tensors = [leaf for leaf in leaves if leaf.shape is not None]
    counts = f"{len(image.entries)} entries, {len(tensors)} tensor{'s' * (len(tensors) != 1)}"
    out.line(f"{called}: {size(image.length)}, {counts}, read from {image.tier}")
    out.table(["name", "type", "shape", "bytes", "value"], [leaf.as_row() for leaf in leaves])
    return 0
