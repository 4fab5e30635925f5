from exp.turn import *

rng=np.random.default_rng(0)
L=rng.integers(0,8193,4096).astype("int32")
for k,dtype in ((2048,"bfloat16"),(512,"float32"),(512,"bfloat16"),(2048,"float32")):
    isz=jnp.dtype(dtype).itemsize
    vs=old(4096,8192,k,dtype)
    vs|={f"n{wg}":whole(8192,k,dtype,wg) for wg in (1,2,4) if 32<=8192*isz//wg//128<=128}
    for kind in ("normal","band","constant"): run(4096,8192,k,dtype,vs,kind)
    run(4096,8192,k,dtype,vs,lengths=L)
for rows,v,k,dtype,wgs in ((64,32768,2048,"bfloat16",(4,)),(256,16384,2048,"bfloat16",(2,4)),(64,8192,512,"float32",(2,4)),(64,8192,512,"bfloat16",(1,2,4))):
    run(rows,v,k,dtype,old(rows,v,k,dtype)|{f"n{w}":whole(v,k,dtype,w) for w in wgs})
for rows,v,k,dtype in ((256,131072,2048,"float32"),(256,131072,2048,"bfloat16"),(64,1048576,2048,"bfloat16"),(1,1048576,2048,"bfloat16"),(64,131072,2048,"float32"),(2048,131072,512,"bfloat16"),(2048,131072,2048,"bfloat16")):
    run(rows,v,k,dtype,old(rows,v,k,dtype))
