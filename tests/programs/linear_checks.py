"""Checks of the projection over 8, 4 or 2 devices; sharded_checks.py has others, and runs both."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_softmax as ps
from benchmarks.support import links
from pallas_softmax._src.dispatch.choose import choose_plain
from pallas_softmax._src.dispatch.operation import describe
from pallas_softmax._src.linear import xla
from pallas_softmax._src.linear.chunks import chunk_rows
from pallas_softmax._src.linear.losses import Columns, Head, Tokens
from pallas_softmax._src.sample import noise
from pallas_softmax._src.sample.operation import CUTOFF, SAMPLE
from tests.support import covering, linear

N, D, V = 64, 24, 512
ROWS = 5  # rows of a chunk before rounding to a multiple of 8
BYTES = 8  # bytes of a logit: its value and its gradient in float32
CHECKS = {}

# Shardings of x, w, bias and the numbers of tokens on a mesh with the axes "data" and "model".
LAYOUTS = {
    "tokens": (P("data"), P(), P(), P("data")),
    "columns": (P(), P(None, "model"), P("model"), P()),
    "both": (P("data"), P(None, "model"), P("model"), P("data")),
    "fsdp": (P("data"), P("data"), P(), P("data")),
}
HOW = ("auto", "explicit", "shard_map")


def register(*combinations):
    """Adds a check to CHECKS for combinations of its parameters."""

    def add(check):
        for parameters in combinations:
            CHECKS["-".join([check.__name__, *map(str, parameters)])] = functools.partial(check, *parameters)
        return check

    return add


def mesh_of(how, sizes=None):
    """Returns a mesh of 8, 4 or 2 devices, by default with two of them along the columns."""
    devices = next(n for n in (8, 4, 2) if n <= jax.device_count())
    sizes = sizes or {"data": devices // 2, "model": 2}
    kinds = (AxisType.Explicit if how == "explicit" else AxisType.Auto,) * len(sizes)
    return jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=kinds, devices=jax.devices()[:devices])


def lay(arrays, mesh, specs):
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]


def specs_of(layout, arrays):
    x, w, bias, of_tokens = LAYOUTS[layout]
    known = {"x": x, "w": w, "bias": bias, "teacher_x": x, "teacher_w": w, "teacher_bias": bias}
    return {name: known.get(name, of_tokens) for name in arrays}


def execute(f, how, layout, arrays, held=("x", "w", "bias"), reduce=jax.lax.psum, named_mesh=True):
    """Returns the results of f on sharded arrays, with its gradients, and the collectives of several devices.

    With how="shard_map", f gets the shards of its arguments, and the mesh axis of the columns.

    Args:
      f: a function of a dictionary of arrays, and of axis_name.
      held: the arrays that have a gradient; none for results with one element per token.
      reduce: how the results of the shards of the tokens make one.
      named_mesh: whether `jax.set_mesh` names the mesh.
    """
    mesh, specs = mesh_of(how), specs_of(layout, arrays)

    def on_shard(shards):
        for name in ("w", "teacher_w") if layout == "fsdp" else ():
            if name in shards:
                shards = shards | {name: jax.lax.all_gather(shards[name], "data", tiled=True)}
        value = f(shards, axis_name="model" if layout in ("columns", "both") else None)
        return reduce(value, "data") if held and layout != "columns" else value

    whole = f
    if how == "shard_map":
        out_specs = P() if held else LAYOUTS[layout][-1]
        whole = jax.shard_map(on_shard, mesh=mesh, in_specs=(specs,), out_specs=out_specs)
    with jax.set_mesh(mesh) if named_mesh else contextlib.nullcontext():
        laid = dict(zip(arrays, lay(arrays.values(), mesh, specs.values())))
        program = jax.jit(with_gradients(whole, held)).lower(laid).compile()
        results = program(laid)
    # A group of one device sends nothing; XLA leaves such collectives in the program.
    return results, [c for c in links.collectives(program.as_text()) if c.group > 1]


def with_gradients(f, held):
    """Returns f, with its gradients in these arrays of its dictionary if there are some."""
    if not held:
        return f
    return lambda arrays: jax.value_and_grad(lambda h: f(arrays | h))({name: arrays[name] for name in held})


def on_one_device(f, arrays, held=("x", "w", "bias")):
    return jax.jit(with_gradients(f, held))(arrays)


def assert_near(got, want, bound=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert linear.rounded_errors(a, np.asarray(b, "float64")) <= bound


def assert_sharded_alike(gradients, how, layout):
    for name, spec in specs_of(layout, gradients).items():
        sharding = NamedSharding(mesh_of(how), spec)
        assert gradients[name].sharding.is_equivalent_to(sharding, gradients[name].ndim), (name, spec)


def arrays_of(n=N):
    x, w, labels, bias = linear.arrays(n, D, V, "float32", bias=True)
    return {"x": x, "w": w, "bias": bias, "labels": labels}


def sent(layout, reduction, devices):
    """Returns the bytes of the all-reduces and of the all-gathers that a device must take part in.

    If several devices share a row, they gather m, d and the label's logit, and reduce the float32 sum for dx, both
    chunk by chunk. With one loss per token, the forward gathers the three numbers of all tokens at once. The backward
    gathers them again, chunk by chunk, because the inputs are float32.
    """
    data, model = devices // 2, 2
    tokens, columns = layout in ("tokens", "both", "fsdp"), layout in ("columns", "both")
    width = V // model if columns else V
    rows = N // data if tokens else N
    reduced = 4 * (D + 1) * width if tokens and data > 1 else 0
    gathered = 4 * D * V if layout == "fsdp" and data > 1 else 0
    chunk = chunk_rows(rows, width, BYTES, BYTES * ROWS * V)
    if columns:
        # the program has the first chunk, and a loop for the others
        seen = chunk * (2 if chunk < rows else 1)
        reduced += 4 * D * seen
        gathered += model * 12 * (seen + (rows if reduction is None else 0))
    return reduced, gathered


@register(*itertools.product(HOW, LAYOUTS, ("mean", None)))
def linear_loss(how, layout, reduction):
    """Loss and gradients agree with one device, and the collectives have exactly the necessary bytes."""
    arrays = arrays_of()

    def mean(arrays, axis_name=None):
        static = {"reduction": reduction, "workspace_bytes": BYTES * ROWS * V, "axis_name": axis_name}
        return jnp.mean(ps.linear_cross_entropy(**arrays, **static))

    (value, gradients), found = execute(mean, how, layout, arrays, reduce=jax.lax.pmean)
    losses, size, *want, _ = linear.losses_and_gradients(weights=np.full(N, 1 / N), **arrays)
    assert abs(float(value) - losses.mean()) <= 8 * np.spacing(np.float32(size.max() + losses.max()))
    # float32 sums of about a hundred terms
    assert_near([gradients[name] for name in ("x", "w", "bias")], want, 2e-6)
    assert_sharded_alike(gradients, how, layout)
    reduced, gathered = sent(layout, reduction, mesh_of(how).devices.size)
    small = 16  # the loss itself
    by_kind = {kind: sum(c.bytes for c in found if c.kind == kind) for kind in {c.kind for c in found}}
    if layout == "fsdp" and reduced:
        assert by_kind.pop("reduce-scatter") == 4 * D * V, found
        reduced -= 4 * D * V
    assert by_kind.pop("all-gather", 0) == gathered, found
    assert reduced <= by_kind.pop("all-reduce", 0) <= reduced + small, (reduced, found)
    assert not by_kind, found


@register(*itertools.product(("auto", "explicit"), LAYOUTS), ("shard_map", "columns"))
def linear_not_finite(how, layout):
    """The gradients of a mean that is not finite are 0 on all devices, whichever device has the bad number."""
    arrays = arrays_of()
    nan, inf, label = (np.array(arrays[name]) for name in ("x", "bias", "labels"))
    nan[N - 1, 2], inf[label[0]], label[N // 2] = np.nan, -np.inf, V

    def mean(arrays, axis_name=None):
        return ps.linear_cross_entropy(**arrays, axis_name=axis_name)

    for bad in ({"x": nan}, {"bias": inf}, {"labels": label}):
        # inside of jit, Explicit axes need no `jax.set_mesh`
        (value, gradients), _ = execute(mean, how, layout, arrays | bad, reduce=jax.lax.pmean, named_mesh=False)
        assert not np.isfinite(value)
        assert not any(np.any(np.asarray(g)) for g in gradients.values())


def linear_left_out(how, layout):
    """With many tokens left out, loss and gradients agree with one device. Devices keep different numbers of tokens."""
    n = 1024 * mesh_of(how).shape["data"]
    arrays = arrays_of(n)
    where = np.random.default_rng(3).random(n) < np.linspace(0, 1, n)

    def total(arrays, axis_name=None):
        f = functools.partial(ps.linear_cross_entropy, **arrays, axis_name=axis_name)
        stats = ps.linear_token_stats(**arrays, axis_name=axis_name)
        total = f(reduction="sum") + jnp.sum(f(reduction=None) ** 2)
        return total + jnp.sum(stats.log_probs * stats.entropy + stats.logsumexp)

    bad_x = jnp.where(where[:, None], arrays["x"], jnp.nan)
    (value, gradients), _ = execute(total, how, layout, arrays | {"x": bad_x, "where": where})
    dx = np.asarray(gradients["x"])
    assert not dx[~where].any()
    kept = arrays | {"x": arrays["x"][where], "labels": arrays["labels"][where]}
    assert_near((value, gradients | {"x": dx[where]}), on_one_device(total, kept))


def linear_statistics(how, layout):
    """linear_token_stats, linear_topk and linear_sample agree with one device.

    A row takes one collective, and a draw without filters two. With filters, devices exchange these few logits.
    """
    mesh, arrays = mesh_of(how), arrays_of()
    several_devices = layout in ("columns", "both") or (layout == "fsdp" and mesh.shape["data"] > 1)
    head = {"softcap": 20.0, "temperature": 0.7}

    def without_labels(arrays):
        return {name: arrays[name] for name in ("x", "w", "bias")}

    def stats(arrays, axis_name=None):
        return ps.linear_token_stats(**arrays, **head, axis_name=axis_name)

    def winners(arrays, axis_name=None, k=300, **options):
        return ps.linear_topk(**without_labels(arrays), k=k, axis_name=axis_name, **(options or head))

    def draws(arrays, axis_name=None, **options):
        t = np.linspace(0, 2, N) if how != "shard_map" else 0.7
        key = jax.random.key(0)
        if how == "shard_map" and layout in ("tokens", "both", "fsdp"):  # each device has its own noise
            key = jax.random.fold_in(key, jax.lax.axis_index("data"))
        return ps.linear_sample(key, **without_labels(arrays), temperature=t, axis_name=axis_name, **options)

    in_chunks = functools.partial(winners, k=3, log=True, workspace_bytes=4 * ROWS * V)
    sharding = NamedSharding(mesh, LAYOUTS[layout][-1])
    for f in stats, winners, in_chunks:
        got, found = execute(f, how, layout, arrays, held=())
        assert [c.kind for c in found] == ["all-gather"] * several_devices, found
        assert all(a.sharding.is_equivalent_to(sharding, a.ndim) for a in jax.tree.leaves(got))
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
        jax.tree.map(close, got, on_one_device(f, arrays, held=()))
    for options in {}, {"top_p": 0.9}, {"top_k": 5, "mode": "high", "workspace_bytes": 8 * ROWS * V}:
        f = functools.partial(draws, **options)
        got, found = execute(f, how, layout, arrays, held=())
        assert options or len(found) == several_devices * (1 if layout == "fsdp" else 2), found
        assert_a_draw(arrays, got)
        if how != "shard_map":
            jax.tree.map(close, got, on_one_device(f, arrays, held=()))


@register((SAMPLE,), (CUTOFF,))
def linear_draws_of_padded_columns(operation):
    """Columns that pad a device's shard to whole atoms do not count, as in the arrays that kernels get."""
    mesh = mesh_of("auto")
    own, devices = 60, mesh.shape["model"]
    x, w, *_ = linear.arrays(N, D, own * devices, "float32")
    key = jax.random.key(0)
    z = jax.ShapeDtypeStruct((N, own), jnp.float32)
    call = describe(operation, z, (1,), None, mesh_axes=("model",), function="linear_sample")
    if operation is SAMPLE:
        of_key = jnp.concatenate(noise.words(key, (N, own * devices), 1), -1)
    else:
        of_key = jax.random.gumbel(key, (N, own * devices))
    tokens = Tokens(None, draw=(of_key, None, jnp.full((N, 1), 0.9), None))
    static = {"head": Head(columns=own, undivided=True, precision="highest"), "workspace_bytes": 2**29}
    static |= {"sampler": choose_plain(call), "mesh_axes": ("model",)}

    def on_shard(x, w, tokens):
        w = jnp.pad(w, ((0, 0), (0, 4)), constant_values=9.0)
        return xla.OPERATIONS["projection_sample"](x, w, Columns(), tokens, **static)

    specs = P(), P(None, "model"), P()
    run = jax.shard_map(on_shard, mesh=mesh, in_specs=specs, out_specs=P(), axis_names={"model"})
    got, want = jax.jit(run)(x, w, tokens), ps.linear_sample(key, x, w, top_p=0.9)
    np.testing.assert_array_equal(got[0], want.indices)
    for a, b in zip(got[1:], want[1:]):
        np.testing.assert_allclose(a, b, atol=1e-5)


