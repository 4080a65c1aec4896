"""What a lowered model is run on: the example and one other batch size, with the model's own outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from resfx.export.blame import first_line
from resfx.export.call import Call
from resfx.export.run import run_eager
from resfx.export.sizes import Sizes, batch_of, other_batches


@dataclass(frozen=True, eq=False)
class Feed:
    """Flat inputs and the outputs the model itself gives for them."""

    inputs: tuple[Tensor, ...]
    expected: tuple[Tensor, ...]


def feeds_for(
    model: nn.Module, call: Call, sizes: Sizes, expected: Sequence[Tensor]
) -> tuple[dict[str, Feed], tuple[str, ...]]:
    """Feeds by label ("batch 4") and notes; `expected` are the model's outputs on the example.

    A batch size that the model itself refuses is passed over; a batch that cannot vary becomes a note.
    """
    example = Feed(call.tensors, tuple(expected))
    batch = batch_of(sizes, call.tensors)
    if batch is None:
        return {"example": example}, ("no input has a dimension: there is no other batch size to check",)
    feeds = {f"batch {batch}": example}
    reason = "the export fixed it"
    for size, tensors in other_batches(sizes, call.tensors):
        try:
            feeds[f"batch {size}"] = Feed(tensors, run_eager(model, call, tensors).tensors)
        except Exception as error:  # the model's own code: it may refuse a batch size in any way
            reason = f"the model refuses {size} rows with {first_line(error)}"
            continue
        return feeds, ()
    return feeds, (f"the batch is fixed at {batch} ({reason}): no other batch size was checked",)
