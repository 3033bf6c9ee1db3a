"""A restart continues where the last run stopped: the state of the conversation is kept in a folder.

Run: python examples/disk.py model.gguf [folder]
"""

import sys
import tempfile

from llamahybrid import Llama, PromptCache

LETTER = "Dear Sir or Madam, the harbour office asks all owners of moored boats to renew their papers. " * 8
MESSAGES = [{"role": "user", "content": f"{LETTER}\nSum this letter up."}]


def run(model: str, folder: str) -> None:
    """Open the model, ask, and close it, as one run of a program does."""
    cache = PromptCache(disk_dir=folder, disk_bytes=4 << 30)
    llm = Llama(model, n_ctx=4096, verbose=False, prompt_cache=cache)
    llm.create_chat_completion(MESSAGES, max_tokens=24, temperature=0)

    request = llm.last_request
    print(f"{request.left} of {request.total} prompt tokens decoded, state from: {request.source}")
    llm.close()  # waits until everything is written


def main(model: str, folder: str) -> None:
    """Run twice on one folder; the second run stands for the next start of your program."""
    run(model, folder)
    run(model, folder)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as scratch:
        main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else scratch)
