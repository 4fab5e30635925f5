from exp.turn import *
import dataclasses
rng=np.random.default_rng(0)
def both(rows,v,k,dtype,kind="normal",lengths=None,extra=()):
    vs=old(rows,v,k,dtype); vs["new"]=vs.pop("list")
    for wg in extra: vs[f"n{wg}"]=whole(v,k,dtype,wg)
    run(rows,v,k,dtype,vs,kind,None if lengths is None else rng.integers(0,v+1,rows).astype("int32"))
for k,dtype in ((2048,"bfloat16"),(512,"float32"),(512,"bfloat16"),(2048,"float32")):
    for kind in ("normal","shifted","scaled","band","constant"): both(4096,8192,k,dtype,kind)
    both(4096,8192,k,dtype,lengths=1)
for rows,v,k,dtype in ((4096,8192,8,"bfloat16"),(4096,8192,8,"float32"),(4096,4096,64,"float32")): both(rows,v,k,dtype,lengths=1)
for rows,v,k,dtype in ((4096,2048,512,"bfloat16"),(4096,4096,512,"float32"),(132,16384,2048,"bfloat16"),(1,8192,512,"float32"),(64,8192,2048,"float32"),(1024,16384,1024,"bfloat16"),(4096,8192,2048,"float16"),(4096,5001,512,"bfloat16")): both(rows,v,k,dtype)
both(1,1048576,2048,"bfloat16"); both(64,131072,2048,"float32");both(1,131072,2048,"float32"); both(256,131072,2048,"float32",lengths=1)
