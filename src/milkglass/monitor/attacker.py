"""Attacks while the owner watches: the audit's attacks on this key's model, then on what is sent.

Attacks that need no text run once, on the model as it was uploaded, and say for each scrambled id which token it is.
With public text, what is sent is deciphered again as it grows. The page shows the reading that is right most often. An
attacker cannot choose by the truth, so the page overstates the attack, if anything.
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
from milkglass.audit.key_scene import assemble
from milkglass.audit.run import run
from milkglass.audit.scene import Scene
from milkglass.client.codec.codec import Codec
from milkglass.client.data.texts import PrivateTexts, read_encoded
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

State = Literal["working", "done", "failed"]
IDS_A_TEXT = 64  # ids of a text that sends the whole vocabulary once
DECIPHER_ATTACK = "decipherment"
MIN_TOKENS = 50  # tokens that must be sent before they are deciphered
MIN_GROWTH = 1.1  # growth of the tokens before they are deciphered again
PAUSE_SECONDS = 1.0  # seconds between two checks
WHOLE_VOCABULARY = 0.999  # from this share on the whole vocabulary counts as read
DECIPHER_SECONDS = 30.0  # CPU seconds for one decipherment
T = TypeVar("T")
THREAD = "attack"  # the name of each thread in which something is attacked


async def run_in_thread(work: Callable[[], T]) -> T:
    """Runs work like asyncio.to_thread, but a program that ends does not wait: it can take minutes."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # who waits may be cancelled, and the work goes on

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001  (whoever waits gets it)
            outcome.set_exception(error)

    threading.Thread(target=run, name=THREAD, daemon=True).start()
    return await asyncio.wrap_future(outcome)


def is_attacking() -> bool:
    return any(thread.name == THREAD for thread in threading.enumerate())


@dataclass(frozen=True, eq=False)
class LiveReading:
    """The table that one attack reads.

    Attributes:
        table: (n,) the public id that is read for each scrambled one, or NO_BELIEF.
        cut: whether its budget ended it.
    """

    title: str
    table: Ids
    cut: bool = False

    def right_count(self, ids: Ids, true_ids: Ids) -> int:
        """Returns how many of the scrambled ids are read right, given the true table (n,)."""
        return int((self.table[ids] == true_ids[ids]).sum())


