"""What relight uses of torch that torch does not promise to keep, in one place.

Owns: each private name, why it is needed, and in which versions it is there.
Must not: hold logic of relight's.
Invariant: every name here is there in torch 2.4 to 2.13, or its function says what stands for it where it is not.

Typed as Any where torch has no types for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.storage import TypedStorage, UntypedStorage

__all__ = [
    "REBUILD_PARAMETER",
    "REBUILD_QUANTIZED",
    "REBUILD_TYPE",
    "REBUILD_V2",
    "REBUILD_V3",
    "TYPED_DTYPES",
    "map_location_set",
    "new_storage",
    "restore_location",
    "safe_globals",
    "skips_data",
    "sparse_to_validate",
    "storage_type",
    "storage_type_of",
    "tensor_metadata",
    "typed_storage",
    "validate_sparse",
]

# The functions whose names torch.save writes into every file; they stay as long as the files do.
REBUILD_V2: Any = torch._utils._rebuild_tensor_v2
REBUILD_V3: Any = torch._utils._rebuild_tensor_v3
REBUILD_QUANTIZED: Any = torch._utils._rebuild_qtensor
REBUILD_TYPE: Any = torch._tensor._rebuild_from_type_v2
REBUILD_PARAMETER: tuple[Any, ...] = (
    torch._utils._rebuild_parameter,
    torch._utils._rebuild_parameter_with_state,
)

# Dtypes with a storage class of their own in the file, as FloatStorage; newer dtypes are bytes and a dtype. Without the
# quantized ones, whose tensors are rebuilt in another way.
TYPED_DTYPES: frozenset[torch.dtype] = frozenset(
    dtype for dtype in torch.storage._dtype_to_storage_type_map() if not str(dtype).startswith("torch.q")
)


def typed_storage(storage: UntypedStorage, dtype: torch.dtype) -> Any:
    """A TypedStorage without its deprecation warning: what rebuild functions take and persistent ids name."""
    make: Any = TypedStorage
    return make(wrap_storage=storage, dtype=dtype, _internal=True)


def storage_type_of(dtype: torch.dtype) -> Any:
    """The class that stands for a dtype in a persistent id, as torch.FloatStorage."""
    return getattr(torch, torch.storage._dtype_to_storage_type_map()[dtype])


def storage_type(name: str) -> Any:
    """What torch.load makes of such a class: only its dtype. Raises KeyError for other names."""
    make: Any = torch.serialization.StorageType
    return make(name)


def new_storage(nbytes: int, device: str = "cpu") -> UntypedStorage:
    """A storage with no values yet. Public, but without types."""
    make: Any = UntypedStorage
    storage: UntypedStorage = make(nbytes, device=device)
    return storage


def tensor_metadata(tensor: torch.Tensor) -> dict[str, bool]:
    """The conj and neg bits of a tensor, as torch.save writes them."""
    get: Any = torch._utils.get_tensor_metadata
    metadata: dict[str, bool] = get(tensor)
    return metadata


def restore_location(map_location: Any) -> Any:
    """The function (storage, location) -> storage that torch.load makes of `map_location`."""
    make: Any = torch.serialization._get_restore_location
    return make(map_location)


def skips_data() -> bool:
    """Whether the caller is inside `torch.serialization.skip_data`, which torch has since 2.5."""
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
    validate: Any = torch._utils._validate_loaded_sparse_tensors
    checks: Any = torch.sparse.check_sparse_tensor_invariants
    with checks(enable=always or checks.is_enabled()):
        validate()


@contextmanager
def safe_globals(items: Sequence[Any]) -> Iterator[None]:
    """`torch.serialization.safe_globals`, which torch 2.4 lacks, and which forgets what the user had added too."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals(list(items))
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


@contextmanager
def map_location_set(map_location: Any) -> Iterator[None]:
    """Tells torch's rebuild functions of tensors without a storage where they go, as torch.load does.

    In torch 2.4 it is an attribute of another thread-local object.
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
