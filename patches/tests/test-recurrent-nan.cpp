// A recurrent state that held NaN must not outlive its sequence (0004).

#include "memory-test.h"

static void poison(test_context & ctx) {
    CHECK(ctx.decode(0, 12) == 0);
    auto state = ctx.save(0);
    auto * end = (float *) (state.data() + state.size() % sizeof(float)) + state.size()/sizeof(float);
    for (int i = 1; i <= 1000; ++i) {
        end[-i] = NAN;
    }
    CHECK(ctx.load(state, 0));
    CHECK(ctx.decode(12, 13) == 0);
    CHECK(std::isnan(ctx.logits()[0]) && "the end of the state does not reach the logits");
}

int main(int argc, char ** argv) {
    test_model model(argc, argv);
    test_context ctx(model, test_model::params());

    poison(ctx);
    CHECK(llama_memory_seq_rm(ctx.mem, 0, -1, -1));
    CHECK(ctx.decode(0, 8, 0, 1) == 0);
    CHECK(ctx.goes_on(8, 0, 1));

    llama_memory_clear(ctx.mem, true);
    poison(ctx);
    llama_memory_clear(ctx.mem, false);
    CHECK(ctx.decode(0, 8, 0, 1) == 0);
    CHECK(ctx.goes_on(8, 0, 1));

    return 0;
}
