import re
import sys

f,n0=sys.argv[1],int(sys.argv[2]); lines=[l.rstrip("\n") for l in open(f)]
code=[(i,l) for i,l in enumerate(lines) if re.match(r"\s+/\*[0-9a-f]{4,5}\*/\s",l)]
i,l=code[n0]; col=l.index("// |")
hdr=next(x for x in lines if "// | #" in x or re.search(r"//\s*\|\s*#?\s+0",x) ) if any("// | #" in x for x in lines) else None
print(l[:col])
row=l[col:]; m=re.match(r"// \| *(\d+) ",row); print(m[1])
# columns after count: each reg 3 chars? use header
for x in lines[:60]:
    if "GPR" in x or "# GPR" in x: print(x[col:][:300])
print(row[:400])
hd=[x for x in lines if re.search(r"\|\s+#\s+0",x)]
h=hd[0]; pos={}
for mm in re.finditer(r"\d+",h[col:h.index("|",col+6) if False else len(h)]): pos.setdefault(mm.start(),int(mm.group()))
seg=row.split("|")[1]; hs=h[col:].split("|")[1]
cols=[(mm.end()-1,int(mm.group())) for mm in re.finditer(r"\d+",hs)]
live=[r for c,r in cols if c<len(seg) and seg[c] in ":^vx" ]
print(live)
for r in live:
    # last def before n0
    for j in range(n0-1,-1,-1):
        t=code[j][1][:col]
        d=re.match(r"\s+/\*\w+\*/\s+(@!?U?P\w+ )?([A-Z0-9.]+) (?:P\d, )?R(\d+)\b",t)
        if d and (int(d[3])==r or (".128" in d[2] and d[2].startswith("LD") and int(d[3])<=r<int(d[3])+4) or (("WIDE" in d[2] or ".64" in d[2]) and int(d[3])+1==r)) and not d[2].startswith("ST"):
            print(f"R{r} <- {n0-j} before: {t[16:].strip()[:70]}"); break
