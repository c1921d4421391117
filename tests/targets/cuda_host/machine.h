// What templates/cuda/machine.cu.jinja asks of sm_90a, for plain C++: a block's threads are fibers on one thread of the host.
//
// Stated from the PTX ISA, not from the kernels: fragments of wgmma.mma_async.m64nNk16 and m64nNk32 ("Register Fragments": a warp's 16 rows as
// mma.m16n8k16 and m16n8k32 have them), operands in shared memory ("Canonical Layouts", no swizzling), ldmatrix, mbarrier, bar.
// Late mode does every asynchronous thing as late as it may be done: a bulk copy when nothing else can go on, wgmma at the wait, when it reads
// its registers and shared memory. Shared memory starts as NaN. Whoever waits for nothing that can come is an error, and so is a bad copy.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>
#include <ucontext.h>

typedef uint8_t u8;
typedef uint32_t u32;
typedef unsigned long long u64;
typedef long long i64;
#define DEVICE inline
#define __global__
#define __launch_bounds__(...)

struct Index { unsigned x; };

namespace host {
const u32 BASE = 1024;  // where dynamic shared memory starts in the shared window: addresses are no offsets
const int MOST = 512;

struct Pending { std::function<void()> run; };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool done = false;
};
struct Warp { int arrived = 0; u64 generation = 0; u64 slot[2][32]; };
struct Named { int arrived = 0, waiting = 0; u64 generation = 0; };
struct Barrier { u32 count = 0; int pending = 0; i64 bytes = 0; u32 phase = 0; bool there = false; };
struct Matrices { float *d; int *di; const u32 *a; u64 b; };

inline std::vector<u8> memory;
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline std::map<int, Named> named;
inline std::map<u32, Barrier> barriers;
inline std::deque<std::function<void()>> copies;
inline std::vector<std::vector<Matrices>> issued;  // by warp: lanes' parts of the operation that is being issued
inline std::vector<std::deque<std::function<void()>>> queued;  // by warp
inline ucontext_t scheduler;
inline int current = 0, block = 0, threads = 0;
inline u64 progress = 0;
inline bool late = true;
inline const u8 *pool = nullptr;
inline u64 pool_bytes = 0;
inline std::function<void()> body;
inline std::string failure;

[[noreturn]] inline void fail(const char *what) {
    failure = what;
    fibers[current].done = true;
    progress++;
    for (;;) swapcontext(&fibers[current].context, &scheduler);
}
inline void yield() { swapcontext(&fibers[current].context, &scheduler); }
template <class F> void until(F ready) { while (!ready()) yield(); }

