# FILE.ptx -> SASS with a profile of registers
ptxas -arch=sm_90a $1.ptx -o $1.o 2>/dev/null && /tmp/nvd/nvidia/cu13/bin/nvdisasm -c -plr $1.o > $1.sass 2>/dev/null || /tmp/nvd/nvidia/cu13/bin/nvdisasm -c $1.o > $1.sass
