// Which instruction sets this library has and this processor runs, and the C ABI.
#include <cstring>

#include "ops.h"
#include "pool.h"

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#define DECLARE(isa)   \
  namespace isa {      \
  extern const Ops OPS; \
  }
DECLARE(generic)
#if defined(__x86_64__)
DECLARE(avx2)
DECLARE(avx512)
DECLARE(amx)
#elif defined(__aarch64__)
DECLARE(dotprod)
#endif

namespace {

struct Set {
  const char* name;
  const Ops* ops;
  const char* missing;  // null: it runs here
};

#if defined(__x86_64__)
const char* no_avx2() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2")) return "the processor has no AVX2";
  if (!__builtin_cpu_supports("fma")) return "the processor has no FMA";
  return __builtin_cpu_supports("f16c") ? nullptr : "the processor has no F16C";
}

const char* no_avx512() {
  if (const char* reason = no_avx2()) return reason;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vl"))
    return "the processor has no AVX-512 (F, BW, DQ, VL)";
  return __builtin_cpu_supports("avx512vnni") ? nullptr : "the processor has no AVX-512 VNNI";
}

const char* no_amx() {
  if (const char* reason = no_avx512()) return reason;
  unsigned a, b, c, d;
  __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
  if (!(d >> 24 & 1) || !(d >> 25 & 1) || !(d >> 22 & 1)) return "the processor has no AMX (int8 and bf16)";
#if defined(__linux__)
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;  // the system grants tile registers on request
  if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) != 0) return "the system does not grant AMX";
  return nullptr;
#else
  return "AMX is only used on Linux";
#endif
}
#endif

const Set* sets(int* count) {
  static const Set all[] = {
#if defined(__x86_64__)
      {"amx", &amx::OPS, no_amx()},
      {"avx512", &avx512::OPS, no_avx512()},
      {"avx2", &avx2::OPS, no_avx2()},
#elif defined(__aarch64__)
      {"dotprod", &dotprod::OPS, getauxval(AT_HWCAP) & HWCAP_ASIMDDP ? nullptr : "the processor has no dot product instructions"},
#endif
      {"generic", &generic::OPS, nullptr},
  };
  *count = sizeof all / sizeof *all;
  return all;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int32_t writehead_abi() { return 5; }

// The name of instruction set `index`, fastest first; null past the last.
__attribute__((visibility("default"))) const char* writehead_set(int32_t index) {
  int count;
  const Set* all = sets(&count);
  return index < count ? all[index].name : nullptr;
}

// Why it does not run here; null if it does.
__attribute__((visibility("default"))) const char* writehead_missing(int32_t index) {
  int count;
  return sets(&count)[index].missing;
}

__attribute__((visibility("default"))) const Ops* writehead_ops(int32_t index) {
  int count;
  return sets(&count)[index].ops;
}

__attribute__((visibility("default"))) void writehead_threads(int32_t threads) { pool::resize(threads); }

// Makes the calls in order.
__attribute__((visibility("default"))) void writehead_replay(const Call* calls, int64_t count) {
  for (int64_t i = 0; i < count; i++) calls[i].operation(calls[i].arguments);
}

}  // extern "C"
