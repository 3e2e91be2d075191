"""The `relight` command: right answers, one line an error, documented exit codes, and no torch anywhere near it."""

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from relight.cli import main; sys.exit(main())"


class Answer:
    """What the command printed, and its exit code."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        assert "Traceback" not in self.err, self.err

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A memory tier of this module's own: what else runs on the machine does not show in `drain`."""
    memory = tmp_path_factory.mktemp("memory")
    return {**os.environ, "RELIGHT_MEMORY_DIR": str(memory), "COLUMNS": "200"}


@pytest.fixture(scope="module")
def relight(environment: dict[str, str]):
    """The command, in a process that cannot import torch."""

    def run(*arguments: object) -> Answer:
        command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, arguments)]
        return Answer(
            subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        )

    return run


@pytest.fixture(scope="module")
def trainer(environment: dict[str, str]):
    """Runs Python with relight and torch in a process of its own, so that each has an engine of its own."""

    def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "import sys, torch, relight\n" + code, *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)

    return run


SAVE_TAGS = """
root, *tags = sys.argv[1:]
with relight.Checkpointer(root) as ckpt:
    for tag in tags:
        ckpt.save(int(tag) if tag.isdecimal() and not tag.startswith("0") and "--names" not in tags else tag,
                  {"w": torch.full((1000,), 1.0), "tag": tag})
"""


