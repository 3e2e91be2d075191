"""Options: declared once, checked by name and range, taken from the environment, and all of them in the reference."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import numpy
import pytest
from relight.exceptions import InvalidArgument
from relight.options import Options, check_keep

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "options.md"
FIELDS = dataclasses.fields(Options)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in FIELDS:
        monkeypatch.delenv(Options.environment_variable(field.name), raising=False)


def test_defaults_are_those_declared() -> None:
    options = Options()
    assert {f.name: getattr(options, f.name) for f in FIELDS} == {f.name: f.metadata["default"] for f in FIELDS}
    assert pickle.loads(pickle.dumps(options)) == options


def test_options_never_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().copy_threads = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("copy_threads", 0), ("copy_threads", -1), ("copy_threads", True), ("copy_threads", 2.0), ("copy_threads", "2"),
        ("copy_threads", None), ("copy_threads", 257), ("chunk_bytes", 5000), ("chunk_bytes", 1),
        ("memory_bytes_max", 0), ("memory_keep", -1), ("attempts_max", 0), ("retry_delay_s", -0.1),
        ("retry_delay_s", float("nan")), ("lock_timeout_s", float("inf")), ("close_timeout_s", "5"),
        ("torn_check", "maybe"), ("on_error", None), ("memory_dir", ""), ("memory_dir", "a\0b"), ("memory_dir", 3),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_name_value_and_range(name: str, bad: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Options(**{name: bad})  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(f"{name}={bad!r} cannot be used; give ")
    least = next(f for f in FIELDS if f.name == name).metadata["least"]
    if least is not None:
        assert f"from {least} to " in message


def test_numbers_of_numpy_and_paths_are_taken(tmp_path: Path) -> None:
    options = Options(copy_threads=numpy.int64(3), memory_dir=tmp_path, retry_delay_s=1)  # type: ignore[arg-type]
    assert (options.copy_threads, options.memory_dir, options.retry_delay_s) == (3, str(tmp_path), 1.0)
    assert type(options.copy_threads) is int


def test_the_environment_sets_what_the_call_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELIGHT_COPY_THREADS", "7")
    monkeypatch.setenv("RELIGHT_RETRY_DELAY_S", "0.25")
    monkeypatch.setenv("RELIGHT_ON_ERROR", "raise")
    monkeypatch.setenv("RELIGHT_MEMORY_DIR", "/mnt/ram")
    monkeypatch.setenv("RELIGHT_MEMORY_BYTES_MAX", "")
    options = Options(retry_delay_s=2.0)
    assert (options.copy_threads, options.retry_delay_s, options.on_error, options.memory_dir) == (
        7, 2.0, "raise", "/mnt/ram",
    )  # fmt: skip
    assert options.memory_bytes_max is None


@pytest.mark.parametrize("text", ["many", "0", "2.5"])
def test_a_bad_variable_is_refused_by_its_own_name(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("RELIGHT_COPY_THREADS", text)
    with pytest.raises(InvalidArgument, match="RELIGHT_COPY_THREADS="):
        Options()
    assert Options(copy_threads=2).copy_threads == 2


def test_replaced_changes_only_what_is_given() -> None:
    options = Options(copy_threads=4).replaced(on_error="raise", torn_check=None)
    assert (options.copy_threads, options.on_error, options.torn_check) == (4, "raise", "auto")
    with pytest.raises(InvalidArgument, match="no option 'colour'; choose from attempts_max"):
        options.replaced(colour="red")


@pytest.mark.parametrize("keep", [0, -1, True, False, 2.0, "2", [2]])
def test_bl_112_a_keep_without_a_meaning_is_refused(keep: object) -> None:
    with pytest.raises(InvalidArgument, match=r"whole number from 1 up .* or None to keep all"):
        check_keep(keep)


def test_bl_112_none_and_huge_keep_all() -> None:
    assert check_keep(None) is None
    assert check_keep(1) == 1
    assert check_keep(numpy.int32(3)) == 3
    assert check_keep(10**30) == (1 << 32) - 1


def table() -> list[str]:
    rows = ["| option | variable | default | range | of | what it does |", "|---|---|---|---|---|---|"]
    for field in FIELDS:
        facts = field.metadata
        if facts["choices"]:
            span = ", ".join(f"`{choice}`" for choice in facts["choices"])
        elif facts["least"] is None:
            span = "a path"
        else:
            span = f"{facts['least']} to {facts['most']}"
            span += f", a multiple of {facts['multiple_of']}" if facts["multiple_of"] else ""
        of = "process" if facts["per_process"] else "Checkpointer"
        variable = Options.environment_variable(field.name)
        rows.append(f"| `{field.name}` | `{variable}` | `{facts['default']}` | {span} | {of} | {facts['doc']} |")
    return rows


def test_the_reference_has_every_option_as_it_is() -> None:
    got = [line for line in REFERENCE.read_text().splitlines() if line.startswith("|")]
    assert got == table()
