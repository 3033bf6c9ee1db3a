"""The page at /cache in a real browser: light and dark, narrow and wide, with 1,000 conversations.

Chromium, or what LLAMAHYBRID_BROWSER names; skipped where there is none. Screenshots are left in the folder
that LLAMAHYBRID_SCREENSHOTS names.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import TinyModel
from tests.integrations.sides import needed

playwright = needed("playwright.sync_api", "page")

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "microsoft-edge")
CONVERSATIONS = 1000
MARKUP = "<script>document.title = 'wrong'</script><img src=x onerror=\"document.title = 'wrong'\">"
CONTRAST = """() => {
  const channel = (v) => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  const luminance = (c) => { const [r, g, b] = c.match(/[0-9.]+/g).map(Number);
    return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b); };
  const back = (e) => { const c = getComputedStyle(e).backgroundColor;
    return c.startsWith('rgba(0, 0, 0, 0') && e.parentElement ? back(e.parentElement) : c; };
  let worst = [99, ''];
  const all = 'h1, h2, header span, .line span, .soft, .text, .legend, label';
  for (const e of document.querySelectorAll(all)) {
    if (!e.textContent || !e.offsetParent) continue;
    const [a, b] = [luminance(getComputedStyle(e).color), luminance(back(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, e.textContent.slice(0, 40)];
  }
  return worst;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = os.environ.get("LLAMAHYBRID_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no browser: install chromium, or name one in LLAMAHYBRID_BROWSER")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server with `count` conversations, some of them in a tree, one of which looks like markup."""
    from llamahybrid.prompt_cache import LiveView
    from tests.lab.serving import serving

    folder = tmp_path_factory.mktemp("kept")
    model = {"disk_dir": str(folder), "n_ctx": 2048, "ram_bytes": 64 << 20}
    with (
        serving(tiny_model("qwen35"), model=model, api_key="secret") as server,
        server.client(headers={"x-api-key": "secret"}) as client,
    ):
        cache: Any = server.llm.prompt_cache

        def chat(*said: str, **more: Any) -> None:
            roles = ("user", "assistant")
            messages = [{"role": "system", "content": "You are a patient guide to the rivers of Austria."}]
            messages += [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
            asked = {"messages": messages, "max_tokens": 8, "temperature": 0.0, **more}
            assert client.post("/v1/chat/completions", json=asked).status_code == 200

        namespace = server.llm.runner.live.identity.namespace
        chance = np.random.default_rng(0)
        shared = chance.integers(32, 120, 60)
        for _ in range(CONVERSATIONS):
            own = chance.integers(32, 120, int(chance.integers(50, 900)))
            path = np.concatenate([shared, own]).astype(np.int32)
            view = LiveView(namespace, path, len(path), True, False, False)
            cache.admit(view, len(path), cache.buffer(4000))
        for question in ("Which rivers flow through Vienna?", MARKUP, "How long is the Danube?"):
            chat(question)
            chat(question, "It is long.", "Go on, please.")
        chat("private", cache_salt="alice")
        cache.flush()
        yield server


def shown(browser: Any, server: Any, width: int, scheme: str, name: str) -> Any:
    """The page, when it has been drawn, and what it complained of."""
    options = {"viewport": {"width": width, "height": 1000}, "color_scheme": scheme}
    credentials = {"username": "any", "password": "secret"}
    context = browser.new_context(**options, http_credentials=credentials)
    page, complaints = context.new_page(), []
    page.on("console", lambda said: complaints.append(said.text) if said.type != "log" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request", lambda asked: None if asked.url.startswith(server.url) else complaints.append(asked.url)
    )
    page.goto(f"{server.url}/cache#text")
    page.wait_for_selector("#tree .text")
    page.wait_for_selector("#requests li .bar")
    if (folder := os.environ.get("LLAMAHYBRID_SCREENSHOTS")) is not None:
        page.screenshot(path=Path(folder) / f"{name}-{width}-{scheme}.png", full_page=True)
    return page, complaints


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_the_page_shows_all_its_parts(browser: Any, server: Any, width: int, scheme: str) -> None:
    page, complaints = shown(browser, server, width, scheme, "many")
    assert complaints == []
    assert page.title() == "Cache · llamahybrid", "what was said is no markup"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
    assert page.evaluate(
        "[...document.querySelectorAll('section')].every(s => s.scrollWidth <= s.clientWidth)"
    )
    lists = "[...document.querySelectorAll('ol')].every(s => s.scrollWidth <= s.clientWidth)"
    assert page.evaluate(lists)
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    red = int(back.partition("(")[2].split(",")[0])
    assert red > 200 if scheme == "light" else red < 60
    ratio, where = page.evaluate(CONTRAST)
    assert ratio >= 4.5, where
    text = page.inner_text("#tree")
    rows = page.locator("#tree li").count()
    assert rows > 100
    assert f"{MARKUP[:30]}" in text
    assert "alice" not in text
    assert "tenant " in text
    assert "more" in page.inner_text("#tree"), "what is not drawn is told"
    page.context.close()


def test_the_page_follows_changes(browser: Any, server: Any) -> None:
    page, complaints = shown(browser, server, 1600, "light", "live")
    before = page.locator("#requests li").count()
    with server.client(headers={"x-api-key": "secret"}) as client:
        asked = {"prompt": "Tell me a story", "max_tokens": 4, "temperature": 0.0}
        assert client.post("/v1/completions", json=asked).status_code == 200
    page.locator("#requests li").nth(before).wait_for(timeout=60_000)
    page.locator("#text").uncheck()
    page.wait_for_selector("#tree .text", state="detached")
    assert complaints == []
    page.context.close()
