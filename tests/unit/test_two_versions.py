"""Files cross between two versions of torch and numpy, both ways, through relight and through plain torch.load.

Needs an interpreter with another torch, named by the variable RELIGHT_TEST_OTHER_PYTHON; relight comes from here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import relight

OTHER = os.environ.get("RELIGHT_TEST_OTHER_PYTHON")
PACKAGE = Path(relight.__file__).parents[1]

STATE = """
import os, random, sys, warnings
import numpy as np, torch, relight
folder = sys.argv[1]

def tensors():
    torch.manual_seed(0)
    base = torch.arange(60.0).view(6, 10)
    table = torch.randn(1000, 64)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    state = {"base": base, "view": base[::2, ::3], "row": table[3], "big": torch.randn(1 << 16),
             "model": model.state_dict(),
             "parameter": torch.nn.Parameter(torch.ones(3)), "frozen": torch.nn.Parameter(torch.ones(2), False),
             "conj": torch.randn(4, dtype=torch.complex64).conj(), "empty": torch.empty(0, 3), "n": 1 << 70,
             "text": "caf\\u00e9", "none": None, "list": [1, 2.5, (True, {"k": torch.ones(1)})]}
    for name in ("bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 "
                 "float8_e4m3fn float8_e5m2").split():
        state[name] = torch.arange(8).to(getattr(torch, name))
    return state

def newer():  # what the weights-only loader of torch 2.4 refuses, so that torch.load needs weights_only=False there
    state = {name: torch.arange(8).to(getattr(torch, name)) for name in ("uint16", "uint32", "uint64")}
    return {**state, "set": {1, 2}, "complex": 1 + 2j, "bytearray": bytearray(b"ab"), "bytes": b"\\x00\\xff",
            "two dtypes": [state["uint16"], state["uint16"].view(torch.int16)],
            "array": np.arange(6.0).reshape(2, 3), "records": np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
            "scalar": np.float32(1.5), "when": np.datetime64("2020-02-03", "D")}

def same(a, b, at="state"):
    assert type(a) is type(b), (at, type(a), type(b))
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.stride(), a.requires_grad) == (b.dtype, b.shape, b.stride(), b.requires_grad), at
        if a.dtype.is_complex or not a.numel():
            assert torch.equal(a, b), at
        else:
            one, other = (x.detach().contiguous().view(torch.uint8).tolist() for x in (a, b))
            assert one == other, at
    elif isinstance(a, dict):
        assert list(a) == list(b), at
        for key in a:
            same(a[key], b[key], f"{at}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), at
        for index, (one, other) in enumerate(zip(a, b)):
            same(one, other, f"{at}.{index}")
    elif isinstance(a, (np.ndarray, np.generic)):
        assert a.dtype == b.dtype and np.array_equal(a, b), at
    else:
        assert a == b, at

def training():
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    generator, numpy_generator = torch.Generator().manual_seed(5), np.random.default_rng(6)
    return model, optimizer, scheduler, generator, numpy_generator

def steps(model, optimizer, scheduler, generator, numpy_generator):
    values = []
    for _ in range(3):
        loss = model(torch.randn(8, 4, generator=generator)).square().mean()
        loss = loss + torch.rand(()) * float(numpy_generator.random())
        optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step()
        values.append([float(loss.detach()), random.random(), float(np.random.rand())])
    return values

def parts_of(parts):
    return relight.TrainState(**dict(zip(("model", "optimizer", "scheduler", "generator", "shuffle"), parts)))
"""

SAVE = (
    STATE
    + """
relight.save(tensors(), folder + "/tensors.pt")
relight.save(newer(), folder + "/newer.pt")
with relight.Checkpointer(folder + "/run") as ckpt:
    parts = training()
    random.seed(1); np.random.seed(2)
    steps(*parts)
    ckpt.save(3, parts_of(parts))
    ckpt.wait()
    relight.save(steps(*parts), folder + "/expected.pt")
import nebulaml as nm
nm.init(folder + "/nebula")
nm.Checkpoint("global_step7", 1).save("m", tensors())
nm.flush_persistence()
print(torch.__version__)
"""
)
LOAD = (
    STATE
    + """
path = folder + "/tensors.pt"
state = tensors()
same(relight.load(path), state)
same(relight.load(path, mmap=True), state)
same(relight.load(path, map_location="cpu"), state)
same(relight.load(path, weights_only=False), state)
assert relight.load(path, map_location="meta")["base"].is_meta
for options in ({}, {"mmap": True}, {"map_location": "cpu"}):
    same(torch.load(path, weights_only=True, **options), state)
    same(torch.load(path, weights_only=False, **options), state)
with relight.open(path) as view:
    assert torch.equal(view["view"], state["view"])
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
from relight.torch.restore import load_into
load_into(model, relight.load(path)["model"])
same(dict(model.state_dict()), dict(state["model"]))

path = folder + "/newer.pt"
state = newer()
same(relight.load(path), state)
same(torch.load(path, weights_only=False), state)
assert relight.load(path)["two dtypes"][0].data_ptr() % 64 == 0
one, other = torch.load(path, weights_only=False)["two dtypes"]
assert one.data_ptr() == other.data_ptr()

parts = training()
with relight.Checkpointer(folder + "/run") as ckpt:
    ckpt.resume(parts_of(parts))
expected, found = torch.load(folder + "/expected.pt", weights_only=True), steps(*parts)
assert [row[1:] for row in found] == [row[1:] for row in expected]  # Python and numpy: exact
for one, other in zip(found, expected):
    assert abs(one[0] - other[0]) < 1e-6, (found, expected)  # the arithmetic of two builds may differ in the last bit

import nebulaml as nm
nm.init(folder + "/nebula")
same(nm.get_latest_checkpoint().load("m"), tensors())
print(torch.__version__)
"""
)


@pytest.mark.skipif(OTHER is None, reason="RELIGHT_TEST_OTHER_PYTHON names no interpreter with another torch")
@pytest.mark.parametrize("direction", ["to the other", "from the other"])
def test_files_cross_between_two_versions_of_torch(tmp_path: Path, direction: str) -> None:
    """Guards: a name, a dtype or an opcode in the file that an older torch lacks."""
    assert OTHER is not None
    writer, reader = (sys.executable, OTHER) if direction == "to the other" else (OTHER, sys.executable)
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "RELIGHT_MEMORY_DIR": str(tmp_path)}
    versions = []
    for python, script in ((writer, SAVE), (reader, LOAD)):
        done = subprocess.run(
            [python, "-W", "ignore", "-c", script, str(tmp_path)],
            env=environment,
            timeout=300,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        versions.append(done.stdout.split()[-1])
    assert versions[0] != versions[1], "both interpreters have the same torch"
