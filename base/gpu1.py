"""Noise kernel on a GPU: tokens against categorical, then times of variants."""
import functools, os, sys, time
import jax, jax.numpy as jnp, numpy as np
sys.path.insert(0, "base"); sys.path.insert(0, ".")
import pallas_softmax_base as old
from benchmarks.support.timing import interleave
from benchmarks.support.contenders import Call
from pallas_softmax._src.sample import draw_ptx, mosaic_gpu as mg, noise_ptx, plan as plans, winner_ptx
from pallas_softmax._src.sample.plan import plan_sample, plan_of

NONE = 2**31 - 1
f32 = lambda a: jnp.asarray(np.array(a, np.float32).reshape(-1))

def words_of(key, rows, v):
    k = jax.random.key_data(key)
    at = np.arange(rows, dtype=np.uint64) * v
    return jnp.stack([jnp.full(rows, k[0]), jnp.full(rows, k[1]), jnp.asarray((at >> 32).astype("u4")), jnp.asarray((at & 0xFFFFFFFF).astype("u4"))], 1)

def params(t=1.0, k=NONE, pp=1.0, mp=0.0):
    return mg.Params(f32(t), jnp.asarray([k], jnp.int32), f32(pp), f32(mp))

def draw(x, words, p, plan, stride=1):
    return mg.sample_rows(x, None, p, words if stride else None, plan, stride)

def sort_key(x):
    bits = {4: jnp.int32, 2: jnp.int16}[x.dtype.itemsize]
    b = jax.lax.bitcast_convert_type(x, bits)
    return (b ^ ((b >> (8 * x.dtype.itemsize - 1)) & jnp.array(2 ** (8 * x.dtype.itemsize - 1) - 1, bits))).astype(jnp.int32)

CHECKS = {}

def check(rows, v, dt):
    """Functions of one shape, compiled once."""
    plan = plan_sample(rows, v, jnp.dtype(dt), (9, 0))
    S = jax.ShapeDtypeStruct
    x, w = S((rows, v), dt), S((rows, 4), "uint32")
    p = jax.tree.map(lambda a: S(a.shape, a.dtype), params())
    def want(x, p, cut, index):
        key = jax.random.key(rows + v)
        k = sort_key(x)
        kept = (k > cut[0][:, None]) | ((k == cut[0][:, None]) & (jnp.arange(v)[None] <= cut[1][:, None]))
        g = jax.random.gumbel(key, (rows, v), jnp.float32)
        z = x.astype(jnp.float32) / p.temperature[0]
        y = jnp.where(kept, z + g, -jnp.inf)
        best = jnp.argmax(y, 1)
        at = lambda i: jnp.take_along_axis(y, i[:, None], 1)[:, 0]
        return best, at(best) - at(index), kept.sum(1), jax.nn.logsumexp(z, 1), jnp.log((jax.nn.softmax(z, 1) * kept).sum(1)), jnp.take_along_axis(jax.nn.log_softmax(z, 1), index[:, None], 1)[:, 0]
    i, f = S((rows,), "int32"), S((rows,), "float32")
    return (rows, v, dt), [jax.jit(lambda x, w, p: draw(x, w, p, plan)).lower(x, w, p), jax.jit(lambda x, p: draw(x, None, p, plan, None)).lower(x, p), jax.jit(want).lower(x, p, [i, i, f, f], i)]

def compare(rows, v, dt, kind, p):
    key = jax.random.key(rows + v)
    x = jax.random.normal(jax.random.key(7), (rows, v)) * 3
    if kind == "const": x = jnp.zeros((rows, v)) + 1.5
    if kind == "ints": x = jnp.round(x)
    if kind == "sorted": x = jnp.sort(x, 1)
    x = x.astype(dt)
    run, cutoff, want = CHECKS[rows, v, dt]
    w = words_of(key, rows, v)
    got, again, cut = run(x, w, p), run(x, w, p), cutoff(x, p)
    best, gap, kept, lse, lm, lp = want(x, p, cut, got[0])
    same = all(bool((a == b).all()) for a, b in zip(got, again))
    err = lambda a, b: float(jnp.max(jnp.abs(a - b)))
    print(f"{rows}x{v} {dt[:3]+dt[-2:]} {kind} k={int(p.top_k[0]) if int(p.top_k[0]) < NONE else '-'} p={float(p.top_p[0]):.2f} m={float(p.min_p[0]):.2f}: differ {int((best != got[0]).sum())}/{rows} gap {float(jnp.max(jnp.abs(gap))):.0e} kept {int(kept.min())}..{int(kept.max())} {err(lse, cut[2]):.0e} {err(lm, cut[3]):.0e}/{err(lm, got[2]):.0e} {err(lp, got[1]):.0e} {'' if same else 'NOT REPEATABLE'}", flush=True)

def timed(calls, seconds=2.0, repeats=20):
    out = {}
    def failed(n, e): print("failed", n, str(e)[:200])
    t = interleave({n: Call(run=lambda f=f: {"y": f()}, ran="") for n, f in calls.items()}, repeats, seconds, failed)
    return {n: np.median(v) * 1e6 for n, v in t.items() if v}

RACE = dict(winner_ptx.Race.__dict__)

def run_once(self):
    p = self.p
    self._sweep()
    of = p.each_cta(self._first_best, [self.best, self.index], [-np.inf, 2**31 - 1], p.word(p.plan.best))
    best, winner = self._first_best(of)
    return p.var(p.origin), p.select(winner.equals(12345), 1, 0, "u32")

