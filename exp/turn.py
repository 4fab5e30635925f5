import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.support.contenders import Call
from benchmarks.support.timing import _device_times, interleave
from exp.base import select_kernel as base_kernel
from exp.base.select_plan import plan_selection as base_plan
from pallas_softmax._src.topk.select_plan import plan_selection, whole_plan
from tests.topk.select import *

T0=time.time(); LIMIT=float(sys.argv[1]) if len(sys.argv)>1 else 1e9
CPU="cpu" in sys.argv
HOPPER=(9,0)
def whole(v,k,dtype,wg):
    return whole_plan(v,k,wg,v*jnp.dtype(dtype).itemsize//wg//128)
@functools.cache
def jitted(plan,k,has):
    m=base_kernel if "base" in type(plan).__module__ else select_kernel
    if has: return jax.jit(lambda x,L: tuple(m.select_rows(x,None,L,k,plan,sorted=False)))
    return jax.jit(lambda x: tuple(m.select_rows(x,None,None,k,plan,sorted=False)))
def old(rows,v,k,dtype): return {"base":base_plan(rows,v,k,dtype,HOPPER),"list":plan_selection(rows,v,k,dtype,HOPPER)}
def run(rows,v,k,dtype,variants,kind="normal",lengths=None,label=""):
    if time.time()-T0>LIMIT: print("skip",rows,v,k,dtype,kind,flush=True); return
    dt=jnp.dtype(dtype); key=jax.random.key(1)
    if CPU:
        for name,plan in variants.items():
            args=[jax.ShapeDtypeStruct((rows,v),dt)]+([] if lengths is None else [jax.ShapeDtypeStruct((rows,),"int32")])
            jitted(plan,k,lengths is not None).trace(*args).lower(lowering_platforms=("cuda",))
        print("lowered",rows,v,k,dtype,[*variants],flush=True); return
    @jax.jit
    def make():
        x=jax.random.normal(key,(rows,v),jnp.float32)
        if kind=="band": x=1+jnp.abs(x)*2.0**-12
        if kind=="shifted": x=x+1000
        if kind=="scaled": x=x*1e-3
        if kind=="constant": x=x*0+1.5
        if kind=="cauchy": x=jax.random.cauchy(key,(rows,v))**3
        return x.astype(dt)
    x=make(); xs={r:np.asarray(x[r]) for r in range(0,rows,max(rows//5,1))}
    args=(x,) if lengths is None else (x,jnp.asarray(lengths))
    calls={}
    for name,plan in variants.items():
        f=jitted(plan,k,lengths is not None)
        try:
            out=jax.block_until_ready(f(*args))
            for r,row in xs.items():
                n=v if lengths is None else int(np.clip(lengths[r],0,v)); kept=np.arange(v)<n
                assert_selected(out[0][r],out[1][r],row,k,kept,np.array(-np.inf,dt) if lengths is not None else LOWEST[dt.name],f"{name} {r}")
        except Exception as e: print("FAIL",name,dtype,k,kind,str(e)[:200].replace("\n"," "),flush=True)
        calls[name]=Call(functools.partial(f,*args),"x")
    t=interleave(calls,20,0.8,lambda n,e: print("failed",n,str(e)[:100]),_device_times)
    print(f"{rows}x{v} k={k} {dt.name[:4]} {kind}{'' if lengths is None else ' len'}{label}:",", ".join(f"{n} {np.median(s)*1e6:.1f}" for n,s in t.items()),flush=True)
