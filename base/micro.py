"""Picoseconds of one word of threefry in a full GPU, in variants."""
import functools, sys
import jax, jax.numpy as jnp, numpy as np
import jax.experimental.pallas as pl
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.inline import insert_ptx

ROT = (13, 15, 26, 6), (17, 29, 16, 24)
TURNS = 400

def words_at(p, key, places, wide, one):
    keys = [*key, p.bitwise3(lambda a, b, c: a ^ b ^ c, *key, p.var(0x1BD11BDA, "u32"))]
    halves = [p.split(place)[::-1] for place in places]
    halves = [(x + keys[0], y + keys[1]) for x, y in halves]
    add = (lambda x, y: p.multiply_add(x, one, y)) if one is not None else (lambda x, y: x + y)
    n = 0
    for i in range(5):
        for by in ROT[i % 2]:
            halves = [(add(x, y), y) for x, y in halves]
            if n in wide:
                out = []
                for x, y in halves:
                    low, high = p.split(p.multiply_wide(y, 1 << by))
                    out.append((x, p.bitwise3(lambda a, b, c: (a | b) ^ c, low, high, x)))
                halves = out
            else:
                halves = [(x, p.rotate_left(y, by) ^ x) for x, y in halves]
            n += 1
        halves = [(x + keys[(i + 1) % 3], y + (keys[(i + 2) % 3] + (i + 1))) for x, y in halves]
    return [x ^ y for x, y in halves]

def program(chains, wide, opaque):
    p = CtaProgram(8, 1)
    key = tuple(p.operands("u32", "key0", "key1"))
    one = p.operand("one", "u32") if opaque else None
    acc, lo = p.var(0, "u32"), p.var(p.thread)
    with p.each(0, p.operand("turns", "u32")):
        places = [p.join(lo + 7 * c, p.var(0, "u32")) for c in range(chains)]
        for w in words_at(p, key, places, wide, one):
            p.set(acc, acc ^ w)
        p.increase(lo, 1000)
    p.store(p.operand("out", "u64") + p.multiply_wide(p.thread, 4), acc, space="global")
    return p

def kernel(chains, wide, opaque, ctas):
    def micro(k_gmem, out):
        numbers = {"key0": k_gmem[0], "key1": k_gmem[1], "one": k_gmem[2], "turns": jnp.uint32(TURNS)}
        insert_ptx(program(chains, wide, opaque), {"out": out}, numbers if opaque else {k: v for k, v in numbers.items() if k != "one"})
    return jax.jit(lambda k: gpu_kernel(micro, grid={"row": ctas}, out_type=[jax.ShapeDtypeStruct((256,), jnp.int32)], warpgroups=2)(k))

SETS = {"-": (), "w5": (1, 6, 11, 16), "w10": tuple(range(1, 20, 2)), "w17": tuple(i for i in range(20) if i % 7)}
K = jnp.asarray([3, 4, 1], jnp.uint32)
CASES = [(1, "-", 0), (2, "-", 0), (3, "-", 0), (4, "-", 0), (2, "w5", 0), (2, "w10", 0), (2, "w17", 0), (2, "-", 1), (2, "w10", 1), (4, "w10", 0)]
