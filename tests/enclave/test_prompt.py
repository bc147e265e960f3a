"""Which tokens of a prompt are the user's: short texts that the template has as well, and templates that lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from milkglass.enclave import prompt
from milkglass.enclave.budget import RowBudget
from milkglass.enclave.inside import OpenTable
from milkglass.enclave.lists import RnmSettings, TokenSanitizer, with_lists
from milkglass.enclave.package import RowPolicy, TablePackage
from milkglass.errors import CodecError, EnclaveError
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.tokenizer import load_tokenizer
from tests import tiny

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<s>system\nYou help the nurse, and you call her the user</s>\n{% endif %}"
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}<s>assistant\n"
)
CHATML_BEFORE = "<s>system\nYou help the nurse, and you call her the user</s>\n<s>user\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama-tied", tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    result = load_tokenizer(folder)
    result.chat_template = CHATML
    return result


def private(tokenizer: Any, messages: list[dict[str, str]]) -> list[str]:
    """The user's parts, as text."""
    found = prompt.of_chat(tokenizer, messages, 500)
    return [tokenizer.decode(found.ids[run]).strip() for run in found.runs]


@pytest.mark.parametrize("text", ["the", "user", "system", "nurse", "s", "a", "and you", "You help the nurse", "1"])
def test_a_text_that_the_template_has_as_well_is_the_users_where_the_user_wrote_it(tokenizer: Any, text: str) -> None:
    """By hand, from the rendered template."""
    found = prompt.of_chat(tokenizer, [{"role": "user", "content": text}], 500)
    rendered = CHATML_BEFORE + text
    offsets = tokenizer(rendered + "</s>\n<s>assistant", add_special_tokens=False, return_offsets_mapping=True)
    start = len(CHATML_BEFORE)
    expected = [a < start + len(text) and b > start for a, b in offsets["offset_mapping"]]
    assert found.private.tolist() == expected


def test_each_turn_has_its_own_place(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "say fever or invoice"}, {"role": "user", "content": "fever"},
        {"role": "assistant", "content": "fever"}, {"role": "user", "content": "invoice"},
    ]  # fmt: skip
    found = prompt.of_chat(tokenizer, messages, 500)
    assert len(found.runs) == 2
    text = tokenizer.decode(found.ids)
    assert tokenizer.decode(found.ids[: found.runs[0].start]).count("fever") == 1
    assert tokenizer.decode(found.ids[: found.runs[1].start]).count("fever") == 3
    assert text.count("invoice") == 2


@pytest.mark.parametrize(
    "template",
    [
        CHATML + "{{ messages[0]['content'] | upper }}",
        CHATML + "{{ messages[0]['content'] | length }}",
        CHATML + "{{ messages[0]['content'][:3] }}",
        CHATML + "{{ messages[0]['content'] | reverse }}",
        CHATML + "{% if 'fever' in messages[0]['content'] %}!{% endif %}",
        CHATML.replace("{{ m['content'] }}", "{{ m['content'] | replace('fever', 'heat') }}"),
    ],
)
def test_a_template_that_says_more_of_a_message_is_refused(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(CodecError, match="rewrites what a message says") as caught:
        prompt.of_chat(tokenizer, [{"role": "user", "content": "my father has a fever"}], 500)
    assert "father" not in str(caught.value)


def test_a_message_that_the_template_repeats_is_the_users_at_both_places(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML + "{{ messages[0]['content'] }}"
    found = prompt.of_chat(tokenizer, [{"role": "user", "content": "my father has a fever"}], 500)
    assert len(found.runs) == 2
    assert "father" not in tokenizer.decode(found.ids[~found.private])


@pytest.mark.parametrize("content", ["  fever ", "\nfever"])
def test_a_template_may_strip_messages(tokenizer: Any, content: str) -> None:
    for template in (CHATML, CHATML.replace("m['content']", "m['content'] | trim")):
        tokenizer.chat_template = template
        assert "fever" in private(tokenizer, [{"role": "user", "content": content}])[0]


def test_special_tokens_among_the_users_are_refused(folder: Path) -> None:
    """A provider whose tokenizer calls ordinary words special would read them."""
    table = Checkpoint.open(folder).read("model.embed_tokens.weight")
    package = with_lists(TablePackage.of_model(folder, table, RowPolicy(1000, 10_000)), 5)
    known = load_tokenizer(folder)
    tokens = prompt.of_text(known, "my father has a fever", "", 100)
    counts = np.zeros(len(table), np.int64)
    opened = OpenTable(package, RowBudget(package.policy, 1e4), TokenSanitizer(package, counts), bytes(32), known)
    word = int(tokens.ids[tokens.private][1])
    package.special[word] = True
    with pytest.raises(EnclaveError, match="special token"):
        opened.sanitized(tokens, RnmSettings())
    assert np.flatnonzero(package.special).size > 1