def assert_a_draw(arrays, drawn):
    """Asserts that each token has an index, and its log-probability below the share of what the filters keep."""
    assert ((drawn.indices >= 0) & (drawn.indices < V)).all()
    assert (drawn.log_probs <= drawn.log_mass).all() and (drawn.log_mass < 1e-6).all()


def linear_divergence(how, layout):
    """With a teacher that is sharded alike, no w is gathered, and a sum that is not finite has gradients of 0."""
    x, w, *_ = linear.arrays(N, D, V, "float32")
    teacher_x, teacher_w, *_ = linear.arrays(N, 2 * D, V, "float32", seed=1)
    arrays = {"x": x.at[N - 1].set(jnp.nan), "w": w, "teacher_x": teacher_x, "teacher_w": teacher_w}

    def plain_sum(arrays, axis_name=None):
        return ps.linear_kl_divergence(**arrays, reduction="sum", axis_name=axis_name)

    (_, gradients), found = execute(plain_sum, how, layout, arrays, ("x", "w"))
    if how != "shard_map":  # there, each device judges the sum of its own tokens
        assert not any(np.any(np.asarray(g)) for g in gradients.values())
    if layout != "fsdp":  # a few numbers per token are gathered
        assert sum(c.bytes for c in found if c.kind == "all-gather") <= 64 * 4 * N < 4 * D * V, found


