#!/bin/bash
# vb8.sh NAME SRC "forward dims" "backward dims" [nolink]: operators flash_cute_NAME of SRC's csrc and include; kernels: bf16 sm80 of 64, 96, 128, 256 (others from main's objects)
N=$1; S=$2; ALL="64 96 128 192 256"; M=/work/main/build/native; G=/work/var/obj/$N; mkdir -p $G /work/main/build/gpu/bwlibs
cd $M
export CCACHE_DEPEND=1 CCACHE_NOHASHDIR=1 CCACHE_COMPILERCHECK="%compiler% --version"
INC="-I/work/var/gen8 -I$S/include"
CPP="/usr/bin/ccache /usr/bin/c++ -O3 -std=c++20 -DNDEBUG -fPIC -fvisibility=hidden -DPy_LIMITED_API=0x030a0000 -DTORCH_TARGET_VERSION=0x020a000000000000 $INC -isystem external/torch/include -isystem external/python -DFLASH_CUTE_WITH_CUDA -isystem external/toolkit/include"
NV="/usr/bin/ccache external/toolkit/bin/nvcc -ccbin=/usr/bin/c++ -O3 -std=c++20 -DNDEBUG -Xcompiler=-fPIC,-fvisibility=hidden -Xptxas=-v -lineinfo --expt-relaxed-constexpr --expt-extended-lambda --compress-mode=size $INC -isystem external/cutlass -gencode=arch=compute_80,code=sm_90"
for d in $3; do [ -n "$NOLEVEL" ] && export SKIP=1
  L=$(grep -A1 "forward_sm80_bf16_$d.o:" build.ninja | grep -o "Xptxas=--register[^ ]*" | head -1)
  [ -n "$NOLEVEL" ] && L=""
  $NV ${L:+-$L} -c generated/forward_sm80_bf16_$d.cu -MD -MF $G/f$d.d -o $G/f$d.o > $G/f$d.log 2>&1; grep -hE "error" $G/f$d.log | head -5
  echo "$N f$d $(grep -A2 "forward_kernel_sm80" $G/f$d.log | grep -E "stack|registers" | sed 's/ptxas info *: //' | tr '\n' ' ')"
done
for d in $4; do
  L=$(grep -A1 "backward_sm80_bf16_$d.o:" build.ninja | grep -o "Xptxas=--register[^ ]*" | head -1)
  $NV ${L:+-$L} -c generated/backward_sm80_bf16_$d.cu -MD -MF $G/b$d.d -o $G/b$d.o > $G/b$d.log 2>&1; grep -hE "error" $G/b$d.log | head -5
  echo "$N b$d $(grep -A2 "backward_kernel_sm80" $G/b$d.log | grep -E "stack|registers" | sed 's/ptxas info *: //' | tr '\n' ' ')"
done
[ -n "$5" ] && exit 0
rm -rf $G/csrc; cp -r $S/csrc $G/csrc; sed -i "s/_LIBRARY(flash_cute,/_LIBRARY(flash_cute_$N,/; s/_LIBRARY_FRAGMENT(flash_cute,/_LIBRARY_FRAGMENT(flash_cute_$N,/; s/_LIBRARY_IMPL(flash_cute,/_LIBRARY_IMPL(flash_cute_$N,/" $G/csrc/*.cpp
OBJ=""
for f in ops backward_cpu backward_cuda device forward_cpu forward_cuda softmax softmax_cuda tensors validate kernels/calls kernels/kernels; do
  o=$G/$(basename $f).o; $CPP -MD -MF $o.d -c $G/csrc/$f.cpp -o $o || exit 1; OBJ="$OBJ $o"; done
for d in $ALL; do [ -f $G/f$d.o ] && OBJ="$OBJ $G/f$d.o" || OBJ="$OBJ objects/forward_sm80_bf16_$d.o"; [ -f $G/b$d.o ] && OBJ="$OBJ $G/b$d.o" || OBJ="$OBJ objects/backward_sm80_bf16_$d.o"; done
OBJ="$OBJ $(ls objects/softmax_fp32.o objects/softmax_fp16.o objects/softmax_bf16.o)"
/usr/bin/c++ -shared -Wl,--exclude-libs,ALL -Wl,-s $OBJ -o /work/main/build/gpu/bwlibs/$N.so -Lexternal/torch/lib -Wl,--no-as-needed -ltorch -Wl,--as-needed -ltorch_cpu -lc10 -Lexternal/toolkit/lib64 -lcudart_static -ldl -lrt -lpthread && ls -la /work/main/build/gpu/bwlibs/$N.so | awk '{print $5}'
