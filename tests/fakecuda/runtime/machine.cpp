#include "machine.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace fake {

namespace {

constexpr size_t ARENA_BYTES = size_t{256} << 30;  // of addresses; memory is taken when it is written
constexpr size_t PAGE = 4096;
constexpr int GARBAGE = 0xA5;  // what new memory holds
constexpr size_t MOST_GARBAGE = size_t{64} << 20;
constexpr size_t GRAIN = size_t{1} << 21;  // of addresses, as the driver gives them

thread_local int device_of_thread = 0;
thread_local cudaError_t last_error = cudaSuccess;

Policy policy_named(const std::string& name) {
    static const std::map<std::string, Policy> policies{
        {"eager", Policy::eager}, {"lazy", Policy::lazy},     {"side first", Policy::side}, {"consumer first", Policy::main},
        {"random", Policy::random}, {"never", Policy::never},
    };
    auto found = policies.find(name);
    if (found == policies.end()) {
        std::fprintf(stderr, "fake CUDA: there is no policy %s\n", name.c_str());
        std::abort();
    }
    return found->second;
}

Machine* make_machine() {
    auto* made = new Machine;  // never deleted: torch calls the runtime while the process ends
    if (const char* policy = std::getenv("FAKECUDA_POLICY")) made->policy = policy_named(policy);
    const char* devices = std::getenv("FAKECUDA_DEVICES");
    made->devices.resize(devices ? std::atoi(devices) : 1);
    for (size_t index = 0; index < made->devices.size(); ++index) {
        Device& device = made->devices[index];
        device.main = new Stream{static_cast<int>(index), 0, {}};
        made->streams.insert(device.main);
        device.file = memfd_create("fake device", 0);
        if (ftruncate(device.file, ARENA_BYTES)) std::abort();
        auto map = [&](int protection) {
            void* found = mmap(nullptr, ARENA_BYTES, protection, MAP_SHARED | MAP_NORESERVE, device.file, 0);
            if (found == MAP_FAILED) std::abort();
            madvise(found, ARENA_BYTES, MADV_DONTDUMP);
            return static_cast<char*>(found);
        };
        device.base = map(PROT_NONE);
        device.reachable = map(PROT_READ | PROT_WRITE);
    }
    pthread_atfork(nullptr, nullptr, [] { machine().forked = true; });
    return made;
}

// Run what is first in a queue; false if there is nothing, or it waits for a mark that has not happened.
bool step(Stream* stream) {
    if (stream->queue.empty()) return false;
    Operation& first = stream->queue.front();
    if (first.wait) {
        if (!first.wait->happened) return false;
        stream->queue.pop_front();
        return true;
    }
    const Operation operation = std::move(first);
    stream->queue.pop_front();
    if (operation.mark) {
        operation.mark->happened = true;
    } else if (!device(stream->device).broken) {
        operation.run();
    }
    return true;
}

bool goes_ahead(const Stream* stream) {
    switch (machine().policy) {
        case Policy::eager: return true;
        case Policy::side: return stream->priority < 0;
        case Policy::main: return stream->priority >= 0;
        default: return false;
    }
}

// The allocation that an address is in.
std::map<char*, size_t>::iterator around(std::map<char*, size_t>& ranges, const void* address) {
    auto after = ranges.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (after == ranges.begin()) return ranges.end();
    auto found = std::prev(after);
    return static_cast<const char*>(address) < found->first + found->second ? found : ranges.end();
}

bool covers(std::map<char*, size_t>& ranges, const void* address, size_t nbytes) {
    auto found = around(ranges, address);
    return found != ranges.end() && static_cast<const char*>(address) + nbytes <= found->first + found->second;
}

}  // namespace

Machine& machine() {
    static Machine* made = make_machine();
    return *made;
}

Hold::Hold() {
    std::recursive_mutex& mutex = machine().mutex;
    if (mutex.try_lock()) return;
    using Check = int (*)();
    using Save = void* (*)();
    using Restore = void (*)(void*);
    static const auto check = reinterpret_cast<Check>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    static const auto save = reinterpret_cast<Save>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    static const auto restore = reinterpret_cast<Restore>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
    if (check && check()) {
        void* thread = save();
        mutex.lock();
        restore(thread);
    } else {
        mutex.lock();
    }
}

