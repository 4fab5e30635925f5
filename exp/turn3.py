from exp.turn2 import both
for k,dtype in ((2048,"bfloat16"),(512,"float32"),(512,"bfloat16"),(2048,"float32")):
    for kind in ("normal","band","shifted"): both(4096,8192,k,dtype,kind)
    both(4096,8192,k,dtype,lengths=1)
for dtype in ("float32","bfloat16"):
    both(1,131072,2048,dtype); both(1,1048576,2048,dtype); both(8,131072,2048,dtype); both(64,32768,2048,dtype)
    both(64,131072,2048,dtype); both(256,131072,2048,dtype); 
for dtype in ("bfloat16","float32"):
    both(64,1048576,2048,dtype); both(2048,131072,512,dtype); both(2048,131072,2048,dtype)
both(256,131072,2048,"float32",lengths=1); both(4096,8192,8,"bfloat16",lengths=1); both(1024,16384,1024,"bfloat16"); both(4096,8192,2048,"float16")
