# sv.sh NAME SRC: softmax fp32 and bf16 of SRC under flash_cute_NAME
N=$1; S=$2; M=/work/main/build/native; G=/work/var/obj/$N; mkdir -p $G; cd $M
export CCACHE_DEPEND=1 CCACHE_NOHASHDIR=1 CCACHE_COMPILERCHECK="%compiler% --version"
INC="-I/work/var/gen0 -I$S/include"
CPP="/usr/bin/ccache /usr/bin/c++ -O3 -std=c++20 -DNDEBUG -fPIC -fvisibility=hidden -DPy_LIMITED_API=0x030a0000 -DTORCH_TARGET_VERSION=0x020a000000000000 $INC -isystem external/torch/include -isystem external/python -DFLASH_CUTE_WITH_CUDA -isystem external/toolkit/include"
NV="/usr/bin/ccache external/toolkit/bin/nvcc -ccbin=/usr/bin/c++ -O3 -std=c++20 -DNDEBUG -Xcompiler=-fPIC,-fvisibility=hidden -Xptxas=-v -lineinfo --expt-relaxed-constexpr --expt-extended-lambda --compress-mode=size $INC -isystem external/cutlass -gencode=arch=compute_90a,code=sm_90a"
for e in fp32 bf16 fp16; do $NV -c generated/softmax_$e.cu -o $G/softmax_$e.o > $G/s_$e.log 2>&1; grep -hE "error" $G/s_$e.log | head -5; grep -c "spill" $G/s_$e.log; done
rm -rf $G/csrc; cp -r $S/csrc $G/csrc; sed -i "s/_LIBRARY(flash_cute,/_LIBRARY(flash_cute_$N,/; s/_LIBRARY_FRAGMENT(flash_cute,/_LIBRARY_FRAGMENT(flash_cute_$N,/; s/_LIBRARY_IMPL(flash_cute,/_LIBRARY_IMPL(flash_cute_$N,/" $G/csrc/*.cpp
OBJ=""
for f in ops backward_cpu backward_cuda device forward_cpu forward_cuda softmax softmax_cuda tensors validate kernels/calls kernels/kernels; do
  o=$G/$(basename $f).o; $CPP -MD -MF $o.d -c $G/csrc/$f.cpp -o $o || exit 1; OBJ="$OBJ $o"; done
:
OBJ="$OBJ $G/softmax_fp32.o $G/softmax_fp16.o $G/softmax_bf16.o"
/usr/bin/c++ -shared -Wl,--exclude-libs,ALL -Wl,-s $OBJ -o /work/main/build/gpu/bwlibs/$N.so -Lexternal/torch/lib -Wl,--no-as-needed -ltorch -Wl,--as-needed -ltorch_cpu -lc10 -Lexternal/toolkit/lib64 -lcudart_static -ldl -lrt -lpthread && ls -la /work/main/build/gpu/bwlibs/$N.so | awk '{print $5}'
