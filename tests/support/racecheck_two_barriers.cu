// racecheck reports hazards here that do not exist: docs/dev/racecheck.md, "A barrier of one warpgroup, then of all".
__global__ void __launch_bounds__(256) two_barriers(int *out) {
  __shared__ int word[40];
  int sum = 0;
  if (threadIdx.x < 128) asm volatile("bar.sync 1, 128;");
  for (int i = 0; i < 40; ++i) {
    if (threadIdx.x == 0) word[i] = i;
    asm volatile("bar.sync 0;" ::: "memory");
    if (threadIdx.x % 32 == 0) sum += word[i];  // reported: RAW, thread 0 and thread 128, 160, 192 or 224
  }
  out[blockIdx.x * 256 + threadIdx.x] = sum;
}

int main() {
  int *out;
  cudaMalloc(&out, 8 * 256 * sizeof(int));
  two_barriers<<<8, 256>>>(out);
  return cudaDeviceSynchronize();
}
