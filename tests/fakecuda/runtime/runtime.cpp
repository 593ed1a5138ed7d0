// The functions of libcudart that torch calls, on fake devices.

#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "machine.hpp"

using namespace fake;

// Within each function that reaches a device: hold the machine, and fail where the device is broken.
#define CALL(name)                                                           \
    Hold hold;                                                               \
    count(name);                                                             \
    if (cudaError_t error = status(current_device())) return error

// -- devices -----------------------------------------------------------------------------------------------------------

EXPORT cudaError_t cudaGetDeviceCount(int* count) {
    *count = machine().devices.size();
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDevice(int* index) {
    *index = current_device();
    return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int index) {
    Hold hold;
    count("cudaSetDevice");
    if (index < 0 || index >= static_cast<int>(machine().devices.size())) return result(cudaErrorInvalidDevice);
    current_device() = index;
    device(index).has_context = true;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int index) {
    std::memset(found, 0, sizeof *found);
    std::strcpy(found->name, "NVIDIA H100 80GB HBM3 (fake)");
    found->major = 9;
    found->multiProcessorCount = 132;
    found->totalGlobalMem = machine().total_bytes;
    found->warpSize = 32;
    found->maxThreadsPerBlock = 1024;
    found->maxThreadsPerMultiProcessor = 2048;
    found->regsPerMultiprocessor = found->regsPerBlock = 65536;
    found->sharedMemPerBlock = 49152;
    found->sharedMemPerBlockOptin = 232448;
    found->sharedMemPerMultiprocessor = 233472;
    found->l2CacheSize = 50 << 20;
    found->maxGridSize[0] = 2147483647;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    found->unifiedAddressing = found->concurrentKernels = found->canMapHostMemory = found->streamPrioritiesSupported = 1;
    found->asyncEngineCount = 3;
    found->pciBusID = 0x10 + index;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
        case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
        case cudaDevAttrMultiProcessorCount: *value = 132; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
        default: *value = 1;
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    CALL("cudaMemGetInfo");
    *total_bytes = machine().total_bytes;
    *free_bytes = *total_bytes - device(current_device()).used_bytes;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 0;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return result(cudaErrorPeerAccessUnsupported); }

EXPORT cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int index) {
    std::snprintf(id, length, "0000:%02x:00.0", 0x10 + index);
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize() {
    CALL("cudaDeviceSynchronize");
    reach_all(current_device());
    return status(current_device());
}

EXPORT const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorInitializationError: return "cudaErrorInitializationError";
        case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
        case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
        case cudaErrorNotReady: return "cudaErrorNotReady";
        case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
        case cudaErrorAssert: return "cudaErrorAssert";
        case cudaErrorHostMemoryAlreadyRegistered: return "cudaErrorHostMemoryAlreadyRegistered";
        case cudaErrorHostMemoryNotRegistered: return "cudaErrorHostMemoryNotRegistered";
        case cudaErrorNotSupported: return "cudaErrorNotSupported";
        default: return "an error of the fake CUDA runtime";
    }
}

EXPORT const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : cudaGetErrorName(error);
}

// -- streams -----------------------------------------------------------------------------------------------------------

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
    CALL("cudaStreamCreate");
    auto* made = new Stream{current_device(), priority, {}};
    machine().streams.insert(made);
    *stream = reinterpret_cast<cudaStream_t>(made);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }  // what it has still runs

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
    Hold hold;
    *priority = stream_of(stream)->priority;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
    CALL("cudaStreamQuery");
    advance();
    return stream_of(stream)->queue.empty() ? cudaSuccess : result(cudaErrorNotReady);
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    CALL("cudaStreamSynchronize");
    Stream* waited = stream_of(stream);
    host_waits("stream", mark(waited));
    return status(waited->device);
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    CALL("cudaStreamWaitEvent");
    wait_in_stream(stream_of(stream), reinterpret_cast<Event*>(event)->mark);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* found) {
    *found = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* found, unsigned long long*, cudaGraph_t*,
                                            const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
    *found = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
    CALL("cudaLaunchHostFunc");
    issue(stream_of(stream), [=] { function(argument); });
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* argument, unsigned) {
    CALL("cudaStreamAddCallback");
    issue(stream_of(stream), [=] { function(stream, cudaSuccess, argument); });
    return cudaSuccess;
}

