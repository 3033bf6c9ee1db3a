// A graph that the eval callback cancels half-way is not reported as computed (0011).

#include "memory-test.h"

struct counter {
    int n_seen  = 0;
    int stop_at = 0; // 0: never
};

static bool evaluate(struct ggml_tensor *, bool ask, void * user_data) {
    auto * count = (counter *) user_data;
    if (ask) {
        return true;
    }
    ++count->n_seen;
    return count->stop_at == 0 || count->n_seen < count->stop_at;
}

int main(int argc, char ** argv) {
    test_model model(argc, argv);

    counter count;
    auto params = test_model::params();
    params.cb_eval           = evaluate;
    params.cb_eval_user_data = &count;

    test_context ctx(model, params);
    CHECK(ctx.decode(0, 12) == 0);

    const int before = count.n_seen;
    CHECK(ctx.decode(12, 13) == 0);
    CHECK(count.n_seen > before);

    count.stop_at = count.n_seen + (count.n_seen - before)/2;
    CHECK(ctx.decode(13, 14) == 2);

    return 0;
}
