"""Softmax first called in a capture, or by a new thread, in new processes."""
import subprocess, sys, os
CASES = {
 "capture": "x=torch.randn(64,1024,device='cuda');torch.cuda.synchronize()\ng=torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g): y,l=flash_cute.softmax(x)\ng.replay();torch.cuda.synchronize();print((y-x.softmax(-1)).abs().max().item()<1e-6)",
 "capture long": "x=torch.randn(4,300000,device='cuda').half();torch.cuda.synchronize()\ng=torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g): y,l=flash_cute.softmax(x)\ng.replay();torch.cuda.synchronize();print((y.float()-x.float().softmax(-1)).abs().max().item()<1e-3)",
 "capture thread_local": "x=torch.randn(64,1024,device='cuda');torch.cuda.synchronize()\ng=torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g,capture_error_mode='thread_local'): y,l=flash_cute.softmax(x)\ng.replay();torch.cuda.synchronize();print((y-x.softmax(-1)).abs().max().item()<1e-6)",
 "capture backward": "x=torch.randn(64,1024,device='cuda',requires_grad=True);d=torch.randn(64,1024,device='cuda');torch.cuda.synchronize()\ng=torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g):\n  y,l=flash_cute.softmax(x);(a,)=torch.autograd.grad(y,x,d)\ng.replay();torch.cuda.synchronize()\nb,=torch.autograd.grad(x.softmax(-1),x,d);print((a-b).abs().max().item()<1e-5)",
 "thread": "import threading\nr=[]\ndef f():\n  x=torch.randn(64,1024,device='cuda').bfloat16();r.append((flash_cute.softmax(x)[0].float()-x.float().softmax(-1)).abs().max().item()<1e-2)\nt=threading.Thread(target=f);t.start();t.join();print(r[0])",
 "threads": "import threading\nr=[]\ndef f(i):\n  x=torch.randn(64,8<<i,device='cuda').bfloat16();r.append((flash_cute.softmax(x)[0].float()-x.float().softmax(-1)).abs().max().item()<1e-2)\nts=[threading.Thread(target=f,args=(i,)) for i in range(12)]\n[t.start() for t in ts];[t.join() for t in ts];print(len(r)==12 and all(r))",
 "attention capture": "q=torch.randn(2,4,200,64,device='cuda').half();torch.cuda.synchronize()\ng=torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g): y,l=flash_cute.forward(q,q,q,True)\ng.replay();torch.cuda.synchronize();print((y-torch.nn.functional.scaled_dot_product_attention(q,q,q,is_causal=True)).abs().max().item()<1e-2)",
}
def start(code): return subprocess.Popen([sys.executable,"-c","import torch,flash_cute\n"+code],stdout=subprocess.PIPE,stderr=subprocess.STDOUT,text=True)
ps={n:start(c) for n,c in CASES.items()}
for n,p in ps.items():
    out=p.communicate(timeout=100)[0].strip().splitlines(); print("cold", n, out[-1] if out else "nothing", flush=True)
