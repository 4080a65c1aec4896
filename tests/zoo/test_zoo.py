"""The zoo: find and a warm start on every model, ONNX on a fixed sample. `pytest -m zoo`.

`ZOO_SHARD=K/N` takes the K-th (from 0) of N parts of the models; `ZOO_WHOLE=K/N` only those of that part through every step of two
forms, and the others through find and a warm start of Delta. Each model runs in a process of its own, as in the sweep of `make coverage`.
"""

from __future__ import annotations

import os

import pytest
from zoo_builders import ZOO
from zoo_known import KNOWN
from zoo_sweep import shard, take_through, warm_up

# One of each kind: a decoder, a mixture of experts, an encoder, two sequences, a pyramid, plain convolutions, windows.
ONNX_SAMPLE = (
    "qwen2",
    "olmo2",
    "enc/albert_group2",
    "s2s/mt5",
    "vis/pvt_v2",
    "tv/resnet34",
    "timm/swin_tiny_patch4_window7_224",
)
# 412 million parameters: its copies and their gradients do not fit into the memory that one model gets, so it is searched only.
LARGE = ("timm/deepseek_vit_412m",)
SECONDS = 300.0


def in_part(variable: str, name: str) -> bool:
    part, parts = map(int, os.environ.get(variable, "0/1").split("/"))
    return shard(name, part, parts)


def groups_of(name: str) -> list[str]:
    if name in LARGE:
        return ["find"]
    rewrites = ["find", "delta", "multigate"] if in_part("ZOO_WHOLE", name) else ["quick"]
    return [*rewrites, *(["onnx", "multigate_onnx"] if name in ONNX_SAMPLE else [])]


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm_up()


@pytest.mark.zoo
@pytest.mark.parametrize("name", [name for name in ZOO if in_part("ZOO_SHARD", name)])
def test_zoo(name: str) -> None:
    groups = groups_of(name)
    found = take_through(name, groups, SECONDS * len(groups))
    results = {step: result for group in found.values() for step, result in group["steps"].items()}
    wrong = {step: result["reason"] for step, result in results.items() if result["status"] in ("fail", "refuse")}
    known = {
        step: text for step, text in KNOWN.get(name, {}).items() if "quick" not in groups or "multigate" not in step
    }
    assert wrong.keys() == known.keys(), wrong
    assert all(text in wrong[step] for step, text in known.items()), wrong


@pytest.mark.zoo
def test_the_table_of_what_is_known_names_models_of_the_zoo() -> None:
    assert set(KNOWN) <= set(ZOO)
    assert set(ONNX_SAMPLE) <= set(ZOO)
