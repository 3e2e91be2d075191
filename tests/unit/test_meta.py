"""meta: what a caller may say of a checkpoint, as strict JSON."""

from __future__ import annotations

import json
import math

import numpy
import pytest
import torch
from relight.exceptions import InvalidArgument
from relight.meta import meta_to_json


def test_scalars_of_numpy_and_torch_become_plain_json() -> None:
    meta = {
        "loss": numpy.float32(0.5),
        "n": numpy.int64(3),
        "t": torch.tensor(2),
        "ok": True,
        "l": (1, None),
    }
    assert json.loads(meta_to_json(meta)) == {"loss": 0.5, "n": 3, "t": 2, "ok": True, "l": [1, None]}
    assert meta_to_json(None) == "{}"


def test_numbers_that_json_lacks_become_words_and_cost_no_save() -> None:
    meta = {"loss": math.nan, "best": [math.inf, -math.inf], "t": torch.tensor(float("nan"))}
    assert json.loads(meta_to_json(meta), parse_constant=pytest.fail) == {
        "loss": "NaN", "best": ["Infinity", "-Infinity"], "t": "NaN",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ({"a": {"b": object()}}, r"meta\['a'\]\['b'\] is a object"),
        ({"a": [torch.zeros(2)]}, r"meta\['a'\]\[0\] is a Tensor"),
        ({1: 2}, "meta has the key 1"),
        ([1], "meta is a list"),
    ],
)
def test_what_is_no_json_is_refused_by_its_key(meta: object, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        meta_to_json(meta)  # type: ignore[arg-type]


def test_a_meta_inside_itself_is_refused() -> None:
    meta: dict[str, object] = {}
    meta["self"] = meta
    with pytest.raises(InvalidArgument, match="nested more than 64 deep"):
        meta_to_json(meta)
