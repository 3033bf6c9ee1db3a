// seq_rm(-1, ...) matches any sequence, in a recurrent memory too (0005).

#include "memory-test.h"

int main(int argc, char ** argv) {
    test_model model(argc, argv);

    auto params = test_model::params();
    params.n_seq_max  = 2;
    params.kv_unified = true;

    test_context ctx(model, params);
    CHECK(ctx.decode(0, 12, 0, 0) == 0);
    CHECK(ctx.decode(0, 12, 1, 1) == 0);

    // a part of a state cannot be removed, and nothing changes
    CHECK(!llama_memory_seq_rm(ctx.mem, -1, 6, -1));
    CHECK(llama_memory_seq_pos_max(ctx.mem, 0) == 11);
    CHECK(llama_memory_seq_pos_max(ctx.mem, 1) == 11);

    CHECK(llama_memory_seq_rm(ctx.mem, -1, -1, -1));
    CHECK(llama_memory_seq_pos_max(ctx.mem, 0) == -1);
    CHECK(llama_memory_seq_pos_max(ctx.mem, 1) == -1);

    CHECK(ctx.decode(0, 8, 1, 2) == 0);
    CHECK(ctx.goes_on(8, 1, 2));

    return 0;
}
