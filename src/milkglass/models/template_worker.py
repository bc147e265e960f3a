"""`python -m milkglass.models.template_worker`: renders chat templates for another process, until its input closes.

A chat template is a program that came with a model. It runs here without the key, the passphrase or the network's
secrets of the calling process, in Jinja's sandbox, and with a limit on memory. The calling process sets the deadline
and ends this one (chat_template.py). Each request and each answer is one line of JSON; an empty answer comes first.

A template sees what transformers shows it (`utils/chat_template_utils.py`): the same extensions, filters and functions,
and plain JSON values only. Tests compare the two.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from milkglass.system import close_memory

MEMORY_BYTES = 1 << 29  # bytes that rendering may add after the modules are loaded
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # where messages hold their thoughts


class Generation(jinja2.ext.Extension):
    """Renders the body of the tag `{% generation %}`, which marks an assistant's words for training."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Returns the node of a tag, whose body is rendered as if there were no tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class TemplateDict:
    """Makes dicts of plain values, as `dict` in a template, and gives no access to Python's type."""

    def __call__(self, *pairs: Any, **entries: Any) -> dict[Any, Any]:
        return dict(*pairs, **entries)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        """Returns a dict of these keys with one value."""
        return dict.fromkeys(*arguments)


class TemplateNamespace(jinja2.utils.Namespace):
    """Holds values, as `namespace` in a template.

    It refuses names that begin with an underscore, by which Python could be reached.
    """

    def __init__(*arguments: Any, **entries: Any) -> None:
        self, *mappings = arguments  # a template may call an entry `self`
        entries_given: dict[Any, Any] = dict(*mappings, **entries)
        for name in entries_given:
            _require_public(name)
        jinja2.utils.Namespace.__init__(self, entries_given)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template's namespace cannot hold {name!r}")


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON. Jinja's own filter would escape `<` and others for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    """Returns the local time in a form of strftime."""
    return datetime.now().strftime(form)


def environment() -> ImmutableSandboxedEnvironment:
    """Returns Jinja's sandbox with what transformers shows a template."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals |= {
        "raise_exception": _refuse, "strftime_now": _now, "dict": TemplateDict(), "namespace": TemplateNamespace,
    }  # fmt: skip
    return sandbox


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    return environment().from_string(template)


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    options: Mapping[str, Any],
) -> str:
    """Returns a conversation in a template. All values are JSON values of the calling process."""
    return _compile(template).render(
        messages=[_with_thoughts(message) for message in messages],
        tools=tools,
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **options,
    )


def _with_thoughts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message with its thoughts as `reasoning_content` and `thinking`, the names that templates read."""
    thoughts = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _names(template: str) -> list[str]:
    """Returns the variables that a template reads and does not set."""
    sandbox = environment()
    return sorted(jinja2.meta.find_undeclared_variables(sandbox.parse(template)))


def main() -> None:
    """Answers requests until the input closes."""
    requests, output = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    close_memory()  # it is given texts
    memory_limit = _address_space() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    output.write(b"{}\n")  # ready: from now on each answer has the deadline of one conversation
    output.flush()
    while line := requests.readline():
        request = json.loads(line)
        try:
            if request["call"] == "names":
                answer: dict[str, Any] = {"names": _names(request["template"])}
            else:
                fields = ("template", "messages", "tools", "add_generation_prompt", "options")
                answer = {"text": render(*(request[name] for name in fields))}
            answer_line = json.dumps(answer).encode() + b"\n"
        except MemoryError:
            answer_line = b'{"fault": "memory"}\n'
        except jinja2.TemplateError:
            answer_line = b'{"fault": "refused"}\n'
        except Exception:  # noqa: BLE001  (whatever a template does is its own fault, and its words may quote a message)
            answer_line = b'{"fault": "failed"}\n'
        output.write(answer_line)
        output.flush()


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123  (pathlib is not loaded here)
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
