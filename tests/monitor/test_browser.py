"""The page in a real browser, at two widths, with the keyboard alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests import tiny
from tests.monitor.browser import Tab, browsing, installed
from tests.monitor.kit import KEY, Shown, showing
from tests.server.kit import until

pytestmark = [
    pytest.mark.skipif(installed() is None, reason="Chromium is not installed here"),
    pytest.mark.timeout(900),
]
WIDTHS = (1200, 500)
CARDS = "document.querySelectorAll('article')"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    with showing(tmp_path_factory.mktemp("browser")) as one:
        until(lambda: one.state()["attack"]["state"] == "done")
        yield one


@pytest.fixture
def tab(shown: Shown) -> Iterator[Tab]:
    with browsing() as one:
        yield one


def opened(tab: Tab, shown: Shown, width: int) -> None:
    tab.wide(width)
    tab.open(shown.address)
    tab.until("document.getElementById('model').options.length === 1")


def asked(tab: Tab, text: str) -> None:
    """With the keyboard: the message has the focus, Enter sends it."""
    before = tab.value(f"{CARDS}.length")
    tab.value("document.getElementById('message').focus()")
    tab.type(text)
    tab.press("Enter")
    tab.until(f"{CARDS}.length === {before} + 1 && document.getElementById('stop').disabled")
    tab.until("document.querySelector('article:last-child').innerText.includes('Answered')")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_conversation_in_a_browser(tab: Tab, shown: Shown, width: int, tmp_path: Path) -> None:
    opened(tab, shown, width)
    tab.value("document.getElementById('most').value = 6")
    asked(tab, tiny.TEXTS[0])
    asked(tab, "and then?")
    text = tab.text()
    assert tiny.TEXTS[0] in text and "tokens of before are sent again" in text
    assert "The last answer was cut after 6 tokens" in text
    one = shown.state()["exchanges"][-1]
    assert " ".join(map(str, one["question"]["ids"])) in text  # what the provider sees
    assert tab.value("document.querySelectorAll('mark').length") > 0 and "tokens right" in text
    assert "of the" in tab.value("document.getElementById('verdict').textContent")
    assert "Most is read." in text and "Tokens a second" in text and "Encoded under this key" in text
    assert tab.value("document.documentElement.scrollWidth <= window.innerWidth")  # nothing is cut off
    labels = tab.value("getComputedStyle(document.querySelector('.label')).display")
    assert labels == ("none" if width == 1200 else "block")
    assert tab.value("location.href").endswith("/")  # the key is not left in the address
    assert {url.split("/")[2] for url in tab.requested if not url.startswith("data:")} == {shown.url.split("/")[2]}
    assert not tab.faults
    tab.picture(tmp_path / f"{width}.png")


def test_the_keyboard_reaches_everything_and_a_screen_reader_has_names(tab: Tab, shown: Shown) -> None:
    opened(tab, shown, 1200)
    reached = []
    for _ in range(8):
        tab.press("Tab")
        reached.append(tab.value("document.activeElement.id || document.activeElement.className"))
    assert reached == ["hidden skip", "message", "send", "fresh", "model", "most", "warmth", "hidden skip"] or (
        reached[:7] == ["hidden skip", "message", "send", "fresh", "model", "most", "warmth"]
    )
    names = tab.accessible()
    for pair in (
        ("RootWebArea", "Milkglass: who sees what"),
        ("heading", "Who sees what"),
        ("main", "What crossed"),
        ("button", "Send"),
        ("button", "Stop"),
        ("button", "New conversation"),
        ("combobox", "Model"),
        ("spinbutton", "Tokens at most"),
        ("spinbutton", "Temperature"),
    ):
        assert pair in names, pair
    assert any(role == "textbox" and name.startswith("Your message") for role, name in names)
    assert any(role == "status" for role, _ in names)
    assert not [role for role, name in names if role in ("button", "textbox", "combobox", "spinbutton") and not name]
    tab.value("document.getElementById('message').focus()")
    tab.type("one")
    tab.press("Enter", shift=True)
    tab.type("two")
    assert tab.value("document.getElementById('message').value") == "one\ntwo"  # and nothing was sent


def test_a_refusal_is_said_and_the_message_is_not_lost(tab: Tab, shown: Shown) -> None:
    opened(tab, shown, 500)
    tab.value("document.getElementById('most').value = 5000")
    tab.value("document.getElementById('message').focus()")
    tab.type("hello")
    tab.press("Enter")
    tab.until("document.getElementById('trouble').textContent.includes('maximum context length')")
    assert tab.value("document.getElementById('message').value") == "hello"
    assert tab.value("document.getElementById('trouble').getAttribute('role')") == "alert"


def test_text_that_looks_like_markup_stays_text(tab: Tab, shown: Shown) -> None:
    opened(tab, shown, 1200)
    tab.value("document.getElementById('most').value = 2")
    asked(tab, "<img src=x onerror=\"document.title='owned'\">")
    assert tab.value("document.title") == "Milkglass: who sees what" and tab.value("document.images.length") == 0


def test_without_the_key_the_page_says_so(tab: Tab, shown: Shown) -> None:
    tab.wide(500)
    tab.open(shown.url)
    tab.until("document.getElementById('trouble').textContent.includes('open the address that milkglass ui printed')")


def test_an_address_opens_one_tab_and_a_reload_keeps_it(tab: Tab, shown: Shown) -> None:
    address = shown.address
    opened(tab, shown, 1200)
    stored = tab.value("JSON.stringify({...sessionStorage, ...localStorage, cookies: document.cookie})")
    assert KEY not in stored and address.split("#")[1] not in stored
    tab.call("Page.reload")
    tab.until("document.readyState === 'complete' && document.getElementById('model').options.length === 1")
    assert not tab.value("document.getElementById('trouble').textContent")
    with browsing() as other:
        other.open(address)  # it was used
        other.until("document.getElementById('trouble').textContent.includes('opens one tab')")
        other.value(f"location.hash = '#{shown.page.access.one_time_code}'")  # the new one, in the same tab
        other.until("document.getElementById('model').options.length === 1")
        assert not other.value("document.getElementById('trouble').textContent")


def test_a_tab_of_an_earlier_command_takes_the_new_address(tab: Tab, shown: Shown) -> None:
    tab.open(shown.url)
    tab.value("sessionStorage.setItem('key', 'of-an-earlier-command')")
    tab.open(f"{shown.url}/?x")
    tab.until("document.getElementById('trouble').textContent.includes('a command that ended')")
    tab.value(f"location.hash = '#{shown.page.access.one_time_code}'")
    tab.until("document.getElementById('model').options.length === 1")
    assert not tab.value("document.getElementById('trouble').textContent")


def test_a_page_whose_command_ended_asks_no_more(tab: Tab, shown: Shown) -> None:
    opened(tab, shown, 1200)
    tab.value("window.fetched = 0; window.kept = fetch; window.fetch = () => { fetched += 1; throw new Error(); }")
    tab.value("window.waited = setTimeout; window.setTimeout = (work, ms) => waited(work, 0)")  # no second is waited
    with httpx2.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:  # ends the open question
        assert client.post(f"{shown.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
    tab.until("!document.getElementById('again').hidden")
    asked_so_far = tab.value("fetched")
    tab.value("document.getElementById('message').focus()")
    tab.type("a secret")
    tab.press("Enter")
    assert tab.value("new Promise(done => waited(() => done(fetched), 1500))") == asked_so_far == 5
    assert tab.value("document.getElementById('message').value") == "a secret"
    tab.value("window.fetch = kept")
    tab.value("document.getElementById('again').click()")
    tab.until("!document.getElementById('trouble').textContent && document.getElementById('again').hidden")
