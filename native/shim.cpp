// What must not run in Python: see shim.cdef.h for the contract of each function.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <iterator>
#include <new>

#if defined(__SSE2__) || defined(_M_X64)
#include <emmintrin.h>
#endif

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

using Take = bool (*)(const void *data, size_t size, void *sink);
using WriteState = size_t (*)(void *ctx, int32_t seq, uint32_t flags, Take take, void *sink);
using WriteRange = size_t (*)(void *ctx, int32_t seq, int32_t p0, int32_t p1, Take take, void *sink);

struct {
    Decode decode;
    StateGet state_get;
    StateSet state_set;
    WriteState write_state;
    WriteRange write_range;
} llama;

// xxhash.h
struct {
    void *(*create)();
    int (*free)(void *state);
    int (*reset)(void *state);
    int (*update)(void *state, const void *data, size_t size);
    uint64_t (*digest)(const void *state);
} xxh3;

void *context(uintptr_t address) { return reinterpret_cast<void *>(address); }

template <typename Function>
void bind(Function &function, uintptr_t address) {
    function = reinterpret_cast<Function>(address);
}

constexpr size_t LINE = 64;

// Bytes from `at` to the next line of the cache.
size_t to_line(const uint8_t *at) { return -reinterpret_cast<uintptr_t>(at) % LINE; }

// A copy that leaves its target out of the cache: what is saved is not read soon, and fetching the lines that
// are about to be overwritten would take half as long again. Whole lines only: to stream a part of one that
// was fetched is slower than all of this saves.
void copy_past_cache(uint8_t *to, const uint8_t *from, size_t size) {
#if defined(__SSE2__) || defined(_M_X64)
    const size_t head = std::min(size, to_line(to));
    std::memcpy(to, from, head);
    to += head, from += head, size -= head;
    for (; size >= LINE; size -= LINE) {
        for (size_t i = 0; i < LINE; i += sizeof(__m128i), to += sizeof(__m128i), from += sizeof(__m128i)) {
            _mm_stream_si128(reinterpret_cast<__m128i *>(to), _mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
        }
    }
#endif
    std::memcpy(to, from, size);
}

void end_of_copies() {
#if defined(__SSE2__) || defined(_M_X64)
    _mm_sfence();  // other threads see what was streamed
#endif
}

// Takes the pieces of a state: copies and hashes them a block at a time, so that each is read from memory once.
class Sink {
public:
    Sink(uint8_t *out, size_t size) : at_(out), left_(size), large_(size >= LARGE), hash_(xxh3.create()) {
        if (!hash_) throw std::bad_alloc();
        xxh3.reset(hash_);
    }
    ~Sink() { xxh3.free(hash_); }
    Sink(const Sink &) = delete;
    Sink &operator=(const Sink &) = delete;

    static bool take(const void *data, size_t size, void *sink) {
        return static_cast<Sink *>(sink)->take(static_cast<const uint8_t *>(data), size);
    }

    uint64_t digest() const {
        end_of_copies();
        return xxh3.digest(hash_);
    }

private:
    static constexpr size_t BLOCK = 4096;      // a multiple of what xxh3 takes at once; fits the innermost cache
    static constexpr size_t LARGE = 1u << 20;  // smaller ones may be read again from the cache

    bool take(const uint8_t *data, size_t size) {
        if (size > left_) return false;
        left_ -= size;
        while (size > 0) {
            const size_t n = std::min(size, BLOCK + to_line(at_));  // the next block begins a line
            xxh3.update(hash_, data, n);
            if (large_) copy_past_cache(at_, data, n);
            else std::memcpy(at_, data, n);
            at_ += n, data += n, size -= n;
        }
        return true;
    }

    uint8_t *at_;
    size_t left_;
    bool large_;
    void *hash_;
};

// Gives a sink to `write` and says what came of it.
template <typename Write>
size_t save(uint8_t *out, size_t size, uint64_t *digest, Write write) try {
    Sink sink(out, size);
    const size_t written = write(&sink);
    *digest = sink.digest();
    return written;
} catch (const std::exception &) {
    return 0;
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

void llh_bind_pieces(uintptr_t write_state, uintptr_t write_range, const uintptr_t hash[5]) {
    bind(llama.write_state, write_state);
    bind(llama.write_range, write_range);
    bind(xxh3.create, hash[0]);
    bind(xxh3.free, hash[1]);
    bind(xxh3.reset, hash[2]);
    bind(xxh3.update, hash[3]);
    bind(xxh3.digest, hash[4]);
}

size_t llh_state_save(uintptr_t ctx, uint8_t *out, size_t size, int32_t seq, uint32_t flags, uint64_t *digest) {
    return save(out, size, digest,
                [&](Sink *sink) { return llama.write_state(context(ctx), seq, flags, Sink::take, sink); });
}

size_t llh_range_save(uintptr_t ctx, uint8_t *out, size_t size, int32_t seq, int32_t p0, int32_t p1, uint64_t *digest) {
    return save(out, size, digest,
                [&](Sink *sink) { return llama.write_range(context(ctx), seq, p0, p1, Sink::take, sink); });
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
