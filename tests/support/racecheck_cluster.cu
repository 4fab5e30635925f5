// racecheck reports hazards here that do not exist: docs/dev/racecheck.md, "An mbarrier over a cluster".
#include <cstdint>

__device__ uint32_t of_cta(uint32_t address, uint32_t cta) {
  uint32_t out;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(address), "r"(cta));
  return out;
}

__global__ void __cluster_dims__(4, 1, 1) __launch_bounds__(128) exchange(float *out) {
  __shared__ float mine[128];
  __shared__ __align__(8) uint64_t barrier;
  uint32_t at = __cvta_generic_to_shared(&barrier), thread = threadIdx.x;
  if (thread == 0)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 4; fence.mbarrier_init.release.cluster;" ::"r"(at) : "memory");
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  mine[thread] = blockIdx.x;
  __syncthreads();
  if (thread < 4)
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(of_cta(at, thread)) : "memory");
  asm volatile("{ .reg .pred met;\n wait: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 met, [%0], 0;\n"
               "@!met bra wait; }" ::"r"(at) : "memory");
  if (thread < 4) {
    float theirs;  // reported: RAW, the write of one CTA and the read of another
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(theirs)
                 : "r"(of_cta(__cvta_generic_to_shared(&mine[thread]), thread)) : "memory");
    out[blockIdx.x * 4 + thread] = theirs;
  }
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

int main() {
  float *out;
  cudaMalloc(&out, 32 * 4 * sizeof(float));
  exchange<<<32, 128>>>(out);
  return cudaDeviceSynchronize();
}
