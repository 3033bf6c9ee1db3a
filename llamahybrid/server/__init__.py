"""The HTTP server: llama_cpp.server's routes, settings and config file, with slots behind them.

A request, from its route to its chunks:

1. `routes`: takes a body, of another API as in `anthropic/`, `responses/`, `llama_server/`, and calls
   `Service.answer`.
2. `bodies`: its fields, translated (`translation`, `messages`) and bounded, as a completion or a chat.
3. `service`: refuses, waits for a slot (`admission`, `models`), starts a job.
4. `job`: a thread makes the answer; its chunks come out in the event loop.
5. `completion`, in that thread: arguments of a `Llama` (`arguments`), its completion, thinking and calls
   parsed out of the text (`chat_parser`), in the form of the API (`answer_format`).
6. `answer`: the chunks as an HTTP response.
"""
