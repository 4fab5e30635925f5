"""Softmax and its family along an axis that is not the last one: the kernel of columns, its plan, and who is chosen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from tests.support import bounds, cases, kernels, oracle
from tests.support.cases import BF16, F16, F32
from tests.support.covering import cover, first, first_values, pairs
from tests.support.kernels import ALL, FEW, HOPPER, Strips, Tile
from tests.support.lowering import array, kernel_names, kernel_results, lowered

pytestmark = pytest.mark.usefixtures("quick_compilation")

# --- Numbers, in the interpreter ----------------------------------------------------------------------

# Columns in registers: over one lane and more for each row of the strip, over all of them; by vectors and elements;
# in strips that end with the array and beyond it.
TILES = [
    (Tile(128, 2, 4, 1), 127, F32, ALL + FEW[:1]),
    (Tile(24, 32, 1, 1), 21, F32, ALL),
    (Tile(2, 128, 4, 1), 2, BF16, FEW + FEW[:1]),
    (Tile(8, 16, 4, 1), 8, F16, ALL + FEW[:1]),
    (Tile(1, 128, 1, 1), 1, BF16, FEW),
    (Tile(1024, 4, 4, 1), 1000, F32, ALL + FEW[:1]),
]
# In shared memory: whole steps, a shorter last one, one alone; rows that end with the strip and before it.
STRIPS = [
    (Strips(1000, 8, 4, 1, 128), F32, ALL + FEW[:1]),
    (Strips(1024, 16, 4, 1, 256), BF16, FEW + FEW[:1]),
    (Strips(129, 32, 4, 1, 128), F32, ALL + FEW[:1]),
    (Strips(127, 32, 4, 1, 256), F16, FEW + FEW[:1]),
]


@pytest.mark.parametrize(("name", "case"), first(3, pairs(oracle.OPERATIONS, TILES)), ids=str)
def test_columns_in_registers(name, case):
    plan, v, dtype, names = case
    if name == "logsumexp" and dtype != F32:  # XLA for CPUs loses the NaN in max(x.astype("float32"), 1)
        names = [n if n not in ("nan_and_inf", "everything") else "normal" for n in names]
    kernels.assert_columns(name, cases.rows(names, v, dtype), names, plan)


@pytest.mark.parametrize(("name", "case"), first(2, pairs(oracle.OPERATIONS, STRIPS)), ids=str)
def test_columns_in_shared_memory(name, case):
    plan, dtype, names = case
    kernels.assert_columns(name, cases.rows(names, plan.vocab, dtype), names, plan)
