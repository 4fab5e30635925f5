"""The kernels of softmax, log_softmax, logsumexp and their backwards with a given plan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_softmax._src import target
from pallas_softmax._src.dispatch.operation import OPERATIONS, describe
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.softmax import columns_plan, mosaic_gpu
from pallas_softmax._src.softmax import plan as softmax_plan
from pallas_softmax._src.softmax.columns_plan import Strips
from pallas_softmax._src.softmax.plan import Parts
from tests.support import bounds, cases
from tests.support.cases import ALL, BF16, F16, F32, FEW
from tests.support.plans import HOPPER
from tests.support.twins import INTERPRET, interpreted

plan_softmax = functools.partial(softmax_plan.plan_softmax, capability=HOPPER)
plan_columns = functools.partial(columns_plan.plan_columns, capability=HOPPER)


def softmax_results(name, arrays, where=None, axes=(-1,), plan=None, interpret=INTERPRET):
    """Returns everything that the kernel of an operation returns: for logsumexp also m and d."""
    axes = tuple(a % arrays[0].ndim for a in axes)
    arrays = [jnp.asarray(a) for a in arrays]
    where = None if where is None else jnp.asarray(where)
    if plan is None:
        call = describe(OPERATIONS[name], arrays[0], axes, where, function=name)
        plan = mosaic_gpu.plan(call, target.capability())
    with interpreted(interpret):
        return jax.tree.leaves(mosaic_gpu.softmax_rows(name, plan, tuple(arrays), where, axes=axes))


def softmax_rows(name, arrays, where=None, axes=(-1,), plan=None, interpret=INTERPRET):
    """Returns the kernel's result in the dtype that the public functions return."""
    out = softmax_results(name, arrays, where, axes, plan, interpret)[0]
    return np.asarray(out.astype(arrays[-1].dtype))


def assert_softmax(name, x, names, where=None, plan=None, interpret=INTERPRET):
    """Asserts that the kernel is right for the logits x, with garbage at masked positions."""
    arrays = cases.operands(name, x, where)
    if where is not None:
        arrays = [cases.spoil_masked(a, where) if a is arrays[-1] else a for a in arrays]
    got = softmax_rows(name, arrays, where, plan=plan, interpret=interpret)
    bounds.assert_operation(name, got, arrays, names, where)


def columns_results(name, arrays, plan, interpret=INTERPRET):
    """Returns everything that the kernel of columns returns for arrays (outer, vocab, inner)."""
    return softmax_results(name, arrays, None, (1,), mosaic_gpu.Columns(arrays[0].shape, plan), interpret)


def columns_rows(name, arrays, plan, interpret=INTERPRET):
    """Runs the kernel of columns on rows (rows, vocab), stored as the columns of one array, or of two if even."""
    rows, vocab = arrays[0].shape
    outer = 1 if rows % 2 else 2
    across = [np.asarray(a).reshape(outer, -1, vocab).swapaxes(1, 2) for a in arrays]
    out = np.asarray(columns_results(name, across, plan, interpret)[0].astype(arrays[-1].dtype))
    return out.swapaxes(1, 2).reshape(rows, -1)


def assert_columns(name, x, names, plan, interpret=INTERPRET):
    arrays = cases.operands(name, x)
    got = columns_rows(name, arrays, plan, interpret)
    bounds.assert_operation(name, got, arrays, names)


EVEN = [*ALL, "normal"]  # an even number of rows, for the columns of two arrays
# (tile, V, dtype, rows). Vectors and single elements; tiles that end with the columns, and beyond them.
COLUMN_TILES = [
    (Tile(24, 8, 1, 1), 21, F32, ALL), (Tile(128, 4, 4, 1), 127, F32, EVEN),
    (Tile(8, 16, 4, 1), 8, BF16, EVEN), (Tile(2, 128, 4, 1), 2, F16, FEW + FEW[:1]),
    (Tile(1, 128, 1, 1), 1, BF16, FEW), (Tile(1024, 4, 4, 1), 1000, F32, EVEN),
    (Tile(21, 128, 1, 3), 21, F32, ALL),
]  # fmt: skip
# (strips, dtype, rows). Steps that end with the array, and beyond it; a single step; strips that end with the columns.
# With turns: slots for one strip, for more than one, and for all, where the last cluster takes fewer strips.
COLUMN_STRIPS = [
    (Strips(129, 8, 1, 64, 3), F32, EVEN),
    (Strips(129, 8, 1, 64, 4, turns=3), BF16, EVEN),
    (Strips(1024, 8, 1, 256, 4), F16, EVEN),
    (Strips(127, 16, 1, 128, 1), BF16, EVEN),
    (Strips(1000, 8, 1, 128, 8), F32, EVEN),
    (Strips(129, 8, 1, 64, 3, turns=2), F32, EVEN),
    (Strips(1000, 8, 1, 128, 16, turns=2), F16, EVEN),
]
# Columns that are only read, through fewer slots.
READ_STRIPS = [(Strips(1000, 8, 1, 128, 3), F32, EVEN), (Strips(1024, 8, 1, 64, 1), F32, EVEN)]
# (plan, dtype, rows). One CTA per row: exact blocks; several steps, the last one short. Rows and segments that are not
# aligned to 16 bytes; segments that overlap, or are all the same; single rows, or rows that together fill a multiple of
# 16 bytes.
PARTS = [
    (Parts(1003, 4, 2, 1, True), F32, FEW), (Parts(1003, 8, 1, 2, False), BF16, FEW),
    (Parts(1003, 8, 4, 3, False), F16, FEW + FEW[:1]), (Parts(1000, 4, 2, 3, False), F32, FEW),
    (Parts(1024, 8, 1, 2, False), BF16, FEW), (Parts(1024, 4, 2, 1, True), F32, ALL),
    (Parts(5000, 8, 2, 1, True), BF16, FEW), (Parts(1003, 4, 2, 1, True), F32, ALL),
    (Parts(1002, 4, 1, 2, False), F32, FEW[:4]),
    (Parts(1535, 4, 2, 2, False), F32, FEW[:4]),  # the middle is one block
    # several segments of a CTA: they fill blocks, or overlap in their last block
    (Parts(4096, 4, 2, 1, True, per_cta=4), F32, FEW), (Parts(5000, 8, 1, 1, True, per_cta=4), BF16, FEW),
]  # fmt: skip
# Rows in turns: slots for one row, for more than one, and for all. Their slots are freed while elements are written, so
# only operations that write elements have turns.
IN_TURNS = [
    (Parts(1003, 4, 1, 1, True, teams=3, slots=2), F32, FEW),
    (Parts(1024, 8, 1, 1, True, teams=4, slots=3), BF16, FEW),
    (Parts(1000, 4, 2, 1, True, teams=1, slots=9), F32, FEW),
]
# Rows that are written and that shared memory cannot hold: some steps are read twice.
READ_AGAIN = [
    (Parts(1503, 4, 1, 1, True, teams=3, slots=2), F32, FEW),
    (Parts(4096, 8, 1, 1, True, teams=4, slots=2), BF16, FEW),
    (Parts(4001, 4, 1, 1, True, teams=1, slots=7), F32, ALL),
]
