"""What relight uses of torch that torch does not promise to keep, in one place.

Owns: each private name, why it is needed, and in which versions it is there.
Must not: hold logic of relight's.
Invariant: no other module of relight names anything private of torch (`tests/unit/test_private_torch.py`). Every name
    was seen in torch 2.4.1, 2.7.1 and 2.13.0, but where its comment says what stands for it in some of them.

What is needed in every case is looked up when this module is imported: a torch that has lost or renamed it is reported
before anything is written or read, by the name that is lacking.

Typed as Any where torch has no types for it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from relight.exceptions import CheckpointError
from torch.storage import TypedStorage, UntypedStorage

__all__ = [
    "REBUILD_PARAMETER",
    "REBUILD_QUANTIZED",
    "REBUILD_TYPE",
    "REBUILD_V2",
    "REBUILD_V3",
    "SEEN",
    "STORAGE_CLASSES",
    "TYPED_DTYPES",
    "backward_hooks_of",
    "fake_device_of",
    "in_fake_mode",
    "is_sparse_class",
    "load_hooks_of",
    "load_rule_of",
    "map_location_set",
    "new_storage",
    "optimizer_load_hooks_of",
    "restore_location",
    "safe_globals",
    "set_checkpoint_offset",
    "set_fake_device",
    "skips_data",
    "sparse_to_validate",
    "storage_identity",
    "storage_type",
    "storage_type_of",
    "tensor_metadata",
    "typed_storage",
    "untyped_of",
    "validate_sparse",
    "version_of",
    "weights_only_globals",
    "without_torch_function",
]

SEEN = "2.4 to 2.13"  # what docs/reference/compatibility.md and the error below say


def _need(path: str) -> Any:
    """What torch has under this name.

    Raises:
        CheckpointError: this torch has no such name.
    """
    found: Any = torch
    done = "torch"
    for part in path.split(".")[1:]:
        done = f"{done}.{part}"
        if not hasattr(found, part):
            try:
                importlib.import_module(done)  # a module that `import torch` leaves out
            except ModuleNotFoundError:
                raise CheckpointError(
                    f"relight needs {path}, which this torch ({torch.__version__}) does not have. It was tested with "
                    f"torch {SEEN}: use one of these, or a newer relight"
                ) from None
        found = getattr(found, part)
    return found


def _attribute(path: str) -> Any:
    """A function for the last name of `path` of an object: as fast as the attribute, and refused if it is not there."""
    _need(path)
    return attrgetter(path.rpartition(".")[2])


# The functions whose names torch.save writes into every file; they stay as long as the files do.
REBUILD_V2: Any = _need("torch._utils._rebuild_tensor_v2")
REBUILD_V3: Any = _need("torch._utils._rebuild_tensor_v3")
REBUILD_QUANTIZED: Any = _need("torch._utils._rebuild_qtensor")
REBUILD_TYPE: Any = _need("torch._tensor._rebuild_from_type_v2")
REBUILD_PARAMETER: tuple[Any, ...] = (
    _need("torch._utils._rebuild_parameter"),
    _need("torch._utils._rebuild_parameter_with_state"),
)

# The classes that a pickler meets as storages, as torch.FloatStorage; a set that torch fills when it is imported.
STORAGE_CLASSES: Any = _need("torch._storage_classes")
# The classes of old, as torch.sparse.FloatTensor, which files may name.
_TENSOR_CLASSES: Any = _need("torch._tensor_classes")

_storage_types: Callable[[], dict[torch.dtype, str]] = _need("torch.storage._dtype_to_storage_type_map")

# Dtypes with a storage class of their own in the file, as FloatStorage; newer dtypes are bytes and a dtype. Without the
# quantized ones, whose tensors are rebuilt in another way.
TYPED_DTYPES: frozenset[torch.dtype] = frozenset(
    dtype for dtype in _storage_types() if not str(dtype).startswith("torch.q")
)

# How often a tensor was changed in place. The autograd documentation speaks of it, so it is half public.
version_of: Callable[[torch.Tensor], int] = _attribute("torch.Tensor._version")
backward_hooks_of: Callable[[torch.Tensor], Any] = _attribute("torch.Tensor._backward_hooks")
# Which storage it is, as long as it is alive: two Python objects can be one storage.
storage_identity: Callable[[UntypedStorage], int] = _attribute("torch.UntypedStorage._cdata")
# `TypedStorage.untyped()` is public, and warns.
untyped_of: Callable[[Any], Any] = attrgetter("_untyped_storage")

# Inside it a tensor subclass answers as the plain tensor that it is to C++.
without_torch_function: Callable[[], Any] = _need("torch._C.DisableTorchFunctionSubclass")

_own_list: Callable[[], dict[str, object]] = _need("torch._weights_only_unpickler._get_allowed_globals")
_detect_fake_mode: Callable[[Any], Any] = _need("torch._guards.detect_fake_mode")
_tensor_metadata: Callable[[torch.Tensor], dict[str, bool]] = _need("torch._utils.get_tensor_metadata")
_restore_location: Callable[[Any], Any] = _need("torch.serialization._get_restore_location")
_storage_type: Callable[[str], Any] = _need("torch.serialization.StorageType")
_validate_sparse: Callable[[], None] = _need("torch._utils._validate_loaded_sparse_tensors")


def weights_only_globals() -> dict[str, object]:
    """The list of torch's own weights-only loader, by the names in the pickle; a new dict each time.

    What newer versions have on it is added as far as this torch has the thing at all: 2.4 lacks some of its own dtypes
    (uint16 and others), and jagged tensors, which newer ones allow once `torch.nested` is imported.
    """
    names = ("_rebuild_device_tensor_from_numpy", "_rebuild_device_tensor_from_cpu_tensor")
    newer = {f"torch._utils.{name}": getattr(torch._utils, name) for name in names if hasattr(torch._utils, name)}
    dtypes = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    jagged: Any = sys.modules.get("torch.nested._internal.nested_tensor")  # 2.4 imports it with the first one
    if jagged is not None:
        newer["torch.nested._internal.nested_tensor.NestedTensor"] = jagged.NestedTensor
    return {**newer, **dtypes, **_own_list()}


def typed_storage(storage: UntypedStorage, dtype: torch.dtype) -> Any:
    """A TypedStorage without its deprecation warning: what rebuild functions take and persistent ids name."""
    make: Any = TypedStorage
    return make(wrap_storage=storage, dtype=dtype, _internal=True)


def storage_type_of(dtype: torch.dtype) -> Any:
    """The class that stands for a dtype in a persistent id, as torch.FloatStorage."""
    return getattr(torch, _storage_types()[dtype])


def storage_type(name: str) -> Any:
    """What torch.load makes of such a class: only its dtype. Raises KeyError for other names."""
    return _storage_type(name)


def new_storage(nbytes: int, device: str = "cpu") -> UntypedStorage:
    """A storage with no values yet. Public, but without types."""
    make: Any = UntypedStorage
    storage: UntypedStorage = make(nbytes, device=device)
    return storage


def tensor_metadata(tensor: torch.Tensor) -> dict[str, bool]:
    """The conj and neg bits of a tensor, as torch.save writes them."""
    return _tensor_metadata(tensor)


def restore_location(map_location: Any) -> Any:
    """The function (storage, location) -> storage that torch.load makes of `map_location`."""
    return _restore_location(map_location)


def skips_data() -> bool:
    """Whether the caller is inside `torch.serialization.skip_data`, which 2.4 lacks."""
    local: Any = getattr(torch.serialization, "_serialization_tls", None)
    return bool(getattr(local, "skip_data", False))


def sparse_to_validate() -> list[torch.Tensor]:
    """Sparse tensors that were rebuilt without a check; a load checks them when all of its data is there."""
    utils: Any = torch._utils
    per_thread = getattr(utils, "_get_sparse_tensors_to_validate", None)  # torch 2.15 has this, 2.13 one list for all
    waiting: list[torch.Tensor] = utils._sparse_tensors_to_validate if per_thread is None else per_thread()
    return waiting


def validate_sparse(*, always: bool = False) -> None:
    """Checks them now, if that is `always` done or the user asked torch for such checks, and forgets them."""
    checks: Any = torch.sparse.check_sparse_tensor_invariants
    with checks(enable=always or checks.is_enabled()):
        _validate_sparse()


@contextmanager
def safe_globals(items: Sequence[Any]) -> Iterator[None]:
    """`torch.serialization.safe_globals`, which torch 2.4 lacks, and which forgets what the user had added too.

    Of pairs (object, name), which torch takes since 2.6, an older one is told the object alone.
    """
    before = list(torch.serialization.get_safe_globals())  # 2.4 gives the list itself, which would grow
    pairs = hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint")
    told = [item[0] if isinstance(item, tuple) and not pairs else item for item in items]
    torch.serialization.add_safe_globals(told)
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


@contextmanager
def map_location_set(map_location: Any) -> Iterator[None]:
    """Tells torch's rebuild functions of tensors without a storage where they go, as torch.load does.

    In torch 2.4 it is an attribute of another thread-local object, `torch._utils._thread_local_state`.
    """
    local: Any = getattr(torch.serialization, "_serialization_tls", None)
    if local is None or not hasattr(local, "map_location"):
        local = getattr(torch._utils, "_thread_local_state")  # noqa: B009  # torch 2.13 has no such name to check
    before = getattr(local, "map_location", None)
    local.map_location = map_location
    try:
        yield
    finally:
        local.map_location = before


def is_sparse_class(cls: Any) -> bool:
    """Whether it is one of the classes of old for sparse tensors, as torch.sparse.FloatTensor."""
    return cls in _TENSOR_CLASSES and "sparse" in cls.__module__


def in_fake_mode() -> bool:
    """Whether tensors that are made now are fake ones, without data."""
    return _detect_fake_mode(None) is not None


def fake_device_of(storage: UntypedStorage) -> Any:
    """The device that torch has noted on a storage without data; None if it has not. 2.4 never does."""
    return getattr(storage, "_fake_device", None)


def set_fake_device(storage: Any, location: str) -> None:
    """Notes the device on a storage made under a fake mode, as torch.load does; the rebuild function reads it."""
    storage._fake_device = location


def set_checkpoint_offset(storage: Any, offset: int) -> None:
    """Notes where the bytes of a storage on meta are in the file, as torch.load does since 2.7."""
    storage._checkpoint_offset = offset


def load_hooks_of(module: torch.nn.Module) -> Any:
    """What was registered to change a state dict before the module loads it; empty if nothing was."""
    return module._load_state_dict_pre_hooks


def load_rule_of(module: torch.nn.Module) -> Any:
    """The method by which the class of a module takes its own keys from a state dict."""
    return type(module)._load_from_state_dict


def optimizer_load_hooks_of(optimizer: torch.optim.Optimizer) -> Any:
    """What was registered to change a state before the optimizer loads it; empty if nothing was."""
    return optimizer._optimizer_load_state_dict_pre_hooks
