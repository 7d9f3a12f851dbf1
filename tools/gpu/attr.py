import re,sys,collections
c=collections.Counter(); cur=[]; prev=False
for l in open(sys.argv[1]):
    if '//## File' in l:
        if not prev: cur=[]
        cur.append(l); prev=True
    else:
        prev=False
        if re.search(r'\b(STL|LDL)\b',l) or re.search(r'(STL|LDL)[ .]',l):
            t=''.join(cur)
            roles=[r for r in ('producer_sm90','query_sums_sm90','finish_queries','consumer_sm90','warpgroup_sm90') if r in t]
            op='STL' if 'STL' in l else 'LDL'
            c[(roles[0] if roles else re.sub(r'.*include.','',cur[-1].strip())[-60:] if cur else '?',op)]+=1
for k,v in sorted(c.items()): print(v,k)
