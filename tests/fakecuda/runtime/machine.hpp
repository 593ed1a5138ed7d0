// A host with fake CUDA devices: streams that are queues, events, and memory that only queued work can reach.
//
// An operation runs when the policy lets its stream go ahead, or when the host waits for something behind it; never before
// what CUDA promises to run before it, and nothing else is promised. So an access that neither the order of a stream nor an
// event protects gives wrong numbers, not once in a thousand runs but always.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fake {

struct Stream;

// A place in a stream's queue. It has happened when everything before it has run.
struct Mark {
    Stream* stream;
    bool happened = false;
};
using MarkPtr = std::shared_ptr<Mark>;

// What a stream has in its queue: work to run, which a broken device leaves out; a mark to wait for; or one that happens.
struct Operation {
    std::function<void()> run;
    MarkPtr wait;
    MarkPtr mark;
};

struct Stream {
    int device;
    int priority;  // below 0: urgent
    std::deque<Operation> queue;
};

struct Event {
    MarkPtr mark;  // none: it was never recorded, and has happened
    unsigned flags;
    int device;
    long recorded_at = 0;
};

// Memory of a device that was freed in the order of a stream.
struct Returned {
    char* address;
    Stream* stream;
    MarkPtr freed;
};

struct Device {
    Stream* main = nullptr;               // its default stream
    char* base = nullptr;                 // addresses that the program sees; no access is allowed
    char* reachable = nullptr;            // the same memory, as queued work reaches it
    int file = -1;                        // that memory
    size_t next = 0;                      // bytes of addresses given out; none is given out twice
    std::map<char*, size_t> allocations;  // in use, by address
    size_t used_bytes = 0;
    std::vector<Returned> pool;  // of cudaFreeAsync
    bool has_context = false;
    cudaError_t broken = cudaSuccess;  // every later call fails with it
};

// A copy from or to page-locked memory of the host that has not run yet.
struct Copy {
    const char* host;
    size_t nbytes;
    MarkPtr done;
};

enum class Policy { eager, lazy, side, main, random, never };

struct Machine {
    std::recursive_mutex mutex;
    Policy policy = Policy::eager;
    std::mt19937 random{1};
    std::vector<Device> devices;
    std::set<Stream*> streams;
    std::map<char*, size_t> locked;     // by cudaHostRegister
    std::map<char*, size_t> allocated;  // by cudaHostAlloc
    std::deque<Copy> copies;
    std::map<const void*, std::string> kernels;  // torch's, by the address of their stubs
    std::map<std::string, long> counts;          // of calls
    std::vector<std::string> violations;
    long locks_left = -1;                     // how many ranges may still be page-locked; -1: any number
    size_t total_bytes = size_t{80} << 30;  // of each device
    long ticks = 0;                           // of events that were recorded
    bool forked = false;
    void (*watch_waits)(const char*) = nullptr;
};

Machine& machine();

// Holds the machine. A thread that would have to wait lets go of Python's lock meanwhile: whoever holds the machine may be
// running work in Python.
class Hold {
public:
    Hold();
    ~Hold();
};

int& current_device();
Device& device(int index);

// The stream behind a handle; 0, 1 and 2 are the default stream of the current device.
Stream* stream_of(cudaStream_t handle);

void issue(Stream* stream, std::function<void()> work);
MarkPtr mark(Stream* stream);
void wait_in_stream(Stream* stream, MarkPtr mark);

// The host waits for a mark. Only what has to run runs.
void reach(const MarkPtr& mark);
void host_waits(const char* what, const MarkPtr& mark);  // the same, and the program is told if it has to wait
void reach_all(int device);

// Let streams go as far as the policy wants and events allow.
void advance();

// Note a call.
void count(const std::string& name);

// Note something that a program must not do.
void violation(const std::string& what, const void* address, size_t nbytes);

// The last error of this thread: set and returned unless it is success. A device that is broken fails each call.
cudaError_t result(cudaError_t error);
cudaError_t status(int device);

// -- memory ------------------------------------------------------------------------------------------------------------

cudaError_t allocate(void** address, size_t nbytes);
cudaError_t release(void* address);

// Where queued work reaches the bytes at an address of a device; null unless all of them are in one allocation.
char* reachable(const void* address, size_t nbytes);

// The device that has an allocation at an address; -1: none.
int device_at(const void* address);

// Whether the device can copy the bytes of the host by itself.
bool is_locked(const void* address, size_t nbytes);

}  // namespace fake
