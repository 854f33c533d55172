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
    u64 bytes;
};

template <int MAX_BLOCKS>
struct Piece {
    const Segment *segments;
    char *slab;
    u64 block_bytes;
    u64 keep;           // 1: slab lines are the last to leave L2
    u64 items;
    u32 segments_per_block;
    u32 first_segment;  // of the first block
    u32 blocks[MAX_BLOCKS];
};

// Lines of the slab are the last to leave L2, lines of the pool the first.
struct Policies {
    u64 slab, pool;
};

__device__ __forceinline__ Policies policies() {
    Policies both;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(both.slab));
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(both.pool));
    return both;
}

// What is read or written once must not push anything out of L1.
template <typename V, bool HINT>
__device__ __forceinline__ V load(const V *from, u64) {
    return __ldcg(from);
}

template <>
__device__ __forceinline__ uint4 load<uint4, true>(const uint4 *from, u64 policy) {
    uint4 value;
    asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from), "l"(policy)
                 : "memory");
    return value;
}

template <typename V, bool HINT>
__device__ __forceinline__ void store(V *to, V value, u64) {
    *to = value;
}

template <>
__device__ __forceinline__ void store<uint4, true>(uint4 *to, uint4 value, u64 policy) {
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to),
                 "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "l"(policy)
                 : "memory");
}

template <typename V, bool HINT>
__device__ __forceinline__ void copy_segment(char *to, const char *from, u64 bytes, u64 policy_to,
                                             u64 policy_from) {
    V *out = reinterpret_cast<V *>(to);
    const V *in = reinterpret_cast<const V *>(from);
    const u32 count = u32(bytes / sizeof(V));
    u32 at = threadIdx.x & 31;
    // Four independent loads per lane in flight: 2 KiB per warp with the widest accesses.
    for (; at + 3 * 32 < count; at += 4 * 32) {
        V part[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) part[i] = load<V, HINT>(in + at + i * 32, policy_from);
#pragma unroll
        for (int i = 0; i < 4; ++i) store<V, HINT>(out + at + i * 32, part[i], policy_to);
    }
    for (; at < count; at += 32)
        store<V, HINT>(out + at, load<V, HINT>(in + at, policy_from), policy_to);
}

template <typename V, bool TO_SLAB, int MAX_BLOCKS>
__device__ __forceinline__ void move(const Piece<MAX_BLOCKS> &piece) {
    const u32 warps = gridDim.x * (blockDim.x / 32);
    const u32 warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const u64 start = piece.segments[piece.first_segment].slot_offset;
    const Policies both = policies();
    const u64 policy_to = TO_SLAB ? both.slab : both.pool;
    const u64 policy_from = TO_SLAB ? both.pool : both.slab;
    const u32 items = u32(piece.items);
    for (u32 item = warp; item < items; item += warps) {
        const u32 place = piece.first_segment + item;
        const u32 block = place / piece.segments_per_block;
        const Segment segment = piece.segments[place % piece.segments_per_block];
        char *pool = reinterpret_cast<char *>(segment.address +
                                              piece.blocks[block] * segment.block_stride);
        char *slab = piece.slab + (block * piece.block_bytes + segment.slot_offset - start);
        char *to = TO_SLAB ? slab : pool;
        const char *from = TO_SLAB ? pool : slab;
        if (piece.keep)
            copy_segment<V, true>(to, from, segment.bytes, policy_to, policy_from);
        else
            copy_segment<V, false>(to, from, segment.bytes, policy_to, policy_from);
    }
}

#define KERNELS(NAME, TO_SLAB)                                                                  \
    extern "C" __global__ void __launch_bounds__(128)                                           \
        NAME##_16_few(const __grid_constant__ Piece<48> piece) {                                \
        move<uint4, TO_SLAB, 48>(piece);                                                        \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(128)                                           \
        NAME##_16(const __grid_constant__ Piece<960> piece) {                                   \
        move<uint4, TO_SLAB, 960>(piece);                                                       \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(128)                                           \
        NAME##_4(const __grid_constant__ Piece<960> piece) {                                    \
        move<u32, TO_SLAB, 960>(piece);                                                         \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(128)                                           \
        NAME##_1(const __grid_constant__ Piece<960> piece) {                                    \
        move<unsigned char, TO_SLAB, 960>(piece);                                               \
    }

KERNELS(gather, true)
KERNELS(scatter, false)