@pytest.fixture(scope="module")
def made(trainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with steps 100 and 200; each test that changes it copies it first."""
    root = tmp_path_factory.mktemp("made") / "root"
    done = trainer(SAVE_TAGS, root, 100, 200)
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "root"))


# ---- what is there ----


def test_ls_lists_oldest_first_and_marks_the_latest(relight, made: Path) -> None:
    answer = relight("ls", made)
    assert answer.code == 0
    assert [line.split()[0] for line in answer.lines[1:]] == ["global_step100", "global_step200"]
    assert answer.lines[-1].endswith("latest")
    assert relight("ls", made, "--json").json["latest"] == "global_step200"


def test_bl_095_order_is_by_number_not_by_text(relight, trainer, tmp_path: Path) -> None:
    """Latest was 9 because the text `9` sorts after `10000`."""
    steps = [9, 10, 99, 100, 500, 1000, 2500, 10000]
    shuffled = random.Random(95).sample(steps, len(steps))
    assert trainer(SAVE_TAGS, tmp_path / "root", *shuffled).returncode == 0
    listed = relight("ls", tmp_path / "root", "--json").json
    assert [one["step"] for one in listed["checkpoints"]] == steps
    assert listed["latest"] == "global_step10000"


def test_bl_096_order_is_by_value_and_only_what_relight_committed_counts(relight, trainer, tmp_path: Path) -> None:
    code = """
with relight.Checkpointer(sys.argv[1]) as ckpt:
    for tag in ("09000000", "100000", "best-of-all", "0900000"):
        ckpt.save(tag, {"tag": tag})
"""
    assert trainer(code, tmp_path).returncode == 0
    for name in ("handpicked", "best", "10.bak"):
        (tmp_path / name).mkdir()
    listed = relight("ls", tmp_path, "--json").json
    ours = [one["tag"] for one in listed["checkpoints"] if not one["foreign"]]
    assert ours == ["best-of-all", "100000", "0900000", "09000000"]
    assert listed["latest"] == "09000000"


def lacks_manifest(tag: Path) -> None:
    (tag / ".relight" / "manifest.json").unlink()


def lacks_file(tag: Path) -> None:
    (tag / "state.pt").unlink()


def has_an_empty_file(tag: Path) -> None:
    (tag / "state.pt").write_bytes(b"")


def is_empty(tag: Path) -> None:
    shutil.rmtree(tag)
    tag.mkdir()


@pytest.mark.parametrize("damage", [lacks_manifest, lacks_file, has_an_empty_file, is_empty])
def test_bl_097_a_broken_checkpoint_is_never_the_latest_and_is_refused_by_name(relight, root: Path, damage) -> None:
    shutil.copytree(root / "global_step200", root / "global_step300")
    damage(root / "global_step300")
    (root / "latest").write_text("global_step300")
    listed = relight("ls", root)
    assert "global_step200" in listed.lines[-1] and listed.lines[-1].endswith("latest")
    if damage is not is_empty:  # an empty directory has nothing that could be missed
        assert "global_step300" in listed.err
    shown = relight("show", root, "global_step300")
    assert shown.code in (1, 2) and "global_step300" in shown.err
    if damage in (lacks_file, has_an_empty_file):
        verified = relight("verify", root)
        assert verified.code == 1
        assert "global_step300" in verified.out and "state.pt" in verified.out


def test_bl_100_times_of_files_play_no_part(relight, root: Path) -> None:
    before = [one["tag"] for one in relight("ls", root, "--json").json["checkpoints"]]
    for age, path in enumerate(sorted(root.rglob("*"))):
        os.utime(path, (1e9 - age, 1e9 - age))
    assert [one["tag"] for one in relight("ls", root, "--json").json["checkpoints"]] == before
    for path in root.rglob("*"):
        os.utime(path, (5e8, 5e8))
    listed = relight("ls", root, "--json").json
    assert [one["tag"] for one in listed["checkpoints"]] == before
    assert listed["latest"] == "global_step200"


def test_bl_166_links_work_and_a_dangling_one_is_skipped(relight, made: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(made, elsewhere)
    (tmp_path / "link").symlink_to(elsewhere)
    (elsewhere / "global_step100").rename(tmp_path / "moved")
    (elsewhere / "global_step100").symlink_to(tmp_path / "moved")
    (elsewhere / "global_step300").symlink_to(tmp_path / "nowhere")
    listed = relight("ls", tmp_path / "link")
    assert listed.code == 0
    assert [line.split()[0] for line in listed.lines[1:]] == ["global_step100", "global_step200"]
    assert "global_step300" in listed.err
    verified = relight("verify", tmp_path / "link", "global_step100")
    assert verified.code == 0, verified.err


def test_ls_shows_what_others_left_as_foreign(relight, root: Path) -> None:
    (root / "epoch7").mkdir()
    torch.save({"a": torch.ones(2)}, root / "epoch7" / "model.pt")
    listed = relight("ls", root, "--json").json
    foreign = [one for one in listed["checkpoints"] if one["foreign"]]
    assert [one["tag"] for one in foreign] == ["epoch7"]
    assert listed["latest"] == "global_step200"
    verified = relight("verify", root)
    assert verified.code == 0 and "epoch7" in verified.out


# ---- contents ----


@pytest.mark.parametrize("entries", [999, 1_000, 1_001, 70_000])
def test_bl_033_all_readers_show_the_same_content(relight, tmp_path: Path, entries: int) -> None:
    """Pickle writes dicts in batches of 1,000; a reader of ours dropped what came after the first."""
    import relight as package

    state = {f"k{i}": i for i in range(entries)}
    state |= {"t": torch.arange(6.0).reshape(2, 3), "nested": {"list": [1, "two", None]}}
    package.save(state, tmp_path / "relight.pt")
    torch.save(state, tmp_path / "torch.pt")
    by_torch = torch.load(tmp_path / "relight.pt", weights_only=True)
    assert by_torch.keys() == state.keys() and torch.equal(by_torch["t"], state["t"])
    assert package.load(tmp_path / "torch.pt").keys() == state.keys()
    shown = relight("show", tmp_path / "relight.pt", "--json").json["contents"]
    assert shown == relight("show", tmp_path / "torch.pt", "--json").json["contents"]
    values = {leaf["name"]: leaf for leaf in shown}
    assert len(values) == entries + 4
    assert all(values[f"k{i}"]["value"] == str(i) for i in range(entries))
    assert values["t"]["type"] == "tensor float32" and values["t"]["shape"] == [2, 3]
    assert values["nested.list.1"]["value"] == "two"


class Mark:
    """Pickles as a call that leaves a file behind, if anything calls it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def zip_with_pickle(path: Path, data: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
    return path


def test_show_runs_no_code_of_a_checkpoint(relight, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    file = zip_with_pickle(tmp_path / "hostile.pt", pickle.dumps({"x": Mark(mark), "y": 1}))
    answer = relight("show", file, "--json")
    assert not mark.exists()
    assert {leaf["name"]: leaf["value"] for leaf in answer.json["contents"]}["y"] == "1"


def test_show_ends_on_shared_lists_that_multiply(relight, tmp_path: Path) -> None:
    level: list[object] = ["lol"]
    for _ in range(60):
        level = [level, level, level]
    level.append(level)
    answer = relight("show", zip_with_pickle(tmp_path / "many.pt", pickle.dumps(level)))
    assert answer.code == 0
    assert len(answer.lines) < 200


@pytest.mark.parametrize("data", [b"", b"\x80\x02", b"garbage", b"\x80\x02}q\x00.", b"\x80\x02(K\x01K\x02e."])
def test_show_of_a_damaged_pickle_is_one_line(relight, tmp_path: Path, data: bytes) -> None:
    answer = relight("show", zip_with_pickle(tmp_path / "bad.pt", data))
    assert answer.code in (0, 1)
    assert len(answer.err.splitlines()) <= 1


def test_names_do_not_move_the_cursor(relight, trainer, tmp_path: Path) -> None:
    code = r"""
with relight.Checkpointer(sys.argv[1]) as ckpt:
    ckpt.save(1, files={"two\nlines \x1b[2J.pt": {"key\rname": 1}})
"""
    done = trainer(code, tmp_path)
    assert done.returncode == 0, done.stderr
    answer = relight("show", tmp_path, "global_step1")
    assert "\x1b" not in answer.out and r"two\nlines \x1b[2J.pt" in answer.out
    inside = relight("show", tmp_path, "global_step1", "--file", "two\nlines \x1b[2J.pt")
    assert r"key\rname" in inside.out and "\r" not in inside.out


def test_show_tells_of_a_checkpoint_and_of_a_file_in_it(relight, made: Path) -> None:
    answer = relight("show", made, "global_step200")
    assert answer.code == 0 and "state.pt" in answer.out and "latest" in answer.out
    inside = relight("show", made, "global_step200", "--file", "state.pt")
    assert "tensor float32" in inside.out and "[1000]" in inside.out


# ---- verify ----


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def test_verify_finds_one_flipped_bit_and_names_the_file(relight, root: Path) -> None:
    assert relight("verify", root).code == 0
    file = root / "global_step100" / "state.pt"
    flip(file, file.stat().st_size // 2)
    answer = relight("verify", root)
    assert answer.code == 1
    assert "global_step100: state.pt" in answer.out and "global_step200: 1 file" in answer.out
    assert relight("verify", root, "global_step200").code == 0
    assert relight("verify", root, "global_step100").code == 1
    answer = relight("verify", root, "--json")
    assert [one["ok"] for one in answer.json["checkpoints"]] == [False, True]


def test_verify_of_a_single_file(relight, tmp_path: Path) -> None:
    torch.save({"a": torch.arange(10000)}, tmp_path / "plain.pt")
    assert relight("verify", tmp_path / "plain.pt").code == 0
    flip(tmp_path / "plain.pt", (tmp_path / "plain.pt").stat().st_size // 2)
    answer = relight("verify", tmp_path / "plain.pt")
    assert answer.code == 1 and "plain.pt" in answer.out + answer.err


# ---- history, export ----


def test_history_shows_each_save(relight, made: Path) -> None:
    rows = relight("history", made, "--json").json
    assert {"global_step100", "global_step200"} <= {row["tag"] for row in rows}
    assert {row["tag"] for row in relight("history", made, "--tag", "global_step100", "--json").json} == {
        "global_step100"
    }
    assert len(relight("history", made, "--last", 1, "--json").json) == 1
    assert relight("history", made).code == 0


def test_export_gives_files_that_plain_torch_loads(relight, made: Path, tmp_path: Path) -> None:
    assert relight("export", made, "global_step100", tmp_path / "out").code == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["state.pt"]
    assert torch.equal(torch.load(tmp_path / "out" / "state.pt", weights_only=True)["w"], torch.ones(1000))
    again = relight("export", made, "global_step200", tmp_path / "out")
    assert again.code == 2 and "--force" in again.err
    assert torch.load(tmp_path / "out" / "state.pt", weights_only=True)["tag"] == "100"
    assert relight("export", made, "global_step200", tmp_path / "out", "--force").code == 0
    assert torch.load(tmp_path / "out" / "state.pt", weights_only=True)["tag"] == "200"


def test_export_leaves_nothing_of_a_damaged_file(relight, root: Path, tmp_path: Path) -> None:
    file = root / "global_step100" / "state.pt"
    flip(file, file.stat().st_size // 2)
    answer = relight("export", root, "global_step100", tmp_path / "out")
    assert answer.code == 1 and "state.pt" in answer.err
    assert list((tmp_path / "out").iterdir()) == []


# ---- drain ----


def test_drain_persists_what_a_killed_process_left(relight, trainer, tmp_path: Path) -> None:
    code = """
import os, signal
ckpt = relight.Checkpointer(sys.argv[1])
ckpt.save(1, {"w": torch.full((4 << 20,), 3.0)})
handle = ckpt.save(2, {"w": torch.full((4 << 20,), 5.0)})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert trainer(code, tmp_path).returncode == -signal.SIGKILL
    found = relight("drain", "--list", "--json").json
    assert len(found) == 1 and not found[0]["alive"]
    assert "global_step2" in {one["tag"] for one in found[0]["checkpoints"]}
    listed = relight("ls", tmp_path, "--json").json
    if "global_step2" not in {one["tag"] for one in listed["checkpoints"]}:  # else the disk was faster than the kill
        assert "global_step2" in {one["tag"] for one in listed["in_memory"]}
        assert "`relight drain` persists it" in relight("ls", tmp_path).out
        shown = relight("show", tmp_path, "global_step2")
        assert shown.code == 2 and "`relight drain` persists it" in shown.err
        kept = relight("drain", "--remove")
        assert kept.code == 1 and "global_step2" in kept.err
    drained = relight("drain")
    assert drained.code == 0, drained.err
    assert relight("drain", "--list", "--json").json == []
    assert relight("verify", tmp_path).code == 0
    assert torch.equal(
        torch.load(tmp_path / "global_step2" / "state.pt", weights_only=True)["w"], torch.full((4 << 20,), 5.0)
    )


def test_drain_remove_with_force_frees_the_memory(relight, trainer, tmp_path: Path) -> None:
    code = """
import os, signal
relight.Checkpointer(sys.argv[1]).save(1, {"w": torch.zeros(16 << 20)})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert trainer(code, tmp_path).returncode == -signal.SIGKILL
    assert relight("drain", "--remove", "--force").code == 0
    assert relight("drain", "--list", "--json").json == []


# ---- the command line itself ----


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls", "/nonexistent/root"),
        ("show", "/nonexistent/file.pt"),
        ("verify", "/nonexistent/root"),
        ("history", "/nonexistent/root"),
        ("show", "ROOT", "no-such-tag"),
        ("show", "ROOT"),
        ("show", "ROOT", "global_step100", "--file", "no-such-file"),
        ("verify", "ROOT", "no-such-tag"),
        ("export", "ROOT", "no-such-tag", "/tmp/out"),
        ("export", "ROOT", "global_step100", "/tmp/out", "--file", "nothing"),
        ("ls", "FILE"),
        ("no-such-verb",),
        (),
    ],
    ids=" ".join,
)
def test_what_is_not_there_is_one_line_and_exit_code_2(relight, made: Path, arguments: tuple[str, ...]) -> None:
    file = made / "global_step100" / "state.pt"
    places = {"ROOT": str(made), "FILE": str(file)}
    answer = relight(*(places.get(argument, argument) for argument in arguments))
    assert answer.code == 2
    if arguments and arguments[0] != "no-such-verb":
        assert len(answer.err.splitlines()) == 1 and answer.err.startswith("relight: "), answer.err


def test_a_foreign_zip_is_named_as_such(relight, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        archive.writestr("cat.txt", "meow")
    answer = relight("show", tmp_path / "photos.zip")
    assert answer.code == 2 and "photos.zip" in answer.err
    (tmp_path / "text.pt").write_text("hello")
    answer = relight("show", tmp_path / "text.pt")
    assert answer.code == 1 and "text.pt" in answer.err


def test_looking_changes_nothing(relight, root: Path) -> None:
    """Guards: a reader that finishes moves, writes `latest` or a history line."""

    def seen() -> dict[str, tuple[int, int]]:
        return {str(p): (p.stat().st_mtime_ns, p.stat().st_ino) for p in sorted(root.rglob("*"))}

    before = seen()
    for verb in (("ls",), ("show",), ("verify",), ("history",)):
        extra = ("global_step100",) if verb == ("show",) else ()
        assert relight(*verb, root, *extra).code == 0
    assert seen() == before


def test_ls_of_a_root_that_may_only_be_read(relight, root: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    root.chmod(0o500)
    try:
        assert relight("ls", root).code == 0
        assert relight("verify", root).code == 0
    finally:
        root.chmod(0o700)


def test_a_closed_pipe_is_no_error(made: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, "ls", str(made)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_the_version(relight) -> None:
    answer = relight("--version")
    assert answer.code == 0 and answer.out.startswith("relight ")
