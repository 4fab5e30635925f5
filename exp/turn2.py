
from exp.turn import *

rng=np.random.default_rng(0)
def both(rows,v,k,dtype,kind="normal",lengths=None,extra=()):
    vs=old(rows,v,k,dtype); vs.pop("list"); vs["new"]=plan_selection(rows,v,k,dtype,HOPPER,False,lengths is not None)
    for wg in extra: vs[f"n{wg}"]=whole(v,k,dtype,wg)
    run(rows,v,k,dtype,vs,kind,None if lengths is None else rng.integers(0,v+1,rows).astype("int32"))
