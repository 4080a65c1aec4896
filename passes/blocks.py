"""How the sites of a stream are grouped into blocks (forms with `granularity="block"`)."""

from __future__ import annotations

from resfx.passes.errors import FormError


def check_options(form: str, granularity: str, block_size: int | None, blocks: int | None) -> None:
    """Block granularity takes exactly one of the two, every other granularity none. Errors: FormError."""
    given = [name for name, value in (("block_size", block_size), ("blocks", blocks)) if value is not None]
    if granularity != "block" and given:
        raise FormError(f"{form}: {given[0]} belongs to granularity=block, not to granularity={granularity}")
    if granularity == "block" and len(given) != 1:
        raise FormError(f"{form}: granularity=block takes exactly one of block_size and blocks")
    for value in (block_size, blocks):
        if value is not None and value < 1:
            raise FormError(f"{form}: {given[0]}={value} must be at least 1")


def refuse(sites: int, blocks: int | None) -> str | None:
    """Why `sites` can't be cut into `blocks`."""
    if blocks is not None and blocks > sites:
        return f"it has {sites} sites, too few for blocks={blocks}; at most {sites} fit"
    return None


def starts(sites: int, block_size: int | None, blocks: int | None) -> frozenset[int]:
    """The first site of every block but the first: sizes as even as possible, the earlier ones larger."""
    if block_size is not None:
        return frozenset(range(block_size, sites, block_size))
    if blocks is None:
        return frozenset()
    size, larger = divmod(sites, blocks)
    return frozenset(block * size + min(block, larger) for block in range(1, blocks))