Hold::~Hold() { machine().mutex.unlock(); }

int& current_device() { return device_of_thread; }

Device& device(int index) { return machine().devices.at(index); }

Stream* stream_of(cudaStream_t handle) {
    if (reinterpret_cast<size_t>(handle) <= 2) return device(current_device()).main;
    return reinterpret_cast<Stream*>(handle);
}

void issue(Stream* stream, std::function<void()> work) {
    if (machine().policy == Policy::never) return;
    stream->queue.push_back({std::move(work), nullptr, nullptr});
    advance();
}

MarkPtr mark(Stream* stream) {
    auto made = std::make_shared<Mark>(Mark{stream});
    if (machine().policy == Policy::never) {
        made->happened = true;
        return made;
    }
    stream->queue.push_back({nullptr, nullptr, made});
    advance();
    return made;
}

void wait_in_stream(Stream* stream, MarkPtr mark) {
    if (!mark || mark->happened) return;
    stream->queue.push_back({nullptr, std::move(mark), nullptr});
    advance();
}

void host_waits(const char* what, const MarkPtr& mark) {
    if (!mark->happened && machine().watch_waits) machine().watch_waits(what);
    reach(mark);
}

void reach(const MarkPtr& mark) {
    std::vector<MarkPtr> needed{mark};
    while (!needed.empty()) {
        MarkPtr latest = needed.back();
        if (latest->happened) {
            needed.pop_back();
        } else if (!step(latest->stream)) {
            if (latest->stream->queue.empty() || needed.size() > machine().streams.size()) {
                std::fprintf(stderr, "fake CUDA: streams wait for each other\n");
                std::abort();
            }
            needed.push_back(latest->stream->queue.front().wait);
        }
    }
}

void reach_all(int device) {
    const std::vector<Stream*> streams(machine().streams.begin(), machine().streams.end());
    for (Stream* stream : streams) {
        if (stream->device == device) reach(mark(stream));
    }
}

void advance() {
    Machine& all = machine();
    if (all.policy == Policy::random) {
        const std::vector<Stream*> streams(all.streams.begin(), all.streams.end());
        for (unsigned steps = all.random() % 4; steps--;) step(streams[all.random() % streams.size()]);
        return;
    }
    const std::vector<Stream*> streams(all.streams.begin(), all.streams.end());
    for (bool any = true; any;) {
        any = false;
        for (Stream* stream : streams) {
            if (goes_ahead(stream) && step(stream)) any = true;
        }
    }
}

void count(const std::string& name) { ++machine().counts[name]; }

void violation(const std::string& what, const void* address, size_t nbytes) {
    char where[96];
    std::snprintf(where, sizeof where, ": %zu bytes at %p", nbytes, address);
    machine().violations.push_back(what + where);
}

cudaError_t result(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

cudaError_t status(int index) {
    if (machine().forked) return result(cudaErrorInitializationError);
    return result(device(index).broken);
}

// -- memory ------------------------------------------------------------------------------------------------------------

cudaError_t allocate(void** address, size_t nbytes) {
    Device& on = device(current_device());
    on.has_context = true;
    const size_t taken = (nbytes + GRAIN - 1) / GRAIN * GRAIN;
    if (on.used_bytes + nbytes > machine().total_bytes || on.next + taken > ARENA_BYTES) {
        return result(cudaErrorMemoryAllocation);
    }
    char* found = on.base + on.next;
    on.next += taken + GRAIN;  // a gap, so that what reaches beyond an allocation is in none
    on.allocations[found] = nbytes;
    on.used_bytes += nbytes;
    *address = found;
    std::memset(on.reachable + (found - on.base), GARBAGE, std::min(nbytes, MOST_GARBAGE));
    return cudaSuccess;
}

cudaError_t release(void* address) {
    for (Device& on : machine().devices) {
        auto found = on.allocations.find(static_cast<char*>(address));
        if (found == on.allocations.end()) continue;
        const size_t offset = found->first - on.base, nbytes = (found->second + PAGE - 1) / PAGE * PAGE;
        fallocate(on.file, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, offset, nbytes);
        on.used_bytes -= found->second;
        on.allocations.erase(found);
        return cudaSuccess;
    }
    return result(cudaErrorInvalidValue);
}

char* reachable(const void* address, size_t nbytes) {
    const int index = device_at(address);
    if (index < 0) return nullptr;
    Device& on = device(index);
    if (!covers(on.allocations, address, nbytes)) return nullptr;
    return on.reachable + (static_cast<const char*>(address) - on.base);
}

int device_at(const void* address) {
    for (size_t index = 0; index < machine().devices.size(); ++index) {
        Device& on = device(index);
        if (around(on.allocations, address) != on.allocations.end()) return index;
    }
    return -1;
}

bool is_locked(const void* address, size_t nbytes) {
    return covers(machine().locked, address, nbytes) || covers(machine().allocated, address, nbytes);
}

}  // namespace fake

