"""The kernel that selects many winners: rows that are hard for it, its right answers, and the machine that runs it."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_softmax._src import folding
from pallas_softmax._src.dispatch.operation import Call
from pallas_softmax._src.select import kernel as select_kernel
from pallas_softmax._src.select import plan as select_plan
from pallas_softmax._src.select.kernel import program_of
from pallas_softmax._src.select.plan import SelectPlan, registers_plan
from pallas_softmax._src.topk.operation import SELECT
from tests.support import oracle, ptx
from tests.support.plans import HOPPER
from tests.support.twins import INTERPRET, interpreted


def rows_of(v, k, dtype, seed=0):
    """Returns rows by name: random ones, in narrow bands, with ties, in order, with special numbers."""
    rng, at = np.random.default_rng(seed), np.arange(v)
    normal = rng.standard_normal(v)
    special = np.array([0, -0.0, 1, np.inf, -np.inf, np.nan, -np.nan])
    rows = {
        "normal": normal,
        "peaked": rng.standard_cauchy(v) ** 3,
        "shifted": normal + 1000,
        "scaled": normal * 1e-3,
        "denormal": normal * 1e-40,
        "band": 1 + np.abs(normal) * 2.0**-12,
        "negative": -np.abs(normal) - 5,
        "ascending": np.sort(normal),
        "descending": -np.sort(normal),
        "constant": np.full(v, 1.5),
        "+0 and -0": np.where(at % 3, -0.0, 0.0),
        "rounded": np.round(2 * normal),
        "special": rng.choice(special, v),
        "-inf but for one": np.where(at == v - 1, 0, -np.inf),
        "winners at the end": np.where(at >= v - k, normal + 9, normal),
        "winners where no sample is": np.where(at // 16 % 7 == 3, normal + 9, normal),
        "k - 1 numbers": np.where(at < k - 1, 1.0, -np.nan),
    }
    # A row in registers guesses the range of its winners from the first word of each vector.
    itemsize = dtype.itemsize
    vector, byte = np.divmod(at * itemsize, 16)
    is_first = byte < 4
    rows["the first words tie"] = np.where(is_first, 5, 1)
    ones = np.ones(v, dtype).view(f"u{itemsize}")
    beside_it = np.where(is_first, vector % 2 * 4096, -1 - at % 7).astype(ones.dtype)
    with np.errstate(all="ignore"):
        rows = {name: row.astype(dtype) for name, row in rows.items()}
    return rows | {"winners below the first words": (ones + beside_it).view(dtype)}


def plan_selection(rows, v, k, dtype, capability=HOPPER, masked=False, lengths=False, in_order=False):
    options = {"masked": masked, "lengths": lengths, "sorted": in_order}
    call = Call(SELECT, str(dtype), rows, v, k=k, function="top_k", **options)
    plan = select_plan.plan_selection(call, capability)
    return plan if isinstance(plan, SelectPlan) else None


def assert_rows(got, x, k, where=None, lengths=None, names=None, *, sorted=False):
    """Asserts that the winners of rows are right, bit by bit, in any order unless `sorted`. Masked ones are -inf."""
    kept = oracle.unmasked(x, where) if lengths is None else oracle.within(x, lengths, where)
    values, indices = (np.asarray(a)[: len(x)] for a in got)
    want = np.where(kept, x, np.array(-np.inf, x.dtype))
    want = np.take_along_axis(want, indices, -1).view(f"u{x.itemsize}")
    best = oracle.topk_indices(x, k, kept)
    if not sorted:
        indices, best = np.sort(indices, -1), np.sort(best, -1)
    for i in range(len(x)):
        name = names[i] if names else f"row {i}"
        np.testing.assert_array_equal(indices[i], best[i], err_msg=name)
        np.testing.assert_array_equal(values[i].view(want.dtype), want[i], err_msg=name)


def machine_launch(x, mask, lengths, k, plan, fill, *, offset=0, rng=None):
    """Does what `select.kernel._launch` does, in NumPy; also returns the number of steps of the machine."""
    rows, itemsize = len(x), x.dtype.itemsize
    row = np.repeat(np.arange(rows), plan.ctas)
    values, indices = (ptx.Device(np.zeros((rows, k), dtype)) for dtype in (x.dtype, "int32"))
    operands = {"x": ptx.Device(np.asarray(x), offset * itemsize), "values": values, "indices": indices}
    operands |= {"row": row, "part": np.arange(len(row)) % plan.ctas, "list": 0, "scratch": plan.list_bytes}
    operands["length"] = plan.vocab if lengths is None else np.resize(np.asarray(lengths), rows)[row]
    if mask is not None:
        operands |= {"mask": ptx.Device(np.asarray(mask.array), offset), "mask_row": np.asarray(mask.row(row))}
    bits = -1 if fill is None else int(fill.view(f"i{itemsize}")) << 32 - 8 * itemsize
    program = program_of(plan, x.dtype, mask is not None, bits)
    # Shared memory holds anything at first, and something else in each CTA.
    memory = np.random.default_rng(0).integers(0, 256, (len(row), plan.smem_bytes), "u1")
    machine = ptx.Machine(program, memory, plan.threads, operands, rng, clusters=rows)
    machine.run()
    return values.array, indices.array, machine.steps


def machine_select(plan: SelectPlan, x, *, mask=None, length=None, offset=0, fill=None, rng=None):
    """Runs one row, with no more of it and of the mask than the length; returns its winners and the number of steps."""
    whole = length is None
    x, mask = (None if a is None else a[None] if whole else a[None, :length] for a in (x, mask))
    mask = None if mask is None else folding.Mask(jnp.asarray(mask), folding.mask_rows((1,), (1,)))
    lengths = None if whole else np.array([length])
    *found, steps = machine_launch(x, mask, lengths, plan.k, plan, fill, offset=offset, rng=rng)
    return found, steps


def select_rows(x, k, plan, where=None, lengths=None, *, sorted=False, interpret=INTERPRET):
    """Returns the winners of the kernel for rows x, (rows, v), with a mask (mask rows, v or 1)."""
    mask = None
    if where is not None:
        rows = folding.mask_rows(where.shape[:1], x.shape[:1])
        mask = folding.Mask(jnp.asarray(where), rows)
    lengths = None if lengths is None else jnp.asarray(lengths, jnp.int32)
    with interpreted(interpret):
        ctas = plan.ctas if interpret is None else 1  # the interpreter has no clusters
        plan = dataclasses.replace(plan, sorted=sorted, ctas=ctas)
        return select_kernel.select_rows(jnp.asarray(x), mask, lengths, k, plan)


def offset_of(plan):
    """Returns where rows start, in elements after a multiple of 16 bytes. Registers may have no room for an offset."""
    return 0 if plan.in_registers and plan.vocab % 8 == 0 else 3


# One CTA and clusters; one block and several; rows that do not start at multiples of 16 bytes; lists that overflow.
PLANS = [
    (SelectPlan(8192, 2048, 1, 2, 6144, 1), "float32"), (SelectPlan(20001, 700, 4, 2, 2112, 2), "bfloat16"),
    (SelectPlan(16384, 256, 8, 1, 2048, 2), "float16"), (SelectPlan(20001, 700, 2, 4, 2112, 1), "float32"),
    (SelectPlan(2500, 2048, 1, 2, 2528, 1), "bfloat16"), (SelectPlan(70000, 100, 16, 2, 2048, 4), "float32"),
    (SelectPlan(12345, 4096, 2, 2, 12288, 1), "float32"), (SelectPlan(20001, 5, 2, 4, 2048, 4), "float32"),
    (SelectPlan(9001, 1, 1, 1, 2048, 4), "bfloat16"), (SelectPlan(30001, 700, 2, 4, 3456, 1, 128), "bfloat16"),
    (SelectPlan(20001, 512, 1, 2, 2048, 1, 32), "float16"),
    # Rows in registers: full ones, and one that does not start at a multiple of 16 bytes.
    (registers_plan(8192, 3000, 1, 128), "bfloat16"), (registers_plan(4096, 1500, 4, 32), "float32"),
    (registers_plan(7001, 900, 2, 128), "float16"),
]  # fmt: skip
