"""Runs attacks for the monitor's page: the audit's attacks on the key's model, then decipherment of what is sent.

Attacks that need no text run once, on the model as it was uploaded, and guess for each scrambled id which token it is.
With public text, what is sent is deciphered again and again as it grows. The page shows the reading that is right most
often. A real attacker cannot choose by the truth, so the page overstates the attack, if anything.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeVar

import numpy as np

from milkglass.attacks.catalogue import ATTACKS
from milkglass.audit.key_scene import scene_of_texts
from milkglass.audit.run import run
from milkglass.audit.scene import Scene
from milkglass.client.codec.codec import Codec
from milkglass.client.data.texts import EncodedTexts, read_encoded
from milkglass.client.key.key import Key
from milkglass.errors import MilkglassError
from milkglass.models.checkpoint import Checkpoint
from milkglass.monitor.exchanges import ExchangeLog
from milkglass.rows.data_file import Source
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import why_not
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Candidates
from milkglass.threat.observations import Tokens

AttackState = Literal["working", "done", "failed"]
IDS_PER_TEXT = 64  # ids of each of the made-up texts that send the whole vocabulary once
DECIPHER_ATTACK = "decipherment"
MIN_TOKENS = 50  # with fewer tokens, nothing is deciphered
MIN_GROWTH_FACTOR = 1.1  # the tokens are deciphered again when they have grown by this factor
POLL_SECONDS = 1.0  # the time between two checks whether there is enough to decipher
WHOLE_VOCABULARY_SHARE = 0.999  # once this share of the vocabulary is read, no further attack is run on the model
DECIPHER_SECONDS = 30.0  # CPU seconds for one decipherment
Result = TypeVar("Result")
THREAD_NAME = "attack"  # the name of every thread that attacks


async def run_in_thread(function: Callable[[], Result]) -> Result:
    """Runs `function` like asyncio.to_thread, but in a daemon thread: a program that ends does not wait for it."""
    future_result: Future[Result] = Future()
    future_result.set_running_or_notify_cancel()  # so that the function goes on if the caller is cancelled

    def run() -> None:
        try:
            future_result.set_result(function())
        except BaseException as error:  # noqa: BLE001  (raised for the caller)
            future_result.set_exception(error)

    threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
    return await asyncio.wrap_future(future_result)


def is_attacking() -> bool:
    """Returns whether a thread of this process attacks."""
    return any(thread.name == THREAD_NAME for thread in threading.enumerate())


@dataclass(frozen=True, eq=False)
class LiveReading:
    """Holds what one attack reads: a token for each scrambled id.

    Attributes:
        title: the attack's title.
        public_ids: (n,) the public id that is read for each scrambled id, or NO_BELIEF.
        is_cut: whether the attack's budget ended it.
    """

    title: str
    public_ids: Ids
    is_cut: bool = False

    def right_count(self, ids: Ids, true_ids: Ids) -> int:
        """Returns how many of `ids` (m,) are read right. `true_ids` is (n,) the true public id of each scrambled id."""
        return int((self.public_ids[ids] == true_ids[ids]).sum())


@dataclass(eq=False)
class LiveAttacker:
    """Attacks the key's model and what is sent, with the public model.

    Attributes:
        base: the original model.
        key: the key of the model. Attacks get none of its secrets.
        codec: encodes the public text, and holds the true public id of each scrambled id.
        public_source: public text. None: what is sent is not deciphered.
        budget_seconds: CPU seconds for the attacks on the model.
        state: whether the attacks on the model run, are done, or failed.
        model_failure: why the attacks on the model failed, or "".
        decipher_failure: why what is sent could not be deciphered the last time, or "".
        readings: what the attacks read so far.
        model_budget: the budget of the attacks on the model. None: they have not begun.
    """

    base: Checkpoint
    key: Key
    codec: Codec
    public_source: Source | None = None
    budget_seconds: float = 120.0
    state: AttackState = "working"
    model_failure: str = ""
    decipher_failure: str = ""
    readings: list[LiveReading] = field(default_factory=list)
    model_budget: Budget | None = None
    _is_stopped: bool = False

    async def run(self, log: ExchangeLog) -> None:
        """Attacks the model, and then, with public text, what is sent, until it is cancelled.

        After a cancellation, attacks in threads end as soon as they ask their budget. A failure is stored in
        `model_failure`, or in `decipher_failure` after the attacks on the model.
        """
        try:
            scene = await run_in_thread(self._build_scene)
            show_readings = partial(asyncio.get_running_loop().call_soon_threadsafe, log.touch)
            candidates = await run_in_thread(partial(self._attack_model, scene, show_readings))
            self.state = "done"
            log.touch()
            if self.public_source is not None:
                await self._attack_sent_texts(log, scene, candidates, self.public_source)
        except Exception as error:  # noqa: BLE001  (any error of an attack: the page must not wait for ever)
            if self.state == "done":
                self.decipher_failure = _failure_text(error)
            else:
                self.state, self.model_failure = "failed", _failure_text(error)
            log.touch()
        finally:
            self._is_stopped = True

    async def _attack_sent_texts(
        self, log: ExchangeLog, scene: Scene, candidates: Candidates | None, public_source: Source
    ) -> None:
        """Deciphers what was sent, each time that its tokens have grown by MIN_GROWTH_FACTOR, also after a failure."""
        corpus = (await run_in_thread(lambda: read_encoded(self.codec, public_source))).original
        deciphered_total = 0
        while True:
            await asyncio.sleep(POLL_SECONDS)
            texts = log.kept_id_lists()
            token_total = sum(map(len, texts))
            if token_total >= max(MIN_TOKENS, MIN_GROWTH_FACTOR * deciphered_total):
                deciphered_total = token_total
                try:
                    await run_in_thread(partial(self._decipher, scene, candidates, texts, corpus))
                    self.decipher_failure = ""
                except Exception as error:  # noqa: BLE001  (any error of an attack: earlier readings stay)
                    self.decipher_failure = _failure_text(error)
                log.touch()

    # --- in a thread --------------------------------------------------------------------------------------------------
    def _build_scene(self) -> Scene:
        """Returns the scene of texts that send every id once. Raises KeyForOtherModel if `base` is not the key's."""
        self.key.require_model(self.base.digest())
        ids = np.arange(len(self.key.sigma), dtype=np.int64)
        sent_ids = Sequences.of(np.array_split(ids, max(1, len(ids) // IDS_PER_TEXT)))
        no_marks = np.zeros(len(ids), np.bool_)
        texts = EncodedTexts(sent_ids, sent_ids.map_ids(self.codec.inverse), no_marks, no_marks)
        return scene_of_texts(self.key, self.codec, self.base, texts, {})

    def _attack_model(self, scene: Scene, show_readings: Callable[[], object]) -> Candidates | None:
        """Runs the attacks that come first, and then the others, unless the first ones read all.

        Args:
            scene: the scene in which every id is sent.
            show_readings: is called when there are new readings.

        Returns:
            The candidates that the attacks found for each token, or None.
        """
        self.model_budget, candidates = self._stoppable_budget(self.budget_seconds), None
        for is_first in (True, False):
            attacks = {name: attack for name, attack in ATTACKS.items() if attack.runs_first == is_first}
            finished_run = run(scene, attacks, None, self.model_budget, seed=0)
            candidates = finished_run.candidates
            for finished_attack in finished_run.outcomes:
                guess, result = finished_attack.guess, finished_attack.result
                if guess is not None and guess.by_id is not None:
                    self.readings.append(LiveReading(result.title, guess.by_id[:, 0], result.cut))
            show_readings()
            results = [finished_attack.result for finished_attack in finished_run.outcomes]
            if any(result.value("vocabulary top-1") >= WHOLE_VOCABULARY_SHARE for result in results):
                break
        return candidates

    def _decipher(
        self, scene: Scene, candidates: Candidates | None, texts: Sequence[Sequence[int]], corpus: Sequences
    ) -> None:
        """Deciphers the ids that were sent, with public text, and replaces this attack's earlier reading.

        Args:
            scene: the scene of the attacks on the model.
            candidates: what those attacks found.
            texts: the scrambled ids of what was sent.
            corpus: the ids of the public text, which is not scrambled.
        """
        attack, scene_observations = ATTACKS[DECIPHER_ATTACK], scene.transcript.observations
        observations = tuple(observation for observation in scene_observations if not isinstance(observation, Tokens))
        transcript = replace(scene.transcript, observations=(*observations, Tokens(Sequences.of(texts))))
        knowledge = replace(scene.adversaries[0].knowledge, candidates=candidates, corpus=corpus)
        if why_not(attack, transcript, knowledge) is not None:
            return
        guess = attack(transcript, knowledge, self._stoppable_budget(DECIPHER_SECONDS), np.random.default_rng(0))
        if guess.by_id is not None:
            title = f"{attack.title}, with {self.public_source.name}" if self.public_source else attack.title
            self.readings = [reading for reading in self.readings if reading.title != title]
            self.readings.append(LiveReading(title, guess.by_id[:, 0]))

    def _stoppable_budget(self, seconds: float) -> Budget:
        """Returns a budget of CPU seconds that also ends when this attacker is cancelled."""
        return Budget(seconds, stopped=lambda: self._is_stopped)

    # --- for the page -------------------------------------------------------------------------------------------------
    def seconds_left(self) -> float:
        """Returns the most CPU seconds that the attacks on the model can still take; 0 if they have ended."""
        if self.state != "working":
            return 0.0
        return self.budget_seconds if self.model_budget is None else self.model_budget.left()

    def strongest_reading(self, readings: Sequence[LiveReading]) -> LiveReading | None:
        """Returns the reading that is right for most of the vocabulary, or None without readings."""
        true_ids = self.codec.inverse
        return max(readings, key=lambda reading: int((reading.public_ids == true_ids).sum()), default=None)


def _failure_text(error: Exception) -> str:
    """Returns the message of a MilkglassError; of another error, whose message may quote a text, only the class."""
    return error.message if isinstance(error, MilkglassError) else f"an internal error ({type(error).__name__})"
