from exp.turn2 import both
for k,dtype in ((2048,"bfloat16"),(512,"float32"),(512,"bfloat16"),(2048,"float32")):
    for kind in ("normal","band","shifted","scaled"):
        if (k,dtype)!=(512,"bfloat16"): both(4096,8192,k,dtype,kind)
    both(4096,8192,k,dtype,lengths=1)
both(4096,8192,512,"bfloat16")
for dtype in ("float32","bfloat16"):
    both(1,131072,2048,dtype); both(64,131072,2048,dtype); both(64,32768,2048,dtype)
both(1,1048576,2048,"bfloat16"); both(256,131072,2048,"float32",lengths=1)
both(4096,8192,8,"bfloat16",lengths=1); both(4096,8192,8,"float32",lengths=1); both(4096,8192,2048,"float16"); both(1024,16384,1024,"bfloat16"); both(4096,4096,512,"float32"); both(4096,2048,512,"bfloat16"); both(64,8192,2048,"float32"); both(1,8192,512,"bfloat16"); both(4096,8192,4096,"bfloat16");both(4096,8192,129,"float32")
