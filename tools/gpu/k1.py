import sys, torch, flash_cute
dev="cuda"; torch.manual_seed(0)
s=2048
for d in (64,128,256):
    b,h=16384//s,2048//d
    q,k,v=(torch.randn(b,s,h,d,device=dev,dtype=torch.bfloat16).transpose(1,2).requires_grad_() for _ in range(3))
    do=torch.randn(b,s,h,d,device=dev,dtype=torch.bfloat16).transpose(1,2)
    if "fwd" in sys.argv and d==64 or "bwd" in sys.argv:
        out,lse=torch.ops.flash_cute._forward(q.detach(),k.detach(),v.detach(),False,family="sm80")
        r=torch.ops.aten._scaled_dot_product_flash_attention(q.detach(),k.detach(),v.detach(),0.0,False)
    if "bwd" in sys.argv:
        torch.ops.flash_cute._backward(do,None,q.detach(),k.detach(),v.detach(),out,lse,False,family="sm80")
        torch.ops.aten._scaled_dot_product_flash_attention_backward(do,q.detach(),k.detach(),v.detach(),r[0],r[1],r[2],r[3],r[4],r[5],0.0,False,r[6],r[7])
torch.cuda.synchronize()
