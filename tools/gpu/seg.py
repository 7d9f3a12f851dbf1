import re,sys
# cumulative share of an iteration between marks
rows=[]
for l in open(sys.argv[1]):
    m=re.match(r"\s*(\d+)\s+([\d.]+)\s+([\d.]+)%\s(.*)",l)
    if m: rows.append((int(m[1]),float(m[2]),float(m[3]),m[4][:70].strip()))
tot=sum(r[2] for r in rows if r[1]>0)
acc=0; last=0
print("sum",tot)
for i,x,p,t in rows:
    acc+=p
    if x>0.3 and re.search(r"HGMMA.*(RZ, !UPT|gsb0)|DEPBAR|SYNCS|FENCE|STSM|MUFU.EX2|STS.128|UBLKRED|LDS|WARPGROUP.ARRIVE|BRA",t):
        if acc>0.25:
            print(f"{i:5d} +{acc:5.2f}  {t}"); acc=0
print(acc)
