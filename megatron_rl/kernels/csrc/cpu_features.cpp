// Detects the GEMM kinds that this processor runs. Compiled without special flags.
#include <cstdint>

#include "gemm_bf16.h"

#if defined(MRL_X86_GEMM)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace mrl {
namespace {

bool has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool bf16 = d >> 22 & 1, tile = d >> 24 & 1;
  if (!bf16 || !tile || !__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTileState = 3u << 17;
  if ((low & kTileState) != kTileState) return false;
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_avx512_bf16() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16");
}

}  // namespace

bool gemm_can_run(int kind) {
  static const bool avx512 = has_avx512_bf16(), amx = avx512 && has_amx();
  return kind == kGemmNone || (kind == kGemmAvx512 && avx512) || (kind == kGemmAmx && amx);
}

int gemm_best_kind() {
  if (gemm_can_run(kGemmAmx)) return kGemmAmx;
  // vdpbf16ps is twice as fast as fp32 FMA on AMD, and up to three times slower on Intel.
  if (gemm_can_run(kGemmAvx512) && __builtin_cpu_is("amd")) return kGemmAvx512;
  return kGemmNone;
}

}  // namespace mrl
#else
namespace mrl {
bool gemm_can_run(int kind) { return kind == kGemmNone; }
int gemm_best_kind() { return kGemmNone; }
}  // namespace mrl
#endif
