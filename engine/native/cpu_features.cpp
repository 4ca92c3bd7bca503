#include "cpu_features.h"

#ifdef TANDEM_X86
#include <cpuid.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#endif

namespace tandem {

KernelTable portable_kernels();
#ifdef TANDEM_X86
KernelTable avx2_kernels();
KernelTable avx512_kernels();
KernelTable avx512_bf16_kernels();
KernelTable avx512_bf16_fma_kernels();
#ifdef TANDEM_AVX512_FP16
KernelTable avx512_fp16_kernels();
#endif
KernelTable amx_kernels();
KernelTable amx_emulated_kernels();
bool amx_self_test();
#endif

namespace {

#ifdef TANDEM_X86

constexpr int kSelfTestPolls = 2000;  // of a millisecond

// Runs a test in a child process, so that an instruction that does not work ends the child alone.
bool passes_in_child(bool (*test)()) {
    const pid_t child = fork();
    if (child < 0) return false;
    if (child == 0) _exit(test() ? 0 : 1);
    int status = 0;
    for (int poll = 0; poll < kSelfTestPolls; ++poll) {
        const pid_t ended = waitpid(child, &status, WNOHANG);
        if (ended == child) return WIFEXITED(status) && WEXITSTATUS(status) == 0;
        if (ended < 0) return false;
        const timespec pause = {0, 1000000};
        nanosleep(&pause, nullptr);
    }
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    return false;
}

// AMX needs the processor's word, the system's permission for the tile registers, and a product that comes out right.
bool amx_works() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return false;
    return passes_in_child(&amx_self_test);
#else
    return false;
#endif
}

void add_x86_variants(std::vector<Variant>& usable) {
    // The compiler's check covers both the processor and the operating system's saving of the registers.
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool bf16 = avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    // Intel's cores multiply pairs of bfloat16 at half the rate of float32 FMAs, AMD's at twice that rate. The vendor
    // decides and not a timing: workers on machines of one kind must choose the same kernels, or tokens would depend on
    // how busy a machine was when they started.
    const Variant by_pairs = {"avx512_bf16", &avx512_bf16_kernels};
    const Variant by_fma = {"avx512_bf16_fma", &avx512_bf16_fma_kernels};
    const bool fma_is_faster = __builtin_cpu_is("intel");
    if (bf16 && amx_works()) usable.push_back({"amx", &amx_kernels});
#ifdef TANDEM_AVX512_FP16
    // Twice as many values in each FMA. Intel's alone have been measured.
    if (bf16 && fma_is_faster && __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512fp16"))
        usable.push_back({"avx512_fp16", &avx512_fp16_kernels});
#endif
    if (bf16) usable.push_back(fma_is_faster ? by_fma : by_pairs);
    if (bf16) usable.push_back(fma_is_faster ? by_pairs : by_fma);
    if (avx512) usable.push_back({"avx512", &avx512_kernels});
    if (avx2) usable.push_back({"avx2", &avx2_kernels});
    usable.push_back({"portable", &portable_kernels});
    if (bf16) usable.push_back({"amx_emulated", &amx_emulated_kernels});
}

#endif

std::vector<Variant> find_variants() {
    std::vector<Variant> usable;
#ifdef TANDEM_X86
    add_x86_variants(usable);
#else
    usable.push_back({"portable", &portable_kernels});
#endif
    return usable;
}

}  // namespace

const std::vector<Variant>& usable_variants() {
    static const std::vector<Variant> variants = find_variants();
    return variants;
}

}  // namespace tandem
