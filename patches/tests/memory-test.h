// What the tests of the memory share: a model, contexts on it, a text to decode and the logits of a clean run.
// They need llama.h and a model, no common: TEST MODEL

#pragma once

#include "llama.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(x)                                                         \
    do {                                                                 \
        if (!(x)) {                                                      \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #x); \
            exit(1);                                                     \
        }                                                                \
    } while (0)

struct test_model {
    llama_model * model;
    int32_t n_vocab;

    test_model(int argc, char ** argv) {
        CHECK(argc == 2 && "a model is needed");
        llama_backend_init();
        llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
        model = llama_model_load_from_file(argv[1], llama_model_default_params());
        CHECK(model);
        n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    }

    ~test_model() {
        llama_model_free(model);
        llama_backend_free();
    }

    static llama_context_params params() {
        auto res = llama_context_default_params();

        res.n_ctx           = 512;
        res.n_threads       = 1;
        res.n_threads_batch = 1;
        return res;
    }
};

struct test_context {
    const test_model & model;
    llama_context * ctx;
    llama_memory_t mem;

    test_context(const test_model & model, const llama_context_params & params)
        : model(model), ctx(llama_init_from_model(model.model, params)), mem(nullptr) {
        CHECK(ctx);
        mem = llama_get_memory(ctx);
    }

    ~test_context() {
        llama_free(ctx);
    }

    // decode the positions [p0, p1) of a text, the last one with logits: what llama_decode() returns
    int32_t decode(llama_pos p0, llama_pos p1, llama_seq_id seq_id = 0, int text = 0) {
        auto batch = llama_batch_init(p1 - p0, 0, 1);
        for (llama_pos p = p0; p < p1; ++p) {
            const int32_t i = batch.n_tokens++;

            batch.token[i]     = (7*p + 31*text + 1) % model.n_vocab;
            batch.pos[i]       = p;
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = seq_id;
            batch.logits[i]    = p == p1 - 1;
        }
        const int32_t res = llama_decode(ctx, batch);
        llama_batch_free(batch);
        return res;
    }

    std::vector<float> logits() {
        const float * data = llama_get_logits_ith(ctx, -1);
        CHECK(data);
        return std::vector<float>(data, data + model.n_vocab);
    }

    std::vector<uint8_t> save(llama_seq_id seq_id, llama_state_seq_flags flags = 0) {
        std::vector<uint8_t> res(llama_state_seq_get_size_ext(ctx, seq_id, flags));
        CHECK(llama_state_seq_get_data_ext(ctx, res.data(), res.size(), seq_id, flags) == res.size());
        return res;
    }

    bool load(const std::vector<uint8_t> & data, llama_seq_id seq_id, llama_state_seq_flags flags = 0) {
        return llama_state_seq_set_data_ext(ctx, data.data(), data.size(), seq_id, flags) == data.size();
    }

    // whether the token at position p gets the logits that it gets in a context that saw nothing but the text
    // n_batch: tokens that were decoded at a time, since other batches alone make 1e-4 on some CPUs
    bool goes_on(llama_pos p, llama_seq_id seq_id = 0, int text = 0, llama_pos n_batch = 1 << 20) {
        CHECK(decode(p, p + 1, seq_id, text) == 0);
        const auto got = logits();

        test_context clean(model, test_model::params());
        for (llama_pos q = 0; q < p; q += n_batch) {
            CHECK(clean.decode(q, p - q < n_batch ? p : q + n_batch, 0, text) == 0);
        }
        CHECK(clean.decode(p, p + 1, 0, text) == 0);
        const auto wanted = clean.logits();

        float low = INFINITY, high = -INFINITY, off = 0.0f;
        for (size_t i = 0; i < wanted.size(); ++i) {
            if (!std::isfinite(got[i])) {
                return false;
            }
            low  = std::fmin(low,  wanted[i]);
            high = std::fmax(high, wanted[i]);
            off  = std::fmax(off,  std::fabs(got[i] - wanted[i]));
        }
        printf("off by %g of %g\n", off, high - low);
        return off <= 1e-4f*(high - low);
    }
};
