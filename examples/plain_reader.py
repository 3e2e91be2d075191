"""Opens checkpoint files with plain torch in a process where relight cannot be imported, and compares two of the runs.

Usage: plain_reader.py REFERENCE MODEL OPTIMIZER FILE...: prints one JSON object {loaded, tensors, different: [names]}.
"""

import json
import sys

for name in ("relight", "nebulaml", "torch_nebula"):
    sys.modules[name] = None  # type: ignore[assignment]  # from here on, importing it raises ImportError

import torch  # noqa: E402


def leaves(value: object, name: str = "") -> dict[str, object]:
    """Everything that is no dict, list or tuple, by its path."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    else:
        return {name: value}
    return {path: leaf for key, item in items for path, leaf in leaves(item, f"{name}/{key}").items()}


def same(one: object, other: object) -> bool:
    """Equal type, shape and every bit."""
    if torch.is_tensor(one) and torch.is_tensor(other):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()
    return type(one) is type(other) and one == other


def main() -> None:
    """Loads and compares."""
    reference, model, optimizer, *files = sys.argv[1:]
    tensors = 0
    for path in files:
        # These are our own files; some hold the states of Python's and NumPy's generators, which weights_only refuses.
        tensors += sum(torch.is_tensor(leaf) for leaf in leaves(torch.load(path, weights_only=False)).values())
    expected = torch.load(reference, weights_only=False)
    different = []
    for part, path in (("model", model), ("optimizer", optimizer)):
        there, wanted = leaves(torch.load(path, weights_only=True)), leaves(expected[part])
        names = sorted(there.keys() | wanted.keys())
        missing = object()
        different += [part + n for n in names if not same(there.get(n, missing), wanted.get(n, missing))]
    print(json.dumps({"loaded": len(files), "tensors": tensors, "different": different}))


if __name__ == "__main__":
    main()
