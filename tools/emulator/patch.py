import re,pathlib
R=pathlib.Path('/tmp/review/inc')
def sub(path, pairs):
    p=R/path; t=p.read_text()
    for a,b in pairs:
        assert a in t,(path,a)
        t=t.replace(a,b)
    p.write_text(t)
p=R/'cute/arch/mma_sm80.hpp'; t=p.read_text()
for kind,name in (('half','SM80_16x8x16_F32F16F16F32_TN'),('bf','SM80_16x8x16_F32BF16BF16F32_TN')):
    a=f'    CUTE_INVALID_CONTROL_PATH("Attempting to use {name} without CUTE_ARCH_MMA_SM80_ENABLED");'
    i=t.index(f'struct {name}\n'); j=t.index(a,i); 
    assert j-i<1500
    t=t[:j]+f'    emu::mma({"true" if kind=="half" else "false"}, d0,d1,d2,d3,a0,a1,a2,a3,b0,b1,c0,c1,c2,c3);'+t[j+len(a):]
p.write_text(t)
p=R/'cute/arch/copy_sm75.hpp'; t=p.read_text()
for name,tr in (('SM75_U32x4_LDSM_N','false'),('SM75_U16x8_LDSM_T','true')):
    i=t.index(f'struct {name}\n'); a='    CUTE_INVALID_CONTROL_PATH("Trying to use ldmatrix without CUTE_ARCH_LDSM_SM75_ACTIVATED.");'
    j=t.index(a,i)
    t=t[:j]+f'    emu::ldmatrix({tr}, &smem_src, dst0,dst1,dst2,dst3);'+t[j+len(a):]
p.write_text(t)
p=R/'cute/arch/copy_sm80.hpp'; t=p.read_text()
a='    CUTE_INVALID_CONTROL_PATH("Support for cp.async instructions has not been enabled");'
for name,pr in (('SM80_CP_ASYNC_CACHEALWAYS','true'),('SM80_CP_ASYNC_CACHEGLOBAL_ZFILL','pred')):
    i=t.index(f'struct {name}\n'); j=t.index(a,i)
    t=t[:j]+f'    emu::cp_async(&gmem_src,&smem_dst,{pr});'+t[j+len(a):]
t=t.replace('cp.async.wait_group %0;\\n" :: "n"(N));\n  }\n#endif','cp.async.wait_group %0;\\n" :: "n"(N));\n  }\n#else\n  static_assert(N==0); emu::cp_wait_all();\n#endif')
assert 'emu::cp_wait_all' in t
p.write_text(t)
sub('flash_cute/attention/softmax.hpp',[('asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));','y = ::exp2f(x); if (fabsf(y) < 1.17549435e-38f) y = 0;')])
sub('flash_cute/attention/tile_of_block.hpp',[('asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));','index = blockIdx.x;'),('alignas(Tile) __shared__ unsigned char','alignas(Tile) static unsigned char')])
sub('flash_cute/backward/key_parts.hpp',[('asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));','index = threadIdx.x;')])
sub('flash_cute/backward/split_mainloop_sm80.hpp',[('asm volatile("bar.sync %0, %1;" ::"r"(int(barrier) + index), "r"(threads) : "memory");','emu::bar(int(barrier)+index,threads,true);'),('asm volatile("bar.arrive %0, %1;" ::"r"(int(barrier)), "r"(threads) : "memory");','emu::bar(int(barrier),threads,false);')])
