"""PTX instructions of a warp per row, by stage."""
import sys

import jax.numpy as jnp
import numpy as np

from pallas_softmax._src.topk import select_row_ptx as R
from pallas_softmax._src.topk.select_plan import plan_selection, whole_plan
from tests.support import ptx
from tests.support.plans import HOPPER
from tests.topk.select import *


def stages(plan,dtype,x,length=None,names=("select_row","read_row","search","count_buckets","first_ties","fill_list","bits_of","list_winners","append_few","append_many","pick","clear","count","append","scan_warps","write_list","write_results","missing","find","last_key","compact","sample","stream","visit","read_keys")):
    R.program_of.cache_clear(); R.select_program.cache_clear()
    marks=[]; saved={}
    for n in names:
        cls=next(c for c in R.RowProgram.__mro__ if n in vars(c)); f=vars(cls)[n]; saved[n]=(cls,f)
        def w(self,*a,_f=f,_n=n,**k):
            s=len(self.lines); out=_f(self,*a,**k); marks.append((_n,s,len(self.lines),self)); return out
        setattr(cls,n,w)
    p=R.program_of(plan,x.dtype,False,int(np.array(-np.inf,x.dtype).view(f"u{x.itemsize}"))<<32-8*x.itemsize)
    for n,(cls,f) in saved.items(): setattr(cls,n,f)
    at=[0]
    for line in p.lines: at.append(at[-1]+len(ptx._parse(line+"\n")[0]))
    cnt=np.zeros(at[-1]+1,int); go=ptx.Machine._go
    def _go(self,group,a,stop):
        s=self.steps; go(self,group,a,stop); d=self.steps-s
        cnt[a:a+d]+=len(np.unique(group//32))
    ptx.Machine._go=_go
    try: machine_launch(x[None],None,None if length is None else np.array([length]),plan.k,plan,np.array(-np.inf,x.dtype))
    finally: ptx.Machine._go=go
    R.program_of.cache_clear(); R.select_program.cache_clear()
    # exclusive
    owner=np.full(len(cnt),-1)
    order=sorted([m for m in marks if m[3] is p],key=lambda m:-(m[2]-m[1]))
    labels=[]
    for i,(n,s,e,_) in enumerate(order): owner[at[s]:at[e]]=i; labels.append(n)
    out={}
    for i,n in enumerate(labels): out[n]=out.get(n,0)+int(cnt[owner==i].sum())
    out["rest"]=int(cnt[owner==-1].sum())
    return int(cnt.sum()),out
LEN=[int(sys.argv[2])] if len(sys.argv)>2 else []
if __name__=="__main__":
    for k,dtype in ((2048,"bfloat16"),(512,"bfloat16"),(2048,"float32"),(512,"float32")):
        x=np.random.default_rng(0).standard_normal(8192).astype(jnp.dtype(dtype))
        old=plan_selection(4096,8192,k,dtype,HOPPER)
        if sys.argv[1:2]==["old"]: print(dtype,k,"old",*stages(old,dtype,x,*LEN),flush=True)
        wg=1 if x.itemsize==2 else 2
        print(dtype,k,"new",*stages(whole_plan(8192,k,wg,8192*x.itemsize//wg//128),dtype,x,*LEN),flush=True)
