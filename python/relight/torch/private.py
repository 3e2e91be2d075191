"""What relight uses of torch that torch does not promise to keep, in one place.

Owns: each private name, why it is needed, and in which versions it is there.
Must not: hold logic of relight's.
Invariant: every name here was looked up in torch 2.4 and in torch 2.13, or says since when it is there.

Typed as Any where torch has no types for it.
"""

from __future__ import annotations

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
    "new_storage",
    "restore_location",
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


def sparse_to_validate() -> list[torch.Tensor]:
    """Sparse tensors that were rebuilt without a check; a load checks them when all of its data is there."""
    waiting: list[torch.Tensor] = torch._utils._sparse_tensors_to_validate
    return waiting


def validate_sparse() -> None:
    """Checks them now, if the user asked torch for such checks, and forgets them."""
    validate: Any = torch._utils._validate_loaded_sparse_tensors
    validate()
