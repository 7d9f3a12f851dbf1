#!/bin/bash
# vb2.sh NAME SRC "64 128": operators flash_cute_NAME of SRC's csrc and include; kernels: bf16 sm90 of 64, 128, 256 (backward of these dims from SRC, else main's)
N=$1; S=$2; DIMS=$3; ALL="64 96 128 256"; M=/work/main/build/native; G=/work/var/obj/$N; mkdir -p $G /work/main/build/gpu/bwlibs
cd $M
export CCACHE_DEPEND=1 CCACHE_NOHASHDIR=1 CCACHE_COMPILERCHECK="%compiler% --version"
INC="-I/work/var/gen9 -I$S/include"
CPP="/usr/bin/ccache /usr/bin/c++ -O3 -std=c++20 -DNDEBUG -fPIC -fvisibility=hidden -DPy_LIMITED_API=0x030a0000 -DTORCH_TARGET_VERSION=0x020a000000000000 $INC -isystem external/torch/include -isystem external/python -DFLASH_CUTE_WITH_CUDA -isystem external/toolkit/include"
NV="/usr/bin/ccache external/toolkit/bin/nvcc -ccbin=/usr/bin/c++ -O3 -std=c++20 -DNDEBUG -Xcompiler=-fPIC,-fvisibility=hidden -Xptxas=-v -lineinfo --expt-relaxed-constexpr --expt-extended-lambda --compress-mode=size $INC -isystem external/cutlass -gencode=arch=compute_90a,code=sm_90a"
for d in $DIMS; do
  $NV -c generated/backward_sm90_bf16_$d.cu -MD -MF $G/b$d.d -o $G/b$d.o > $G/b$d.log 2>&1; grep -hE "error|C75|serializ" $G/b$d.log | head -5
  echo "$N d$d $(grep -A1 "backward_kernel_sm90" $G/b$d.log | grep stack | tr '\n' ' ')"
done
for d in $FDIMS; do
  $NV -c generated/forward_sm90_bf16_$d.cu -MD -MF $G/f$d.d -o $G/f$d.o > $G/f$d.log 2>&1; grep -hE "error|C75|serializ" $G/f$d.log | head -5
done
[ -n "$4" ] && exit 0
rm -rf $G/csrc; cp -r $S/csrc $G/csrc; sed -i "s/_LIBRARY(flash_cute,/_LIBRARY(flash_cute_$N,/; s/_LIBRARY_FRAGMENT(flash_cute,/_LIBRARY_FRAGMENT(flash_cute_$N,/; s/_LIBRARY_IMPL(flash_cute,/_LIBRARY_IMPL(flash_cute_$N,/" $G/csrc/*.cpp
OBJ=""
for f in ops backward_cpu backward_cuda device forward_cpu forward_cuda softmax softmax_cuda tensors validate kernels/calls kernels/kernels; do
  o=$G/$(basename $f).o; $CPP -MD -MF $o.d -c $G/csrc/$f.cpp -o $o || exit 1; OBJ="$OBJ $o"; done
for d in $ALL; do [ -f $G/f$d.o ] && OBJ="$OBJ $G/f$d.o" || OBJ="$OBJ objects/forward_sm90_bf16_$d.o"; [ -f $G/b$d.o ] && OBJ="$OBJ $G/b$d.o" || OBJ="$OBJ objects/backward_sm90_bf16_$d.o"; done
OBJ="$OBJ $(ls objects/softmax_fp32.o objects/softmax_fp16.o objects/softmax_bf16.o)"
/usr/bin/c++ -shared -Wl,--exclude-libs,ALL -Wl,-s $OBJ -o /work/main/build/gpu/bwlibs/$N.so -Lexternal/torch/lib -Wl,--no-as-needed -ltorch -Wl,--as-needed -ltorch_cpu -lc10 -Lexternal/toolkit/lib64 -lcudart_static -ldl -lrt -lpthread && ls -la /work/main/build/gpu/bwlibs/$N.so | awk '{print $5}'
