"""PTX instructions of a warp per row, by the machine; and ptxas's report."""
import jax.numpy as jnp
import numpy as np

from tests.support import ptx
from tests.topk.select import *


def count(plan,dtype,x,length=None):
    tot={"n":0}; go=ptx.Machine._go
    def _go(self,group,at,stop):
        s=self.steps; go(self,group,at,stop); tot["n"]+=(self.steps-s)*len(np.unique(group//32))
    ptx.Machine._go=_go
    try: machine_launch(x[None],None,None if length is None else np.array([length]),plan.k,plan,np.array(-np.inf,x.dtype))
    finally: ptx.Machine._go=go
    return tot["n"]
if __name__=="__main__":
    from pallas_softmax._src.topk.select_plan import plan_selection
    from tests.support.plans import HOPPER
    for k,dtype in ((2048,"bfloat16"),(512,"bfloat16"),(2048,"float32"),(512,"float32")):
        x=np.random.default_rng(0).standard_normal(8192).astype(jnp.dtype(dtype))
        old=plan_selection(4096,8192,k,dtype,HOPPER)
        out=[f"old {old.warpgroups} {count(old,dtype,x)}"]
        isz=x.dtype.itemsize
        for wg in (1,2,4):
            tb=8192*isz//(wg*128)
            if tb>128 or tb < 32: continue
            p=SelectPlan(8192,k,1,wg,k,1,tb,True)
            out.append(f"new {wg}x{tb} {count(p,dtype,x)}"+f" half {count(p,dtype,x,4096)} short {count(p,dtype,x,1024)}")
        print(dtype,k,*out,flush=True)
