"""Chat templates are rendered as transformers renders them, and escape the sandbox as little."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from milkglass.models.resolve import resolve_model
from milkglass.models.template_worker import environment, render
from milkglass.models.tokenizer import load_tokenizer

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "<b> & 'quotes' \u2028 ünï 🙂"},
    {
        "role": "assistant",
        "content": "ok",
        "tool_calls": [{"function": {"name": "f", "arguments": {"z": 1, "a": [2]}}}],
    },
    {"role": "assistant", "content": "", "thinking": "hm"},
    {"role": "tool", "content": [{"type": "text", "text": "part"}]},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
LOOP = "{% for m in messages %}"
TEMPLATES = [
    LOOP + "{{ m.role }}: {{ m['content'] }}\n{% endfor %}\n  {% if add_generation_prompt %}  go{% endif %}\n",
    LOOP + "{{ m | tojson }}{{ m | tojson(indent=2, ensure_ascii=True, sort_keys=True) }}{% endfor %}",
    "{{ tools | tojson(separators=(',', ':')) if tools else 'none' }}{{ documents }}{{ bos_token }}{{ no }}",
    LOOP + "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    LOOP + "{% if loop.last %}{% break %}{% endif %}{% if m.role == 'user' %}{% continue %}{% endif %}x{% endfor %}",
    "{% set ns = namespace(n=0, self=3) %}" + LOOP + "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ ns['self'] }}",
    "{{ dict(a=1, **{'b': 2}) }}{{ dict.fromkeys(['x', 'y'], 0) }}{{ dict([('k', 'v')]) }}{{ strftime_now('%Y-%m') }}",
    LOOP + "{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.reasoning }};{% endfor %}",
    "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('a') | upper }}{{ messages | map(attribute='role') | list }}",
]  # fmt: skip
REFUSED = [
    "{{ raise_exception('no') }}",
    "{{ ''.__class__ }}{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{{ dict.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__['jinja2'] }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ tojson.__globals__ }}",
    "{{ self.__init__ }}{{ cycler.__init__.__globals__.os }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{% for i in range(1000000) %}{% endfor %}",
    "{{ ''.join.__self__.__class__ }}",
    "{% include 'x' %}",
    "{% unknown %}",
]  # fmt: skip


def other(template: str, talk: list[dict[str, Any]], tools: Any, prompt: bool, options: dict[str, Any]) -> str:
    [text], _ = render_jinja_template([talk], tools, chat_template=template, add_generation_prompt=prompt, **options)
    return str(text)


def outcome(render: Any, *arguments: Any) -> str:
    try:
        return str(render(*arguments))
    except jinja2.TemplateError:
        return "refused"
    except Exception:  # noqa: BLE001  (which one is Python's matter)
        return "failed"


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("template", [*TEMPLATES, *REFUSED, "smollm"])
def test_templates_are_rendered_as_transformers_renders_them(template: str, tools: Any) -> None:
    own: dict[str, Any] = {"bos_token": "<s>", "enable_thinking": False}
    if template == "smollm":
        tokenizer = load_tokenizer(resolve_model("demo:smollm2"))
        template, own = tokenizer.template(), dict(tokenizer.special_tokens_map)
    for talk in ([], TALK[:1], TALK[:3], TALK):
        for prompt in (False, True):
            ours = outcome(render, template, talk, tools, prompt, own)
            assert ours == outcome(other, template, talk, tools, prompt, own)


@pytest.mark.parametrize("template", REFUSED)
def test_nothing_of_python_is_reached(template: str) -> None:
    text = outcome(render, template, TALK, None, False, {})
    assert text in ("refused", "failed", "")


def test_what_a_template_has_is_what_transformers_gives_one() -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    theirs, ours = _compile_jinja_template("").environment, environment()
    assert set(ours.globals) == set(theirs.globals) and set(ours.filters) == set(theirs.filters)
    assert set(ours.tests) == set(theirs.tests) and len(ours.extensions) == len(theirs.extensions)
    assert (ours.trim_blocks, ours.lstrip_blocks) == (theirs.trim_blocks, theirs.lstrip_blocks)