def variant(at_once=2, listed=12, dense=0.75, off=()):
    winner_ptx._DENSE = dense
    winner_ptx.NOISE_AT_ONCE = plans.NOISE_AT_ONCE = at_once
    plans.LISTED_AT_ONCE = listed
    for n in ("run", "_list", "_perturb", "_sweep", "_publish", "_compare"): setattr(winner_ptx.Race, n, RACE[n])
    if {"noise", "sweep", "slow"} & set(off): winner_ptx.Race.run = run_once
    if "slow" in off: winner_ptx.Race._compare = lambda self, one, x, position, index: self.p.set(self.index, index)
    if "pub" in off: winner_ptx.Race._publish = lambda self: self.p.set(self.goal, self.p.max(self.goal, self.p.over_warp(["max"], [self.best])[0]))
    if "noise" in off: winner_ptx.Race._perturb = lambda self, list_, listed, more: (self.p.set(listed, 0), self.p.set(self.dense, 0))
    if "sweep" in off: winner_ptx.Race._sweep = lambda *a: None
    draw_ptx.row_program.cache_clear()

start = time.time()
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(12)

def compiled(lowered):
    return [pool.submit(l.compile) for l in lowered]

SHAPES = [(300, 128256, "float32"), (64, 50257, "bfloat16"), (1000, 1000, "float16")]
if os.environ.get("CHECK", "1") == "1":
    jobs = {}
    for shape in SHAPES:
        name, lowered = check(*shape)
        jobs[name] = compiled(lowered)
    CHECKS.update({name: [j.result() for j in js] for name, js in jobs.items()})
    print("compiled", round(time.time() - start), flush=True)
    for rows, v, dt in SHAPES:
        for kind, p in [("normal", params()), ("const", params()), ("ints", params(k=50)), ("normal", params(pp=.9)), ("ints", params(2., 300, .8, .03)), ("sorted", params(mp=.01))][: 6 if rows in (300, 64) else 4]:
            compare(rows, v, dt, kind, p)
    print("checked", round(time.time() - start), flush=True)

VARIANTS = {"new": {}, "a1": dict(at_once=1), "a3": dict(at_once=3), "nodense": dict(dense=2.0), "d.6": dict(dense=0.6), "L8": dict(listed=8), "nonoise": dict(off=("noise",))}
S = jax.ShapeDtypeStruct
P = jax.tree.map(lambda a: S(a.shape, a.dtype), params())
SIZES = [(1024, 151936, "float32"), (256, 128256, "float32"), (64, 128256, "float32"), (1024, 151936, "bfloat16")]
KEY = jax.random.key(3)
jobs = {}
for size in SIZES:
    rows, v, dt = size
    plan = plan_sample(rows, v, jnp.dtype(dt), (9, 0))
    x = S((rows, v), dt)
    def add(name, plan):
        jobs[size, name] = pool.submit(jax.jit(lambda x, w, p: draw(x, w, p, plan)).lower(x, S((rows, 4), "uint32"), P).compile)
    for vn, vv in VARIANTS.items():
        if rows != 1024 and vn not in ("new", "nonoise") or dt == "bfloat16" and vn != "new": continue
        variant(**vv)
        add(vn, plan)
    variant()
    if dt == "bfloat16":
        import dataclasses
        pass
    else:
        jobs[size, "cut"] = pool.submit(jax.jit(lambda x, w, p: draw(x, None, p, plan, None)).lower(x, S((rows, 4), "uint32"), P).compile)
    for name, kw in (("old none", {}), ("old k50", {"top_k": 50}), ("old p.9", {"top_p": np.float32(.9)})):
        jobs[size, name] = pool.submit(jax.jit(lambda x, kw=kw: old.sample(KEY, x, **kw)[0]).lower(x).compile)
    jobs[size, "cat"] = pool.submit(jax.jit(lambda x: jax.random.categorical(KEY, x)).lower(x).compile)
F = {k: j.result() for k, j in jobs.items()}
print("compiled", round(time.time() - start), flush=True)
for size in SIZES:
    rows, v, dt = size
    w = words_of(KEY, rows, v)
    for kind, scale in [("normal3", 3.0), ("5%", 5.8), ("const", 0.0)]:
        x = (jax.random.normal(jax.random.key(7), (rows, v)) * scale).astype(dt)
        calls = {n: (lambda f=F[size, n]: f(x)) for n in ("old none", "cat")}
        own = [n for s, n in F if s == size and n in ("new", "lists", "cut")]
        if kind == "normal3":
            calls |= {n: (lambda f=F[size, n]: f(x)) for n in ("old k50", "old p.9")}
            for n, p in (("k50", params(k=50)), ("p.9", params(pp=.9))):
                for o in own:
                    calls[f"{o} {n}"] = lambda p=p, o=o: F[size, o](x, w, p)
        for (r, n), f in F.items():
            if r == size and n in (*VARIANTS, *own): calls[n] = lambda f=f, p=params(): f(x, w, p)
        t = timed(calls, 1.0, 10)
        print(rows, v, dt[:2], kind, "; ".join(f"{n} {u:.1f}" for n, u in t.items()), f"[{time.time()-start:.0f}s]", flush=True)
print("done", round(time.time() - start))
