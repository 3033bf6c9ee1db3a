// What must not run in Python: see shim.cdef.h for the contract of each function.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <new>

extern "C" {
#include "shim.cdef.h"
}

namespace {

// llama_batch of include/llama.h; llh_bind() compares it with what llama_cpp declares.
struct Batch {
    int32_t n_tokens;
    int32_t *token;
    float *embd;
    int32_t *pos;
    int32_t *n_seq_id;
    int32_t **seq_id;
    int8_t *logits;
};

// A struct of the same size may have its fields in another order.
#define FIELD(name) offsetof(Batch, name), sizeof(Batch::name)
constexpr size_t LAYOUT[] = {FIELD(n_tokens), FIELD(token),  FIELD(embd),   FIELD(pos),
                             FIELD(n_seq_id), FIELD(seq_id), FIELD(logits), sizeof(Batch)};
#undef FIELD

using Decode = int32_t (*)(void *ctx, Batch batch);
using StateGet = size_t (*)(void *ctx, uint8_t *out, size_t size, int32_t seq, uint32_t flags);
using StateSet = size_t (*)(void *ctx, const uint8_t *data, size_t size, int32_t seq, uint32_t flags);

struct {
    Decode decode;
    StateGet state_get;
    StateSet state_set;
} llama;

void *context(uintptr_t address) { return reinterpret_cast<void *>(address); }

template <typename Function>
void bind(Function &function, uintptr_t address) {
    function = reinterpret_cast<Function>(address);
}

}  // namespace

struct llh_stop {
    std::atomic<uint64_t> running{0};
    std::atomic<uint64_t> stopped{0};
    std::atomic<bool> armed{false};
};

bool llh_bind(uintptr_t decode, uintptr_t state_get, uintptr_t state_set, const size_t layout[15]) {
    static_assert(std::size(LAYOUT) == 15);
    if (!std::equal(std::begin(LAYOUT), std::end(LAYOUT), layout)) return false;
    bind(llama.decode, decode);
    bind(llama.state_get, state_get);
    bind(llama.state_set, state_set);
    return true;
}

// No exception may reach C or Python. One from libllama leaves the context in a state nobody knows.
void llh_decode_batch(uintptr_t ctx, uintptr_t batch, int32_t *result) try {
    *result = llama.decode(context(ctx), *reinterpret_cast<const Batch *>(batch));
} catch (const std::exception &) {
    *result = LLH_THREW;
}

size_t llh_state_get(uintptr_t ctx, uint8_t *out, size_t size, int32_t seq, uint32_t flags) try {
    return llama.state_get(context(ctx), out, size, seq, flags);
} catch (const std::exception &) {
    return 0;
}

size_t llh_state_set(uintptr_t ctx, const uint8_t *data, size_t size, int32_t seq, uint32_t flags) try {
    return llama.state_set(context(ctx), data, size, seq, flags);
} catch (const std::exception &) {
    return 0;
}

llh_stop *llh_stop_new(void) { return new (std::nothrow) llh_stop; }

void llh_stop_free(llh_stop *stop) { delete stop; }

void llh_stop_begin(llh_stop *stop, uint64_t number) { stop->running.store(number); }

void llh_stop_request(llh_stop *stop, uint64_t number) {
    uint64_t seen = stop->stopped.load();
    while (seen < number && !stop->stopped.compare_exchange_weak(seen, number)) {
    }
}

void llh_stop_arm(llh_stop *stop, bool armed) { stop->armed.store(armed); }

bool llh_stop_poll(void *data) {
    const auto *stop = static_cast<const llh_stop *>(data);
    const uint64_t running = stop->running.load();
    return running != 0 && stop->armed.load() && stop->stopped.load() == running;
}
