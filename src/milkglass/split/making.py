"""Split and train: a model and labelled texts become two folders, both complete or neither there.

Training happens here, where both halves are. The texts are read whole: they are tokenised at once anyway.

What this module does not know: any method, and how training goes (encoders/training.py).
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

from milkglass.checkpoint import Checkpoint
from milkglass.client.dataset import number_labels, read_examples, summarise
from milkglass.defence import Labelled
from milkglass.encoders.draws import SECRET
from milkglass.encoders.encoder import EncoderDefence
from milkglass.errors import CodecError, UsageError
from milkglass.split import folders
from milkglass.split.parameters import told

Tell = Callable[[int], None]


@dataclass(frozen=True)
class Data:
    corpus: Labelled = field(repr=False)
    labels: dict[str, int] = field(repr=False)

    @property
    def pairs(self) -> bool:
        return self.corpus.pairs is not None


def read_data(path: Path) -> Data:
    """Texts with the names of their classes. Raises CodecError where there are none, or one alone."""
    found = summarise(path)
    if found.task != "classification":
        raise CodecError(f"{path.name} has no labels", 'give rows with a "text" and a "label"')
    if len(found.labels) < 2:
        raise CodecError(f"{path.name} has 1 label only", "classification needs at least 2")
    labels = number_labels(found.labels, None)
    examples = list(read_examples(path))
    pairs = [one.pair or "" for one in examples] if found.pairs else None
    corpus = Labelled([one.text for one in examples], [labels[str(one.label)] for one in examples], pairs)
    return Data(corpus, labels)


def steps_of(defence: EncoderDefence, texts: int) -> int:
    """How many steps the training takes."""
    how = defence.training
    steps = how.epochs * -(-texts // how.batch_size)
    return steps if how.max_steps is None else min(steps, how.max_steps)


def require_free(client: Path, server: Path) -> None:
    """Raises UsageError where a folder is there, or where one half would lie in the other's."""
    for folder in (client, server):
        if folder.exists():
            raise UsageError(f"{folder} exists already", "give a new folder, or remove that one first")
    one, other = client.absolute(), server.absolute()
    if one == other or one in other.parents or other in one.parents:
        raise UsageError(
            f"{client} and {server} are one folder, or one is in the other",
            "the client's half must never lie where the server's goes",
        )


def make(
    defence: EncoderDefence, base: Checkpoint, model: str, data: Data, client: Path, server: Path, tell: Tell
) -> None:
    """Writes both folders. model: where the original is found again. tell: hears of each step."""
    require_free(client, server)
    with _beside(client) as near_client, _beside(server) as near_server:
        with _watched(tell):
            half, _ = defence.split(base, data.corpus, secrets.token_bytes(SECRET), near_server / "half")
        half.save(near_client / "half")
        folders.write(near_server / "half", folders.ServerAbout(defence.name, told(defence)))
        about = folders.ClientAbout(
            defence.name, told(defence), asdict(defence.training), model, data.labels, data.pairs,
            folders.weights_digest(near_server / "half"),
        )  # fmt: skip
        folders.write(near_client / "half", about)
        _place({near_client / "half": client, near_server / "half": server})


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """A folder on the same disk, closed to others, gone in the end: Ctrl-C leaves nothing half written."""
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".milkglass-split-", dir=folder.absolute().parent) as name:
        yield Path(name)


def _place(moves: dict[Path, Path]) -> None:
    done: list[Path] = []
    try:
        for made, wanted in moves.items():
            made.rename(wanted)
            done.append(wanted)
    except BaseException:  # one half alone is of no use
        for wanted in done:
            shutil.rmtree(wanted)
        raise


@contextmanager
def _watched(tell: Tell) -> Iterator[None]:
    """A defence's `split` says nothing of how far it is; torch tells of every optimiser's step in this process."""
    handle = register_optimizer_step_post_hook(lambda *_: tell(1))
    try:
        yield
    finally:
        handle.remove()
