# mypy: ignore-errors
"""The Triton kernels of `group_kernels`: one pass over sources that several readers have in common, forward and backward.

A source is [tokens, D], contiguous; keys are [readers, D] in the dtype of statistics, scalars [readers, tokens]. A program takes a token,
or one after the other, and for each the sources, in a loop at run time: the code doesn't grow with their number. Tensors whose number
varies come as `s0`, `s1`, .. (sources) and `r0`, `r1`, .. (results): a compiler sees which pointers are written through.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pick(j, s0, s1, s2, s3, s4, s5, s6, s7):
    """The j-th of 8 tensors."""
    low = tl.where(j < 2, tl.where(j == 0, s0, s1), tl.where(j == 2, s2, s3))
    high = tl.where(j < 6, tl.where(j == 4, s4, s5), tl.where(j == 6, s6, s7))
    return tl.where(j < 4, low, high)


@triton.jit
def _read(row, keys, eps, top, total, mixed, plain, READERS: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr):
    """One more source, whose entries are at `row`, for every reader: maximum of scores, sum of powers, weighted sum; the plain sum."""
    R: tl.constexpr = mixed.shape[0]
    D: tl.constexpr = mixed.shape[1]
    WIDE: tl.constexpr = mixed.dtype
    reader, feature = tl.arange(0, R), tl.arange(0, D)
    squares = tl.zeros([], WIDE)
    score = tl.zeros([R], WIDE)
    for start in tl.static_range(0, D, PART):
        column = start + tl.arange(0, PART)
        v = tl.load(row + column, mask=column < SIZE, other=0.0).to(WIDE)
        within = (reader < READERS)[:, None] & (column < SIZE)[None, :]
        key = tl.load(keys + reader[:, None] * SIZE + column[None, :], mask=within, other=0.0)
        squares += tl.sum(v * v, 0)
        score += tl.sum(key * v[None, :], 1)
    score *= tl.rsqrt(squares / SIZE + eps)
    v = tl.load(row + feature, mask=feature < SIZE, other=0.0).to(WIDE)
    largest = tl.maximum(top, score)
    keep, power = tl.exp(top - largest), tl.exp(score - largest)
    return largest, total * keep + power, mixed * keep[:, None] + power[:, None] * v[None, :], plain + v


@triton.jit
def _places(token, tokens, READERS: tl.constexpr, SIZE: tl.constexpr, R: tl.constexpr, D: tl.constexpr):
    """Where the entries of a token are in [readers, tokens, D] and its scalars in [readers, tokens], and which of them there are."""
    reader, feature = tl.arange(0, R), tl.arange(0, D)
    scalars = reader.to(tl.int64) * tokens + token
    return scalars[:, None] * SIZE + feature[None, :], scalars, (reader < READERS)[:, None] & (feature < SIZE)[None, :]


@triton.jit
def _begin(
    token, tokens, keys, before, lse,
    READERS: tl.constexpr, SIZE: tl.constexpr, R: tl.constexpr, D: tl.constexpr, HAS_SUM: tl.constexpr, CONTINUES: tl.constexpr,
):  # fmt: skip
    """What `_read` starts from: nothing, or with CONTINUES what `before` and `lse` tell."""
    WIDE: tl.constexpr = keys.dtype.element_ty
    reader, feature = tl.arange(0, R), tl.arange(0, D)
    top, total = tl.full([R], float("-inf"), WIDE), tl.zeros([R], WIDE)
    mixed, plain = tl.zeros([R, D], WIDE), tl.zeros([D], WIDE)
    if CONTINUES:
        at, scalars, inside = _places(token, tokens, READERS, SIZE, R, D)
        top = tl.load(lse + scalars, mask=reader < READERS, other=0.0)
        total = tl.full([R], 1.0, WIDE)
        mixed = tl.load(before + at, mask=inside, other=0.0).to(WIDE)
        if HAS_SUM:
            of_sum = (tokens * READERS + token) * SIZE + feature
            plain = tl.load(before + of_sum, mask=feature < SIZE, other=0.0).to(WIDE)
    return top, total, mixed, plain


@triton.jit
def carry_kernel(
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15, s16, s17, s18, s19,
    keys, before, lse, values, count, tokens, eps,
    READERS: tl.constexpr, SIZE: tl.constexpr, R: tl.constexpr, D: tl.constexpr, PART: tl.constexpr,
    HAS_SUM: tl.constexpr, CONTINUES: tl.constexpr,
):  # fmt: skip
    """`read_kernel` over so many sources that others must follow: values is [readers, tokens, D]; with HAS_SUM one more, the sum."""
    token = tl.program_id(0).to(tl.int64)
    reader, feature = tl.arange(0, R), tl.arange(0, D)
    at, scalars, inside = _places(token, tokens, READERS, SIZE, R, D)
    top, total, mixed, plain = _begin(token, tokens, keys, before, lse, READERS, SIZE, R, D, HAS_SUM, CONTINUES)
    for j in range(count):
        low, high = _pick(j, s0, s1, s2, s3, s4, s5, s6, s7), _pick(j - 8, s8, s9, s10, s11, s12, s13, s14, s15)
        source = tl.where(j < 8, low, tl.where(j < 16, high, _pick(j - 16, s16, s17, s18, s19, s19, s19, s19, s19)))
        top, total, mixed, plain = _read(
            source + token * SIZE, keys, eps, top, total, mixed, plain, READERS, SIZE, PART
        )
    tl.store(values + at, mixed / total[:, None], mask=inside)
    if HAS_SUM:
        tl.store(values + (tokens * READERS + token) * SIZE + feature, plain, mask=feature < SIZE)
    tl.store(lse + scalars, top + tl.log(total), mask=reader < READERS)


@triton.jit
def read_kernel(
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11,
    r0, r1, r2, r3, r4, r5, r6, r7,
    keys, before, lse, state, count, tokens, eps,
    READERS: tl.constexpr, SIZE: tl.constexpr, R: tl.constexpr, D: tl.constexpr, PART: tl.constexpr,
    HAS_SUM: tl.constexpr, CONTINUES: tl.constexpr,
):  # fmt: skip
    """The r-th result is V_r = sum_j exp(z_rj - lse[r]) v_j, lse[r] = logsumexp_j z_rj, over `count` sources.

    With HAS_SUM state = sum_j v_j. With CONTINUES over those as well that `before`, like `values` of `carry_kernel`, and `lse` are about.
    """
    token = tl.program_id(0).to(tl.int64)
    reader, feature = tl.arange(0, R), tl.arange(0, D)
    _, scalars, inside = _places(token, tokens, READERS, SIZE, R, D)
    top, total, mixed, plain = _begin(token, tokens, keys, before, lse, READERS, SIZE, R, D, HAS_SUM, CONTINUES)
    for j in range(count):
        low, high = _pick(j, s0, s1, s2, s3, s4, s5, s6, s7), _pick(j - 8, s8, s9, s10, s11, s11, s11, s11, s11)
        row = tl.where(j < 8, low, high) + token * SIZE
        top, total, mixed, plain = _read(row, keys, eps, top, total, mixed, plain, READERS, SIZE, PART)
    rows = _pick(reader, r0, r1, r2, r3, r4, r5, r6, r7) + token * SIZE
    tl.store(rows[:, None] + feature[None, :], mixed / total[:, None], mask=inside)
    if HAS_SUM:
        tl.store(state + token * SIZE + feature, plain, mask=feature < SIZE)
    tl.store(lse + scalars, top + tl.log(total), mask=reader < READERS)


@triton.jit
def _back(
    row, out, later, to_sum, g_row, keys, eps, shift, to_total, for_keys,
    READERS: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr, HAS_SUM: tl.constexpr, HAS_LATER: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of the source at `row` to `out`; what it adds to that of the keys."""
    R: tl.constexpr = for_keys.shape[0]
    D: tl.constexpr = for_keys.shape[1]
    WIDE: tl.constexpr = for_keys.dtype
    reader, feature = tl.arange(0, R), tl.arange(0, D)
    squares = tl.zeros([], WIDE)
    score = tl.zeros([R], WIDE)
    inner = tl.zeros([R], WIDE)
    for start in tl.static_range(0, D, PART):
        column = start + tl.arange(0, PART)
        within = (reader < READERS)[:, None] & (column < SIZE)[None, :]
        v = tl.load(row + column, mask=column < SIZE, other=0.0).to(WIDE)
        key = tl.load(keys + reader[:, None] * SIZE + column[None, :], mask=within, other=0.0)
        g = tl.load(g_row[:, None] + column[None, :], mask=within, other=0.0).to(WIDE)
        squares += tl.sum(v * v, 0)
        score += tl.sum(key * v[None, :], 1)
        inner += tl.sum(g * v[None, :], 1)
    inverse = tl.rsqrt(squares / SIZE + eps)
    score *= inverse
    power = tl.where(reader < READERS, tl.exp(score - shift), 0.0)
    slope = power * (inner + to_total) * inverse
    back = tl.sum(slope * score, 0) * inverse / SIZE
    for start in tl.static_range(0, D, PART):
        column = start + tl.arange(0, PART)
        within = (reader < READERS)[:, None] & (column < SIZE)[None, :]
        v = tl.load(row + column, mask=column < SIZE, other=0.0).to(WIDE)
        key = tl.load(keys + reader[:, None] * SIZE + column[None, :], mask=within, other=0.0)
        g = tl.load(g_row[:, None] + column[None, :], mask=within, other=0.0).to(WIDE)
        own = tl.sum(power[:, None] * g + slope[:, None] * key, 0) - back * v
        if HAS_SUM:
            own += tl.load(to_sum + column, mask=column < SIZE, other=0.0).to(WIDE)
        if HAS_LATER:
            own += tl.load(later + column, mask=column < SIZE, other=0.0).to(WIDE)
        tl.store(out + column, own, mask=column < SIZE)
    v = tl.load(row + feature, mask=feature < SIZE, other=0.0).to(WIDE)
    return for_keys + slope[:, None] * v[None, :]


