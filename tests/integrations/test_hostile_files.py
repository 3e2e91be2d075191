"""Files made by an attacker, or by nobody: an error that names the file, and never a read outside of its bytes."""

from __future__ import annotations

import io
import pickle
import struct
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import relight
import torch

# ---- pickles by hand, in the letters of the pickle protocol ----


def name(module: str, member: str) -> bytes:
    return f"c{module}\n{member}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    coded = pickle.encode_long(value)
    return b"\x8a" + bytes([len(coded)]) + coded


def items(*values: int) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


def storage(count: int = 4, key: str = "0", kind: bytes = b"ctorch\nFloatStorage\n", location: bytes = b"") -> bytes:
    return b"(" + text("storage") + kind + text(key) + (location or text("cpu")) + number(count) + b"tQ"


def tensor(offset: int = 0, size: bytes = b"", stride: bytes = b"", over: bytes = b"") -> bytes:
    hooks = call(name("collections", "OrderedDict"))
    parts = (over or storage(), number(offset), size or items(4), stride or items(1), b"\x89", hooks)
    return call(name("torch._utils", "_rebuild_tensor_v2"), *parts)


def array(offset: int, strides: bytes = b"N") -> bytes:
    data = b"\x96" + struct.pack("<Q", 32) + bytes(32)
    return call(name("numpy", "ndarray"), items(4), text("<f8"), data, number(offset), strides, text("C"))


def archive(path: Path, body: bytes) -> Path:
    """A torch.save archive with four floats in data/0 and the pickle `body`."""
    torch.save({"a": torch.arange(4.0)}, path)
    with zipfile.ZipFile(path) as made:
        members = {one: made.read(one) for one in made.namelist()}
    with zipfile.ZipFile(path, "w") as made:
        for one, data in members.items():
            made.writestr(one, b"\x80\x02" + body + b"." if one.endswith("data.pkl") else data)
    return path


FLOATS = name("torch", "FloatStorage")
TENSOR = name("torch", "Tensor") + b")\x81"
GENERATOR = name("torch._C", "Generator")
COUNTER = name("collections", "Counter") + b")\x81"
BROKEN = {
    "a tensor that begins outside of its bytes": tensor(offset=10**6),
    "a tensor that begins far outside": tensor(offset=2**62),
    "an offset that no machine has": tensor(offset=2**64),
    "a tensor before its bytes": tensor(offset=-1),
    "a tensor longer than its bytes": tensor(size=items(100_000)),
    "a tensor of 4 TB": tensor(size=items(2**40)),
    "a size that overflows": tensor(size=items(2**62, 8), stride=items(8, 1)),
    "a negative size": tensor(size=items(-4)),
    "a negative stride": tensor(offset=3, stride=items(-1)),
    "strides out of the bytes": tensor(size=items(2, 2), stride=items(1000, 1)),
    "sizes without strides": tensor(size=items(2, 2)),
    "a storage of a petabyte": tensor(over=storage(10**15)),
    "a storage of less than nothing": tensor(over=storage(-5)),
    "a storage that is not there": tensor(over=storage(key="77")),
    "a storage of another directory": tensor(over=storage(key="../version")),
    "a storage of another kind": tensor(over=storage(kind=name("collections", "OrderedDict"))),
    "a storage whose name is a list": b"(" + text("storage") + FLOATS + b"]" + text("cpu") + b"K\4tQ",
    "a storage without a name": b"(" + text("storage") + b"tQ",
    "a location that is a number": tensor(over=storage(location=b"K\7")),
    "a tensor set over other bytes": TENSOR + b"(" + storage() + number(10**6) + items(4) + items(1) + b"tb",
    "an array before its bytes": array(-64),
    "an array beside its bytes": array(0, items(8000)),
    "bytes of ten terabytes": call(name("builtins", "bytes"), number(10**13)),
    "a bytearray of ten terabytes": call(name("builtins", "bytearray"), number(10**13)),
    "a list of a range": call(name("builtins", "list"), call(name("builtins", "range"), number(10**14))),
    "a call without arguments": call(name("torch._utils", "_rebuild_tensor_v2")),
    "arguments that are a number": name("collections", "OrderedDict") + b"K\5R",
    "a key that is a list": b"}]K\1s",
    "state that is none for a generator": call(GENERATOR, text("cpu")) + b"K\1b",
    "state for a range": call(name("builtins", "range"), number(5)) + b"}" + text("x") + b"K\1sb",
    "another class for an object": COUNTER + b"N}" + text("__class__") + name("argparse", "Namespace") + b"s\x86b",
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_what_no_pickler_writes_is_a_corrupt_file(tmp_path: Path, what: str) -> None:
    """Guards: memory of the process in a tensor or an array; a bare TypeError that `resume` did not pass over."""
    path = archive(tmp_path / "made.pt", BROKEN[what])
    for load in (relight.load, lambda path: relight.load(path, mmap=True), relight.open):
        with pytest.raises(relight.CorruptCheckpoint, match=r"made\.pt"):
            load(path)
    with pytest.raises(relight.CorruptCheckpoint):
        relight.load(io.BytesIO(path.read_bytes()))


def test_indices_of_a_sparse_tensor_are_checked(tmp_path: Path) -> None:
    """Guards: torch loads them unchecked, and writes out of bounds when the tensor is used."""
    path = tmp_path / "sparse.pt"
    with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
        torch.save(torch.sparse_coo_tensor(torch.tensor([[0, 10**9]]), torch.ones(2), (4,), is_coalesced=True), path)
    with pytest.raises(relight.CorruptCheckpoint, match="sparse tensor"):
        relight.load(path)
    torch.save(torch.eye(3).to_sparse(), path)  # and nothing of the refused one is left for the next load
    assert torch.equal(relight.load(path).to_dense(), torch.eye(3))
    assert torch.equal(torch.load(path, weights_only=True).to_dense(), torch.eye(3))


def test_a_generator_that_stands_outside_of_its_numbers_is_refused(tmp_path: Path) -> None:
    """Guards: numpy reads wherever the state says at the next draw, and the process dies."""
    path = tmp_path / "rng.pt"
    bits = np.random.MT19937(1)
    state: Any = bits.state
    state["state"]["pos"] = 10**9
    bits.state = state
    legacy = np.random.RandomState(1)
    legacy.set_state(("MT19937", np.arange(624, dtype=np.uint32), -(10**6), 0, 0.0))

    class AsNumpy1:
        """A Generator as numpy 1 pickles it, which gives the state to it and not to its bits."""

        def __reduce__(self) -> Any:
            return vars(sys.modules["numpy.random._pickle"])["__generator_ctor"], ("MT19937",), state

    for one in (bits, np.random.Generator(bits), legacy, AsNumpy1()):
        relight.save({"rng": one}, path)
        with pytest.raises(relight.CorruptCheckpoint, match="its last place is 624"):
            relight.load(path)


def test_a_random_state_that_stands_outside_of_its_numbers_is_not_resumed(tmp_path: Path) -> None:
    generator = np.random.Generator(np.random.MT19937(1))
    twin = np.random.Generator(np.random.MT19937(2))
    state: Any = twin.bit_generator.state
    state["state"]["pos"] = 10**9
    twin.bit_generator.state = state
    with relight.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, relight.TrainState(shuffle=twin))
        before = generator.bit_generator.state
        with pytest.raises(relight.CorruptCheckpoint, match="random state"):
            checkpointer.resume(relight.TrainState(shuffle=generator))
    assert np.array_equal(generator.bit_generator.state["state"]["key"], before["state"]["key"])


