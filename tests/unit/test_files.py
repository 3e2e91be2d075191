"""relight.save, load and open on paths: the same rules as torch, whole files, and tensors without reading the file."""

from __future__ import annotations

import io
import os
import pickle
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import relight
import torch


def test_a_path_gets_the_bytes_that_a_file_object_gets(tmp_path: Path) -> None:
    """Guards: the two writers of one layout drift apart."""
    state = {"w": torch.randn(300, 301), "v": torch.arange(10), "big": torch.zeros(1 << 20, dtype=torch.uint8)}
    buffer = io.BytesIO()
    relight.save(state, buffer)
    relight.save(state, tmp_path / "archive.pt")
    assert (tmp_path / "archive.pt").read_bytes() == buffer.getvalue()


@pytest.mark.parametrize("name", ["Prüfung-模型-🚀", "a b", "x" * 200])
def test_bl_030_names_in_any_script(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    path = folder / f"{name}.pt"
    state = {"w": torch.randn(1000)}
    relight.save(state, path)
    for load in (relight.load, torch.load):
        assert torch.equal(load(path, weights_only=True)["w"], state["w"])
    assert [entry.name for entry in folder.iterdir()] == [path.name]


def test_bl_032_a_hundred_thousand_tiny_tensors_cost_what_they_cost_with_torch(tmp_path: Path) -> None:
    state = {f"k{i}": torch.full((16,), float(i)) for i in range(100_000)}
    path = tmp_path / "many.pt"
    relight.save(state, path)
    torch.save(state, tmp_path / "torch.pt")
    assert path.stat().st_size < 1.15 * (tmp_path / "torch.pt").stat().st_size
    loaded = relight.load(path)
    assert len(loaded) == len(state) and all(torch.equal(loaded[key], state[key]) for key in list(state)[::997])


@pytest.mark.parametrize("count", [999, 1000, 1001, 70_000])
def test_bl_033_readers_agree_on_any_number_of_entries(tmp_path: Path, count: int) -> None:
    """Pickle writes containers in batches of 1,000, and zip has 16-bit counts."""
    state = {f"k{i}": torch.tensor([i], dtype=torch.int32) for i in range(count)} | {"list": list(range(count))}
    path = tmp_path / "state.pt"
    relight.save(state, path)
    ours, theirs = relight.load(path), torch.load(path, weights_only=True)
    for loaded in (ours, theirs):
        assert list(loaded) == list(state) and loaded["list"] == state["list"]
        assert torch.equal(torch.cat([loaded[f"k{i}"] for i in range(count)]), torch.arange(count, dtype=torch.int32))


def failures() -> Iterator[tuple[str, Any, type[BaseException]]]:
    class Interrupts:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    class Exhausts:
        def __reduce__(self) -> Any:
            raise MemoryError

    yield "unpicklable", threading.Lock(), relight.NotPicklable
    yield "Ctrl-C", Interrupts(), KeyboardInterrupt
    yield "no memory", Exhausts(), MemoryError


@pytest.mark.parametrize(("what", "part", "error"), list(failures()), ids=lambda x: x if isinstance(x, str) else "")
def test_bl_053_a_save_that_fails_leaves_the_old_file(
    tmp_path: Path, what: str, part: Any, error: type[BaseException]
) -> None:
    path = tmp_path / "model.pt"
    relight.save({"w": torch.ones(10)}, path)
    before = path.read_bytes()
    with pytest.raises(error):
        relight.save({"w": torch.randn(1 << 18), "part": part}, path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["model.pt"]
    assert torch.equal(relight.load(path)["w"], torch.ones(10))


@pytest.mark.parametrize("through", ["path", "symlink", "hard link"])
def test_bl_059_a_mapped_file_may_be_saved_over(tmp_path: Path, through: str) -> None:
    path, other = tmp_path / "model.pt", tmp_path / "other.pt"
    relight.save({"a": torch.arange(100_000.0), "b": torch.ones(100_000)}, path)
    if through == "symlink":
        other.symlink_to(path)
    elif through == "hard link":
        other.hardlink_to(path)
    else:
        other = path
    mapped = relight.load(path, mmap=True)
    second = relight.load(path, mmap=True)
    mapped["a"][5] = -1
    relight.save(mapped, other)
    assert mapped["a"][5] == -1 and second["a"][5] == 5 and torch.equal(mapped["b"], torch.ones(100_000))
    loaded = relight.load(other)
    assert loaded["a"][5] == -1 and torch.equal(loaded["a"][6:], torch.arange(100_000.0)[6:])
    path.unlink()
    assert second["a"][99_999] == 99_999


def test_bl_059_another_process_keeps_what_it_has_mapped(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    relight.save({"a": torch.zeros(1 << 18)}, path)
    code = (
        "import sys, relight; a = relight.load(sys.argv[1], mmap=True)['a']; print('mapped', flush=True); "
        "sys.stdin.readline(); print(float(a.sum()), flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None and reader.stdin is not None
        assert reader.stdout.readline() == "mapped\n"
        relight.save({"a": torch.ones(1 << 18)}, path)
        out, _ = reader.communicate("go\n", timeout=60)
    assert reader.returncode == 0 and out == "0.0\n"
    assert relight.load(path)["a"].sum() == 1 << 18


def test_a_mapped_load_changes_nothing_on_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    relight.save({"a": torch.zeros(1000)}, path)
    before = path.read_bytes()
    relight.load(path, mmap=True)["a"].fill_(3)
    assert path.read_bytes() == before
    with pytest.raises(relight.InvalidArgument, match="path"):
        relight.load(io.BytesIO(before), mmap=True)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"weights_only": False},
    {"mmap": True},
    {"mmap": True, "weights_only": False},
    {"map_location": "cpu"},
    {"map_location": torch.device("cpu")},
    {"map_location": {"cpu": "cpu"}},
    {"map_location": lambda storage, location: storage},
    {"map_location": lambda storage, location: None},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bl_102_every_way_to_load_gives_the_values_of_the_file_asked_for(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    for step in (1, 2):
        relight.save({"w": torch.full((5000,), float(step)), "step": step}, tmp_path / f"{step}.pt")
    loaded = relight.load(tmp_path / "1.pt", **options)
    assert loaded["step"] == 1 and torch.equal(loaded["w"], torch.ones(5000))


def test_bl_102_meta_and_lazy(tmp_path: Path) -> None:
    relight.save({"w": torch.ones(5), "step": 1}, tmp_path / "1.pt")
    meta = relight.load(tmp_path / "1.pt", map_location="meta")
    assert meta["step"] == 1 and meta["w"].is_meta and meta["w"].shape == (5,)
    with relight.open(tmp_path / "1.pt") as view:
        assert torch.equal(view["w"], torch.ones(5)) and view.metadata == {"step": 1}


@pytest.fixture
def from_gpu(tmp_path: Path) -> Path:
    """As saved from the sixth GPU of another machine."""
    path = tmp_path / "gpu.pt"
    torch.serialization.register_package(5, lambda storage: "cuda:5", lambda storage, location: None)
    try:
        relight.save({"w": torch.arange(4.0)}, path)
    finally:
        torch.serialization._package_registry[:] = [
            entry for entry in torch.serialization._package_registry if entry[0] != 5
        ]
    return path


@pytest.mark.skipif(torch.cuda.device_count() > 5, reason="this machine has the device")
def test_bl_167_without_the_gpu_the_error_says_how_to_load(from_gpu: Path) -> None:
    with pytest.raises(relight.InvalidArgument, match=r"saved from 'cuda:5'.*map_location='cpu'"):
        relight.load(from_gpu)


@pytest.mark.parametrize(
    "where",
    [
        "cpu",
        torch.device("cpu"),
        {"cuda:5": "cpu"},
        lambda storage, location: storage if location == "cuda:5" else None,
    ],
    ids=["text", "device", "dict", "function"],
)
def test_bl_167_the_map_follows_the_rules_of_torch(from_gpu: Path, where: Any) -> None:
    assert relight.load(from_gpu, map_location=where)["w"].tolist() == [0, 1, 2, 3]
    assert torch.load(from_gpu, map_location=where, weights_only=True)["w"].tolist() == [0, 1, 2, 3]


# ---- open ----


def test_open_gives_names_shapes_dtypes_and_single_tensors(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    model = torch.nn.Linear(3, 2)
    relight.save(
        {"model": model.state_dict(), "hist": [torch.ones(1), {"x": torch.zeros(2, dtype=torch.int8)}], "n": 3}, path
    )
    with relight.open(path) as view:
        assert list(view) == ["model.weight", "model.bias", "hist.0", "hist.1.x"] and len(view) == 4
        assert view.shapes["model.weight"] == (2, 3) and view.dtypes["hist.1.x"] == torch.int8
        assert torch.equal(view["model.weight"][1], model.weight[1].detach())
        with pytest.raises(KeyError, match=re.escape("did you mean 'model.weight'")):
            view["model.weigth"]
        kept = view["model.bias"]
        view.verify()
        path.unlink()
    assert torch.equal(kept, model.bias.detach())
    with pytest.raises(relight.InvalidArgument, match="closed"):
        view["model.bias"]


def test_open_gives_the_tensors_of_a_file_that_load_refuses(tmp_path: Path) -> None:
    class Hidden:
        pass

    globals()["Hidden"] = Hidden
    Hidden.__qualname__ = "Hidden"
    path = tmp_path / "run.pt"
    relight.save({"args": Hidden(), "queue": [Hidden], "w": torch.ones(2)}, path)
    with pytest.raises(relight.ObjectNotAllowed, match=r"relight\.open"):
        relight.load(path)
    with relight.open(path) as view:
        assert view["w"].tolist() == [1, 1]
        assert view.refused == {"args": f"{__name__}.Hidden", "queue.0": f"{__name__}.Hidden"}


def test_a_view_does_not_pickle(tmp_path: Path) -> None:
    """Guards: a worker that gets a view in its arguments, and an error about relight._core.Image."""
    relight.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    with relight.open(tmp_path / "x.pt") as view, pytest.raises(relight.NotPicklable, match=r"x\.pt.*pass the path"):
        pickle.dumps(view)


def test_names_that_meet_are_kept_apart(tmp_path: Path) -> None:
    relight.save({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}, tmp_path / "x.pt")
    with relight.open(tmp_path / "x.pt") as view:
        assert {name: view[name].item() for name in view} == {"a.b": 0, "a.b#2": 1}


def bytes_read() -> int:
    """What this process has read by system calls; reads through a mapping are not among them."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])  # type: ignore[index]


def test_open_reads_no_data_until_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    relight.save({"w": torch.ones(1 << 22), "v": torch.zeros(4)}, path)
    relight.open(path).close()  # what is imported at first use is read now
    before = bytes_read()
    with relight.open(path) as view:
        assert view["w"][::1000].sum() == len(range(0, 1 << 22, 1000))
    assert bytes_read() - before < 1 << 20


# ---- errors ----


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(relight.CheckpointNotFound):
        relight.load(tmp_path / "none.pt")
    with pytest.raises(FileNotFoundError):
        relight.open(tmp_path / "none.pt")


def test_a_truncated_file_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    relight.save({"w": torch.randn(10_000)}, path)
    data = path.read_bytes()
    for end in (0, 1, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:end])
        for mmap in (False, True):
            with pytest.raises(relight.CorruptCheckpoint):
                relight.load(path, mmap=mmap)


def test_a_flipped_byte_of_a_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    relight.save({"w": torch.zeros(100_000)}, path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(relight.CorruptCheckpoint, match="data/0"):
        relight.load(path)


def test_an_archive_that_another_tool_compressed_is_loaded(tmp_path: Path) -> None:
    relight.save({"w": torch.zeros(10_000)}, tmp_path / "x.pt")
    with (
        zipfile.ZipFile(tmp_path / "x.pt") as old,
        zipfile.ZipFile(tmp_path / "y.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    assert (tmp_path / "y.pt").stat().st_size < 5000
    assert torch.equal(relight.load(tmp_path / "y.pt")["w"], torch.zeros(10_000))
    assert torch.equal(relight.load(io.BytesIO((tmp_path / "y.pt").read_bytes()))["w"], torch.zeros(10_000))


def test_the_old_format_is_loaded_by_its_path(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    assert relight.load(tmp_path / "x.pt")["w"].tolist() == [1, 1, 1]
    with pytest.raises(relight.InvalidArgument, match=r"relight\.load"):
        relight.open(tmp_path / "x.pt")


def test_a_torchscript_archive_is_said_to_be_one(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as file:
        for name in ("data.pkl", "constants.pkl", "version"):
            file.writestr(f"x/{name}", b"3")
    with pytest.raises(relight.InvalidArgument, match=r"torch\.jit\.load"):
        relight.load(tmp_path / "x.pt")


# ---- what changes while it is saved ----


def test_bl_070_a_tensor_changed_during_the_copy_is_named() -> None:
    state = {"model": {"w": torch.zeros(10)}}

    class Meddler(io.BytesIO):
        def write(self, data: Any) -> int:
            state["model"]["w"].add_(1)
            return super().write(data)

    with pytest.raises(relight.TornSnapshot, match=r"model\.w was changed"):
        relight.save(state, Meddler())


def test_bl_070_the_version_of_a_parameter_counts() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(2)).sum().backward()

    class Meddler(io.BytesIO):
        def write(self, data: Any) -> int:
            optimizer.step()
            return super().write(data)

    with pytest.raises(relight.TornSnapshot):
        relight.save({"net": dict(model.named_parameters())}, Meddler())
    with pytest.raises(relight.TornSnapshot):
        relight.save({"net": model.state_dict()}, Meddler())


# ---- save_async ----


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(1000, 64)
        self.head = torch.nn.Linear(64, 1000, bias=False)
        self.head.weight = self.embed.weight


def test_bl_009_async_gives_the_file_of_the_blocking_save(tmp_path: Path) -> None:
    state = Tied().state_dict()
    (tmp_path / "a").mkdir()
    relight.save(state, tmp_path / "model.pt")
    handle = relight.save_async(state, tmp_path / "a" / "model.pt")
    assert handle.staged() and handle.result(60) == str(tmp_path / "a" / "model.pt")
    assert (tmp_path / "a" / "model.pt").read_bytes() == (tmp_path / "model.pt").read_bytes()
    loaded = relight.load(tmp_path / "a" / "model.pt")
    assert loaded["embed.weight"].data_ptr() == loaded["head.weight"].data_ptr()
    assert (tmp_path / "model.pt").stat().st_size < 1000 * 64 * 4 + 16384


def test_bl_070_what_is_changed_after_the_call_is_not_in_the_file(tmp_path: Path) -> None:
    state = {"w": torch.zeros(4 << 20)}
    handle = relight.save_async(state, tmp_path / "x.pt")
    for _ in range(20):
        state["w"].add_(1)
    handle.result(60)
    assert relight.load(tmp_path / "x.pt")["w"].count_nonzero() == 0


def test_bl_070_another_thread_that_writes_during_the_copy_is_noticed_or_came_after(tmp_path: Path) -> None:
    """Through `.data`, which no version counter sees."""
    state = {"w": torch.zeros(8 << 20)}
    stop = threading.Event()

    def meddle() -> None:
        while not stop.is_set():
            state["w"].data.add_(1)

    thread = threading.Thread(target=meddle)
    thread.start()
    try:
        for number in range(5):
            path = tmp_path / f"{number}.pt"
            try:
                relight.save_async(state, path).result(60)
            except relight.TornSnapshot:
                assert not path.exists()
                continue
            values = relight.load(path)["w"]
            # The writer may have stood still in the middle of a sweep: then that is the state at the moment of the
            # call, with one border for each thread of the sweep and one between. A mixture of moments has more, or more
            # values.
            borders = int((values[1:] != values[:-1]).sum())
            assert values.max() - values.min() <= 1 and borders < 2 * torch.get_num_threads(), "a mixture was written"
    finally:
        stop.set()
        thread.join()


def test_bl_072_a_load_waits_for_the_save_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    for number in range(3):
        relight.save_async({"n": number, "w": torch.full((1 << 20,), float(number))}, path)
        loaded = relight.load(path)
        assert loaded["n"] == number and loaded["w"][7] == number


def test_bl_072_open_and_save_after_a_save_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    relight.save_async({"w": torch.zeros(1 << 20)}, path)
    with relight.open(path) as view:
        assert view["w"][0] == 0
    first = relight.save_async({"w": torch.ones(1 << 20)}, path)
    relight.save({"w": torch.full((1 << 20,), 2.0)}, path)
    first.result(60)
    assert relight.load(path)["w"][0] == 2


def test_save_async_takes_paths_only() -> None:
    with pytest.raises(relight.InvalidArgument, match="path"):
        relight.save_async({}, io.BytesIO())  # type: ignore[arg-type]
