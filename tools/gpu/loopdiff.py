import subprocess,sys,re
def loop(obj):
    out=subprocess.run(['cuobjdump','-sass',obj],capture_output=True,text=True).stdout
    fn=None; funcs={}
    for l in out.splitlines():
        m=re.search(r'Function : (\S+)',l)
        if m: fn=m.group(1); funcs[fn]=[]
        m=re.match(r'\s+/\*([0-9a-f]{4,})\*/\s+(.*?);',l)
        if m and fn: funcs[fn].append((int(m.group(1),16),m.group(2)))
    for f,ins in funcs.items():
        if 'backward_kernel_sm90' not in f: continue
        for a,t in ins:
            m=re.search(r'BRA.*?(0x[0-9a-f]+)',t)
            if m and int(m.group(1),16)<a:
                b=int(m.group(1),16); body=[x for x in ins if b<=x[0]<=a]; h=sum('HGMMA' in x[1] for x in body)
                if 20<h<=40 and len(body)<1500: return [re.sub(r'\b(UR|R|UP|P|B)\d+\b',r'\1',re.sub(r'0x[0-9a-f]+','X',x[1])) for x in body]
a,b=loop(sys.argv[1]),loop(sys.argv[2])
import difflib
d=[l for l in difflib.unified_diff(a,b,lineterm='',n=0) if not l.startswith(('---','+++'))]
print(len(a),len(b),'diff lines',len(d)); print('\n'.join(d[:int(sys.argv[3]) if len(sys.argv)>3 else 30]))
