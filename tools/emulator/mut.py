import subprocess,sys
g=open('good.hpp').read()
P='inc/flash_cute/backward/split_mainloop_sm80.hpp'
def rep(*pairs):
    t=g
    for a,b,n in pairs:
        assert t.count(a)>=1,a
        if n==0: t=t.replace(a,b,1)
        else:
            i=t.index(a); i=t.index(a,i+1); t=t[:i]+b+t[i+len(a):]
    return t
W='wait_at(BarrierId::half, kHalf, int(half));'
M={
'no half (P/dS)':rep((W,'',0)),
'no half at end':rep((W,'',1)),
'no loaded':rep(('wait_at(BarrierId::loaded, kThreads);','',0),('arrive_at(BarrierId::loaded, kThreads);','',0)),
'no gradients':rep(('wait_at(BarrierId::gradients, kThreads);','',0),('if (!has_weights) arrive_at(BarrierId::gradients, kThreads);','',0)),
'no weights':rep(('arrive_at(BarrierId::weights, kThreads);','',0),('wait_at(BarrierId::weights, kThreads);','',0)),
'no cp wait':rep(('        cp_async_wait<0>();\n        arrive','        arrive',0)),
'load before weights':rep(('        wait_at(BarrierId::weights, kThreads);\n        if (next_head < end_head) load_queries(next_head, next_block, stage ^ 1);','        if (next_head < end_head) load_queries(next_head, next_block, stage ^ 1);\n wait_at(BarrierId::weights, kThreads);\n',0)),
'no last add':rep(('    for (int i = 0; i < kSums; ++i) add(i);\n  }\n\n private','  }\n\n private',0)) if '    for (int i = 0; i < kSums; ++i) add(i);\n  }\n\n private' in g else None,
}
for n,t in M.items():
    if t is None: print('skip',n); continue
    open(P,'w').write(t)
    r=subprocess.run('bash build.sh 256',shell=True,capture_output=True,text=True)
    if r.returncode: print(n,'BUILD',r.stderr[-300:]); continue
    caught=[]
    for case in ('three steps, odd',):
        for p in range(6):
            r=subprocess.run(['./emu_256_0_bf16',case,str(p)],capture_output=True,text=True)
            o=r.stdout
            caught.append('E' if 'EMU FAIL' in o else ('R' if 'RACE' in o else '')+('V' if '!!!' in o else '') or '-')
    print(f'{n:22s}',caught,flush=True)
open(P,'w').write(g)
