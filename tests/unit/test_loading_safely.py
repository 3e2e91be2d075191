"""Loading without running code: what comes back unasked, what is refused and how it is named."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import enum
import io
import pathlib
import pickle
import random
import struct
import uuid
import zoneinfo
from collections import Counter, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import relight
import torch
from relight.torch import archive, private, safe_types
from relight.torch.safe_unpickler import SafeUnpickler


def saved(obj: Any) -> io.BytesIO:
    file = io.BytesIO()
    relight.save(obj, file)
    file.seek(0)
    return file


def there_and_back(obj: Any, **options: Any) -> Any:
    return relight.load(saved(obj), **options)


class Mode(enum.Enum):
    FAST = "fast"


@dataclasses.dataclass
class Config:
    width: int


Point = namedtuple("Point", "x y")


def test_bl_036_a_namespace_of_settings_comes_back() -> None:
    args = argparse.Namespace(lr=0.1, out=pathlib.Path("/x/y"), mode=Mode.FAST)
    loaded = there_and_back({"args": args, "w": torch.ones(2)}, allow=[Mode])["args"]
    assert loaded == args and type(loaded.out) is type(args.out)


def test_bl_036_what_is_not_allowed_is_named_with_its_place_and_the_way_out() -> None:
    state = {"args": argparse.Namespace(mode=Mode.FAST), "cfg": [Config(3)], "w": torch.ones(2)}
    with pytest.raises(relight.ObjectNotAllowed) as caught:
        there_and_back(state)
    text = str(caught.value)
    mode, config = (f"{cls.__module__}.{cls.__qualname__}" for cls in (Mode, Config))
    assert f"args.mode ({mode})" in text and f"cfg.0 ({config})" in text
    assert f"allow=['{mode}', '{config}']" in text and "weights_only=False" in text
    assert caught.value.name == mode
    assert there_and_back(state, allow=[Mode, Config])["cfg"] == [Config(3)]
    assert there_and_back(state, weights_only=False)["cfg"] == [Config(3)]


def test_bl_036_allow_takes_full_names() -> None:
    state = {"u": uuid.UUID(int=5), "order": struct.Struct}
    with pytest.raises(relight.ObjectNotAllowed, match=r"order \(_struct\.Struct\)"):
        there_and_back(state)
    assert there_and_back(state, allow=["_struct.Struct"]) == state


@pytest.mark.parametrize("allow", [["no.such.Class"], ["nothing"], "collections.deque", [3]])
def test_a_name_in_allow_that_nothing_has_is_refused(allow: Any) -> None:
    with pytest.raises(relight.InvalidArgument, match="allow"):
        there_and_back({"x": 1}, allow=allow)


def test_bl_036_no_code_runs_unasked(tmp_path: pathlib.Path) -> None:
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return pathlib.Path.touch, (marker,)

    with pytest.raises(relight.ObjectNotAllowed, match="allow="):
        there_and_back({"x": Evil()})
    assert not marker.exists()


def test_the_operating_system_cannot_be_allowed() -> None:
    class Evil:
        def __reduce__(self) -> Any:
            import os

            return os.getcwd, ()

    with pytest.raises(relight.ObjectNotAllowed, match=r"posix\.getcwd"):
        there_and_back(Evil(), allow=["os.getcwd", ("x", "posix.getcwd")])


def test_bl_038_random_states_go_on_with_the_same_draws() -> None:
    generator = torch.Generator().manual_seed(3)
    new_style, old_style = np.random.default_rng(4), np.random.RandomState(5)
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "generator": generator,
        "generator state": generator.get_state(),
        "new": new_style,
        "old": old_style,
        "bits": new_style.bit_generator.state,
    }
    loaded = there_and_back(state)
    expected = (random.random(), np.random.rand(), torch.rand(1), torch.rand(1, generator=generator))
    expected_new, expected_old = new_style.random(), old_style.rand()
    random.setstate(loaded["python"])
    np.random.set_state(loaded["numpy"])
    torch.set_rng_state(loaded["torch"])
    again = (random.random(), np.random.rand(), torch.rand(1), torch.rand(1, generator=loaded["generator"]))
    assert again == expected
    assert (loaded["new"].random(), loaded["old"].rand()) == (expected_new, expected_old)
    fresh = np.random.default_rng()
    fresh.bit_generator.state = loaded["bits"]
    assert fresh.random() == expected_new


@pytest.mark.parametrize("cls", [np.random.MT19937, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64])
def test_bl_038_every_kind_of_numpy_generator(cls: Any) -> None:
    generator = np.random.Generator(cls(1))
    loaded = there_and_back(generator)
    assert loaded.random() == generator.random()
    copied = pickle.loads(pickle.dumps(generator))  # numpy 1.26 does not pickle the seed sequence, numpy 2 does
    if copied.bit_generator.seed_seq.entropy == generator.bit_generator.seed_seq.entropy:
        assert loaded.spawn(1)[0].random() == generator.spawn(1)[0].random()


VALUES = [
    {1, 2},
    frozenset([3]),
    bytearray(b"ab"),
    b"",
    1 + 2j,
    range(1, 9, 2),
    slice(1, None, 2),
    Ellipsis,
    NotImplemented,
    Fraction(1, 3),
    Decimal("1.10"),
    datetime.datetime(2026, 1, 2, 3, 4, tzinfo=zoneinfo.ZoneInfo("Europe/Paris")),
    datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=2), "here")),
    datetime.date(2026, 1, 2),
    datetime.time(1, 2),
    datetime.timedelta(days=3),
    uuid.uuid5(uuid.NAMESPACE_DNS, "x"),
    torch.Size([1, 2]),
    torch.bfloat16,
    torch.device("cuda:3"),
    deque([1, 2], maxlen=4),
    Counter("aab"),
    pathlib.PurePosixPath("/a"),
    pathlib.PureWindowsPath("c:/a"),
    np.float32,
    int,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_bl_040_common_values_come_back_as_they_were(value: Any) -> None:
    loaded = there_and_back({"x": value})["x"]
    assert type(loaded) is type(value) and loaded == value
    if isinstance(value, deque):
        assert loaded.maxlen == value.maxlen


def test_bl_040_a_namedtuple_is_on_the_other_list() -> None:
    with pytest.raises(relight.ObjectNotAllowed, match=r"p \(.*\.Point\)"):
        there_and_back({"p": Point(1, 2)})
    assert there_and_back({"p": Point(1, 2)}, allow=[Point])["p"] == Point(1, 2)


def test_what_torch_was_told_to_allow_is_allowed() -> None:
    before = list(torch.serialization.get_safe_globals())
    torch.serialization.add_safe_globals([Config])
    try:
        assert there_and_back(Config(1)) == Config(1)
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def test_what_is_told_to_torch_for_one_load_is_forgotten_and_nothing_else() -> None:
    """Guards: torch 2.4 gives out its own list, which then grew: `allow` of one load held for all after it."""
    torch.serialization.add_safe_globals([Point])
    before = list(torch.serialization.get_safe_globals())
    try:
        with private.safe_globals([Config]):
            assert Config in torch.serialization.get_safe_globals()
        assert sorted(map(id, torch.serialization.get_safe_globals())) == sorted(map(id, before))
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals([one for one in before if one is not Point])


# ---- files made by an attacker ----


def load_pickle(data: bytes) -> Any:
    unpickler = SafeUnpickler(data, table=safe_types.allowed_globals(), persistent_load=lambda _: None)
    return unpickler.load()


class Call:
    """Pickles as any call with any state: what an attacker would write by hand."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.reduced