// -- events ------------------------------------------------------------------------------------------------------------

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    CALL(flags & cudaEventBlockingSync ? "cudaEventCreate, blocking" : "cudaEventCreate");
    *event = reinterpret_cast<cudaEvent_t>(new Event{nullptr, flags, current_device()});
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
    Hold hold;
    count("cudaEventDestroy");
    delete reinterpret_cast<Event*>(event);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    CALL("cudaEventRecord");
    auto* recorded = reinterpret_cast<Event*>(event);
    Stream* on = stream_of(stream);
    if (recorded->device != on->device) return result(cudaErrorInvalidResourceHandle);
    recorded->mark = mark(on);
    recorded->recorded_at = ++machine().ticks;
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
    CALL("cudaEventQuery");
    advance();
    const MarkPtr& mark = reinterpret_cast<Event*>(event)->mark;
    return !mark || mark->happened ? cudaSuccess : result(cudaErrorNotReady);
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    const auto* waited = reinterpret_cast<Event*>(event);
    const MarkPtr mark = waited->mark;
    const bool waits = mark && !mark->happened;
    CALL(waits ? "cudaEventSynchronize, which waits" : "cudaEventSynchronize");
    if (waits) host_waits(waited->flags & cudaEventBlockingSync ? "blocking event" : "event", mark);
    return status(current_device());
}

// A millisecond passes with each event that is recorded.
EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t last) {
    Hold hold;
    auto *from = reinterpret_cast<Event*>(first), *to = reinterpret_cast<Event*>(last);
    if ((from->flags | to->flags) & cudaEventDisableTiming) return result(cudaErrorInvalidResourceHandle);
    if (!from->mark || !to->mark) return result(cudaErrorInvalidResourceHandle);
    if (!from->mark->happened || !to->mark->happened) return result(cudaErrorNotReady);
    *milliseconds = to->recorded_at - from->recorded_at;
    return cudaSuccess;
}

// -- memory of devices -------------------------------------------------------------------------------------------------

EXPORT cudaError_t cudaMalloc(void** address, size_t nbytes) {
    CALL("cudaMalloc");
    return allocate(address, nbytes);
}

EXPORT cudaError_t cudaFree(void* address) {
    CALL("cudaFree");
    if (!address) return cudaSuccess;
    const int index = device_at(address);
    if (index >= 0) reach_all(index);
    return release(address);
}

// What was freed in the order of a stream is given out again in that order, or to others when the stream is there.
EXPORT cudaError_t cudaMallocAsync(void** address, size_t nbytes, cudaStream_t handle) {
    CALL("cudaMallocAsync");
    Stream* stream = stream_of(handle);
    auto& pool = device(stream->device).pool;
    for (auto each = pool.begin(); each != pool.end(); ++each) {
        const size_t size = device(stream->device).allocations.at(each->address);
        if (size < nbytes || size > 2 * nbytes + 512 || (each->stream != stream && !each->freed->happened)) continue;
        *address = each->address;
        pool.erase(each);
        return cudaSuccess;
    }
    return allocate(address, nbytes);
}

EXPORT cudaError_t cudaFreeAsync(void* address, cudaStream_t handle) {
    CALL("cudaFreeAsync");
    Stream* stream = stream_of(handle);
    Device& on = device(stream->device);
    auto found = on.allocations.find(static_cast<char*>(address));
    if (found == on.allocations.end()) return result(cudaErrorInvalidValue);
    on.pool.push_back({found->first, stream, mark(stream)});
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int index) {
    *pool = reinterpret_cast<cudaMemPool_t>(&device(index));
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }

EXPORT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }

EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
    Hold hold;
    Device& on = *reinterpret_cast<Device*>(pool);
    size_t returned = 0;
    for (auto& each : on.pool) returned += on.allocations.at(each.address);
    const bool used = attribute == cudaMemPoolAttrUsedMemCurrent || attribute == cudaMemPoolAttrUsedMemHigh;
    *static_cast<unsigned long long*>(value) = on.used_bytes - (used ? returned : 0);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t) {
    Hold hold;
    Device& on = *reinterpret_cast<Device*>(pool);
    std::vector<Returned> kept;
    for (auto& each : on.pool) {
        if (!each.freed->happened || release(each.address) != cudaSuccess) kept.push_back(each);
    }
    on.pool = kept;
    return cudaSuccess;
}

// -- memory of the host ------------------------------------------------------------------------------------------------

EXPORT cudaError_t cudaHostAlloc(void** address, size_t nbytes, unsigned) {
    CALL("cudaHostAlloc");
    void* made = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) return result(cudaErrorMemoryAllocation);
    machine().allocated[static_cast<char*>(made)] = nbytes;
    *address = made;
    return cudaSuccess;
}

static bool is_mapped(const void* address, size_t nbytes) {
    const size_t begin = reinterpret_cast<size_t>(address) & ~size_t{4095}, end = reinterpret_cast<size_t>(address) + nbytes;
    std::vector<unsigned char> in_memory((end - begin + 4095) / 4096);
    return mincore(reinterpret_cast<void*>(begin), end - begin, in_memory.data()) == 0;
}

