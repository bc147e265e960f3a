"""An engine that spells words in letters whose ids it knows learns no id by the turns that repeat its answers."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milkglass.client.codec import spelling
from milkglass.client.codec.codec import Codec
from milkglass.client.codec.spelling import ALLOWED_PLACE_COUNT, misspelt_runs
from milkglass.client.key.key import Key, KeyInfo
from milkglass.client.results import Answer, Conversation
from milkglass.client.upload_names import tokenizer_digest
from milkglass.engines.engine import IdsChunk, IdsRequest
from milkglass.models.resolve import resolve_model
from milkglass.proxy.answer_memory import AnswerMemory
from milkglass.proxy.text.calls import count_needless_escapes
from tests.proxy.test_bodies import Asking

WORDS = [
    "patient", "diagnosis", "pancreatitis", "syphilis", "pregnant", "bankruptcy", "invoice", "attorney", "merger",
    "layoffs", "overdose", "custody", "arrest", "password", "transfer", "Warsaw", "Berlin", "insulin", "chemotherapy",
    "fraud", "witness", "contract", "offshore", "lawsuit", "acquisition", "terminated", "negative", "positive",
]  # fmt: skip
FEW = "Noted: " + " ".join(WORDS[:8]) + "."
QUESTION = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "note", "parameters": {"type": "object"}}}]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content | trim }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)


@dataclass
class Plain:
    """What `Asking` needs of a model. Attributes: codec: of SmolLM2's tokenizer."""

    codec: Codec

    def own(self, text: str) -> list[int]:
        """Scrambled ids in which the tokenizer writes a text."""
        return self.codec.sigma[self.codec.tokenizer(text, add_special_tokens=False)["input_ids"]].tolist()

    def spelled(self, text: str) -> list[int]:
        """The same text letter by letter."""
        return [one for letter in text for one in self.own(letter)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    folder = resolve_model("demo:smollm2")
    copy = tmp_path_factory.mktemp("smollm2")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (copy / name).write_bytes((folder / name).read_bytes())
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    size = json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"]
    info = KeyInfo({"tokenizer_sha256": tokenizer_digest(copy)})
    return Plain(Codec.open(Key.new("sha256:test", size, (), info), copy))


class Chosen(Asking):
    """An application, and an engine that answers what it was told to, three ids at a time."""

    def __init__(self, model: Plain, *answers: list[int]) -> None:
        super().__init__(model, length=4000)  # type: ignore[arg-type]
        left = list(answers)

        async def generate(name: str, request: IdsRequest) -> AsyncGenerator[IdsChunk, None]:
            self.engine.asked.append(request)
            ids = left.pop(0) if left else model.own("Yes.")
            for at in range(0, len(ids), 3):
                yield IdsChunk(ids[at : at + 3])
            yield IdsChunk(finish="stop")

        self.engine.generate = generate  # type: ignore[method-assign]

    def said(self, **body: Any) -> dict[str, Any]:
        answer = self.one("chat/completions", max_tokens=1000, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]

    def prompt(self) -> list[int]:
        return list(self.engine.asked[-1].prompt)


def named(model: Plain, text: str, prompt: list[int]) -> list[str]:
    """Words of the text whose own ids stand in the prompt, which the engine never wrote."""
    letters = set(model.spelled(text))
    return [word for word in text.split() for one in model.own(" " + word) if one in prompt and one not in letters]


def inside(part: list[int], whole: list[int]) -> bool:
    return any(whole[at : at + len(part)] == part for at in range(len(whole) - len(part) + 1))


def test_the_attack_works_where_ids_are_not_kept(model: Plain) -> None:
    """The control: the text of an answer that the proxy did not give names the words' own ids."""
    asking = Chosen(model)
    asking.said(messages=[*QUESTION, {"role": "assistant", "content": FEW}, *QUESTION])
    assert len(named(model, FEW, asking.prompt())) >= 8


@pytest.mark.parametrize(
    "repeated",
    [FEW, f"  {FEW}\n", FEW[:-20], FEW[:60] + " and so on", FEW.rstrip(".")],
    ids=["whole", "blanks", "cut", "another end", "stripped"],
)
def test_what_repeats_an_answer_is_sent_in_its_own_ids(model: Plain, repeated: str) -> None:
    asking = Chosen(model, model.spelled(FEW))
    assert asking.said(messages=QUESTION)["content"] == FEW
    asking.said(messages=[*QUESTION, {"role": "assistant", "content": repeated}, {"role": "user", "content": "go on"}])
    assert named(model, FEW, asking.prompt()) == []
    assert model.codec.decode(asking.prompt()).count(repeated.strip()) == 1
    if repeated.strip() == FEW:
        assert inside(model.spelled(FEW), asking.prompt())


def test_what_another_agent_is_told_keeps_the_ids_and_a_users_own_word_does_not(model: Plain) -> None:
    asking = Chosen(model, model.spelled(FEW), model.spelled("diagnosis"))
    asking.said(messages=QUESTION)
    asking.said(messages=[{"role": "user", "content": FEW}])
    assert named(model, FEW, asking.prompt()) == []
    asking.said(
        messages=[{"role": "user", "content": "diagnosis"}]
    )  # a user's own, which the engine could read in letters
    assert inside(model.own("diagnosis"), asking.prompt())
    guessed = Chosen(model, model.spelled("Summarise this for me, please: the patient has a diagnosis of"))
    guessed.said(messages=QUESTION)  # a guess of what the user will say; its beginning comes true
    guessed.said(
        messages=[{"role": "user", "content": "Summarise this for me, please: the patient " + "is well. " * 9}]
    )
    assert inside(model.own(" the patient"), guessed.prompt())


def test_reasoning_and_arguments_of_calls_keep_their_ids(model: Plain) -> None:
    before, after = "<think>", f'{WORDS[0]}</think><tool_call>\n{{"name": "note", "arguments": {{"text": "'
    begin, end = model.own(before), model.own('"}}\n</tool_call>')
    asking = Chosen(model, [*begin, *model.spelled(FEW[:30]), *model.own(after), *model.spelled(FEW), *end])
    message = asking.said(messages=QUESTION, tools=TOOLS)
    assert message["reasoning_content"].startswith(FEW[:30])
    assert [one["function"]["name"] for one in message["tool_calls"]] == ["note"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}
    asking.said(messages=[*QUESTION, message, result], tools=TOOLS)
    assert named(model, FEW.removesuffix("."), asking.prompt()) == []
    assert model.codec.decode(asking.prompt()).count(FEW[:30]) == 2


def test_a_templated_prompt_and_a_quotation_keep_the_ids_of_the_answers_inside(model: Plain) -> None:
    asking = Chosen(model, model.spelled(FEW))
    asking.said(messages=QUESTION)
    prompt = f"<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n{FEW}<|im_end|>\n<|im_start|>user\ngo on"
    assert asking.one("completions", prompt=prompt, max_tokens=5).status_code == 200
    assert named(model, FEW, asking.prompt()) == [] and inside(model.spelled(FEW), asking.prompt())
    assert model.codec.decode(asking.prompt(), skip_special=False) == prompt
    asking.said(messages=[{"role": "user", "content": f"The other one said: {FEW} Is it right?"}])
    assert named(model, FEW, asking.prompt()) == [] and inside(model.spelled(FEW), asking.prompt())


def test_an_honest_answer_is_sent_as_before(model: Plain) -> None:
    text = "The patient is well. She asked for an invoice, and for the custody of her dog."
    turns = [*QUESTION, {"role": "assistant", "content": text}, *QUESTION]
    plain, kept = Chosen(model), Chosen(model, model.own(text))
    kept.said(messages=QUESTION)
    for asking in (plain, kept):
        asking.said(messages=turns)
    assert plain.prompt() == kept.prompt()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_spelled_otherwise_is_ended(model: Plain, stream: bool) -> None:
    text = "Noted " + " ".join(WORDS)
    asking = Chosen(model, model.spelled(text))
    answer = asking.one("chat/completions", messages=QUESTION, max_tokens=1000, stream=stream)
    assert "spelled its answer otherwise than the tokenizer writes it" in answer.text
    assert "misspelt_answer" in answer.text and (stream or answer.status_code == 502)
    assert asking.backend.memory.misspelt_count == 1
    asking.said(messages=[*QUESTION, {"role": "assistant", "content": text[:60]}, *QUESTION])
    assert named(model, text[:60], asking.prompt()) == []  # what was shown of it keeps its ids as well


def escaped(text: str) -> str:
    return "".join(f"\\u{ord(letter):04x}" for letter in text)


def a_call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "note", "arguments": {arguments}}}\n</tool_call>'


