"""find on every model: sites, streams, branches, loops and source lines as read from the models' source."""

from __future__ import annotations

import linecache
from collections import Counter

import pytest
from models_zoo import ZOO

import resfx


def text_of(source: str) -> str:
    """The statement at `file:line`, "" for no source."""
    file, _, line = source.rpartition(":")
    return linecache.getline(file, int(line)).strip() if source else ""


@pytest.mark.parametrize("name", ZOO)
def test_find(name: str) -> None:
    entry = ZOO[name]
    model, args, kwargs = entry.build()
    names = list(model.state_dict())
    found = resfx.find(model, args, kwargs)

    assert tuple(len(stream.sites) for stream in found.streams) == entry.streams
    assert Counter(text_of(site.source) for site in found.sites) == entry.adds
    expected = sum(entry.streams) if entry.branches is None else entry.branches
    assert sum(len(site.branches) for site in found.sites) == expected
    assert tuple((loop.count, loop.branches) for loop in found.loops) == entry.loops
    assert all(site.rewritable for site in found.sites)
    assert all(stream.refused is None and stream.axis is not None for stream in found.streams)
    assert list(model.state_dict()) == names, "find changed the model"
    assert not model.training

    for stream in found.streams:
        # The norm or activation after the last site has no site to lead to: it is what leaves the stream.
        assert {site.transition for site in stream.sites[:-1]} <= {entry.transition or ()}


@pytest.mark.parametrize("name", ["nanogpt", "bert"])
def test_find_in_train_mode_finds_the_same(name: str) -> None:
    entry = ZOO[name]
    model, args, kwargs = entry.build()
    found = resfx.find(model.train(), args, kwargs)
    assert tuple(len(stream.sites) for stream in found.streams) == entry.streams
    assert model.training
