"""A stop button: another thread cancels one stream by its handle; other requests continue.

Run: python examples/cancel.py model.gguf
"""

import sys
from threading import Event, Thread

from llamahybrid import Llama

MESSAGES = [{"role": "user", "content": "Tell me a very long story about a lighthouse."}]


def main(model: str) -> None:
    """Stream an answer and press the button after ten pieces."""
    llm = Llama(model, n_ctx=4096, verbose=False)
    pressed = Event()

    with llm.request() as handle:
        stream = llm.create_chat_completion(MESSAGES, stream=True, max_tokens=None)

    def button() -> None:
        pressed.wait()
        handle.cancel()  # from any thread, at any time; a late call does nothing

    thread = Thread(target=button)
    thread.start()
    pieces = 0
    for chunk in stream:
        (choice,) = chunk["choices"]
        pieces += "content" in choice["delta"]
        if pieces == 10:
            pressed.set()
    thread.join()
    print(f"ended by {choice['finish_reason']!r} after {pieces} pieces")

    llm.create_chat_completion(MESSAGES, max_tokens=1)
    print(f"asked again: {llm.last_request.left} prompt tokens decoded")
    llm.close()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1])