ESCAPED = {
    "text": f'{{"text": "{escaped(" " + " ".join(WORDS))}"}}',
    "a letter of each": '{"text": "' + " ".join(escaped(one[0]) + one[1:] for one in WORDS) + '"}',
    "keys": "{" + ", ".join(f'"{escaped(" " + one)}": 1' for one in WORDS) + "}",
    "inside of a string": json.dumps(f'{{"text": "{escaped(" ".join(WORDS))}"}}'),
    "escaped escapes": '"' + escaped('{"text": "' + escaped(" ".join(WORDS[:3])) + '"}') + '"',
}


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ESCAPED)
def test_a_call_that_escapes_plain_letters_is_ended(model: Plain, kind: str, stream: bool, temperature: float) -> None:
    asking = Chosen(model, model.own(a_call(ESCAPED[kind])))
    more = {"tools": TOOLS, "stream": stream, "temperature": temperature, "max_tokens": 3000}
    answer = asking.one("chat/completions", messages=QUESTION, **more)
    assert "misspelt_answer" in answer.text and "arguments" not in answer.text
    assert asking.backend.memory.misspelt_count == 1


def test_escapes_that_programs_write_are_none(model: Plain) -> None:
    assert count_needless_escapes(r'{"a": "\u0026\u003c\u0022\u005c\n\/\u00e9\u007f\u20ac \\u0061 \ud83d\ude00"}') == 0
    assert count_needless_escapes(r'{"\u0061": "\u007E\\\u0020"}') == 3
    said = {"text": "naïve 日本 <a href='x'>\n\t& \\u0061 \\u0062" * 9}
    for arguments in (json.dumps(said), json.dumps(json.dumps(said)), json.dumps(said, ensure_ascii=False)):
        asking = Chosen(model, model.own(a_call(arguments)))
        call = asking.said(messages=QUESTION, tools=TOOLS)["tool_calls"][0]["function"]
        assert json.loads(call["arguments"]) == said


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("more", [{}, {"stop": ["!"]}])
def test_short_answers_are_counted_together(model: Plain, path: str, more: dict[str, Any]) -> None:
    words = [one for one in WORDS if len(model.own(" " + one)) == 1]
    answers = [[*model.own("Noted"), *model.spelled(f" {one}"), *model.own("!")] for one in words]
    asking, most = Chosen(model, *answers), spelling.max_place_count(sum(map(len, answers)))
    answers = [asking.one(path, max_tokens=60, **more).text for _ in words]
    shown = sum("misspelt_answer" not in one for one in answers)
    assert (
        ALLOWED_PLACE_COUNT <= shown <= most < len(words) and asking.backend.memory.misspelt_count == len(words) - shown
    )
    assert asking.said(messages=QUESTION)["content"] == "Yes."  # an honest answer is none of these