// -- what tests ask and tell it (fakecuda/runtime.py) --------------------------------------------------------------------

using namespace fake;

EXPORT void fake_set_policy(const char* name, unsigned seed) {
    Hold hold;
    machine().policy = policy_named(name);
    machine().random.seed(seed);
    advance();
}

EXPORT int fake_enqueue(void* stream, void (*work)(void*), void* argument) {
    Hold hold;
    Stream* on = stream_of(static_cast<cudaStream_t>(stream));
    if (on->device != current_device()) return result(cudaErrorInvalidResourceHandle);
    if (cudaError_t error = status(on->device)) return error;
    issue(on, [=] { work(argument); });
    return cudaSuccess;
}

EXPORT void* fake_reachable(const void* address, size_t nbytes) {
    Hold hold;
    return reachable(address, nbytes);
}

EXPORT int fake_device_at(const void* address) {
    Hold hold;
    return device_at(address);
}

// What queued work calls when it fails: the device is broken from then on, as after an assertion in a kernel.
EXPORT void fake_break(int index, int error) {
    Hold hold;
    if (!device(index).broken) device(index).broken = static_cast<cudaError_t>(error);
}

EXPORT void fake_mend() {
    Hold hold;
    for (Device& each : machine().devices) each.broken = cudaSuccess;
    machine().locked.clear();
    last_error = cudaSuccess;
}

EXPORT void fake_watch_waits(void (*watch)(const char*)) {
    Hold hold;
    machine().watch_waits = watch;
}

EXPORT void fake_refuse_locks_after(long count) {
    Hold hold;
    machine().locks_left = count;
}

EXPORT void fake_set_memory(size_t bytes) {
    Hold hold;
    machine().total_bytes = bytes;
}

EXPORT void fake_note(const char* name) {
    Hold hold;
    count(name);
}

EXPORT long fake_count(const char* name) {
    Hold hold;
    return machine().counts[name];
}

// The counted calls, a line each: the name, a tab, the number. Valid until the next call.
EXPORT const char* fake_counts() {
    Hold hold;
    static std::string told;
    told.clear();
    for (auto& [name, number] : machine().counts) told += name + "\t" + std::to_string(number) + "\n";
    return told.c_str();
}

EXPORT void fake_forget_counts() {
    Hold hold;
    machine().counts.clear();
}

// The violations, a line each, which are forgotten then. Valid until the next call.
EXPORT const char* fake_violations() {
    Hold hold;
    static std::string told;
    told.clear();
    for (auto& each : machine().violations) told += each + "\n";
    machine().violations.clear();
    return told.c_str();
}

EXPORT long fake_locked_ranges() {
    Hold hold;
    return machine().locked.size();
}

EXPORT int fake_has_context(int index) {
    Hold hold;
    return device(index).has_context;
}

EXPORT cudaError_t cudaGetLastError() {
    const cudaError_t found = last_error;
    last_error = cudaSuccess;
    return found;
}

EXPORT cudaError_t cudaPeekAtLastError() { return last_error; }
