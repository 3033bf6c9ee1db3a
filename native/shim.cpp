// What must not run in Python: see shim.cdef.h for the contract of each function.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

extern "C" {
#include "shim.cdef.h"
}

namespace {

// llama_batch of include/llama.h; llh_bind() compares its size with what llama_cpp declares.
struct Batch {
    int32_t n_tokens;
    int32_t *token;
    float *embd;
    int32_t *pos;
    int32_t *n_seq_id;
    int32_t **seq_id;
    int8_t *logits;
};

using Decode = int32_t (*)(void *ctx, Batch batch);
using StateGet = size_t (*)(void *ctx, uint8_t *out, size_t size, int32_t seq, uint32_t flags);
using StateSet = size_t (*)(void *ctx, const uint8_t *data, size_t size, int32_t seq, uint32_t flags);

struct {
    Decode decode;
    StateGet state_get;
    StateSet state_set;
} llama;

void *context(uintptr_t address) { return reinterpret_cast<void *>(address); }

}  // namespace

struct llh_stop {
    std::atomic<uint64_t> running{0};
    std::atomic<uint64_t> stopped{0};
    std::atomic<bool> armed{false};
};

bool llh_bind(uintptr_t decode, uintptr_t state_get, uintptr_t state_set, size_t batch_size) {
    if (batch_size != sizeof(Batch)) return false;
    llama.decode = reinterpret_cast<Decode>(decode);
    llama.state_get = reinterpret_cast<StateGet>(state_get);
    llama.state_set = reinterpret_cast<StateSet>(state_set);
    return true;
}

int32_t llh_decode(uintptr_t ctx, const int32_t *tokens, int32_t n, int32_t pos, int32_t seq, int32_t outputs) try {
    std::vector<int32_t> positions(n), n_seq_id(n, 1);
    std::vector<int32_t *> seq_id(n, &seq);
    std::vector<int8_t> logits(n, outputs == LLH_OUTPUTS_ALL);
    for (int32_t i = 0; i < n; ++i) positions[i] = pos + i;
    if (n > 0 && outputs == LLH_OUTPUTS_LAST) logits[n - 1] = 1;
    // libllama only reads the tokens; its struct is shared with callers that fill it in.
    Batch batch{n,               const_cast<int32_t *>(tokens), nullptr,      positions.data(),
                n_seq_id.data(), seq_id.data(),                 logits.data()};
    return llama.decode(context(ctx), batch);
} catch (const std::bad_alloc &) {
    return LLH_NO_MEMORY;
}

void llh_decode_batch(uintptr_t ctx, uintptr_t batch, int32_t *result) {
    *result = llama.decode(context(ctx), *reinterpret_cast<const Batch *>(batch));
}

size_t llh_state_get(uintptr_t ctx, uint8_t *out, size_t size, int32_t seq, uint32_t flags) {
    return llama.state_get(context(ctx), out, size, seq, flags);
}

size_t llh_state_set(uintptr_t ctx, const uint8_t *data, size_t size, int32_t seq, uint32_t flags) {
    return llama.state_set(context(ctx), data, size, seq, flags);
}

size_t llh_common_prefix(const int32_t *a, const int32_t *b, size_t n) {
    constexpr size_t block = 1024;  // memcmp is vectorised where a search for the first difference is not
    size_t at = 0;
    while (n - at >= block && std::memcmp(a + at, b + at, block * sizeof *a) == 0) at += block;
    return std::mismatch(a + at, a + n, b + at).first - a;
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