@triton.jit
def back_older_kernel(
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15,
    to_sources, keys, lse, to_values, to_totals, to_state, later, to_keys, count, tokens, eps, first,
    READERS: tl.constexpr, SIZE: tl.constexpr, R: tl.constexpr, D: tl.constexpr, PART: tl.constexpr,
    HAS_SUM: tl.constexpr, HAS_LATER: tl.constexpr,
):  # fmt: skip
    """`back_kernel` with to_sources [count, tokens, D]."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    zero = tl.zeros([], tl.int64)  # counters of a loop are narrow
    reader, feature = tl.arange(0, R), tl.arange(0, D)
    for_keys = tl.zeros([R, D], keys.dtype.element_ty)
    for token in range(program, tokens, programs):
        scalars = reader * tokens + token
        shift = tl.load(lse + scalars, mask=reader < READERS, other=0.0)
        to_total = tl.load(to_totals + scalars, mask=reader < READERS, other=0.0)
        g_row = to_values + (reader.to(tl.int64) * tokens + token) * SIZE
        for j in range(count):
            low, high = _pick(j, s0, s1, s2, s3, s4, s5, s6, s7), _pick(j - 8, s8, s9, s10, s11, s12, s13, s14, s15)
            offset, at = (zero + token) * SIZE, ((zero + j) * tokens + token) * SIZE
            row, out = tl.where(j < 8, low, high) + offset, to_sources + at
            more = later + ((zero + first + j) * tokens + token) * SIZE
            for_keys = _back(
                row, out, more, to_state + offset, g_row, keys, eps, shift, to_total, for_keys,
                READERS, SIZE, PART, HAS_SUM, HAS_LATER,
            )  # fmt: skip
    at_keys = (program * READERS + reader)[:, None] * SIZE + feature[None, :]
    tl.store(to_keys + at_keys, for_keys, mask=(reader < READERS)[:, None] & (feature < SIZE)[None, :])


@triton.jit
def back_kernel(
    s0, s1, s2, s3, s4, s5, s6, s7,
    r0, r1, r2, r3, r4, r5, r6, r7,
    keys, lse, to_values, to_totals, to_state, later, to_keys, count, tokens, eps, first,
    READERS: tl.constexpr, SIZE: tl.constexpr, R: tl.constexpr, D: tl.constexpr, PART: tl.constexpr,
    HAS_SUM: tl.constexpr, HAS_LATER: tl.constexpr,
):  # fmt: skip
    """The j-th result is dv_j of `group_read`'s formulas, with HAS_SUM to_state and with HAS_LATER later[first + j] added; `count` sources.

    to_keys[p] is the gradient of the keys from the tokens of program p.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    zero = tl.zeros([], tl.int64)  # counters of a loop are narrow
    reader, feature = tl.arange(0, R), tl.arange(0, D)
    for_keys = tl.zeros([R, D], keys.dtype.element_ty)
    for token in range(program, tokens, programs):
        scalars = reader * tokens + token
        shift = tl.load(lse + scalars, mask=reader < READERS, other=0.0)
        to_total = tl.load(to_totals + scalars, mask=reader < READERS, other=0.0)
        g_row = to_values + (reader.to(tl.int64) * tokens + token) * SIZE
        for j in range(count):
            offset, more = (zero + token) * SIZE, later + ((zero + first + j) * tokens + token) * SIZE
            row = _pick(j, s0, s1, s2, s3, s4, s5, s6, s7) + offset
            out = _pick(j, r0, r1, r2, r3, r4, r5, r6, r7) + offset
            for_keys = _back(
                row, out, more, to_state + offset, g_row, keys, eps, shift, to_total, for_keys,
                READERS, SIZE, PART, HAS_SUM, HAS_LATER,
            )  # fmt: skip
    at_keys = (program * READERS + reader)[:, None] * SIZE + feature[None, :]
    tl.store(to_keys + at_keys, for_keys, mask=(reader < READERS)[:, None] & (feature < SIZE)[None, :])
