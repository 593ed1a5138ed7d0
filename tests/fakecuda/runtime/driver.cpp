// The functions of libcuda that Triton and torch call, on the fake devices of the runtime beside it. Triton's kernels are
// launched and counted, and a program may look at each launch; they are not run.

#include <cuda.h>
#include <dlfcn.h>

#include <cstddef>
#include <cstring>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Kernel {
    std::string name;
};

// A function of the runtime, whose library is loaded before this one.
template <typename Function>
Function runtime(const char* name) {
    return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

int current_device() {
    static const auto get = runtime<int (*)(int*)>("cudaGetDevice");
    int index = 0;
    get(&index);
    return index;
}

CUcontext context_of(int index) { return reinterpret_cast<CUcontext>(static_cast<size_t>(index + 1)); }

// What a program is told of each launch: the kernel's name, the grid, threads, and the addresses of its arguments.
using Watch = void (*)(const char*, unsigned, unsigned, unsigned, unsigned, void**);
Watch watch = nullptr;

void nothing(void*) {}

}  // namespace

EXPORT void fake_watch_launches(Watch watching) { watch = watching; }

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* launched, CUfunction function, void** arguments, void**) {
    static const auto enqueue = runtime<int (*)(void*, void (*)(void*), void*)>("fake_enqueue");
    static const auto note = runtime<void (*)(const char*)>("fake_note");
    auto* kernel = reinterpret_cast<Kernel*>(function);
    note(("kernel of Triton: " + kernel->name).c_str());
    if (watch) {
        watch(kernel->name.c_str(), launched->gridDimX, launched->gridDimY, launched->gridDimZ, launched->blockDimX, arguments);
    }
    return static_cast<CUresult>(enqueue(launched->hStream, nothing, nullptr));
}

EXPORT CUresult cuGetErrorString(CUresult, const char** text) {
    *text = "an error of the fake CUDA driver";
    return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute, CUdeviceptr address) {
    *static_cast<CUdeviceptr*>(value) = address;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    static const auto note = runtime<void (*)(const char*)>("fake_note");
    note("cuModuleLoadData");
    *module = static_cast<CUmodule>(const_cast<void*>(image));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
    *function = reinterpret_cast<CUfunction>(new Kernel{name});
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

EXPORT CUresult cuDeviceGet(CUdevice* device, int index) {
    *device = index;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
        default: *value = 1;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
    *context = context_of(current_device());
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
    *device = current_device();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    static const auto set = runtime<int (*)(int)>("cudaSetDevice");
    if (context) set(reinterpret_cast<size_t>(context) - 1);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    *context = context_of(device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
    static const auto has_context = runtime<int (*)(int)>("fake_has_context");
    if (flags) *flags = 0;
    *active = has_context(device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDriverGetVersion(int* version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
