#include "cpu_features.h"

namespace tandem {

KernelTable portable_kernels();
#ifdef TANDEM_X86
KernelTable avx2_kernels();
KernelTable avx512_kernels();
KernelTable avx512_bf16_kernels();
#endif

std::vector<Variant> usable_variants() {
    std::vector<Variant> usable;
#ifdef TANDEM_X86
    // The compiler's check covers both the processor and the operating system's saving of the registers.
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16"))
        usable.push_back({"avx512_bf16", &avx512_bf16_kernels});
    if (avx512) usable.push_back({"avx512", &avx512_kernels});
    if (avx2) usable.push_back({"avx2", &avx2_kernels});
#endif
    usable.push_back({"portable", &portable_kernels});
    return usable;
}

}  // namespace tandem