// Whether a copy that has not run yet reads or writes the host's bytes.
static bool is_being_copied(const char* host, size_t nbytes) {
    for (auto& each : machine().copies) {
        if (!each.done->happened && each.host < host + nbytes && host < each.host + each.nbytes) return true;
    }
    return false;
}

EXPORT cudaError_t cudaFreeHost(void* address) {
    Hold hold;
    count("cudaFreeHost");
    auto found = machine().allocated.find(static_cast<char*>(address));
    if (found == machine().allocated.end()) return result(cudaErrorInvalidValue);
    if (is_being_copied(found->first, found->second)) violation("memory was freed during a copy", address, found->second);
    munmap(address, found->second);
    machine().allocated.erase(found);
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostRegister(void* address, size_t nbytes, unsigned) {
    CALL("cudaHostRegister");
    auto* begin = static_cast<char*>(address);
    if (machine().locks_left == 0) return result(cudaErrorMemoryAllocation);
    if (nbytes > size_t{1} << 45) return result(cudaErrorInvalidValue);
    for (auto& [other, size] : machine().locked) {
        if (begin < other + size && other < begin + nbytes) {
            violation("memory was page-locked twice", address, nbytes);
            return result(cudaErrorHostMemoryAlreadyRegistered);
        }
    }
    if (!is_mapped(address, nbytes)) violation("memory that is not mapped was page-locked", address, nbytes);
    if (machine().locks_left > 0) --machine().locks_left;
    machine().locked[begin] = nbytes;
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void* address) {
    CALL("cudaHostUnregister");
    auto found = machine().locked.find(static_cast<char*>(address));
    if (found == machine().locked.end()) {
        violation("memory was unlocked that is not page-locked", address, 0);
        return result(cudaErrorHostMemoryNotRegistered);
    }
    if (is_being_copied(found->first, found->second)) violation("memory was unlocked during a copy", address, found->second);
    if (!is_mapped(address, found->second)) violation("memory was unmapped while it was page-locked", address, found->second);
    machine().locked.erase(found);
    return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
    CALL("cudaPointerGetAttributes");
    std::memset(found, 0, sizeof *found);
    found->devicePointer = found->hostPointer = const_cast<void*>(address);
    found->device = device_at(address);
    if (found->device >= 0) {
        found->type = cudaMemoryTypeDevice;
        found->hostPointer = nullptr;
    } else if (is_locked(address, 1)) {
        found->type = cudaMemoryTypeHost;
        found->device = 0;
    } else {
        found->type = cudaMemoryTypeUnregistered;
        found->devicePointer = nullptr;
    }
    return cudaSuccess;
}

// -- copies ------------------------------------------------------------------------------------------------------------

// Where the bytes at an address are when a copy runs: the device's, or the host's.
static char* at_run_time(const void* address, size_t nbytes, bool of_device) {
    char* found = of_device ? reachable(address, nbytes) : static_cast<char*>(const_cast<void*>(address));
    if (!found) violation("a copy of memory of the device that is not allocated", address, nbytes);
    return found;
}

static void copy_now(void* target, bool to_device, const void* source, bool from_device, size_t nbytes) {
    char *to = at_run_time(target, nbytes, to_device), *from = at_run_time(source, nbytes, from_device);
    if (to && from) std::memmove(to, from, nbytes);
}

EXPORT cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t nbytes, cudaMemcpyKind kind, cudaStream_t handle) {
    Hold hold;
    if (cudaError_t error = status(current_device())) return error;
    if (!nbytes) return cudaSuccess;
    Stream* stream = stream_of(handle);
    const bool to = device_at(target) >= 0, from = device_at(source) >= 0;
    if (kind == cudaMemcpyHostToDevice && !to) violation("a copy to no memory of a device", target, nbytes);
    if (kind == cudaMemcpyDeviceToHost && !from) violation("a copy from no memory of a device", source, nbytes);
    if (to && from) {
        count("copy within devices");
        issue(stream, [=] { copy_now(target, true, source, true, nbytes); });
        return cudaSuccess;
    }
    auto* host = static_cast<const char*>(to ? source : target);
    const std::string direction = to ? "copy to a device" : "copy to the host";
    if (!is_locked(host, nbytes)) {  // the host waits for the stream, and copies
        if (is_locked(host, 1)) violation("a copy reaches beyond page-locked memory", host, nbytes);
        count(direction + ", pageable");
        host_waits("copy of pageable memory", mark(stream));
        copy_now(target, to, source, from, nbytes);
        return status(stream->device);
    }
    count(direction);
    std::shared_ptr<std::vector<char>> before;
    if (to && machine().policy != Policy::never) before = std::make_shared<std::vector<char>>(host, host + nbytes);
    issue(stream, [=] {
        if (!is_mapped(host, nbytes)) {
            violation("memory of the host was unmapped before a copy ran", host, nbytes);
            return;
        }
        if (before && std::memcmp(before->data(), host, nbytes)) {
            violation("the source of a copy was changed before the copy ran", host, nbytes);
        }
        copy_now(target, to, source, from, nbytes);
    });
    auto& copies = machine().copies;
    while (!copies.empty() && copies.front().done->happened) copies.pop_front();
    copies.push_back({host, nbytes, mark(stream)});
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpy(void* target, const void* source, size_t nbytes, cudaMemcpyKind) {
    CALL("cudaMemcpy");
    reach(mark(stream_of(nullptr)));
    copy_now(target, device_at(target) >= 0, source, device_at(source) >= 0, nbytes);
    return status(current_device());
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t nbytes, cudaStream_t handle) {
    CALL("cudaMemcpyPeerAsync");
    issue(stream_of(handle), [=] { copy_now(target, true, source, true, nbytes); });
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t width,
                                     size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; ++row) {
        const cudaError_t error = cudaMemcpyAsync(static_cast<char*>(target) + row * target_pitch,
                                                  static_cast<const char*>(source) + row * source_pitch, width, kind, stream);
        if (error) return error;
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemsetAsync(void* target, int value, size_t nbytes, cudaStream_t handle) {
    CALL("cudaMemsetAsync");
    issue(stream_of(handle), [=] {
        if (char* to = at_run_time(target, nbytes, true)) std::memset(to, value, nbytes);
    });
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemset(void* target, int value, size_t nbytes) {
    const cudaError_t error = cudaMemsetAsync(target, value, nbytes, nullptr);
    return error ? error : cudaStreamSynchronize(nullptr);
}

// -- kernels of torch: launched and counted, not run -------------------------------------------------------------------

EXPORT void** __cudaRegisterFatBinary(void*) {
    static void* handle[4];
    return handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
    machine().kernels[stub] = name;
}
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT char __cudaInitModule(void**) { return 1; }

static thread_local struct {
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
} configuration;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
    configuration = {grid, block, shared_bytes, stream};
    return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared_bytes = configuration.shared_bytes;
    *static_cast<cudaStream_t*>(stream) = configuration.stream;
    return cudaSuccess;
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
    *kernel = static_cast<cudaKernel_t>(const_cast<void*>(stub));
    return cudaSuccess;
}

static cudaError_t launch(const void* stub, cudaStream_t handle) {
    CALL("kernel of torch");
    Stream* stream = stream_of(handle);
    if (stream->device != current_device()) return result(cudaErrorInvalidResourceHandle);
    auto found = machine().kernels.find(stub);
    count("not run: " + (found == machine().kernels.end() ? std::string("?") : found->second));
    issue(stream, [] {});
    return cudaSuccess;
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
    return launch(kernel, stream);
}
EXPORT cudaError_t cudaLaunchKernel(const void* stub, dim3, dim3, void**, size_t, cudaStream_t stream) {
    return launch(stub, stream);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* stub, dim3, dim3, void**, size_t, cudaStream_t stream) {
    return launch(stub, stream);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* launched, const void* stub, void**) {
    return launch(stub, launched->stream);
}

EXPORT cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void* code, cudaJitOption*, void**, unsigned,
                                       cudaLibraryOption*, void**, unsigned) {
    *library = static_cast<cudaLibrary_t>(const_cast<void*>(code));
    return cudaSuccess;
}
EXPORT cudaError_t cudaLibraryUnload(cudaLibrary_t) { return cudaSuccess; }
EXPORT cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t, const char* name) {
    Hold hold;
    auto* stub = new char;
    machine().kernels[stub] = name;
    *kernel = reinterpret_cast<cudaKernel_t>(stub);
    return cudaSuccess;
}
EXPORT cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
    std::memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->numRegs = 32;
    found->ptxVersion = found->binaryVersion = 90;
    return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
    *blocks = 4;
    return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
    *blocks = 4;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGetSymbolAddress(void**, const void*) { return result(cudaErrorInvalidSymbol); }
EXPORT cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }

static int not_there() { return cudaErrorNotSupported; }

// Functions of the driver, which are in driver.cpp or not there.
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* found) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = reinterpret_cast<void*>(not_there);
    if (found) *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
