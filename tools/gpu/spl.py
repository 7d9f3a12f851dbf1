import subprocess,sys,re
out=subprocess.run(['cuobjdump','-sass',sys.argv[1]],capture_output=True,text=True).stdout
fn=None; funcs={}
for l in out.splitlines():
    m=re.search(r'Function : (\S+)',l)
    if m: fn=m.group(1); funcs[fn]=[]
    m=re.match(r'\s+/\*([0-9a-f]{4,})\*/\s+(.*?);',l)
    if m and fn: funcs[fn].append((int(m.group(1),16),m.group(2)))
for f,ins in funcs.items():
    if 'backward_kernel_sm90' not in f: continue
    hg=[a for a,t in ins if 'HGMMA' in t]; print(sys.argv[1],'HGMMA',hex(hg[0]),hex(hg[-1]), 'loop candidates')
    for i,(a,t) in enumerate(ins):
        m=re.search(r'BRA.*?(0x[0-9a-f]+)',t)
        if m and int(m.group(1),16)<a:
            b=int(m.group(1),16); body=[x for x in ins if b<=x[0]<=a]; h=sum('HGMMA' in x[1] for x in body)
            if 20<h<=40 and len(body)<1500: print('  loop',hex(b),hex(a),len(body),h,'STL',sum('STL' in x[1] for x in body),'LDL',sum('LDL' in x[1] for x in body))
    print('  spills', ' '.join(f"{hex(a)}:{'S' if 'STL' in t else 'L'}{'.64' if '.64' in t else '.128' if '.128' in t else ''}" for a,t in ins if 'STL' in t or 'LDL' in t))
