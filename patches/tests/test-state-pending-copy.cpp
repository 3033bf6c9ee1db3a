// Copies between streams are carried out before a state is saved or restored (0010).

#include "memory-test.h"

int main(int argc, char ** argv) {
    test_model model(argc, argv);

    auto params = test_model::params();
    params.n_seq_max  = 2;
    params.kv_unified = false;

    test_context ctx(model, params);
    CHECK(ctx.decode(0, 12, 0, 0) == 0);
    const auto other = ctx.save(0);

    // saved at once: the copy's data is there
    llama_memory_seq_cp(ctx.mem, 0, 1, -1, -1);
    const auto copy = ctx.save(1);
    test_context second(model, params);
    CHECK(second.load(copy, 1));
    CHECK(second.goes_on(12, 1, 0));

    // restored at once: the copy does not come over it later
    test_context third(model, params);
    CHECK(third.decode(0, 12, 0, 1) == 0);
    llama_memory_seq_cp(third.mem, 0, 1, -1, -1);
    CHECK(third.load(other, 1));
    CHECK(third.goes_on(12, 1, 0));

    return 0;
}