for check, *parameters in covering.pairs((linear_divergence, linear_statistics, linear_left_out), HOW, LAYOUTS):
    register(parameters)(check)


# --- The bytes that a training step must send -----------------------------------------------------------

STEP_SHAPE = 16, 32, 256, 4096  # batch, sequence, D, V
# Mesh sizes for 8 devices, and shardings of x (batch, sequence, D) and w (D, V).
STEPS = {
    "tokens": ({"data": 8}, P("data"), P()),
    "fsdp": ({"data": 8}, P("data"), P("data")),
    "fsdp on V": ({"data": 8}, P("data"), P(None, "data")),
    "fsdp over two axes": ({"a": 2, "b": 4}, P(("a", "b")), P(("a", "b"))),
    "hybrid fsdp": ({"a": 2, "b": 4}, P(("a", "b")), P("b")),
    "columns": ({"model": 8}, P(), P(None, "model")),
    "tokens and columns": ({"data": 2, "model": 4}, P("data"), P(None, "model")),
    "fsdp and columns": ({"data": 2, "model": 4}, P("data"), P("data", "model")),
    "fsdp on V and columns": ({"data": 2, "model": 4}, P("data"), P(None, ("model", "data"))),
    "sequence and columns": ({"data": 2, "model": 4}, P("data", "model"), P(None, "model")),
    "tokens and columns on one axis": ({"a": 2, "b": 4}, P("b"), P(None, ("a", "b"))),
}


