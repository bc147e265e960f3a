"""The engine without the web: whoever shares a batch, a row's answer is the one that it would get alone."""

from __future__ import annotations

import math
import queue
import random
from typing import Any

import pytest
import torch

from milkglass.errors import Busy, MilkglassError
from milkglass.server.inference.classifier import Classifier, ClassifierRow
from milkglass.server.inference.generator import Generator, Sequence, likeliest_ids
from milkglass.server.inference.model_runner import RunningRows, TransformersRunner
from milkglass.server.inference.sampling import SamplingParams, adjusted_logits, draw_id
from tests import tiny

DECODERS = ("llama-untied", "llama-tied", "gpt2", "gemma2", "mistral", "qwen3")


class Heard:
    """Collects what an engine says of one sequence."""

    def __init__(self, prompt: list[int], **sampling: Any) -> None:
        self.tokens: list[int] = []
        self.reason: str | None = None
        self.error: MilkglassError | None = None
        self.sequence = Sequence(prompt, SamplingParams(**sampling), self._token, self._error)

    def _token(self, token: int, reason: str | None) -> None:
        self.tokens.append(token)
        self.reason = reason

    def _error(self, error: MilkglassError) -> None:
        self.error = error


def prompts(count: int) -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(tiny.VOCAB) for _ in range(chance.randrange(1, 30))] for _ in range(count)]


def drain(engine: Generator) -> None:
    with torch.inference_mode():
        while engine.is_active() or engine._waiting:
            engine.step()


def alone(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy, without any cache: the definition."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", DECODERS)
def test_rows_that_join_and_leave_get_what_they_get_alone(name: str) -> None:
    model = tiny.build(name)
    lengths = [3, 12, 1, 7, 9, 5, 2]
    heard = [Heard(p, temperature=0, max_tokens=n) for p, n in zip(prompts(7), lengths, strict=True)]
    engine = Generator(TransformersRunner(model), max_batch=4, max_waiting=10)
    with torch.inference_mode():
        for one in heard:  # one joins at every step, while others leave
            engine.submit([one.sequence])
            engine.step()
    drain(engine)
    for one, count in zip(heard, lengths, strict=True):
        assert one.tokens == alone(model, one.sequence.prompt, count)
        assert one.reason == "length"


