/* What the shim offers, on one page. Read twice: by CFFI as its cdef, and by shim.cpp as its header.
 *
 * The shim links against no libllama. llh_bind() is handed the addresses of the functions in the library
 * that llama_cpp has loaded, so one compiled shim serves every engine. */

/* Take over the function addresses; `layout` is struct llama_batch as the caller knows it: offset and size of
 * n_tokens, token, embd, pos, n_seq_id, seq_id and logits, in this order, and the size of all.
 * Returns false, and binds nothing, if the shim was compiled for another layout. */
bool llh_bind(uintptr_t decode, uintptr_t state_get, uintptr_t state_set, const size_t layout[15]);

/* llama_decode() of a struct llama_batch. `*result` is its result, or LLH_THREW: llama_decode() threw (memory ran out
 * inside, mostly), and what the context holds is not known. */
#define LLH_THREW -1001
void llh_decode_batch(uintptr_t ctx, uintptr_t batch, int32_t *result);

/* llama_state_seq_get_data_ext() and llama_state_seq_set_data_ext(): bytes written or read, 0 on failure, after which
 * the sequence that was to be set holds anything. */
size_t llh_state_get(uintptr_t ctx, uint8_t *out, size_t size, int32_t seq, uint32_t flags);
size_t llh_state_set(uintptr_t ctx, const uint8_t *data, size_t size, int32_t seq, uint32_t flags);

/* A stop that belongs to one request. Requests are numbered upward from 1; 0 is none. */
typedef struct llh_stop llh_stop;
llh_stop *llh_stop_new(void);
void llh_stop_free(llh_stop *stop);

/* From now on request `number` runs (0: none does). */
void llh_stop_begin(llh_stop *stop, uint64_t number);

/* Stop request `number`, now or when it begins; from any thread. An older number never takes back a newer. */
void llh_stop_request(llh_stop *stop, uint64_t number);

/* Whether polling says anything: false while native code does what must not be stopped half-way. */
void llh_stop_arm(llh_stop *stop, bool armed);

/* True while armed and the running request is the one to stop: a ggml_abort_callback, with the llh_stop as its
 * data. */
bool llh_stop_poll(void *stop);