def least_bytes(layout):
    """Returns the least: w and x are gathered where they must be, gradients are summed once, statistics are merged."""
    sizes, of_x, of_w = STEPS[layout]
    b, s, d, v = STEP_SHAPE
    columns = sizes.get("model", 1)
    tokens = 8 // columns
    dw, x = 4 * d * v // columns, 4 * b * s * d // tokens
    over_tokens, over_columns = (tokens - 1) / tokens, (columns - 1) / columns
    # an all-reduce, or an all-gather forward and a reduce-scatter backward: the same bytes
    total = 2 * over_tokens * dw + 2 * over_columns * x
    if layout == "fsdp on V":  # the smaller one of x and w is gathered
        total = min(total, 2 * 7 / 8 * (4 * d + 12) * b * s)
    if layout == "hybrid fsdp":  # w is gathered over b; the sum is scattered over b, then reduced over a
        total = (2 * 3 / 4 + 2 * 1 / 2 / 4) * dw
    if layout == "tokens and columns on one axis":  # the same of x and dx; every device merges all statistics
        total = (2 * 3 / 4 + 2 * 1 / 2 / 4) * 4 * b * s * d + 2 * 7 / 8 * 12 * b * s
    return total + (2 * over_columns * 12 * b * s // tokens if columns > 1 else 0)


@register(*itertools.product(STEPS, HOW[:2]))
def linear_few_bytes(layout, how):
    """Sums of dw and dx are as small as they can be, and nothing is gathered twice."""
    if jax.device_count() < 8:
        return
    (sizes, of_x, of_w), (b, s, d, v) = STEPS[layout], STEP_SHAPE
    mesh = mesh_of(how, sizes)
    shapes = ((b, s, d), "float32", of_x), ((d, v), "float32", of_w), ((b, s), "int32", P(*of_x[:2]))
    laid = [jax.ShapeDtypeStruct(*a, sharding=NamedSharding(mesh, spec)) for *a, spec in shapes]
    out = None, tuple(a.sharding for a in laid[:2])
    step = jax.jit(jax.value_and_grad(ps.linear_cross_entropy, (0, 1)), out_shardings=out)
    found = links.collectives(step.lower(*laid).compile().as_text())
    assert sum(c.received for c in found) <= 1.1 * least_bytes(layout)


@register(("tokens",), ("hybrid fsdp",), ("columns",), ("tokens and columns on one axis",))
def linear_one_rounding(layout):
    """Gradients in bfloat16 are the same on 8 devices and on one: float32 sums, rounded once."""
    if jax.device_count() < 8:
        return
    x, w, labels, _ = linear.arrays(N, D, V, "bfloat16")
    sizes, of_x, of_w = STEPS[layout]
    gradients = jax.jit(jax.grad(ps.linear_cross_entropy, (0, 1)))
    laid = lay((x, w, labels), mesh_of("auto", sizes), (of_x, of_w, of_x))
    for got, want in zip(gradients(*laid), gradients(x, w, labels)):
        got, want = (np.asarray(a, "float32") for a in (got, want))
        assert np.mean(got != want) < 0.02  # sums in another order may be rounded to a neighbour
        np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-6)


@register(("auto",), ("explicit",))
def linear_own_slices(how):
    """Under vmap, each device computes the gradients of its own slices, and nothing of w's size is sent."""
    mesh = mesh_of(how)
    n = mesh.shape["data"]
    x, w, labels, _ = linear.arrays(N, D, V, "float32")
    arrays = jnp.stack([x] * n), jnp.stack([w * (i + 1) for i in range(n)]), jnp.stack([labels] * n)

    def loss(x, w, labels):
        return jnp.sum(ps.linear_log_probs(x, w, labels))

    f = jax.jit(jax.vmap(jax.grad(loss, (0, 1))))
    with jax.set_mesh(mesh):
        laid = lay(arrays, mesh, (P("data"), P("data", None, "model"), P("data")))
        program = f.lower(*laid).compile()
        got = program(*laid)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, f(*arrays))
    found = [c for c in links.collectives(program.as_text()) if c.group > 1]
    assert all(c.group == 2 and c.bytes <= 4 * N * D for c in found), found  # the sum for dx
