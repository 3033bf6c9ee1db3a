// A rollback must be refused where the snapshots are not those of the sequence's last tokens (0001).

#include "memory-test.h"

// 12 tokens in batches of n_batch, then back by 4: how the sequence goes on
static bool rolled_back(const test_model & model, int n_batch, bool must_be_granted) {
    auto params = test_model::params();
    params.n_rs_seq = 4;

    test_context ctx(model, params);
    CHECK(llama_n_rs_seq(ctx.ctx) == 4 && "the model cannot roll back");
    for (llama_pos p = 0; p < 12; p += n_batch) {
        CHECK(ctx.decode(p, p + n_batch) == 0);
    }
    const bool granted = llama_memory_seq_rm(ctx.mem, 0, 8, -1);
    CHECK(granted || !must_be_granted);
    return ctx.goes_on(granted ? 8 : 12, 0, 0, n_batch);
}

int main(int argc, char ** argv) {
    test_model model(argc, argv);

    CHECK(rolled_back(model, 12, true));
    CHECK(rolled_back(model,  1, false));

    // twice: the snapshots of the tokens that are gone are not those of the tokens that took their place
    auto params = test_model::params();
    params.n_rs_seq = 4;
    test_context ctx(model, params);
    CHECK(ctx.decode(0, 12) == 0);
    CHECK(llama_memory_seq_rm(ctx.mem, 0, 9, -1));
    CHECK(ctx.decode(9, 10) == 0);
    const bool granted = llama_memory_seq_rm(ctx.mem, 0, 8, -1);
    CHECK(ctx.goes_on(granted ? 8 : 10));

    return 0;
}
