"""Checks of the projection over 8, 4 or 2 devices, which sharded_checks.py adds to its own."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_softmax as ps
from benchmarks.support import links
from pallas_softmax._src.linear.chunks import chunk_rows
from tests.support import covering, linear

N, D, V = 64, 24, 512
ROWS = 5  # rows of a chunk before rounding to a multiple of 8
BYTES = 8  # bytes of a logit: its value and its gradient in float32
CHECKS = {}
SLOW = set()

# Shardings of x, w, bias and labels on a mesh with the axes "data" and "model".
LAYOUTS = {
    "tokens": (P("data"), P(), P(), P("data")),
    "columns": (P(), P(None, "model"), P("model"), P()),
    "both": (P("data"), P(None, "model"), P("model"), P("data")),
    "fsdp": (P("data"), P("data"), P(), P("data")),
}


HOW = ("auto", "explicit", "shard_map")


def mesh_of(how):
    """Returns a mesh of 8, 4 or 2 devices, two of them along the columns."""
    devices = next(n for n in (8, 4, 2) if n <= jax.device_count())
    kind = AxisType.Explicit if how == "explicit" else AxisType.Auto
    shape, names = (devices // 2, 2), ("data", "model")
    return jax.make_mesh(shape, names, axis_types=(kind,) * 2, devices=jax.devices()[:devices])


def mapped(f, how, layout, mesh, specs, out_specs, reduce=None):
    """Returns f; for how="shard_map", f on the shards of its arguments, with the mesh axis of the columns.

    Args:
      f: a function of x, w and other arrays, and of axis_name.
      reduce: how the results of the shards of the tokens make one, such as `jax.lax.psum`; None keeps them apart.
    """
    if how != "shard_map":
        return f

    def on_shard(x, w, *others):
        w = jax.lax.all_gather(w, "data", tiled=True) if layout == "fsdp" else w
        value = f(x, w, *others, axis_name="model" if layout in ("columns", "both") else None)
        return value if reduce is None or layout == "columns" else reduce(value, "data")

    return jax.shard_map(on_shard, mesh=mesh, in_specs=specs, out_specs=out_specs)


def lay(arrays, mesh, specs):
    """Returns the arrays, sharded."""
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]


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


def check(how, layout, reduction):
    """Loss and gradients agree with one device, and the collectives have exactly the necessary bytes."""
    mesh = mesh_of(how)
    x, w, labels, bias = linear.arrays(N, D, V, "float32", bias=True)

    def loss(x, w, bias, labels, axis_name=None):
        options = {"reduction": reduction, "workspace_bytes": BYTES * ROWS * V, "axis_name": axis_name}
        return jnp.mean(ps.linear_cross_entropy(x, w, labels, bias=bias, **options))

    specs = LAYOUTS[layout]
    f = mapped(loss, how, layout, mesh, specs, P(), jax.lax.pmean)
    f = jax.jit(jax.value_and_grad(f, (0, 1, 2)))
    with jax.set_mesh(mesh):
        laid = lay((x, w, bias, labels), mesh, specs)
        compiled = f.lower(*laid).compile()
        value, grads = compiled(*laid)
    losses, size, *want = linear.losses_and_gradients(x, w, labels, np.full(N, 1 / N), bias=bias)
    assert abs(float(value) - losses.mean()) <= 8 * np.spacing(np.float32(size.max() + losses.max()))
    for got, expected in zip(grads, want):
        assert linear.rounded_errors(got, expected) <= 2e-6  # float32 sums of about a hundred terms
    for got, spec in zip(grads, specs):
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec), got.ndim), (got.sharding, spec)
    # A group of one device sends nothing; XLA leaves such collectives in the program.
    found = [c for c in links.collectives(compiled.as_text()) if c.group > 1]
    devices = mesh.devices.size
    reduced, gathered = sent(layout, reduction, devices)
    small = 16  # the loss itself
    by_kind = {kind: sum(c.bytes for c in found if c.kind == kind) for kind in {c.kind for c in found}}
    if layout == "fsdp" and reduced:
        assert by_kind.pop("reduce-scatter") == 4 * D * V, found
        reduced -= 4 * D * V
    assert by_kind.pop("all-gather", 0) == gathered, found
    assert reduced <= by_kind.pop("all-reduce", 0) <= reduced + small, (reduced, found)
    assert not by_kind, found


for how, layout, reduction in itertools.product(HOW, LAYOUTS, ("mean", None)):
    name = f"linear-{how}-{layout}-{reduction}"
    CHECKS[name] = functools.partial(check, how, layout, reduction)
    if (how, layout, reduction) != ("auto", "both", "mean"):
        SLOW.add(name)


def not_finite(how, layout):
    """The gradients of a mean that is not finite are 0 on all devices, whichever device has the bad number."""
    mesh, specs = mesh_of(how), LAYOUTS[layout]
    x, w, labels, bias = linear.arrays(N, D, V, "float32", bias=True)

    def loss(x, w, bias, labels, axis_name=None):
        return ps.linear_cross_entropy(x, w, labels, bias=bias, axis_name=axis_name)

    f = jax.jit(jax.value_and_grad(mapped(loss, how, layout, mesh, specs, P(), jax.lax.pmean), (0, 1, 2)))
    nan, inf, label = (np.array(a) for a in (x, bias, labels))
    nan[N - 1, 2], inf[labels[0]], label[N // 2] = np.nan, -np.inf, V
    for arrays in ((nan, w, bias, labels), (x, w, inf, labels), (x, w, bias, label)):
        value, grads = f(*lay(arrays, mesh, specs))  # inside of jit, Explicit axes need no `jax.set_mesh`
        assert not np.isfinite(value)
        assert not any(np.any(np.asarray(g)) for g in grads)


for how, layout in itertools.product(("auto", "explicit"), LAYOUTS):
    CHECKS[f"not_finite-{how}-{layout}"] = functools.partial(not_finite, how, layout)
    SLOW.add(f"not_finite-{how}-{layout}")
CHECKS["not_finite-shard_map-columns"] = functools.partial(not_finite, "shard_map", "columns")
SLOW.add("not_finite-shard_map-columns")


def features(check_vma):
    """All options of a loss, and the other two functions, agree with one device if all devices share the columns."""
    devices = next(n for n in (8, 4, 2) if n <= jax.device_count())
    mesh = jax.make_mesh((devices,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    x, w, labels, bias = linear.arrays(N, D, V, "float32", bias=True)
    where = np.arange(N) % 5 != 1
    some_bad = jnp.where(where, labels, V + 7)

    def total(x, w, bias, weights, axis_name=None):
        static = {"workspace_bytes": BYTES * ROWS * V, "axis_name": axis_name, "softcap": 20.0}
        loss, lse = ps.linear_cross_entropy(
            *(x, w, some_bad),
            **{"bias": bias, "where": where, "label_smoothing": 0.2, "z_loss": 0.02, "temperature": 0.8},
            **{"return_logsumexp": True, **static},
        )
        two = jnp.stack([some_bad, some_bad // 2], 1)
        probs = jnp.stack([jax.nn.sigmoid(weights), weights], 1)
        soft = functools.partial(
            ps.linear_cross_entropy, x, w, two, label_probs=probs, where=where, bias=bias
        )
        loss = loss + soft(z_loss=0.02, **static) + jnp.sum(soft(reduction=None, **static) ** 2)
        loss = loss + jnp.sum(lse * weights)
        cold = jnp.where(np.arange(N) % 3 == 0, 0, 0.7)
        stats = ps.linear_token_stats(x, w, some_bad, bias=bias, where=where, temperature=cold, **static)
        loss = loss + sum(jnp.sum(jnp.where(jnp.isfinite(a), a, 1.0)) for a in stats[:3])
        weighted = ps.linear_cross_entropy(x, w, labels, bias=bias, token_weights=weights, **static)
        log_p = ps.linear_log_probs(x, w, labels, bias=bias, temperature=0.7, **static)
        several = ps.linear_log_probs(x, w, jnp.stack([labels, labels // 2], 1), bias=bias, **static)
        for reduction, beta in (("mean", 0.5), (None, 0)):
            teacher = x[:, ::-1], w[::-1]
            kl = functools.partial(ps.linear_kl_divergence, x, w, *teacher, beta=beta, where=where)
            loss = loss + jnp.sum(kl(bias=bias, reduction=reduction, token_weights=weights, **static))
        loss = loss + weighted + jnp.mean(several * weights[:, None])
        return loss + jnp.mean(log_p * ps.linear_logsumexp(x, w, bias=bias, **static))

    f = functools.partial(total, axis_name="model")
    specs = P(), P(None, "model"), P("model"), P()
    weights = jnp.linspace(-0.5, 1, N)
    f = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    args = x, w, bias, weights
    got, want = (jax.jit(jax.value_and_grad(f, (0, 1, 2, 3)))(*args) for f in (f, total))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), got, want)


def weights_and_several_labels(how, layout):
    """Token weights, several labels and soft labels agree with one device. All are sharded like the tokens."""
    mesh = mesh_of(how)
    x, w, first, bias = linear.arrays(N, D, V, "float32", bias=True)
    rng = np.random.default_rng(2)
    weights = rng.uniform(-0.5, 1.5, N).astype("float32")
    weights[::7] = 0
    labels = np.concatenate([first[:, None], rng.integers(0, V, (N, 2)), first[:, None]], 1).astype("int32")
    static = {"workspace_bytes": BYTES * ROWS * V, "softcap": 20.0}

    def sums(x, w, bias, weights, labels, axis_name=None):
        """Returns two weighted sums of losses, one with its gradients computed in the forward."""
        keywords = {"bias": bias, "axis_name": axis_name, **static}
        loss = functools.partial(
            ps.linear_cross_entropy, x, w, labels[:, 0], token_weights=weights, **keywords
        )
        log_probs = ps.linear_log_probs(x, w, labels, temperature=0.7, **keywords)
        probs = jax.nn.softmax(labels * 0.01)
        soft = functools.partial(ps.linear_cross_entropy, x, w, labels, label_probs=probs, **keywords)
        total = loss(reduction="sum") + jnp.sum(loss(reduction=None) ** 2) + jnp.sum(log_probs**2)
        return total + soft(reduction="sum", z_loss=0.01) + jnp.sum(soft(reduction=None) ** 2)

    specs = *LAYOUTS[layout], LAYOUTS[layout][-1]
    f = mapped(sums, how, layout, mesh, specs, P(), jax.lax.psum)
    args = x, w, bias, weights, labels
    want = jax.jit(jax.value_and_grad(sums, (0, 1, 2, 3)))(*args)
    with jax.set_mesh(mesh):
        laid = lay(args, mesh, specs)
        got = jax.jit(jax.value_and_grad(f, (0, 1, 2, 3)))(*laid)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert linear.rounded_errors(a, np.asarray(b, "float64")) <= 1e-5
    assert not np.asarray(got[1][3])[weights == 0].any()


def left_out_tokens(how, layout):
    """With many tokens left out, loss and gradients agree with one device. Devices keep different numbers of tokens."""
    mesh = mesh_of(how)
    n = 1024 * mesh.shape["data"]
    x, w, labels, bias = linear.arrays(n, D, V, "float32", bias=True)
    where = np.random.default_rng(3).random(n) < np.linspace(0, 1, n)
    x = jnp.where(where[:, None], x, jnp.nan)

    def total(x, w, bias, labels, where, axis_name=None):
        f = functools.partial(
            ps.linear_cross_entropy, x, w, labels, bias=bias, where=where, axis_name=axis_name
        )
        stats = ps.linear_token_stats(x, w, labels, bias=bias, where=where, axis_name=axis_name)
        total = f(reduction="sum") + jnp.sum(f(reduction=None) ** 2)
        return total + jnp.sum(stats.log_probs * stats.entropy + stats.logsumexp)

    specs = *LAYOUTS[layout], LAYOUTS[layout][-1]
    f = mapped(total, how, layout, mesh, specs, P(), jax.lax.psum)
    args = x, w, bias, labels, where
    want = jax.jit(jax.value_and_grad(total, (0, 1, 2)))(x[where], w, bias, labels[where], None)
    with jax.set_mesh(mesh):
        laid = lay(args, mesh, specs)
        value, (dx, *others) = jax.jit(jax.value_and_grad(f, (0, 1, 2)))(*laid)
    dx = np.asarray(dx)
    assert not dx[~where].any()
    for a, b in zip(jax.tree.leaves((value, dx[where], others)), jax.tree.leaves(want)):
        assert linear.rounded_errors(a, np.asarray(b, "float64")) <= 1e-5


def statistics_and_winners(how, layout):
    """linear_token_stats, its gradient and linear_topk agree with one device; a row takes one collective."""
    mesh = mesh_of(how)
    columns = layout in ("columns", "both")
    args = linear.arrays(N, D, V, "float32", bias=True)
    args = args[0], args[1], args[3], args[2]
    specs = LAYOUTS[layout]

    def stats(x, w, bias, labels, **keywords):
        return ps.linear_token_stats(x, w, labels, bias=bias, softcap=20.0, temperature=0.7, **keywords)

    def winners(x, w, bias, labels, **keywords):
        return ps.linear_topk(x, w, 300, bias=bias, softcap=20.0, temperature=0.7, **keywords)

    def in_chunks(x, w, bias, labels, **keywords):
        return ps.linear_topk(x, w, 3, bias=bias, log=True, workspace_bytes=4 * ROWS * V, **keywords)

    def of_tokens(f):
        return mapped(f, how, layout, mesh, specs, specs[-1])

    def gradient(f):
        def total(*args):
            log_probs, entropy, logsumexp, *_ = f(*args)
            return jnp.sum(log_probs * entropy + logsumexp**2)

        return jax.jit(jax.value_and_grad(total, (0, 1, 2)))

    with jax.set_mesh(mesh):
        laid = lay(args, mesh, specs)
        got = []
        for f in stats, winners, in_chunks:
            program = jax.jit(of_tokens(f)).lower(*laid).compile()
            got.append(program(*laid))
            found = [c.kind for c in links.collectives(program.as_text()) if c.group > 1]
            assert found == ["all-gather"] * (columns or (layout == "fsdp" and mesh.shape["data"] > 1)), found
        sharding = NamedSharding(mesh, specs[-1])
        assert all(a.sharding.is_equivalent_to(sharding, a.ndim) for a in jax.tree.leaves(got))
        gradients = gradient(of_tokens(stats))(*laid)
    want = [jax.jit(f)(*args) for f in (stats, winners, in_chunks)]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(gradient(stats)(*args))):
        assert linear.rounded_errors(a, np.asarray(b, "float64")) <= 1e-5


def divergences(how, layout):
    """Divergences from a teacher that is sharded alike agree with one device, also where a token is not finite."""
    mesh = mesh_of(how)
    x, w, _, bias = linear.arrays(N, D, V, "float32", bias=True)
    teacher_x, teacher_w, _, teacher_bias = linear.arrays(N, 2 * D, V, "float32", bias=True, seed=1)
    weights = np.linspace(-0.5, 1.5, N).astype("float32") * (np.arange(N) % 7 != 0)

    def sums(x, w, bias, weights, teacher_x, teacher_w, teacher_bias, axis_name=None):
        f = functools.partial(
            ps.linear_kl_divergence, x, w, teacher_x, teacher_w, bias=bias, teacher_bias=teacher_bias
        )
        static = {"workspace_bytes": BYTES * ROWS * V, "axis_name": axis_name, "softcap": 20.0}
        total = f(beta=0.5, token_weights=weights, reduction="sum", **static)
        total = total + jnp.sum(f(beta=1, reduction=None, temperature=0.7, **static) ** 2)
        return total + f(beta=0, reduction="sum", **static)

    def bad_sum(x, w, bias, weights, teacher_x, teacher_w, teacher_bias, axis_name=None):
        return ps.linear_kl_divergence(x, w, teacher_x, teacher_w, reduction="sum", axis_name=axis_name)

    of_x, of_w, of_bias, of_tokens = LAYOUTS[layout]
    specs = of_x, of_w, of_bias, of_tokens, of_x, of_w, of_bias
    args = x, w, bias, weights, teacher_x, teacher_w, teacher_bias

    def on_shard(f):
        if how != "shard_map":
            return f

        def gathered(*shards, axis_name=None):
            *others, teacher_w, teacher_bias = shards
            if layout == "fsdp":
                teacher_w = jax.lax.all_gather(teacher_w, "data", tiled=True)
            return f(*others, teacher_w, teacher_bias, axis_name=axis_name)

        return mapped(gathered, how, layout, mesh, specs, P(), jax.lax.psum)

    want = jax.jit(jax.value_and_grad(sums, (0, 1, 2, 3)))(*args)
    with jax.set_mesh(mesh):
        laid = lay(args, mesh, specs)
        program = jax.jit(jax.value_and_grad(on_shard(sums), (0, 1, 2, 3))).lower(*laid).compile()
        got = program(*laid)
        if how != "shard_map":  # there, each device judges the sum of its own tokens
            bad = lay((x.at[N - 1].set(jnp.nan), *args[1:]), mesh, specs)
            gradients = jax.jit(jax.grad(bad_sum, (0, 1)))(*bad)
            assert not any(np.any(np.asarray(g)) for g in gradients)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert linear.rounded_errors(a, np.asarray(b, "float64")) <= 1e-5
    for a, spec in zip(got[1], specs):
        assert a.sharding.is_equivalent_to(NamedSharding(mesh, spec), a.ndim), (a.sharding, spec)
    if layout != "fsdp":  # a few numbers per token are gathered, and no w
        found = [c for c in links.collectives(program.as_text()) if c.group > 1 and c.kind == "all-gather"]
        assert sum(c.bytes for c in found) <= 64 * 4 * N < 4 * D * V, found


for (kind, function), how, layout in covering.pairs(
    {
        "divergence": divergences,
        "statistics": statistics_and_winners,
        "left_out": left_out_tokens,
        "weights": weights_and_several_labels,
    }.items(),
    HOW,
    LAYOUTS,
):
    name = f"linear-{kind}-{how}-{layout}"
    CHECKS[name] = functools.partial(function, how, layout)
    if name != "linear-divergence-explicit-both":
        SLOW.add(name)
for check_vma in (False, True):
    CHECKS[f"linear-features-{check_vma}"] = functools.partial(features, check_vma)
    SLOW.add(f"linear-features-{check_vma}")


# --- The bytes that a training step must send -----------------------------------------------------------

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
}


def step(layout, loss, how):
    """Returns the compiled training step of a loss of x, w and labels, all float32.

    With how="shard_map", w is gathered over the axes of the tokens, and x over "model", as a user has to.
    """
    sizes, of_x, of_w = STEPS[layout]
    kind = AxisType.Explicit if how == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=(kind,) * len(sizes))
    b, s, d, v = STEP_SHAPE
    specs = of_x, of_w, P(*of_x[:2])
    shapes = ((b, s, d), "float32"), ((d, v), "float32"), ((b, s), "int32")
    laid = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for (shape, dtype), spec in zip(shapes, specs)
    ]
    if how == "shard_map":
        columns = "model" if "model" in sizes else None

        def gathered(a, spec, *axes, to="varying"):
            for dimension, entry in enumerate(spec):
                for axis in reversed(entry if isinstance(entry, tuple) else (entry,)):
                    if axis in axes:
                        a = jax.lax.all_gather(a, axis, axis=dimension, tiled=True, to=to)
            return a

        def on_shard(x, w, labels):
            x, labels = (gathered(a, of_x[:2], columns, to="invarying") for a in (x, labels))
            others = tuple(axis for axis in sizes if axis != columns)
            value = loss(x, gathered(w, of_w, *others), labels, axis_name=columns)
            return jax.lax.pmean(value, others) if others else value

        whole = jax.shard_map(on_shard, mesh=mesh, in_specs=specs, out_specs=P())
    else:
        whole = loss
    out = None, tuple(a.sharding for a in laid[:2])
    return jax.jit(jax.value_and_grad(whole, (0, 1)), out_shardings=out).lower(*laid).compile()


def step_bytes(layout, loss, how="auto"):
    """Returns the bytes that a device receives in a training step."""
    return sum(c.received for c in links.collectives(step(layout, loss, how).as_text()))


STEP_SHAPE = 16, 32, 256, 4096


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
    return total + (2 * over_columns * 12 * b * s // tokens if columns > 1 else 0)


def few_bytes(layout, how):
    """Sums of dw and dx are as small as they can be, and nothing is gathered twice."""
    if jax.device_count() < 8:
        return
    assert step_bytes(layout, ps.linear_cross_entropy, how) <= 1.1 * least_bytes(layout)


def one_rounding(layout):
    """Gradients in bfloat16 are the same on 8 devices and on one: float32 sums, rounded once."""
    if jax.device_count() < 8:
        return
    x, w, labels, _ = linear.arrays(N, D, V, "bfloat16")
    sizes, of_x, of_w = STEPS[layout]
    mesh = jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=(AxisType.Auto,) * len(sizes))
    gradients = jax.jit(jax.grad(ps.linear_cross_entropy, (0, 1)))
    laid = lay((x, w, labels), mesh, (of_x, of_w, of_x))
    for got, want in zip(gradients(*laid), gradients(x, w, labels)):
        got, want = (np.asarray(a, "float32") for a in (got, want))
        assert np.mean(got != want) < 0.02  # sums in another order may be rounded to a neighbour
        np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-6)


def own_slices(how):
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


for how in HOW[:2]:
    CHECKS[f"linear-own_slices-{how}"] = functools.partial(own_slices, how)
SLOW.add("linear-own_slices-explicit")
for layout, how in itertools.product(STEPS, HOW[:2]):
    CHECKS[f"linear-few_bytes-{layout}-{how}"] = functools.partial(few_bytes, layout, how)
    if (layout, how) not in (("fsdp over two axes", "auto"), ("fsdp on V and columns", "explicit")):
        SLOW.add(f"linear-few_bytes-{layout}-{how}")
for layout in ("tokens", "hybrid fsdp", "columns"):
    CHECKS[f"linear-one_rounding-{layout}"] = functools.partial(one_rounding, layout)
    SLOW.add(f"linear-one_rounding-{layout}")
