"""Messages with Markdown, code and LaTeX: shown as nodes whatever the text, and raw on demand."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from ajet.config import Config
from ajet.observe.experiment import ExperimentFolder
from ajet.observe.recorder import EpisodeRecorder
from ajet.observe.viewer.serve import Viewer
from support.pages_of_viewer import start
from support.synthetic_run import Vocabulary, math_episode

Open = Callable[..., Page]
Shoot = Callable[[Page, str], None]

RENDER = """async (texts) => {
  const script = document.querySelector("script[src*=keys]").getAttribute("src").replace("keys.js", "markdown.js");
  const { appendMarkdown } = await import(script);
  return texts.map((text) => appendMarkdown(document.createElement("div"), text).innerHTML);
}"""

ATTRIBUTES = """async (texts) => {
  const script = document.querySelector("script[src*=keys]").getAttribute("src").replace("keys.js", "markdown.js");
  const { appendMarkdown } = await import(script);
  const found = new Set();
  for (const text of texts) {
    const node = appendMarkdown(document.createElement("div"), text);
    for (const one of node.querySelectorAll("*")) {
      found.add(one.localName);
      for (const { name, value } of one.attributes) found.add(name === "href" ? `href ${value.split(":")[0]}` : name);
    }
  }
  return [...found];
}"""


def rendered(page: Page, *texts: str) -> list[str]:
    found: list[str] = page.evaluate(RENDER, list(texts))
    return found


@pytest.fixture
def page(viewer: Viewer, open_page: Open) -> Page:
    return open_page(viewer, "/x/math-agent/about")


CASES = {
    "a *b* **c** ~~d~~ `e < f`": "<p>a <em>b</em> <strong>c</strong> <s>d</s> <code>e &lt; f</code></p>",
    "2 * 3 * 4, snake_case_name, **not closed": "<p>2 * 3 * 4, snake_case_name, **not closed</p>",
    "costs $5 and $6": "<p>costs $5 and $6</p>",
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "```python\n<b>*x*</b>\n```\nafter": '<pre class="fenced" tabindex="0" data-language="python"><code>'
    "&lt;b&gt;*x*&lt;/b&gt;</code></pre><p>after</p>",
    "````\n```\n````": '<pre class="fenced" tabindex="0"><code>```</code></pre>',
    "```\nnever closed": '<pre class="fenced" tabindex="0"><code>never closed</code></pre>',
    "### Title *x* ###": '<p class="heading-3" role="heading" aria-level="4">Title <em>x</em></p>',
    "- a\n- b\n  - c\n\n3. d\n4. e": "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li></ul>"
    '<ol start="3"><li><p>d</p></li><li><p>e</p></li></ol>',
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "a | b\n--|:-:\n1 | `x\\|y`": '<div class="scroll" tabindex="0"><table><thead><tr><th>a</th><th>b</th></tr></thead>'
    "<tbody><tr><td>1</td><td><code>x|y</code></td></tr></tbody></table></div>",
    r"so $x_1^2$ and \(y\), \boxed{42}": '<p>so <code class="math" title="LaTeX">x_1^2</code> and '
    r'<code class="math" title="LaTeX">y</code>, <code class="math" title="LaTeX">\boxed{42}</code></p>',
    "$$\na *b*\n$$\n\\[ c \\]": '<pre class="math" title="LaTeX" tabindex="0">a *b*</pre>'
    '<pre class="math" title="LaTeX" tabindex="0">c</pre>',
    "[a](https://example.org/x) [b](javascript:alert(1)) ![c](https://a.b/c.png)": '<p><a href="https://example.org/x" '
    'rel="noopener noreferrer" target="_blank" title="https://example.org/x">a</a> [b](javascript:alert(1)) !<a '
    'href="https://a.b/c.png" rel="noopener noreferrer" target="_blank" title="https://a.b/c.png">c</a></p>',
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
}  # fmt: skip


def test_what_is_written_is_shown(page: Page) -> None:
    for (text, wanted), found in zip(CASES.items(), rendered(page, *CASES), strict=True):
        assert found == wanted, text


def test_no_text_makes_other_nodes_or_takes_long(page: Page) -> None:
    drawn = random.Random(0)
    parts = [
        "<script>window.hacked = 1</script>", "<img src=x onerror=window.hacked=1>", "](javascript:window.hacked=1)",
        "[x](http://a.b)", "[x](data:text/html,1)", "&lt;", "\u202e", "\\begin{align}", "\\(", "\\[", "\\]", "\n",
        "\n\n", "[", "`", "``", "```", "**", "*", "_", "$", "$$", "|", "|-|", "~~", "a", "- ", "1. ", "> ", "# ", "  ",
    ]  # fmt: skip
    texts = ["".join(drawn.choices(parts, k=60)) for _ in range(400)]
    texts += [part * 5000 for part in ("`", "*", "_a", "$a", "[", "> ", "- ", "|", "**a", "\\(", "``a", "~~a", "![](")]
    texts += [
        "> " * 200 + "a",
        "\n".join("  " * depth + "- a" for depth in range(200)),
        "|a" * 2000 + "\n" + "|-" * 2000,
    ]
    found = set(page.evaluate(ATTRIBUTES, texts))
    nodes = {
        "p", "em", "strong", "s", "code", "pre", "a", "ul", "ol", "li", "blockquote", "hr", "div", "table", "thead",
        "tbody", "tr", "th", "td", "span",
    }  # fmt: skip
    names = {"class", "role", "aria-level", "tabindex", "start", "title", "rel", "target", "data-language", "href http"}
    assert found <= nodes | names, found - nodes - names
    assert page.evaluate("window.hacked") is None


TEXT = (
    "**Bold** and $x^2$\n\n```python\nprint('<b>')\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n<img src=x onerror=f()>"
)


def test_messages_are_rendered_or_raw(tmp_path: Path, open_page: Open, shoot: Shoot) -> None:
    vocabulary = Vocabulary()
    episode = math_episode(vocabulary, random.Random(3), task=1)
    reply: dict[str, Any] = episode.tree.calls[0].reply
    reply["content"] = TEXT
    with ExperimentFolder.open(Config.model_validate({"ajet": {"experiment_name": "md"}}), exp_dir=tmp_path) as folder:
        recorder = EpisodeRecorder(folder.episodes, tokenizer=vocabulary)
        assert recorder.record(episode, 1).result()
        recorder.close()
    page = open_page(start(tmp_path), f"/x/md/episode/{episode.episode_id}?call=0")
    message = page.locator('.message.assistant[data-call="0"]')
    expect(message.locator("strong")).to_have_text("Bold")
    expect(message.locator("code.math")).to_have_text("x^2")
    expect(message.locator("td")).to_have_count(2)
    assert page.locator("img").count() == 0
    shoot(page, "markdown")
    raw = page.get_by_role("button", name="Raw", exact=True)
    raw.click()
    expect(raw).to_have_attribute("aria-pressed", "true")
    assert message.locator(".bubble > .text").inner_text() == TEXT, "raw is exact"
    page.reload()
    expect(page.locator("#raw")).to_have_attribute("aria-pressed", "true")
    expect(message.locator("strong")).to_have_count(0)