// All 32 lanes meet, each leaves a value and may then read the others'.
inline const u64 *meet(u64 value) {
    Warp &w = warps[current / 32];
    const u64 mine = w.generation;
    w.slot[mine % 2][current % 32] = value;
    progress++;
    if (++w.arrived == 32) {
        w.arrived = 0;
        w.generation++;
    }
    until([&] { return w.generation != mine; });
    return w.slot[mine % 2];
}
inline u8 *at(u32 offset, u32 bytes) {
    if (offset + bytes > memory.size() || offset % (bytes < 16 ? bytes : 16)) fail("an access to shared memory is misaligned or beyond its end");
    return memory.data() + offset;
}
inline float bf16(u32 half) {
    u32 bits = half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline u32 to_bf16(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7FFF;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline float e4m3(u32 code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float size = (code & 0x7F) == 0x7F ? NAN : exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
    return code & 0x80 ? -size : size;
}
inline u32 to_e4m3(float x) {
    if (x != x) return 0x7F;
    u32 best = 0;
    const float size = std::fabs(x);
    for (u32 code = 0; code < 0x7F; code++) {
        const float off = std::fabs(e4m3(code) - size), least = std::fabs(e4m3(best) - size);
        if (off < least || (off == least && code % 2 == 0)) best = code;
    }
    return best | (std::signbit(x) ? 0x80 : 0);
}

// "Canonical Layouts" of the PTX ISA without swizzling, in elements of `size` bytes; T = 16 / size. Along k: ((8,m),(T,2k)):((1T,SBO),(1,LBO));
// along n: ((T,1,m),(8,k)):((1,T,SBO),(1T,LBO)).
inline u32 place(u64 descriptor, int n, int k, int size, bool wide) {
    const u32 start = (descriptor & 0x3FFF) << 4, leading = (descriptor >> 16 & 0x3FFF) << 4, stride = (descriptor >> 32 & 0x3FFF) << 4;
    if (descriptor >> 49) fail("a descriptor with a base offset or swizzling");
    const int T = 16 / size;
    const u32 offset = wide ? n % T * size + n / T * stride + k % 8 * 16 + k / 8 * leading
                            : n % 8 * 16 + n / 8 * stride + k % T * size + k / T * leading;
    return start + offset - BASE;
}
// The element of the A fragment of a warp's 16 rows at (row, k): lane, register, and which of the register's elements.
inline void a_fragment(int row, int k, int size, int &lane, int &reg, int &element) {
    const int each = 4 / size, half = 4 * each;  // elements of a register; k of a half: 8 of 16 bits, 16 of 8
    lane = row % 8 * 4 + k % half / each;
    reg = row / 8 + k / half * 2;
    element = k % each;
}
// The same of D at (row, column).
inline void d_fragment(int row, int column, int &lane, int &reg) {
    lane = row % 8 * 4 + column % 8 / 2;
    reg = column / 8 * 4 + row / 8 * 2 + column % 2;
}
inline double element(u32 bits, int size, char type) {
    bits &= size == 2 ? 0xFFFF : 0xFF;
    return type == 'b' ? bf16(bits) : type == 'f' ? e4m3(bits) : type == 's' ? (double)(int8_t)bits : (double)bits;
}
// d += a b for a warp's 16 rows. Types: b bf16, f e4m3, u u8, s s8.
inline void multiply(std::vector<Matrices> lanes, int n, char a_type, char b_type, bool wide) {
    const int size = a_type == 'b' ? 2 : 1, depth = 32 / size;
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < n; column++) {
            int lane, reg, part;
            d_fragment(row, column, lane, reg);
            float sum = lanes[lane].d ? lanes[lane].d[reg] : 0.0f;
            i64 whole = lanes[lane].di ? lanes[lane].di[reg] : 0;
            for (int k = 0; k < depth; k++) {
                int from, word;
                a_fragment(row, k, size, from, word, part);
                const double x = element(lanes[from].a[word] >> part * 8 * size, size, a_type);
                u32 bits = 0;
                memcpy(&bits, at(place(lanes[0].b, column, k, size, wide), size), size);
                const double y = element(bits, size, b_type);
                if (lanes[lane].d) sum += (float)(x * y);
                else whole += (i64)(x * y);
            }
            if (lanes[lane].d) lanes[lane].d[reg] = sum;
            else lanes[lane].di[reg] = (int)whole;
        }
}
inline void issue(Matrices mine, int n, char a_type, char b_type, bool wide) {
    auto &lanes = issued[current / 32];
    if (lanes.empty()) lanes.resize(32);
    lanes[current % 32] = mine;
    meet(0);
    if (current % 32 == 0) {
        for (const Matrices &lane : lanes)
            if (lane.b != lanes[0].b) fail("wgmma: lanes give different descriptors");
        queued[current / 32].push_back([copy = lanes, n, a_type, b_type, wide] { multiply(copy, n, a_type, b_type, wide); });
    }
    meet(0);
    if (!late) {
        if (current % 32 == 0) { queued[current / 32].front()(); queued[current / 32].pop_front(); }
        meet(0);
    }
}
inline Barrier &barrier(u32 offset) {
    auto found = barriers.find(offset);
    if (found == barriers.end()) fail("an mbarrier that was not made");
    return found->second;
}
inline void turn(Barrier &b) {
    if (b.pending == 0 && b.bytes == 0) {
        b.phase ^= 1;
        b.pending = b.count;
        progress++;
    }
}
inline void start() { body(); fibers[current].done = true; progress++; swapcontext(&fibers[current].context, &scheduler); }

// A grid of blocks of `count` threads, one block after the other. `order`: 0 warps and lanes take their turns forwards, 1 backwards. "" or what went wrong.
inline const char *launch(unsigned grid, int count, u32 shared_bytes, int order, std::function<void()> kernel) {
    body = kernel;
    threads = count;
    failure = "";
    if (count % 32 || count > MOST) return "a block is not of whole warps";
    fibers.resize(count);
    for (block = 0; block < (int)grid && failure.empty(); block++) {
        memory.assign(shared_bytes, 0xFF);
        warps.assign(count / 32, Warp());
        issued.assign(count / 32, {});
        queued.assign(count / 32, {});
        named.clear();
        barriers.clear();
        copies.clear();
        for (Fiber &fiber : fibers) {
            fiber.done = false;
            fiber.stack.resize(128 * 1024);
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, (void (*)())start, 0);
        }
        for (int left = 1; left && failure.empty();) {
            const u64 before = progress;
            left = 0;
            // Each warp goes on as far as it can before the next has its turn.
            for (int warp = 0; warp < count / 32; warp++)
                for (u64 seen = progress - 1; seen != progress && failure.empty();) {
                    seen = progress;
                    for (int lane = 0; lane < 32 && failure.empty(); lane++) {
                        current = order ? count - 1 - 32 * warp - lane : 32 * warp + lane;
                        if (fibers[current].done) continue;
                        left = 1;
                        swapcontext(&scheduler, &fibers[current].context);
                    }
                }
            if (left && progress == before) {
                if (copies.empty()) { failure = "every thread waits for something that does not come"; break; }
                auto copy = order ? copies.back() : copies.front();
                if (order) copies.pop_back(); else copies.pop_front();
                copy();
            }
        }
        if (failure.empty() && !copies.empty()) failure = "a block ended before its copies arrived";
        for (auto &queue : queued)
            if (failure.empty() && !queue.empty()) failure = "a block ended before its wgmma were waited for";
    }
    return failure.c_str();
}
}  // namespace host

