// Kernels for the tests on a GPU: they delay, write, check and misbehave.

typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u64 nanos() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

__device__ __forceinline__ void wait(u64 delay_ns) {
    const u64 end = nanos() + delay_ns;
    while (nanos() < end) __nanosleep(1000);
}

// Holds the stream until the host writes 1 to the flag, or the limit is over.
extern "C" __global__ void hold(const volatile u32 *flag, u64 limit_ns) {
    const u64 end = nanos() + limit_ns;
    while (*flag == 0 && nanos() < end) __nanosleep(1000);
}

// After a delay writes the value to every word of four equal blocks.
extern "C" __global__ void fill_late(u32 *a, u32 *b, u32 *c, u32 *d, u32 words, u32 value,
                                     u64 delay_ns) {
    wait(delay_ns);
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x) {
        a[i] = value;
        b[i] = value;
        c[i] = value;
        d[i] = value;
    }
}

// After a delay counts the words of four equal blocks that don't hold the value.
extern "C" __global__ void check_late(const volatile u32 *a, const volatile u32 *b,
                                      const volatile u32 *c, const volatile u32 *d, u32 words,
                                      u32 value, u64 delay_ns, u32 *wrong) {
    wait(delay_ns);
    u32 bad = 0;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x) {
        bad += (a[i] != value) + (b[i] != value) + (c[i] != value) + (d[i] != value);
    }
    if (bad) atomicAdd(wrong, bad);
}

// Writes to an address that nobody may write: the context is broken from then on.
extern "C" __global__ void trespass(u32 *nowhere) { *nowhere = 1; }
