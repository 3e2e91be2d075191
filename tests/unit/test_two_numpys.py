"""BL-041: arrays and scalars cross between numpy 1.26 and 2, in both directions.

Needs a folder with the other numpy (`pip install --no-deps --target <folder> numpy==1.26.4`), named by the variable
RELIGHT_TEST_OTHER_NUMPY.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

OTHER = os.environ.get("RELIGHT_TEST_OTHER_NUMPY")

STATE = """
import sys, warnings
warnings.simplefilter("ignore")  # torch says that it was built with another numpy
import numpy as np, torch, relight
state = {
    "array": np.arange(6, dtype=np.float32).reshape(2, 3),
    "big": np.arange(3, dtype=">i4"),
    "text": np.array(["a", "b"]),
    "records": np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
    "times": np.array(["2020-01-01"], "datetime64[s]"),
    "float": np.float64(1.5),
    "int": np.int32(-7),
    "bool": np.bool_(True),
    "str": np.str_("x"),
    "long": np.longdouble(2.5),
    "when": np.datetime64("2020-02-03", "D"),
    "legacy": np.random.RandomState(3).get_state(),
    "dtype": np.dtype("<f4"),
}
"""
SAVE = STATE + "relight.save(state, sys.argv[1])"
LOAD = (
    STATE
    + """
for loaded in (relight.load(sys.argv[1]), torch.load(sys.argv[1], weights_only=False)):
    assert list(loaded) == list(state)
    for name, value in state.items():
        got = loaded[name]
        assert type(got) is type(value), (name, type(got))
        if isinstance(value, (np.ndarray, np.generic)):
            assert got.dtype == value.dtype and np.array_equal(got, value), name
    assert np.array_equal(loaded["legacy"][1], state["legacy"][1])
print(np.__version__)
"""
)


@pytest.mark.skipif(OTHER is None, reason="RELIGHT_TEST_OTHER_NUMPY names no folder with another numpy")
@pytest.mark.parametrize("direction", ["to the other", "from the other"])
def test_bl_041_values_cross_between_two_numpys(tmp_path: Path, direction: str) -> None:
    other = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [OTHER, os.environ.get("PYTHONPATH")]))}
    writer, reader = (None, other) if direction == "to the other" else (other, None)
    path = str(tmp_path / "x.pt")
    subprocess.run([sys.executable, "-c", SAVE, path], env=writer, check=True, timeout=120)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, path], env=reader, check=True, timeout=120, capture_output=True, text=True
    )
    assert done.stdout.strip()
