"""The sweep survives what its models do, goes on where it stopped, and reports what it saw."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo_sweep
from zoo_report import gather, page, reason_class, runs
from zoo_steps import Report, Subject, attempt, distance
from zoo_sweep import is_open, read, shard, sweep, take_through

import resfx

NAME = "vis/vit"


def spin(subject: Subject, report: Report) -> None:
    report("capture", {"status": "pass"})
    while True:
        pass


def crash(subject: Subject, report: Report) -> None:
    os._exit(3)


def greedy(subject: Subject, report: Report) -> None:
    report("capture", attempt(lambda: {"status": "pass", "size": torch.empty(1 << 40).numel()}))


@pytest.mark.parametrize(("group", "kind"), [(spin, "timeout"), (crash, "crash")])
def test_a_limit_costs_one_line(group: Callable[..., None], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(zoo_sweep.GROUPS, "find", group)
    found = take_through(NAME, ["find", "delta"], 6)
    assert list(found) == ["find"]
    assert found["find"]["steps"]["limit"]["class"] == kind
    assert (found["find"]["steps"].get("capture") == {"status": "pass"}) is (kind == "timeout")


def test_memory_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(zoo_sweep.GROUPS, "find", greedy)
    step = take_through(NAME, ["find"], 30)["find"]["steps"]["capture"]
    assert step["status"] == "fail"
    assert "memory" in step["reason"]


def test_the_sweep_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, done = tmp_path / "results.jsonl", []

    def fake(name: str, groups: Any, timeout: float) -> dict[str, Any]:
        done.append((name, tuple(groups)))
        late = {"limit": {"status": "fail", "class": "timeout", "reason": "late"}}
        return {group: {"seconds": 1.0, "steps": late if name == "tv/resnet34" else {}} for group in groups}

    monkeypatch.setattr(zoo_sweep, "take_through", fake)
    for groups, timeout in ((["find"], 5.0), (["find", "delta"], 5.0), (["find"], 9.0)):
        sweep(results, [NAME, "tv/resnet34"], groups, timeout, say=lambda text: None)
    assert done == [
        (NAME, ("find",)),
        ("tv/resnet34", ("find",)),
        (NAME, ("delta",)),
        ("tv/resnet34", ("delta",)),
        ("tv/resnet34", ("find",)),
    ]
    assert read(results)["tv/resnet34", "find"]["timeout"] == 9.0
    assert is_open(None, 1.0)


def test_every_model_is_in_one_part() -> None:
    assert all(sum(shard(name, part, 5) for part in range(5)) == 1 for name in zoo_sweep.ZOO)


def test_the_page_counts_and_lists(tmp_path: Path) -> None:
    steps = {
        NAME: {"capture": {"status": "pass"}, "sites": {"status": "fail", "reason": "3 for 4"}},
        "qwen2": {"capture": {"status": "refuse", "class": "CaptureError", "reason": "`model.1` | at line 7"}},
    }
    lines = [
        json.dumps({"model": name, "group": "find", "commit": "abc", "steps": each}) for name, each in steps.items()
    ]
    results = tmp_path / "results.jsonl"
    results.write_text("\n".join(lines))
    text = page(gather([results]), list(runs([results])))
    assert f"- find: 2 of {len(zoo_sweep.ZOO)} models; 2 at abc" in text
    assert "| capture | - | - | 1 / 1 / 0 / 0 | 1 / 1 / 0 / 0 | 50.0% |" in text
    assert "| 1 | capture | refuse | CaptureError: `..` \\| at line # |" in text
    assert f"| {NAME} | sites | fail | 3 for 4 |" in text


def test_the_later_line_counts(tmp_path: Path) -> None:
    files = [tmp_path / "old.jsonl", tmp_path / "new.jsonl"]
    late = {"limit": {"status": "fail", "class": "timeout", "reason": "late"}}
    for file, steps in zip(files, (late, {"capture": {"status": "pass"}}), strict=True):
        file.write_text(json.dumps({"model": NAME, "group": "find", "commit": file.stem, "steps": steps}))
    assert gather(files) == {NAME: {"capture": {"status": "pass"}}}
    assert list(runs(files)) == [f"- find: 1 of {len(zoo_sweep.ZOO)} models; 1 at new"]


def test_reasons_are_classes() -> None:
    one, two = ({"reason": f"`layer.{i}` differs by {i}.5e-{i} ('a{i}')"} for i in (1, 2))
    assert reason_class(one) == reason_class(two)


def test_a_refusal_is_ours_and_all_else_a_failure() -> None:
    def refuse() -> Any:
        raise resfx.CaptureError("no")

    assert attempt(refuse)["status"] == "refuse"
    assert attempt(lambda: {}["x"])["status"] == "fail"


def test_distance_sees_what_differs() -> None:
    one = {"a": torch.ones(3)}
    assert distance(one, one) == 0
    assert distance({"a": torch.full((3,), 1.1)}, one) == pytest.approx(0.1, rel=1e-4)
    nan = {"a": torch.tensor([1.0, float("nan"), 1.0])}
    assert distance(nan, nan) == 0
    assert distance(nan, one) == distance(one, {"b": torch.ones(3)}) == float("inf")
