"""The errors: each kind has a class, pickles whole, is the builtin that it says, and has its lines in the reference."""

from __future__ import annotations

import copy
import errno
import inspect
import multiprocessing
import pickle
from pathlib import Path

import pytest
from relight import exceptions
from relight.exceptions import (
    KINDS,
    CheckpointError,
    CheckpointNotFound,
    DistributedSaveError,
    InvalidArgument,
    NotPicklable,
    ObjectNotAllowed,
    StorageDenied,
    StorageFull,
    StorageUnavailable,
    WaitTimeout,
)

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
kinds = pytest.mark.parametrize(("kind", "cls"), list(KINDS.items()), ids=list(KINDS))


def make(cls: type[CheckpointError]) -> CheckpointError:
    return cls("model.pt is bad; use another", path="/ckpt/model.pt", tag="global_step5", rank=3, retryable=True)


@kinds
def test_every_kind_carries_its_facts_and_prints_only_its_message(kind: str, cls: type[CheckpointError]) -> None:
    error = make(cls)
    assert (error.kind, error.path, error.tag, error.rank, error.retryable) == (
        kind, "/ckpt/model.pt", "global_step5", 3, True,
    )  # fmt: skip
    assert str(error) == error.message == "model.pt is bad; use another"
    bare = cls("alone")
    assert (str(bare), bare.path, bare.tag, bare.rank) == ("alone", None, None, None)
    assert bare.retryable is cls.retryable_by_kind


@kinds
def test_every_kind_pickles_and_copies_whole(kind: str, cls: type[CheckpointError]) -> None:
    error = make(cls)
    error.add_note("while saving step 5")
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        for other in (pickle.loads(pickle.dumps(error, protocol)), copy.deepcopy(error)):
            assert type(other) is cls
            assert vars(other) == vars(error)
            assert str(other) == str(error)
            if isinstance(error, OSError):
                assert isinstance(other, OSError)
                assert (other.errno, other.strerror, other.filename) == (error.errno, error.strerror, error.filename)


def test_errors_cross_to_another_process_and_back() -> None:
    sent = [make(cls) for cls in KINDS.values()]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        got = pool.apply(copy.copy, (sent,))
    assert [(type(error), vars(error)) for error in got] == [(type(error), vars(error)) for error in sent]


@pytest.mark.parametrize(
    ("cls", "builtin", "code"),
    [
        (CheckpointNotFound, FileNotFoundError, errno.ENOENT),
        (StorageFull, OSError, errno.ENOSPC),
        (StorageDenied, PermissionError, errno.EACCES),
        (StorageUnavailable, ConnectionError, errno.EIO),
        (WaitTimeout, TimeoutError, errno.ETIMEDOUT),
        (ObjectNotAllowed, PermissionError, errno.EPERM),
    ],
)
def test_children_of_oserror_have_its_attributes(cls: type[CheckpointError], builtin: type[OSError], code: int) -> None:
    error = make(cls)
    assert isinstance(error, builtin)
    assert (error.errno, error.strerror, error.filename) == (code, error.message, "/ckpt/model.pt")
    bare = cls("alone", errno=errno.EDQUOT)
    assert isinstance(bare, OSError)
    assert (bare.errno, bare.strerror, bare.filename) == (errno.EDQUOT, "alone", None)


def test_children_of_valueerror_are_caught_as_such() -> None:
    with pytest.raises(ValueError, match="a lock"):
        raise NotPicklable("a lock")
    assert issubclass(NotPicklable, InvalidArgument)
    assert issubclass(NotPicklable, pickle.PicklingError)


def test_extra_facts_survive_pickling() -> None:
    distributed = DistributedSaveError("rank 1 failed", errors={1: StorageFull("full", rank=1)})
    again = pickle.loads(pickle.dumps(distributed))
    assert str(again.errors[1]) == "full"
    assert again.errors[1].rank == 1
    refused = pickle.loads(pickle.dumps(ObjectNotAllowed("no", name="evil.Thing", path="x.pt")))
    assert (refused.name, refused.path) == ("evil.Thing", "x.pt")


def test_every_class_is_exported_registered_and_documented() -> None:
    classes = {
        cls
        for _, cls in inspect.getmembers(exceptions, inspect.isclass)
        if issubclass(cls, CheckpointError) and cls.__module__ == exceptions.__name__
    }
    assert classes == set(KINDS.values())
    for cls in classes:
        assert cls.__name__ in exceptions.__all__
        assert cls.__doc__ and "What to do:" in cls.__doc__, cls


@kinds
def test_every_kind_has_its_line_in_the_reference(kind: str, cls: type[CheckpointError]) -> None:
    builtins = [base.__name__ for base in cls.__mro__ if base.__module__ in ("builtins", "_pickle", "pickle")]
    nearest = next(name for name in builtins if name not in ("object", "BaseException")) if builtins else ""
    rows = [line for line in REFERENCE.read_text().splitlines() if line.startswith(f"| `{kind}` |")]
    assert len(rows) == 1, f"docs/reference/errors.md needs one row for {kind}"
    assert f"`{cls.__name__}`" in rows[0]
    assert f"`{nearest}`" in rows[0]
    assert ("yes" in rows[0]) is cls.retryable_by_kind