#define threadIdx (Index{(unsigned)host::current})
#define blockIdx (Index{(unsigned)host::block})

DEVICE u32 address(u32 at) { return host::BASE + at; }
DEVICE u32 load32(u32 at) { u32 x; memcpy(&x, host::at(at, 4), 4); return x; }
DEVICE void load64(u32 at, u32 &low, u32 &high) { const u8 *from = host::at(at, 8); memcpy(&low, from, 4); memcpy(&high, from + 4, 4); }
DEVICE void store32(u32 at, u32 value) { memcpy(host::at(at, 4), &value, 4); }
DEVICE u32 word_of(float x) { u32 y; memcpy(&y, &x, 4); return y; }
DEVICE float float_of(u32 x) { float y; memcpy(&y, &x, 4); return y; }
DEVICE float fused(float a, float b, float c) { return std::fmaf(a, b, c); }
DEVICE float exp2_of(float x) { return std::exp2(x); }
DEVICE u32 two_bf16(float low, float high) { return host::to_bf16(low) | host::to_bf16(high) << 16; }
DEVICE float f16_of(u32 half) {
    const int exponent = half >> 10 & 31, mantissa = half & 1023;
    const float size = exponent == 31 ? (mantissa ? NAN : INFINITY) : exponent ? std::ldexp(1024.0f + mantissa, exponent - 25) : std::ldexp((float)mantissa, -24);
    return half & 0x8000 ? -size : size;
}
DEVICE int leading_zeros(u64 x) { return x ? __builtin_clzll(x) : 64; }
DEVICE int bits_of(u64 x) { return __builtin_popcountll(x); }
DEVICE int first_bit(u32 x) { return __builtin_ffs((int)x) - 1; }
DEVICE int nearest(float x) { return (int)std::nearbyint(x); }
DEVICE u32 permute(u32 a, u32 b, u32 selector) {
    const u64 bytes = (u64)b << 32 | a;
    u32 y = 0;
    for (int i = 0; i < 4; i++) y |= (u32)(bytes >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
    return y;
}
DEVICE u32 minus_bf16(u32 a, u32 b) {
    return two_bf16(host::bf16(a & 0xFFFF) - host::bf16(b & 0xFFFF), host::bf16(a >> 16) - host::bf16(b >> 16));
}
DEVICE u32 e4m3_bf16(u32 codes) { return two_bf16(host::e4m3(codes & 0xFF), host::e4m3(codes >> 8 & 0xFF)); }
DEVICE u32 two_e4m3(float low, float high) { return host::to_e4m3(low) | host::to_e4m3(high) << 8; }
DEVICE float shuffle_xor(float x, int mask) { return float_of((u32)host::meet(word_of(x))[host::current % 32 ^ mask]); }
DEVICE int shuffle_xor(int x, int mask) { return (int)host::meet((u32)x)[host::current % 32 ^ mask]; }
DEVICE int shuffle(int x, int lane) { return (int)host::meet((u32)x)[lane]; }
DEVICE u32 ballot(bool x) {
    const u64 *all = host::meet(x);
    u32 y = 0;
    for (int i = 0; i < 32; i++) y |= (u32)all[i] << i;
    return y;
}
DEVICE void warp_sync() { host::meet(0); }
DEVICE void named_meet(int name, int count, bool waits) {
    host::Named &b = host::named[name];
    const u64 mine = b.generation;
    host::progress++;
    if (++b.arrived == count) {
        b.arrived = 0;
        b.generation++;
    }
    if (waits) host::until([&] { return b.generation != mine; });
}
DEVICE void named_sync(int name, int count) { named_meet(name, count, true); }
DEVICE void named_arrive(int name, int count) { named_meet(name, count, false); }
DEVICE void block_sync() { named_sync(0, host::threads); }
DEVICE void fewer_registers() {}
DEVICE void more_registers() {}

DEVICE void barrier_init(u32 at, u32 count) {
    host::at(at, 8);
    host::Barrier &b = host::barriers[at];
    b.count = count;
    b.pending = (int)count;
}
DEVICE void barrier_inits_done() {}
DEVICE void barrier_expect(u32 at, u32 bytes) {
    host::Barrier &b = host::barrier(at);
    b.bytes += bytes;
    b.pending--;
    host::progress++;
    host::turn(b);
}
DEVICE void barrier_arrive(u32 at) { barrier_expect(at, 0); }
DEVICE void barrier_wait(u32 at, u32 parity) {
    host::Barrier &b = host::barrier(at);
    host::until([&] { return b.phase != parity; });  // the phase of that parity is over
}
DEVICE void bulk_copy(u32 to, const u8 *from, u32 bytes, u32 barrier) {
    if (bytes % 16 || (u64)from % 16 || to % 16 || !bytes) host::fail("a bulk copy whose ends or size are no multiples of 16");
    if (from < host::pool || from + bytes > host::pool + host::pool_bytes) host::fail("a bulk copy from outside the pool");
    host::at(to, 16);
    host::at(to + bytes - 16, 16);
    auto copy = [=] {
        memcpy(host::memory.data() + to, from, bytes);
        host::Barrier &b = host::barriers[barrier];
        b.bytes -= bytes;
        host::progress++;
        host::turn(b);
    };
    if (host::late) host::copies.push_back(copy);
    else copy();
}
DEVICE void written_for_wgmma() {}
DEVICE void load_transposed(u32 (&x)[4], u32 at) {
    const u64 *rows = host::meet(at);
    const int lane = host::current % 32;
    for (int m = 0; m < 4; m++) {  // lane l has elements (row 2 (l % 4) and the next, column l / 4) of each matrix
        u32 halves[2] = {0, 0};
        for (int e = 0; e < 2; e++) memcpy(&halves[e], host::at((u32)rows[8 * m + 2 * (lane % 4) + e], 16) + 2 * (lane / 4), 2);
        x[m] = halves[0] | halves[1] << 16;
    }
    host::meet(0);
}
DEVICE void wgmma_begin() {}
DEVICE void wgmma_commit() {}
DEVICE void wgmma_wait() {
    host::meet(0);
    if (host::current % 32 == 0) {
        auto &queue = host::queued[host::current / 32];
        for (auto &operation : queue) operation();
        queue.clear();
    }
    host::meet(0);
}
template <class T> DEVICE void pin(T &) {}
DEVICE u64 descriptor(u32 at, u32 leading, u32 stride) {
    return (u64)((address(at) & 0x3FFFF) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32;
}
template <int SIZE> DEVICE void wgmma_wide(float (&d)[SIZE], const u32 (&a)[4], u64 b) { host::issue({d, nullptr, a, b}, 2 * SIZE, 'b', 'b', true); }
template <int SIZE> DEVICE void wgmma_along(float (&d)[SIZE], const u32 (&a)[4], u64 b) {
    host::issue({d, nullptr, a, b}, 2 * SIZE, HOST_SCORED, HOST_SCORED, false);
}
template <int SIZE> DEVICE void wgmma_along(int (&d)[SIZE], const u32 (&a)[4], u64 b) { host::issue({nullptr, d, a, b}, 2 * SIZE, 'u', 's', false); }