ATTACKS = {
    "array of objects out of bytes": Call(np.ndarray, (1,), "O", bytearray(8)),
    "array without its own bytes": Call(np.ndarray, (1 << 20,), "f4"),
    "array over the bytes of another object": Call(np.ndarray, (1,), "f4", b"1234"),
    "array that is something else": Call(np.zeros(0).__reduce__()[0], dict, (0,), b"b"),
    "records that hold objects": Call(np.ndarray, (1,), [("a", "O")], bytearray(8)),
    "object dtype": Call(np.dtype, "O"),
    "flags of a dtype": Call(np.dtype, "V8", state=(3, "|", None, None, None, 8, 1, 27)),
    "array state with objects": Call(
        np.zeros(0).__reduce__()[0], np.ndarray, (0,), b"b", state=(1, (1,), np.dtype("O"), False, [1])
    ),
    "state given to a class": Call(type, "x", (), {}),
    "attribute of a class": Call(getattr, torch.Tensor, "__init__"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_what_could_reach_memory_or_code_is_refused(name: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"allowed|not on the list"):
        load_pickle(pickle.dumps(ATTACKS[name], 2))


def test_an_allowed_class_and_function_cannot_be_changed() -> None:
    """BUILD on a class or function would set its attributes."""
    for target in (b"ctorch\nTensor\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n"):
        with pytest.raises(pickle.UnpicklingError, match="state is given to"):
            load_pickle(b"\x80\x02" + target + b"N}X\x01\x00\x00\x00xK\x01s\x86b.")


def test_a_member_of_an_enum_cannot_be_changed() -> None:
    """It is one object for the whole process: a file could change `uuid.SafeUUID.safe` for everybody."""
    attack = Call(uuid.SafeUUID, uuid.SafeUUID.safe.value, state={"_value_": 7})
    with pytest.raises(pickle.UnpicklingError, match="state is given to"):
        load_pickle(pickle.dumps(attack, 2))
    assert uuid.SafeUUID.safe.value == 0


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x02", b"\x80\x02K", b"\x80\x02X\xff\xff\xff\x7fa.", b"i.", b"\x80\x02h\x07."]
)
def test_a_damaged_pickle_is_an_error_of_its_own(data: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError):
        load_pickle(data)


# ---- kinds of file ----


def test_the_old_format_is_loaded_by_the_same_rules() -> None:
    file = io.BytesIO()
    torch.save({"w": torch.arange(3.0)}, file, _use_new_zipfile_serialization=False)
    file.seek(0)
    assert relight.load(file)["w"].tolist() == [0, 1, 2]
    file = io.BytesIO()
    torch.save({"c": Config(1)}, file, _use_new_zipfile_serialization=False)
    file.seek(0)
    with pytest.raises(relight.ObjectNotAllowed, match=r"before torch 1\.6"):
        relight.load(file)
    file.seek(0)
    assert relight.load(file, weights_only=False)["c"] == Config(1)


def test_a_file_object_that_cannot_be_seeked_is_refused() -> None:
    class Pipe:
        def read(self, count: int = -1) -> bytes:
            return b""

    with pytest.raises(relight.InvalidArgument, match=r"io\.BytesIO"):
        relight.load(Pipe())  # type: ignore[arg-type]
    with pytest.raises(relight.InvalidArgument, match="write"):
        relight.save({}, Pipe())  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [b"", b"hello world, this is no checkpoint", b"PK\x03\x04 and then nothing"])
