import json,sys
def walk(o):
    if isinstance(o,dict):
        if 'kernel' in o and 'instance' in o:
            if o.get('spill_bytes') or (len(sys.argv)>1 and sys.argv[1] in o['kernel']): print({k:v for k,v in o.items() if k in('instance','kernel','architecture','tile','registers','spill_bytes')} )
        else:
            for v in o.values(): walk(v)
    elif isinstance(o,list):
        for v in o: walk(v)
walk(json.load(open('flash_cute/build_report.json')))
