import csv,sys
f=sys.argv[1]; lo=float(sys.argv[2]) if len(sys.argv)>2 else 0.9
lines=open(f).read().split('\n')[1:]
rows=list(csv.DictReader(lines))
S=lambda r:int(r['# Samples'] or 0)
tot=sum(map(S,rows)); 
ex=lambda r:int(r['Instructions Executed'] or 0)
mx=max(map(ex,rows))
print('total',tot,'rows',len(rows),'max exec',mx)
loop=[i for i,r in enumerate(rows) if ex(r)>=mx*lo]
print('loop instr',len(loop), 'samples in loop', sum(S(rows[i]) for i in loop)/tot)
a,b=loop[0],loop[-1]
stalls=[k for k in rows[0] if k.startswith('stall_') and 'Not' not in k]
acc=0
for i in range(a,b+1):
    r=rows[i]; s=S(r)
    st=sorted(((int(r[k] or 0),k[6:]) for k in stalls),reverse=True)[:2]
    w=r['L1 Wavefronts Shared']; wi=r['L1 Wavefronts Shared Ideal']
    print(f"{i:5d} {ex(r)/mx:5.2f} {100*s/tot:6.2f}% {r['Source'][:86]:86s} {' '.join(f'{n}:{k}' for n,k in st if n>tot*.002)} {w+'/'+wi if w not in ('','0') else ''}")
