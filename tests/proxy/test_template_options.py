"""What a request asks of the chat template: rendered, or refused by its name; and who may write a special token."""

from __future__ import annotations

from typing import Any

import pytest

from milkglass.errors import UsageError
from milkglass.proxy.text.template_options import template_options
from tests.proxy.kit import Scrambled
from tests.proxy.test_bodies import Asking

SWITCHED = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
EFFORTS = (
    "{% set effort = reasoning_effort or 'medium' %}{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>"
    "{% endfor %}<s>{{ effort }} assistant: "
)
OFF = "<think>\n\n</think>\n\n"
MESSAGES = [{"role": "user", "content": "please call me"}]


@pytest.fixture(scope="module")
def switched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Asking, Scrambled]:
    model = Scrambled.of(tmp_path_factory.mktemp("switched"), template=SWITCHED)
    return Asking(model), model


def prompt(asking: Asking, model: Scrambled) -> str:
    return model.codec.decode(asking.engine.asked[-1].prompt, skip_special=False)


@pytest.mark.parametrize(
    ("more", "off"),
    [
        ({}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, False),
        ({"chat_template_kwargs": {}}, False),
        ({"enable_thinking": False}, True),
        ({"reasoning": {"enabled": False}}, True),
        ({"reasoning": {"enabled": True}}, False),
        ({"reasoning": {"effort": "none"}}, True),
        ({"reasoning_effort": "none"}, True),
        ({"thinking": {"type": "disabled"}}, True),
        ({"thinking": {"type": "enabled"}}, False),
        ({"reasoning": {"enabled": False}, "enable_thinking": False}, True),
    ],
)
def test_thinking_is_switched_as_each_client_asks(
    switched: tuple[Asking, Scrambled], more: dict[str, Any], off: bool
) -> None:
    asking, model = switched
    for path in ("chat/completions", "responses"):
        answer = asking.one(path, **more)
        assert answer.status_code == 200, answer.text
        assert prompt(asking, model).replace(" ", "").endswith(OFF) == off


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"chat_template_kwargs": {"thinking_budget": 0}}, "chat_template_kwargs.thinking_budget"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"enable_thinking": {"a": "<s>"}}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"enable_thinking": "</s>"}}, "chat_template_kwargs.enable_thinking"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"reasoning": {"max_tokens": 0}}, "reasoning.max_tokens"),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking"),
        ({"reasoning": {"enabled": True}, "enable_thinking": False}, "enable_thinking"),
    ],
)
def test_what_the_template_does_not_read_is_refused_by_its_name(
    switched: tuple[Asking, Scrambled], more: dict[str, Any], name: str
) -> None:
    asking, _ = switched
    before = len(asking.engine.asked)
    for path in ("chat/completions", "responses"):
        answer = asking.one(path, **more)
        assert answer.status_code == 400 and name in answer.json()["error"]["message"], answer.text
    assert asking.one("completions", **more).status_code == 400  # nothing of a template there
    assert len(asking.engine.asked) == before


def test_an_effort_goes_to_a_template_that_reads_it(tmp_path: Any) -> None:
    model = Scrambled.of(tmp_path, template=EFFORTS)
    asking = Asking(model)
    for more, word in (
        ({}, "medium"),
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning": {"effort": "none"}}, "none"),
    ):
        assert asking.one("chat/completions", **more).status_code == 200
        assert prompt(asking, model).split("</s>")[-1].split() == ["<s>", word, "assistant:"] or word in prompt(
            asking, model
        )
    assert asking.one("chat/completions", reasoning={"enabled": False}).status_code == 200  # it marks no reasoning
    assert asking.one("chat/completions", reasoning={"enabled": True}).status_code == 400


def test_a_model_that_always_thinks_cannot_be_told_not_to() -> None:
    assert template_options({"reasoning": {"enabled": True}}, frozenset(), True) == {}
    assert template_options({"thinking": {"type": "disabled"}}, frozenset({"thinking"}), True) == {"thinking": False}
    for asked in ({"reasoning": {"enabled": False}}, {"reasoning_effort": "none"}, {"enable_thinking": False}):
        with pytest.raises(UsageError, match="the model thinks always"):
            template_options(asked, frozenset(), True)


def test_a_completions_prompt_keeps_the_special_tokens_of_its_application(switched: tuple[Asking, Scrambled]) -> None:
    """What the application templated itself is what the chat call makes of the same messages."""
    asking, model = switched
    asking.one("chat/completions", messages=MESSAGES)
    rendered = "<s>user: please call me</s><s>assistant: "
    assert asking.one("completions", prompt=rendered).status_code == 200
    chat, completion = asking.engine.asked[-2].prompt, asking.engine.asked[-1].prompt
    before = model.codec.tokenizer("")["input_ids"]  # what this tokenizer puts before any text
    assert list(completion) == [*model.codec.sigma[before], *chat]


@pytest.mark.parametrize("text", ["<p><s>20</s> 15</p>", "a turn ends with </s> always", "<s>", "</s></s>"])
@pytest.mark.parametrize("role", ["user", "assistant", "system", "tool"])
def test_text_that_spells_a_special_token_stays_text(switched: tuple[Asking, Scrambled], text: str, role: str) -> None:
    asking, model = switched
    special = {int(model.codec.sigma[one]) for one in model.codec.tokenizer.all_special_ids}
    turns = [{"role": "user", "content": "x"}, {"role": role, "content": text}, {"role": "user", "content": "y"}]
    plain = [{**one, "content": "z"} if one["content"] == text else one for one in turns]
    counts, shown = [], ""
    for messages in (plain, turns):
        answer = asking.one("chat/completions", messages=messages, max_tokens=1)
        assert answer.status_code == 200, answer.text
        counts.append(sum(one in special for one in asking.engine.asked[-1].prompt))
        shown = prompt(asking, model)
    assert counts[0] == counts[1] and counts[0] > 0
    assert text.replace(" ", "") in shown.replace(" ", "")