def test_the_same_piece_of_text_counts_once_and_old_answers_are_forgotten(model: Plain) -> None:
    last = spelling.SpellingHistory()
    for _ in range(40):  # a model's own habit
        check = spelling.SpellingCheck(model.codec, last)
        check.push([*model.own("Well,"), *model.spelled(" diagnosis")])
        check.flush()
    assert last.count_places(check.counts)[0] == 1
    for number in range(200):
        check = spelling.SpellingCheck(model.codec, last)
        check.counts.token_count, check.counts.runs = 100, {(number,)}
    assert last.count_places(check.counts) == (41, 4100, 1)


def test_an_answer_that_breaks_off_is_counted(model: Plain) -> None:
    last = spelling.SpellingHistory()
    check = spelling.SpellingCheck(model.codec, last)
    check.push([*model.own("Noted"), *model.spelled(" patient diagnosis"), *model.own(" and")])
    check.close()
    assert check.place_count >= 2


def test_a_hot_answer_is_odd_by_itself(model: Plain) -> None:
    asking = Chosen(model, model.spelled("Noted " + " ".join(WORDS)))
    assert asking.said(messages=QUESTION, temperature=1.5)["content"].startswith("Noted patient")


def test_a_few_other_tokens_end_nothing(model: Plain) -> None:
    """As many as models write now and then; one more is the limit."""
    words = [*WORDS, *(word.upper() for word in WORDS)][: ALLOWED_PLACE_COUNT + 1]
    whole = [one for one in words if len(model.own(" " + one)) == 1]
    ids = [one for word in whole for one in (model.own(" " + word) if word != whole[0] else model.spelled(" " + word))]
    assert len(misspelt_runs(model.codec, ids)) == 1
    assert misspelt_runs(model.codec, model.own("naïve 日本語 👩\u200d👩 x=1;\n\n\tdone ")) == set()
    asking = Chosen(model, model.spelled(" ".join(WORDS[:ALLOWED_PLACE_COUNT])))
    assert asking.said(messages=QUESTION)["content"] == " ".join(WORDS[:ALLOWED_PLACE_COUNT])
    assert asking.backend.memory.misspelt_count == 0


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    words=st.lists(
        st.sampled_from(["patient", " diagnosis", "naïve", " 日本", "\n\n", " 42", "👩", ".", " x"]), max_size=12
    ),
    spelled=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_places_are_found_alike_by_names_and_by_letters(model: Plain, words: list[str], spelled: list[bool]) -> None:
    """Names of tokens are quick; letters hold where a text has broken characters as well."""
    codec = model.codec
    parts = [(model.spelled if odd else model.own)(word) for word, odd in zip(words, spelled, strict=False)]
    ids = [one for part in parts for one in part]
    own = spelling._own_places(codec.tokenizer, codec.decode(ids))
    written, text = spelling._decoded_places(codec, ids, True)
    assert text == "".join(words)
    by_letters = spelling._runs(written, own, len(text), True)
    found = misspelt_runs(codec, ids)
    assert {one for run in found for one in run} <= {one for run in by_letters for one in run}  # all of a letter's
    assert bool(found) == bool(by_letters)
    cut = model.own("👩")[:-1]  # a character that is not whole ends nothing and breaks nothing
    assert len(misspelt_runs(codec, [*ids, *cut], is_final=False)) <= len(found)


