"""Golden files: read by torch, zipfile and unzip, and by a reader written from docs/design/format.md alone."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

PROJECT = Path(__file__).resolve().parents[2]
GOLDEN = PROJECT / "tests" / "golden" / "v1" / "global_step5"
SCHEMA = json.loads((PROJECT / "docs" / "design" / "manifest.schema.json").read_text())
ARCHIVES = ["model.pt", "odd name%2Fof a file"]


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("name", ARCHIVES)
def test_torch_loads_the_golden_files(name: str, mmap: bool) -> None:
    state = torch.load(GOLDEN / name, mmap=mmap, weights_only=True)
    assert list(state) == ["weight", "half", "empty", "step", "name"]
    assert torch.equal(state["weight"], torch.arange(4.0))
    assert torch.equal(state["half"], torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    assert state["empty"].shape == (0,)
    assert (state["step"], state["name"]) == (5, "golden")


@pytest.mark.parametrize("name", ARCHIVES)
def test_zip_tools_find_the_golden_files_whole(name: str) -> None:
    with zipfile.ZipFile(GOLDEN / name) as archive:
        assert archive.testzip() is None
    unzip = shutil.which("unzip")
    if unzip is None:
        pytest.skip("unzip is not installed")
    done = subprocess.run([unzip, "-t", str(GOLDEN / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stdout + done.stderr


def _read_manifest(path: Path) -> dict[str, Any]:
    """Section 3 of the format: checksum first, then JSON."""
    text = path.read_bytes()
    covered, tail = text[:-26], text[-26:]
    end = re.fullmatch(rb',\n  "crc32": "([0-9a-f]{8})"\n}\n', tail)
    assert end is not None
    assert int(end[1], 16) == zlib.crc32(covered)
    manifest: dict[str, Any] = json.loads(text)
    return manifest


def test_a_reader_written_from_the_page_finds_every_byte_covered() -> None:
    manifest = _read_manifest(GOLDEN / ".relight" / "manifest.json")
    for record in manifest["files"]:
        data = (GOLDEN / record["path"]).read_bytes()
        assert (len(data), f"{zlib.crc32(data):08x}") == (record["bytes"], record["crc32"])
        step = record["chunk_bytes"]
        chunks = "".join(f"{zlib.crc32(data[at : at + step]):08x}" for at in range(0, len(data), step))
        assert chunks == record["chunks"]


@pytest.mark.parametrize("name", ARCHIVES)
def test_every_byte_of_an_archive_is_where_the_page_says(name: str) -> None:
    image = (GOLDEN / name).read_bytes()
    with zipfile.ZipFile(GOLDEN / name) as archive:
        entries = [(info.filename.encode(), archive.read(info)) for info in archive.infolist()]
    made = bytearray()
    central = b""
    for path, data in entries:
        header, crc, size = len(made), zlib.crc32(data), len(data)
        alignment = 4096 if size >= 65536 else 64
        padding = -(header + 54 + len(path)) % alignment
        made += struct.pack(
            "<4s5H3I2H", b"PK\3\4", 45, 0x808, 0, 0, 0x21, 0, 0xFFFFFFFF, 0xFFFFFFFF, len(path), 24 + padding
        )
        made += path + struct.pack("<2H2Q", 1, 16, size, size) + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        made += data + struct.pack("<4sI2Q", b"PK\7\x08", crc, size, size)
        central += struct.pack(
            "<4s6H3I2H10xI", b"PK\1\2", 45, 45, 0x808, 0, 0, 0x21, crc, size, size, len(path), 0, header
        )
        central += path
    at, count = len(made), len(entries)
    made += central
    made += struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(central), at)
    made += struct.pack("<4sIQI", b"PK\6\7", 0, at + len(central), 1)
    made += struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(central), at, 0)
    assert bytes(made) == image


def _violations(value: Any, schema: dict[str, Any], where: str = "$") -> Iterator[str]:
    """The part of JSON Schema that the published schema uses."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    types = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "null": type(None)}
    wanted = schema.get("type", [])
    wanted = [wanted] if isinstance(wanted, str) else wanted
    if wanted and not any(type(value) is types[name] for name in wanted):
        yield f"{where} is no {wanted}"
        return
    if "const" in schema and value != schema["const"]:
        yield f"{where} is {value!r}"
    if isinstance(value, str):
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
            yield f"{where} has {len(value)} characters"
        if re.search(schema.get("pattern", ""), value) is None:
            yield f"{where} is {value!r}"
    if type(value) is int and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        yield f"{where} is {value}"
    if isinstance(value, dict):
        yield from (f"{where} lacks {name}" for name in schema.get("required", []) if name not in value)
        for name, inner in schema.get("properties", {}).items():
            if name in value:
                yield from _violations(value[name], inner, f"{where}.{name}")
    if isinstance(value, list) and "items" in schema:
        for index, inner in enumerate(value):
            yield from _violations(inner, schema["items"], f"{where}[{index}]")


@pytest.mark.parametrize(("name", "kind"), [("manifest.json", "manifest"), ("part-0.json", "part")])
def test_manifest_and_part_are_as_the_published_schema_says(name: str, kind: str) -> None:
    value = _read_manifest(GOLDEN / ".relight" / name)
    schema = SCHEMA["$defs"][kind]
    assert list(_violations(value, schema)) == []
    # The schema has every field that is written, in the order of writing, and asks for no other.
    assert list(schema["properties"]) == list(value) == schema["required"]
    record = SCHEMA["$defs"]["file"]
    assert list(record["properties"]) == list(value["files"][0]) == record["required"]


def test_the_schema_refuses_what_is_not_a_manifest() -> None:
    good = _read_manifest(GOLDEN / ".relight" / "manifest.json")
    for change in (
        {"sequence": 0},
        {"step": "5"},
        {"best": 1},
        {"crc32": "XYZ"},
        {"tag": ""},
        {"committed_at": "yesterday"},
        {"files": [{**good["files"][0], "path": "../model.pt"}]},
        {"files": [{**good["files"][0], "chunks": "abc"}]},
    ):
        assert list(_violations({**good, **change}, SCHEMA["$defs"]["manifest"])) != [], change


def test_the_page_names_every_field() -> None:
    page = (PROJECT / "docs" / "design" / "format.md").read_text()
    for kind in ("manifest", "part", "file", "writer"):
        for field in SCHEMA["$defs"][kind]["properties"]:
            assert f"`{field}`" in page, f"format.md does not explain {field} of a {kind}"