def test_a_window_shorter_than_the_prompt_and_the_padding() -> None:
    """Mistral's sliding window counts columns; padding on the left must not shift it."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**tiny.LLAMA, sliding_window=8)).eval()
    heard = [Heard(p, temperature=0, max_tokens=12) for p in prompts(5)]
    engine = Generator(TransformersRunner(model), max_batch=5, max_waiting=10)
    engine.submit([one.sequence for one in heard])
    drain(engine)
    assert [one.tokens for one in heard] == [alone(model, one.sequence.prompt, 12) for one in heard]


def test_a_seed_draws_the_same_in_any_company() -> None:
    model = tiny.build("llama-untied")
    found = []
    for company in (0, 3):
        one = Heard([5, 6, 7], seed=11, top_p=0.9, temperature=0.8, max_tokens=10)
        others = [Heard(p, seed=1, max_tokens=6) for p in prompts(company)]
        engine = Generator(TransformersRunner(model), max_batch=8, max_waiting=10)
        engine.submit([*(other.sequence for other in others), one.sequence])
        drain(engine)
        found.append(one.tokens)
    assert found[0] == found[1]


def test_a_stop_id_ends_a_row_and_is_its_last() -> None:
    model = tiny.build("gpt2")
    whole = alone(model, [9, 8, 7], 8)
    one = Heard([9, 8, 7], temperature=0, max_tokens=8, stop_ids=frozenset({whole[3]}))
    engine = Generator(TransformersRunner(model), max_batch=2, max_waiting=2)
    engine.submit([one.sequence])
    drain(engine)
    assert one.tokens == whole[: whole.index(whole[3]) + 1]
    assert one.reason == "stop"


def test_a_cancelled_row_leaves_and_the_others_go_on() -> None:
    model = tiny.build("llama-untied")
    heard = [Heard(p, temperature=0, max_tokens=20) for p in prompts(3)]
    engine = Generator(TransformersRunner(model), max_batch=3, max_waiting=3)
    engine.submit([one.sequence for one in heard])
    with torch.inference_mode():
        engine.step()
        engine.step()
        heard[1].sequence.is_cancelled = True
    drain(engine)
    assert len(heard[1].tokens) == 2
    assert heard[0].tokens == alone(model, heard[0].sequence.prompt, 20)
    assert heard[2].tokens == alone(model, heard[2].sequence.prompt, 20)


def test_long_prompts_wait_for_the_next_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("milkglass.server.inference.generator.MAX_PREFILL_TOKENS", 40)
    model = tiny.build("gpt2")
    heard = [Heard([4] * 30, temperature=0, max_tokens=3) for _ in range(3)]
    engine = Generator(TransformersRunner(model), max_batch=8, max_waiting=8)
    engine.submit([one.sequence for one in heard])
    with torch.inference_mode():
        engine.step()
    assert [len(one.tokens) for one in heard] == [1, 0, 0]
    drain(engine)
    assert [len(one.tokens) for one in heard] == [3, 3, 3]


def test_broken_weights_fail_their_own_row() -> None:
    model = tiny.build("llama-untied")
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    good, bad = Heard([5, 6], temperature=0, max_tokens=2), Heard([7], temperature=0, max_tokens=2)
    engine = Generator(TransformersRunner(model), max_batch=2, max_waiting=2)
    engine.submit([good.sequence, bad.sequence])
    drain(engine)
    assert bad.error is not None and bad.tokens == []
    assert len(good.tokens) == 2 and good.error is None


def test_an_engine_that_meets_an_error_fails_the_batch_and_lives() -> None:
    model = tiny.build("gpt2")
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    engine = Generator(TransformersRunner(model), max_batch=2, max_waiting=2)
    engine.start()
    engine.submit([Sequence([10**6], SamplingParams(max_tokens=1), lambda *a: answers.put(a), answers.put)])
    assert "failed on this batch" in answers.get(timeout=300).message
    engine.submit([Sequence([1], SamplingParams(max_tokens=1), lambda *a: answers.put(a), answers.put)])
    assert answers.get(timeout=300)[1] == "length"
    engine.close()
    with pytest.raises(Busy):
        engine.submit([Sequence([1], SamplingParams(), lambda *a: None, answers.put)])


def test_too_many_waiting_is_busy() -> None:
    engine = Generator(TransformersRunner(tiny.build("gpt2")), max_batch=1, max_waiting=2)
    with pytest.raises(Busy):
        engine.submit([Heard([1]).sequence for _ in range(3)])
    assert not engine._waiting


def test_classification_in_company_is_classification_alone(folders: dict[str, Any]) -> None:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folders["classifier"]).eval()
    found: dict[int, list[float]] = {}
    rows = [
        ClassifierRow(p, None, lambda c, i=i: found.__setitem__(i, c), pytest.fail) for i, p in enumerate(prompts(6))
    ]
    engine = Classifier(model, max_batch=4, max_waiting=8)
    engine.submit(rows)
    with torch.inference_mode():
        engine.step()
        engine.step()
        for i, row in enumerate(rows):
            expected = model(torch.tensor([row.ids])).logits.softmax(-1)[0]
            torch.testing.assert_close(torch.tensor(found[i]), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (SamplingParams(top_k=1), {3}),
        (SamplingParams(top_k=2), {2, 3}),
        (SamplingParams(top_p=0.5), {3}),
        (SamplingParams(top_p=0.8), {2, 3}),
        (SamplingParams(top_p=1e-9), {3}),
        (SamplingParams(temperature=1e-12), {3}),
        (SamplingParams(temperature=1e-39), {3}),
        (SamplingParams(temperature=5e-324), {3}),
        (SamplingParams(temperature=2e-6), {3}),
        (SamplingParams(), {0, 1, 2, 3}),
    ],
)
def test_what_sampling_leaves_in(sampling: SamplingParams, allowed: set[int]) -> None:
    logits = torch.tensor([0.05, 0.1, 0.25, 0.6]).log()
    rng = torch.Generator().manual_seed(0)
    assert {draw_id(logits, sampling, rng) for _ in range(400)} == allowed


def test_draws_follow_the_temperature() -> None:
    logits = torch.tensor([0.2, 0.8]).log()
    rng = torch.Generator().manual_seed(0)
    hits = sum(draw_id(logits, SamplingParams(temperature=2.0), rng) for _ in range(4000)) / 4000
    assert abs(hits - 2 / 3) < 0.03  # (0.8/0.2) ** (1/2) = 2 : 1; four standard deviations


def test_large_logits_at_a_low_temperature_are_no_nan() -> None:
    logits = torch.tensor([-3e38, 0.0, 3e38])
    assert draw_id(logits, SamplingParams(temperature=1e-5, top_p=0.9), torch.Generator().manual_seed(0)) == 2


def test_a_draw_that_fails_ends_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from milkglass.server.inference import generator

    def fragile(logits: torch.Tensor, sampling: SamplingParams, rng: torch.Generator) -> int:
        if sampling.seed == 13:
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        return draw_id(logits, sampling, rng)

    monkeypatch.setattr(generator, "draw_id", fragile)
    good, bad = Heard([5, 6], seed=1, max_tokens=3), Heard([7], seed=13, max_tokens=3)
    engine = Generator(TransformersRunner(tiny.build("gpt2")), max_batch=2, max_waiting=2)
    engine.submit([good.sequence, bad.sequence])
    drain(engine)
    assert bad.error is not None and "probability" not in str(bad.error)
    assert len(good.tokens) == 3 and good.error is None


def test_newcomers_that_cannot_be_read_fail_alone() -> None:
    model = tiny.build("llama-untied")
    running, new = Heard([5, 6], temperature=0, max_tokens=6), Heard([7, 8], temperature=0, max_tokens=6)
    engine = Generator(TransformersRunner(model), max_batch=4, max_waiting=4)
    engine.submit([running.sequence])
    with torch.inference_mode():
        engine.step()
        engine.submit([new.sequence])
        engine._runner = None  # type: ignore[assignment]  # whatever a prefill may die of
        engine.step()
    engine._runner = TransformersRunner(model)
    drain(engine)
    assert new.error is not None and running.error is None
    assert running.tokens == alone(model, [5, 6], 6)


def classified(
    folders: dict[str, Any], asked: list[list[int]], broken: int | None = None
) -> tuple[Classifier, Any, Any]:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folders["classifier"]).eval()
    if broken is not None:
        with torch.no_grad():
            model.bert.embeddings.word_embeddings.weight[broken] = torch.nan
    found: dict[int, list[float]] = {}
    failed: dict[int, MilkglassError] = {}
    rows = [
        ClassifierRow(ids, None, lambda c, i=i: found.__setitem__(i, c), lambda e, i=i: failed.__setitem__(i, e))
        for i, ids in enumerate(asked)
    ]
    engine = Classifier(model, max_batch=8, max_waiting=8)
    engine.submit(rows)
    return engine, found, failed


def test_broken_weights_fail_their_own_row_of_a_classification(folders: dict[str, Any]) -> None:
    engine, found, failed = classified(folders, [[5, 6], [7], [8]], broken=7)
    with torch.inference_mode():
        engine.step()
    assert sorted(found) == [0, 2] and sorted(failed) == [1]


def test_a_pass_of_a_classifier_is_bounded(folders: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("milkglass.server.inference.classifier.TOKENS_PER_PASS", 40)
    engine, found, _ = classified(folders, [[5] * 15, [6] * 20, [7] * 30, [8]])
    seen = []
    with torch.inference_mode():
        while engine._waiting:
            engine.step()
            seen.append(sorted(found))
    assert seen == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]


# --- another engine ---------------------------------------------------------------------------------------------------
class Counting:
    """A runner without a model: the next id is the last one plus 1."""

    def prefill(self, prompts: list[list[int]]) -> tuple[CountingRows, torch.Tensor]:
        return CountingRows(len(prompts)), likely([prompt[-1] + 1 for prompt in prompts])


class CountingRows:
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def advance(self, newest: list[int]) -> torch.Tensor:
        assert len(newest) == self.rows
        return likely([one + 1 for one in newest])

    def keep(self, places: list[int]) -> None:
        assert len(places) > 0 and max(places) < self.rows
        self.rows = len(places)

    def join(self, other: RunningRows) -> None:
        assert isinstance(other, CountingRows)
        self.rows += other.rows


def likely(ids: list[int]) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(ids), 100).float()


def test_another_runner_takes_the_models_place() -> None:
    engine = Generator(Counting(), max_batch=2, max_waiting=9)
    lengths = [3, 1, 5, 2]
    heard = [Heard([10 * n], temperature=0, max_tokens=length) for n, length in enumerate(lengths)]
    engine.submit([one.sequence for one in heard])
    drain(engine)
    assert [one.tokens for one in heard] == [list(range(10 * n + 1, 10 * n + 1 + m)) for n, m in enumerate(lengths)]


def test_penalties_by_hand() -> None:
    """Repetition (Keskar et al., 2019, section 4.1) over prompt and answer, OpenAI's two over the answer alone."""
    logits = torch.tensor([2.0, -2.0, 4.0, 1.0, -1.0])
    both = adjusted_logits(logits, SamplingParams(repetition_penalty=2.0), [0, 1], [1, 2])
    assert both.tolist() == [1.0, -4.0, 2.0, 1.0, -1.0]
    counted = adjusted_logits(
        logits, SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={4: 3.0}), [0], [3, 3, 2]
    )
    assert counted.tolist() == [2.0, -2.0, 4.0 - 0.75, 1.0 - 1.0, 2.0]
    assert logits.tolist() == [2.0, -2.0, 4.0, 1.0, -1.0]


def test_the_least_share_of_the_likeliest() -> None:
    """min_p (Nguyen et al., 2024): of chances 0.6, 0.3 and 0.1, a share of 0.4 leaves two."""
    logits = torch.tensor([0.6, 0.3, 0.1]).log()
    rng = torch.Generator().manual_seed(0)
    assert {draw_id(logits, SamplingParams(min_p=0.4), rng) for _ in range(100)} == {0, 1}
    assert {draw_id(logits, SamplingParams(min_p=0.9), rng) for _ in range(100)} == {0}


def test_the_likeliest_ids_of_all_rows_and_which_rows_are_not_finite() -> None:
    nothing, some, broken = [-math.inf] * 3, [-math.inf, 1.0, 0.5], [0.0, math.nan, 1.0]
    rows = torch.tensor([[0.0, 2.0, 2.0], nothing, some, broken])
    assert likeliest_ids(rows) == [1, None, 1, None]
