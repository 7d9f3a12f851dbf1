s=open('main.cpp').read()
a='  unsigned seed = argc > 3'
f='''  if (getenv("FUZZ")) { std::mt19937 g(atoi(getenv("FUZZ"))); auto R=[&](int a,int b){return a+int(g()%unsigned(b-a+1));};
    for (int n=0;n<25;++n) { Case c{}; c.name="fuzz "+std::to_string(n); c.hk=R(1,2); c.hq=c.hk*R(1,4); c.d=D-8*R(0,3); c.mp=R(0,1)?1:132; c.batch=R(1,3);
      int kind=R(0,4); c.left=big; c.right=big; if(kind==1)c.right=0; if(kind==2){c.left=R(0,80);c.right=R(0,80);} if(kind==3){c.left=R(0,90);c.right=0;} if(kind==4){c.right=R(0,60);}
      c.dq=R(0,3)>0; c.dout=R(0,5)>0; c.dlse=R(0,2)>0;
      if (R(0,1)) { c.cq={R(0,7)}; c.ck={R(0,7)}; for(int b=0;b<c.batch;++b){c.cq.push_back(c.cq.back()+R(0,180)); c.ck.push_back(c.ck.back()+R(0,180));} c.sq=c.cq.back()+R(0,9)+1; c.sk=c.ck.back()+R(0,9)+1; }
      else { c.sq=R(1,200); c.sk=R(1,200); if (R(0,1)) for(int b=0;b<c.batch;++b){ c.uq.push_back(R(0,c.sq)); int u=R(0,c.sk); c.uk.push_back(u); c.lp.push_back(R(0,u)); } }
      printf("%dx%d/%d %dx%d d%d kind %d dq%d dout%d packed%d used%d mp%d  ",c.batch,c.hq,c.hk,c.sq,c.sk,c.d,kind,c.dq,c.dout,!c.cq.empty(),!c.uq.empty(),c.mp);
      run_case(c, 1000+n, R(0,5)); }
    printf("fails: %d\\n", fails); return fails; }
'''
open('main.cpp','w').write(s.replace(a,f+a,1))