@dataclass(eq=False)
class LiveAttacker:
    """An attacker with the public model, who attacks while the page is open.

    Attributes:
        budget: CPU seconds for the attacks on the model.
        reason: why these failed.
        trouble: why what is sent cannot be deciphered at present, or "".
        running: the budget of the attacks on the model, once they began.
    """

    base: Checkpoint
    key: Key
    codec: Codec
    public: Source | None = None
    budget: float = 120.0
    state: State = "working"
    reason: str = ""
    trouble: str = ""
    readings: list[LiveReading] = field(default_factory=list)
    running: Budget | None = None
    _stopped: bool = False

    async def work(self, log: ExchangeLog) -> None:
        """Attacks until there is nothing more to do, or it is cancelled, which ends work in threads early.

        A failure is stored in `reason`, or in `trouble` after the attacks on the model.
        """
        try:
            scene = await run_in_thread(self._scene)
            show = partial(asyncio.get_running_loop().call_soon_threadsafe, log.touch)
            candidates = await run_in_thread(partial(self._solve, scene, show))
            self.state = "done"
            log.touch()
            if self.public is not None:
                await self._attack_sent_texts(log, scene, candidates, self.public)
        except Exception as error:  # noqa: BLE001  (an attack's own, too: the page must not wait for it for ever)
            if self.state == "done":
                self.trouble = _failure_words(error)
            else:
                self.state, self.reason = "failed", _failure_words(error)
            log.touch()
        finally:
            self._stopped = True

    async def _attack_sent_texts(
        self, log: ExchangeLog, scene: Scene, candidates: Candidates | None, public: Source
    ) -> None:
        """Deciphers what was sent, again and again. A decipherment that fails is tried again when more was sent."""
        corpus = (await run_in_thread(lambda: read_encoded(self.codec, public))).original
        deciphered_total = 0
        while True:
            await asyncio.sleep(PAUSE_SECONDS)
            texts = log.kept_texts()
            token_total = sum(map(len, texts))
            if token_total >= max(MIN_TOKENS, MIN_GROWTH * deciphered_total):
                deciphered_total = token_total
                try:
                    await run_in_thread(partial(self._decipher, scene, candidates, texts, corpus))
                    self.trouble = ""
                except Exception as error:  # noqa: BLE001  (what was read before stays)
                    self.trouble = _failure_words(error)
                log.touch()

    # --- in a thread --------------------------------------------------------------------------------------------------
    def _scene(self) -> Scene:
        """Returns the scene in which every id was sent once. Raises KeyForOtherModel if the base is another model."""
        self.key.require_model(self.base.digest())
        ids = np.arange(len(self.key.sigma), dtype=np.int64)
        sent_ids = Sequences.of(np.array_split(ids, max(1, len(ids) // IDS_A_TEXT)))
        no_marks = np.zeros(len(ids), np.bool_)
        texts = PrivateTexts(sent_ids, sent_ids.mapped(self.codec.inverse), no_marks, no_marks)
        return assemble(self.key, self.codec, self.base, texts, {})

    def _solve(self, scene: Scene, show: Callable[[], object]) -> Candidates | None:
        """Attacks the model: attacks that undo the scheme first, shown at once; if they read all, no others."""
        self.running, candidates = self._stoppable_budget(self.budget), None
        for undoes in (True, False):
            attacks = {name: attack for name, attack in ATTACKS.items() if attack.undoes == undoes}
            finished = run(scene, attacks, None, self.running, seed=0)
            candidates = finished.candidates
            for attack in finished.attacks:
                if attack.guess is not None and attack.guess.table is not None:
                    self.readings.append(LiveReading(attack.result.title, attack.guess.table[:, 0], attack.result.cut))
            show()
            if any(attack.result.value("vocabulary top-1") >= WHOLE_VOCABULARY for attack in finished.attacks):
                break
        return candidates

    def _decipher(
        self, scene: Scene, candidates: Candidates | None, texts: Sequence[Sequence[int]], corpus: Sequences
    ) -> None:
        attack, observed = ATTACKS[DECIPHER_ATTACK], scene.transcript.observations
        observations = tuple(observation for observation in observed if not isinstance(observation, Tokens))
        transcript = replace(scene.transcript, observations=(*observations, Tokens(Sequences.of(texts))))
        knowledge = replace(scene.adversaries[0].knowledge, candidates=candidates, corpus=corpus)
        if why_not(attack, transcript, knowledge) is not None:
            return
        guess = attack(transcript, knowledge, self._stoppable_budget(DECIPHER_SECONDS), np.random.default_rng(0))
        if guess.table is not None:
            title = f"{attack.title}, with {self.public.name}" if self.public else attack.title
            self.readings = [reading for reading in self.readings if reading.title != title]
            self.readings.append(LiveReading(title, guess.table[:, 0]))

    def _stoppable_budget(self, seconds: float) -> Budget:
        return Budget(seconds, stopped=lambda: self._stopped)

    # --- for the page -------------------------------------------------------------------------------------------------
    def left(self) -> float:
        """Returns the most CPU seconds that the attacks on the model still take."""
        if self.state != "working":
            return 0.0
        return self.budget if self.running is None else self.running.left()

    def strongest(self, readings: Sequence[LiveReading]) -> LiveReading | None:
        """Returns the reading that is right most often of the vocabulary."""
        true_ids = self.codec.inverse
        return max(readings, key=lambda reading: int((reading.table == true_ids).sum()), default=None)


def _failure_words(error: Exception) -> str:
    """Returns words for a failure. Only our own messages are free of texts; of other errors it names the kind."""
    return error.message if isinstance(error, MilkglassError) else f"an internal error ({type(error).__name__})"
