import re
import sys

import jax

sys.path.insert(0,"/work/shared/tools/mosaic_ptx")

from mosaic_ptx import compile_kernels

from pallas_softmax._src.topk.select_plan import plan_selection, whole_plan
from tests.support.plans import HOPPER
from tests.topk.select import *


def report(k,dtype,plan,lengths=False,save=None):
    f=lambda x,l=None: select_kernel.select_rows(x,None,l,k,plan,sorted=False)
    args=[jax.ShapeDtypeStruct((4096,plan.vocab),dtype)]+([jax.ShapeDtypeStruct((4096,),"int32")] if lengths else [])
    for kk in compile_kernels(jax.jit(f),*args):
        m=re.findall(r"Used (\d+) registers|(\d+) bytes spill",kk.report)
        print(dtype,k,"wg",plan.warpgroups,plan.thread_bytes,"whole" if plan.whole else "list","lengths" if lengths else "",m,"smem",plan.smem_bytes,flush=True)
        if save:
            open(save+".ptx","w").write(kk.ptx)
            open(save+".cubin","wb").write(kk.cubin)
if __name__=="__main__":
    for k,dtype in ((2048,"bfloat16"),(512,"float32")):
        isz=jnp.dtype(dtype).itemsize
        report(k,dtype,plan_selection(4096,8192,k,dtype,HOPPER))
        for wg in (1,2,4):
            tb=8192*isz//(wg*128)
            if tb>128 or tb<32: continue
            report(k,dtype,whole_plan(8192,k,wg,tb),save=f"/tmp/{dtype}{wg}")
            report(k,dtype,whole_plan(8192,k,wg,tb),True)
