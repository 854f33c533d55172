// Gather and scatter between paged KV memory and a packed staging slab.
//
// A block is cut into segments: pieces of rows of at most 4 KiB. One warp copies one segment at a
// time. Work items are (block, segment) pairs, numbered through; a launch covers a range of them.
// The ids of the blocks travel in the kernel's parameters, which the driver copies at launch, so
// that there is no descriptor memory whose life would have to be watched.

typedef unsigned int u32;
typedef unsigned long long u64;

struct Segment {
    u64 address;       // of the segment in block 0
    u64 block_stride;  // bytes from block to block
    u64 slot_offset;   // bytes into the packed block
    u32 bytes;
    u32 padding;
};

template <int MAX_BLOCKS>
struct Piece {
    const Segment *segments;
    char *slab;
    u64 block_bytes;
    u32 segments_per_block;
    u32 first_segment;  // of the first block
    u32 items;
    u32 keep;           // 1: slab lines are the last to leave L2
    u32 blocks[MAX_BLOCKS];
};

__device__ __forceinline__ u64 policy_of(u32 keep) {
    u64 last, normal;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last));
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
    return keep ? last : normal;
}

// A row of the pool is read or written once; it must not push anything out of L1.
template <typename V>
__device__ __forceinline__ V load(const V *from) {
    return __ldcg(from);
}

template <typename V>
__device__ __forceinline__ void store(V *to, V value, u64 policy) {
    *to = value;
}

template <>
__device__ __forceinline__ void store<uint4>(uint4 *to, uint4 value, u64 policy) {
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to),
                 "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "l"(policy)
                 : "memory");
}

template <typename V>
__device__ __forceinline__ void copy_segment(char *to, const char *from, u32 bytes, u64 policy) {
    V *out = reinterpret_cast<V *>(to);
    const V *in = reinterpret_cast<const V *>(from);
    const u32 count = bytes / sizeof(V);
    const u32 lane = threadIdx.x & 31;
    u32 at = lane;
    // Eight independent loads per lane in flight: 4 KiB per warp.
    for (; at + 7 * 32 < count; at += 8 * 32) {
        V part[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) part[i] = load(in + at + i * 32);
#pragma unroll
        for (int i = 0; i < 8; ++i) store(out + at + i * 32, part[i], policy);
    }
    for (; at < count; at += 4 * 32) {
        V part[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (at + i * 32 < count) part[i] = load(in + at + i * 32);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (at + i * 32 < count) store(out + at + i * 32, part[i], policy);
    }
}

template <typename V, bool TO_SLAB, int MAX_BLOCKS>
__device__ __forceinline__ void move(const Piece<MAX_BLOCKS> &piece) {
    const u32 warps = gridDim.x * (blockDim.x / 32);
    const u32 warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const u64 start = piece.segments[piece.first_segment].slot_offset;
    const u64 normal = policy_of(0);
    const u64 slab_policy = TO_SLAB ? policy_of(piece.keep) : normal;
    for (u32 item = warp; item < piece.items; item += warps) {
        const u32 place = piece.first_segment + item;
        const u32 block = place / piece.segments_per_block;
        const Segment segment = piece.segments[place % piece.segments_per_block];
        char *pool = reinterpret_cast<char *>(segment.address +
                                              piece.blocks[block] * segment.block_stride);
        char *slab = piece.slab + (block * piece.block_bytes + segment.slot_offset - start);
        if (TO_SLAB)
            copy_segment<V>(slab, pool, segment.bytes, slab_policy);
        else
            copy_segment<V>(pool, slab, segment.bytes, normal);
    }
}

#define KERNELS(NAME, TO_SLAB)                                                                  \
    extern "C" __global__ void __launch_bounds__(512)                                           \
        NAME##_16_few(const __grid_constant__ Piece<48> piece) {                                \
        move<uint4, TO_SLAB, 48>(piece);                                                        \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(512)                                           \
        NAME##_16(const __grid_constant__ Piece<960> piece) {                                   \
        move<uint4, TO_SLAB, 960>(piece);                                                       \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(512)                                           \
        NAME##_4(const __grid_constant__ Piece<960> piece) {                                    \
        move<u32, TO_SLAB, 960>(piece);                                                         \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(512)                                           \
        NAME##_1(const __grid_constant__ Piece<960> piece) {                                    \
        move<unsigned char, TO_SLAB, 960>(piece);                                               \
    }

KERNELS(gather, true)
KERNELS(scatter, false)
