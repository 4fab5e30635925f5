"""Run by test_transforms.py in a process with four CPU devices; prints {check: "ok" or the error}."""

import json
import traceback

import jax
import numpy as np
from cases import cotangent
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_transforms import DIFFERENTIABLE, FUNCTIONS, X3, loss

X = X3.reshape(-1, X3.shape[-1])
MESH = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,))
ROWS = NamedSharding(MESH, P("rows"))
COLUMNS = NamedSharding(MESH, P(None, "rows"))
# The default of jax.make_mesh: shardings are part of the types, and operations must propagate them.
EXPLICIT = NamedSharding(jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Explicit,)), P("rows"))


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=5e-6, atol=1e-6)


def shard_map(name):
    f = FUNCTIONS[name]
    mapped = jax.shard_map(f, mesh=MESH, in_specs=P("rows"), out_specs=P("rows"))
    close(jax.jit(mapped)(X), f(X))


def shard_map_grad(name):
    f = FUNCTIONS[name]
    mapped = jax.shard_map(f, mesh=MESH, in_specs=P("rows"), out_specs=P("rows"))
    close(jax.jit(jax.grad(loss(mapped)))(X), jax.grad(loss(f))(X))


def named_sharding(name):
    f = FUNCTIONS[name]
    close(jax.jit(f)(jax.device_put(X, ROWS)), f(X))


def named_sharding_grad(name):
    f = loss(FUNCTIONS[name])
    close(jax.jit(jax.grad(f))(jax.device_put(X, ROWS)), jax.grad(f)(X))


def sharded_vocabulary(name):
    f = FUNCTIONS[name]
    close(jax.jit(f)(jax.device_put(X, COLUMNS)), f(X))


def explicit_sharding(name):
    f = FUNCTIONS[name]
    y = jax.jit(f)(jax.device_put(X, EXPLICIT))
    assert jax.typeof(y).sharding.spec[0] == "rows", jax.typeof(y)
    close(y, f(X))


def explicit_sharding_grad(name):
    f = FUNCTIONS[name]
    x, g = jax.device_put(X, EXPLICIT), cotangent(f(X).shape)
    dx = jax.jit(lambda x, g: jax.vjp(f, x)[1](g)[0])(x, jax.device_put(g, EXPLICIT))
    assert jax.typeof(dx).sharding.spec[0] == "rows", jax.typeof(dx)
    close(dx, jax.vjp(f, X)[1](g)[0])


def stays_sharded():
    y = jax.jit(FUNCTIONS["softmax"])(jax.device_put(X, ROWS))
    assert y.sharding.is_equivalent_to(ROWS, y.ndim), y.sharding


def outcome(check, *args):
    try:
        check(*args)
    except Exception:
        return traceback.format_exc()[-3000:]
    return "ok"


CHECKS = [
    shard_map,
    shard_map_grad,
    named_sharding,
    named_sharding_grad,
    explicit_sharding,
    explicit_sharding_grad,
    sharded_vocabulary,
]


def main():
    assert jax.device_count() == 4
    report = {"stays_sharded": outcome(stays_sharded)}
    for check in CHECKS:
        for name in DIFFERENTIABLE if check.__name__.endswith("grad") else FUNCTIONS:
            report[f"{check.__name__}-{name}"] = outcome(check, name)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
