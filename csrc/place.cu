// Placement kernels: pages to packed bytes (store) and back (load), all planes and layers of a slice in one launch.
//
//   nvcc -fatbin -arch=sm_90 -o build/place.fatbin csrc/place.cu
//
// One kernel per direction and width of access. What lies where is place.h's business; a kernel
// only walks over vectors in packed order, so that the packed side is read or written without a gap, and keeps several in
// flight per thread.
#include "place.h"

namespace {

template <typename Vector, bool LOAD>
__device__ __forceinline__ void place(const maru_place &p) {
  // Threads of a warp may need different blocks, for which the parameters' own memory is slow.
  __shared__ int32_t blocks[MARU_PLACE_BLOCKS];
  for (uint32_t i = threadIdx.x; i < p.blocks; i += blockDim.x) blocks[i] = p.block[i];
  __syncthreads();
  const uint64_t *layers = reinterpret_cast<const uint64_t *>(p.layer_addresses);
  const uint32_t step = gridDim.x * blockDim.x * MARU_PLACE_UNROLL;
  for (uint32_t n = 0; n < p.segments; n++) {
    const maru_place_segment &s = p.segment[n];
    for (uint32_t first = blockIdx.x * blockDim.x * MARU_PLACE_UNROLL + threadIdx.x; first < s.vectors; first += step) {
      Vector value[MARU_PLACE_UNROLL];
      uint64_t target[MARU_PLACE_UNROLL];
#pragma unroll
      for (int u = 0; u < MARU_PLACE_UNROLL; u++) {
        uint32_t i = first + u * blockDim.x;
        if (i < s.vectors) {
          uint64_t page, packed;
          maru_place_at(&p, &s, blocks, layers, i, &page, &packed);
          target[u] = LOAD ? page : packed;
          value[u] = *reinterpret_cast<const Vector *>(LOAD ? packed : page);
        }
      }
#pragma unroll
      for (int u = 0; u < MARU_PLACE_UNROLL; u++)
        if (first + u * blockDim.x < s.vectors) *reinterpret_cast<Vector *>(target[u]) = value[u];
    }
  }
}

}  // namespace

#define MARU_KERNEL(name, type, load)                                                                          \
  extern "C" __global__ void __launch_bounds__(MARU_PLACE_THREADS) name(const __grid_constant__ maru_place p) { \
    place<type, load>(p);                                                                                      \
  }
#define MARU_KERNELS(bytes, type)             \
  MARU_KERNEL(maru_load_##bytes, type, true)  \
  MARU_KERNEL(maru_store_##bytes, type, false)

MARU_KERNELS(16, uint4)
MARU_KERNELS(8, uint2)
MARU_KERNELS(4, uint32_t)
MARU_KERNELS(2, uint16_t)
MARU_KERNELS(1, uint8_t)
