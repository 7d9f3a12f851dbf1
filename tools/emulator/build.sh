set -e
D=$1; T=${2:-0}; E=${3:-bf16}
CU="/usr/local/cuda-13.0/include -isystem /usr/local/cuda-13.0/include/cccl"
F="-std=c++20 -O1 -w -Iinc -I. -isystem $CU -fpermissive -include emu.hpp"
[ -f emu.o ] || g++ $F -O2 -c emu.cpp -o emu.o
nice g++ $F -fsanitize=thread -DBUCKET=$D -DTILE=$T -DELEM=$E -c kernels.cpp -o k_$D_$T_$E.o
nice g++ $F -c main.cpp -o main.o
g++ emu.o k_$D_$T_$E.o main.o -o emu_${D}_${T}_$E
