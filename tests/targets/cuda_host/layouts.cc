// The machine's own statements as functions, for the tests that hold them against the PTX ISA's tables.
#define HOST_SCORED 'b'
#include "machine.h"

extern "C" u32 operand_place(u64 descriptor, int n, int k, int size, int wide) { return host::place(descriptor, n, k, size, wide) + host::BASE; }
extern "C" void place_of_a(int row, int k, int size, int *found) { host::a_fragment(row, k, size, found[0], found[1], found[2]); }
extern "C" void place_of_d(int row, int column, int *found) { host::d_fragment(row, column, found[0], found[1]); }
extern "C" u64 described(u32 at, u32 leading, u32 stride) { return descriptor(at, leading, stride); }
extern "C" u32 rounded_bf16(float x) { return host::to_bf16(x); }
extern "C" u32 rounded_e4m3(float x) { return host::to_e4m3(x); }
extern "C" float read_e4m3(u32 code) { return host::e4m3(code); }
extern "C" float read_f16(u32 half) { return f16_of(half); }
