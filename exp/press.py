import re
import sys

for f in sys.argv[1:]:
    n=0; m=0; out=[]; ops=[]
    for line in open(f):
        g=re.match(r"\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9.]+).*?//\s*\|\s*(\d+)",line)
        if not g: continue
        n+=1; m=max(m,int(g[2])); ops.append(g[1].split(".")[0])
        if n%50==0: out.append(f"{n}:{m}({max(set(ops),key=ops.count)})"); m=0; ops=[]
    print(f,n,*out)
