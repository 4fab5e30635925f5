"""x"""
import functools, math
import jax, jax.numpy as jnp
from jax import lax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from pallas_softmax import online
from pallas_softmax.implementations.mosaic_gpu.linear.product import Staging, product, store, WARPGROUP_ROWS
from pallas_softmax.implementations.mosaic_gpu.linear.plan import Tiling
LOG2E = math.log2(math.e)

def _rows(ref, row, interpret):
    if interpret: return ref[pl.ds(row, 64)]
    return plgpu.load(ref.at[pl.ds(row, 64)], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

def normalizers(x, w, labels=None, *, transpose_w=False, ragged=None, tiling=Tiling(), store_e=False, interpret=None):
    n, d = x.shape
    v = w.shape[0 if transpose_w else 1]
    n_pad = -(-n//128)*128
    parts = -(-v // tiling.tile_n)
    ragged = v % tiling.tile_n != 0 if ragged is None else ragged
    def epilogue(acc, place, *refs):
        refs = list(refs)
        labels_gmem = refs.pop(0) if labels is not None else None
        m_gmem, d_gmem, l_gmem = refs[:3]
        z = acc
        if ragged or labels is not None:
            cols = plgpu.broadcasted_iota(jnp.int32, z.shape, 1, layout=None if interpret else plgpu.Layout.WGMMA)
        if ragged:
            z = jnp.where(cols < v - place.column, z, -jnp.inf)
        rows = pl.ds(place.row, 64)
        if labels is not None:
            lab = _rows(labels_gmem, place.row, interpret) - place.column
            hit = cols == lax.broadcast_in_dim(lab, z.shape, (0,))
            l_gmem[place.index, rows] = jnp.sum(jnp.where(hit, z, 0.0), axis=1)
        m2 = jnp.max(z, axis=1) * LOG2E
        s = online.shift(m2)
        e = jnp.exp2(z * LOG2E - lax.broadcast_in_dim(s, z.shape, (0,)))
        m_gmem[place.index, rows] = m2
        d_gmem[place.index, rows] = jnp.sum(e, axis=1)
        if store_e:
            store(place.staging, e.astype(x.dtype), refs[3], place.row, place.column)
    out = [jax.ShapeDtypeStruct((parts, n_pad), jnp.float32)] * 3
    if store_e: out.append(jax.ShapeDtypeStruct((n, -(-v//8)*8), x.dtype))
    return product(epilogue, x, w, [] if labels is None else [labels], b_transposed=transpose_w, out_type=out,
                   staging=Staging(x.dtype, 64) if store_e else None, tiling=tiling, name="linear_normalizers", interpret=interpret)
