"""Pages in headless Chromium, driven by a script that is put behind the page's own."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
HARNESS = """<script>
addEventListener("error", event => report({error: event.message}));
function report(value) {
  const out = document.createElement("pre");
  out.id = "report"; out.textContent = JSON.stringify(value); document.body.append(out);
}
const key = (name, target = document.body) => target.dispatchEvent(new KeyboardEvent("keydown", {key: name, bubbles: true}));
const click = selector => document.querySelector(selector).dispatchEvent(new MouseEvent("click", {bubbles: true}));
const names = selector => [...document.querySelectorAll(selector)].map(e => e.dataset.node);
try { report((() => { @@ })()); } catch (error) { report({error: String(error)}); }
</script>"""


def in_browser(page: Path, script: str, state: str = "") -> Any:
    """What the script returns after the page has started. Skips where there is no Chromium; fails on any JavaScript error."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("no Chromium: apt-get install chromium")
    driven = page.with_name("driven.html")
    driven.write_text(page.read_text(encoding="utf-8").replace("</body>", HARNESS.replace("@@", script) + "</body>"), encoding="utf-8")
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1500,950", "--dump-dom",
               f"--user-data-dir={page.parent / 'profile'}", f"{driven.as_uri()}#{state}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r'<pre id="report">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-500:]
    value = json.loads(html.unescape(found[1]))
    assert not (isinstance(value, dict) and "error" in value), value
    return value
