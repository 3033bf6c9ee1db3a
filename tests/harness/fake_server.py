"""An OpenAI-compatible server without a model: texts are made of the prompt, tokens are four characters."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.harness.broken import common


class FakeServer:
    """On a free port; a context manager. Keywords plant faults."""

    def __init__(
        self,
        *,
        boasts: bool = False,
        mixes_salts: bool = False,
        hides: bool = False,
        stale: bool = False,
        split: bool = False,
        build: str = "",
    ) -> None:
        """`build`: of a server with llama-server's properties."""
        self.boasts, self.mixes_salts, self.hides, self.stale = boasts, mixes_salts, hides, stale
        self.split = split
        """Events are sent in two halves, the second one only when `go` is set."""
        self.go = threading.Event()
        self.known: list[tuple[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                told: dict[str, Any] = {"/v1/models": {"data": [{"id": "fake"}]}}
                if build:
                    told["/props"] = {"build_info": build}
                if self.path not in told:
                    self.send_error(404)
                    return
                self._reply(json.dumps(told[self.path]).encode(), "application/json")

            def do_POST(self) -> None:
                fake.keys.append(self.headers.get("Authorization"))
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.bodies.append(body)
                if self.path != "/v1/chat/completions":
                    self.send_error(404)
                    return
                text, usage = fake.answer(body)
                if not body.get("stream"):
                    message = {"role": "assistant", "content": text}
                    done = {"choices": [{"index": 0, "message": message}], "usage": usage}
                    self._reply(json.dumps(done).encode(), "application/json")
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                events = [
                    {"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in text.split("|")
                ]
                for number, event in enumerate([*events, {"choices": [], "usage": usage}]):
                    if number == 1 and fake.split:
                        fake.go.wait(60)
                    self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                    self.wfile.flush()
                self.wfile.write(b"data: [DONE]\n\n")

            def _reply(self, data: bytes, kind: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def answer(self, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Text and usage; the same prompt has the same text, unless what was stored is stale."""
        prompt = "".join(f"<{m['role']}>{m.get('content') or ''}" for m in body["messages"])
        salt = str(body.get("cache_salt") or "")
        same = 0
        for other, key in self.known:
            if key == salt or self.mixes_salts:
                same = max(same, common(prompt, other))
        cached = 0 if body.get("cache_prompt") is False else same // 4
        self.known.append((prompt, salt))
        total = len(prompt) // 4 + 1
        seen = prompt + "stale" if self.stale and cached > 8 else prompt
        digest = hashlib.sha256(seen.encode()).hexdigest()
        usage: dict[str, Any] = {"prompt_tokens": total, "completion_tokens": 4}
        if not self.hides:
            told = total - 1 if self.boasts else cached
            usage["prompt_tokens_details"] = {"cached_tokens": told}
        return f"{digest[:8]}|{digest[8:16]}", usage

    def __enter__(self) -> FakeServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        self._server.shutdown()
        self._server.server_close()