# ---- no code unless it is asked for ----


class Marks:
    """Leaves a mark where it is unpickled as its pickle says."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return open, (str(self.mark), "w")


def test_weights_only_none_runs_no_code(tmp_path: Path) -> None:
    """Guards: torch's None means its default, which is weights-only; here it was taken for False."""
    mark, path = tmp_path / "ran", tmp_path / "bad.pt"
    torch.save({"x": Marks(mark)}, path)
    with pytest.raises(relight.ObjectNotAllowed):
        relight.load(path, weights_only=None)
    torch.save({"x": Marks(mark)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(relight.ObjectNotAllowed):
        relight.load(path, weights_only=None)
    with relight.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"x": Marks(mark)})
        with pytest.raises(relight.ObjectNotAllowed):
            checkpointer.load(weights_only=None)  # type: ignore[arg-type]  # what a caller of torch.load may pass on
    assert not mark.exists()


# ---- without torch ----


def test_a_deep_nest_does_not_take_all_memory(tmp_path: Path) -> None:
    """Guards: the name of each level was kept, and they grow by the square: 40 GB for a file of 400 KB."""
    levels = 200_000
    path = archive(tmp_path / "deep.pt", b"]" * levels + b"a" * (levels - 1))
    code = """
    import resource, sys
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    sys.modules["torch"] = None
    from relight.cli import main
    sys.exit(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), "show", str(path)], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0 and b"more than 1000 levels down" in done.stdout, done.stderr


# ---- as torch.load ----


def test_an_archive_inside_a_file_object_is_read_from_where_it_stands(tmp_path: Path) -> None:
    torch_reads: list[object] = []
    for saver in (torch.save, relight.save):
        file = io.BytesIO()
        file.write(b"a header of the caller's")
        start = file.tell()
        saver({"a": torch.arange(70_000)}, file)
        file.seek(start)
        assert torch.equal(relight.load(file)["a"], torch.arange(70_000))
        file.seek(start)
        try:
            torch_reads.append(torch.equal(torch.load(file, weights_only=True)["a"], torch.arange(70_000)))
        except RuntimeError as error:
            torch_reads.append(str(error))
    if torch.torch_version.TorchVersion(torch.__version__) >= (2, 7):  # type: ignore[operator]  # compares with tuples
        assert torch_reads == [True, True]
    else:  # 2.4 finds no archive behind a header, its own or ours
        assert torch_reads[0] == torch_reads[1]


def test_an_error_of_map_location_is_the_callers(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    relight.save({"a": torch.arange(4)}, path)

    def locate(storage: Any, location: str) -> Any:
        raise LookupError("no such place in my table")

    with pytest.raises(LookupError, match="my table"):
        relight.load(path, locate)
    for wrong in (0, 3.5, ["cpu"]):
        with pytest.raises(relight.InvalidArgument, match="is no location"):
            relight.load(path, wrong)  # type: ignore[arg-type]  # what is tested
    with pytest.raises(relight.InvalidArgument, match="map_location='nowhere'"):
        relight.load(path, "nowhere")