def test_what_is_no_checkpoint_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(relight.CorruptCheckpoint):
        relight.load(io.BytesIO(data))


def test_a_flipped_byte_is_found() -> None:
    data = bytearray(saved({"w": torch.zeros(1000)}).getvalue())
    data[data.index(bytes(500)) + 100] ^= 1
    with pytest.raises(relight.CorruptCheckpoint, match="data/0"):
        relight.load(io.BytesIO(bytes(data)))


def test_every_cut_of_a_file_is_an_error() -> None:
    data = saved({"w": torch.arange(20.0)}).getvalue()
    for end in range(0, len(data), 37):
        with pytest.raises(relight.CorruptCheckpoint):
            relight.load(io.BytesIO(data[:end]))


def test_bl_027_writes_and_reads_of_a_few_bytes_are_continued() -> None:
    class Slow(io.RawIOBase):
        def __init__(self) -> None:
            self.data = bytearray()

        def write(self, chunk: Any) -> int:
            self.data += bytes(chunk)[:1000]
            return min(len(chunk), 1000)

    class SlowReader(io.BytesIO):
        def read(self, count: int | None = -1) -> bytes:  # type: ignore[override]
            return super().read(count if count is None or count < 0 else min(count, 1 << 16))

    state = {"w": torch.randn(300_000)}
    slow = Slow()
    relight.save(state, slow)  # type: ignore[arg-type]
    assert torch.equal(relight.load(io.BytesIO(bytes(slow.data)))["w"], state["w"])
    assert bytes(slow.data) == saved(state).getvalue()
    assert torch.equal(relight.load(SlowReader(bytes(slow.data)))["w"], state["w"])


def test_what_is_written_to_a_file_object_is_a_plain_archive() -> None:
    import zipfile

    file = saved({"w": torch.randn(100_000), "v": torch.ones(3)})
    opened = zipfile.ZipFile(file)
    assert opened.testzip() is None
    assert opened.namelist()[:4] == [
        f"archive/{n}" for n in ("data.pkl", ".format_version", ".storage_alignment", "byteorder")
    ]
    image = archive.FileImage(file, "x")
    assert image.verify() == [] and image.stem == "archive"