def test_a_conversation_sends_its_answers_in_their_ids(model: Plain) -> None:
    sent, spelled = list[list[int]](), model.spelled(FEW)

    def ask(turns: list[Any]) -> Answer:
        sent.append(model.codec.encode_chat(turns).tolist())
        return Answer(iter([FEW]), 1, list(spelled))

    kept, plain = Conversation(ask, [], True), Conversation(ask, [])
    for conversation in (kept, plain):
        for text in ("hello", "go on"):
            list(conversation.say(text))
    assert named(model, FEW, sent[1]) == [] and inside(spelled, sent[1])
    assert len(named(model, FEW, sent[3])) >= 8
    assert [one["content"] for one in kept.turns] == [one["content"] for one in plain.turns]


def test_memory_is_bounded() -> None:
    memory = AnswerMemory()
    for number in range(30):
        memory.remember("m", [f"answer {number}"], [f"call_{number}"], [number] * 50_000)
    held = [
        number
        for number in range(30)
        if memory.with_answer_ids("m", [{"role": "assistant", "content": f"answer {number}"}])[0].get("answer_ids")
    ]
    assert 5 <= len(held) <= 10 and held[-1] == 29
    assert "answer_ids" not in memory.with_answer_ids("other", [{"role": "assistant", "content": "answer 29"}])[0]
    assert "answer_ids" not in memory.with_answer_ids("m", [{"role": "user", "content": "answer 29"}])[0]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_answer_of_a_real_model_is_ended(model: Plain, temperature: float) -> None:
    """SmolLM2 itself, drawn from all tokens; docs/log.md has 600 answers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model("demo:smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    network = AutoModelForCausalLM.from_pretrained(folder).eval()
    subjects = ("kidney stones", "tax returns")
    forms = ("Explain {}.", "Write JSON with five facts about {}.", "Erkläre {} auf Deutsch.", "Write code about {}.")
    asked = [form.format(one) for one in subjects for form in forms]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": one}], tokenize=False, add_generation_prompt=True)
        for one in asked
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    torch.manual_seed(0)
    drawn: dict[str, Any] = (
        {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    )
    with torch.inference_mode():
        made = network.generate(**batch, max_new_tokens=80, pad_token_id=tokenizer.pad_token_id, **drawn)
    places, last = list[int](), spelling.SpellingHistory()
    for row in made[:, batch["input_ids"].shape[1] :].tolist():
        ids = [one for one in row if one not in tokenizer.all_special_ids]
        check = spelling.SpellingCheck(model.codec, last)  # of one key: counted together as well
        for one in model.codec.sigma[ids].tolist():
            check.push([one])
        check.flush()
        places.append(check.place_count)
    assert len(places) == len(asked) and max(places) <= ALLOWED_PLACE_COUNT
