"""What the zoo's models do not pass, by step, with a piece of the reason: refusals, and answers in which the table is not ours.

A model that is not here passes every step.
"""

from __future__ import annotations

KNOWN: dict[str, dict[str, str]] = {
    # The last layer's sum of the layout stream reaches no output: torch.export drops it, and there is nothing to rewrite.
    "enc/lilt": {"sites": "7 for 8", "branches": "7 for 8", "lines": "modeling_lilt.py"},
}
