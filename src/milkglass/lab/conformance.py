"""Runs the checks that every method must pass, on the entry points of an installed package.

Each check is a function of one entry and an empty folder, and uses a tiny model. A failed assertion says what
is wrong. The project's own tests check more, since they know the methods that they test.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np
import torch

from milkglass.audit.defence_scene import scene_of
from milkglass.audit.run import run
from milkglass.audit.scene import ALIKE, Scene
from milkglass.catalogue import load_entry
from milkglass.client.codec.codec import Codec
from milkglass.client.key.file import seal, unseal
from milkglass.client.key.generate import new_key
from milkglass.client.key.scheme import scheme_of
from milkglass.client.obfuscate.scramble import scramble
from milkglass.client.obfuscate.upload_check import require_scrambled
from milkglass.client.obfuscate.verify import verify
from milkglass.client.upload_names import unknown_tensor_names
from milkglass.compare.result import WayGroup
from milkglass.compare.ways import ALL_TASKS, LABEL_TASKS, DefenceWay, Way
from milkglass.defences.catalogue import defence_of
from milkglass.defences.obfuscated_tables import Plain
from milkglass.engines.engine import IdsEngine, IdsRequest
from milkglass.errors import MilkglassError, UsageError
from milkglass.gradient_defences.defence import GradientDefence, share_gradient
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families.family import Family
from milkglass.noise.stream import Stream
from milkglass.papers import Paper
from milkglass.sanitizers.method import SanitizerMethod
from milkglass.sanitizers.table import WordVectors
from milkglass.schemes.scheme import Scheme
from milkglass.threat.attack import Attack, why_not
from milkglass.threat.budget import Budget, WorkClock
from milkglass.threat.defence import Defence, LabelledTexts
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Activations, Observation, Tokens, Transcript
from milkglass.threat.training_step import SharedStep, pad_texts

PRIVATE_TEXTS = [
    "the nurse called about the results of the test on monday",
    "please move my appointment to friday afternoon",
    "the invoice for the scan is wrong, it says 120 and not 80",
    "my father has a fever since yesterday and cannot eat",
]
VOCAB_SIZE = 300
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
TINY_CONFIG = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 130, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPS = ("attack", "gradient_attack", "scheme", "sanitizer", "defence", "engine", "family", "way")
SECRET, OTHER_SECRET = bytes(range(32)), bytes(range(1, 33))
MIN_BUDGET_CHECKS = 4  # an attack that checks its budget so often does so in a loop
CORPUS = LabelledTexts([*PRIVATE_TEXTS, *(text.replace("the", "a") for text in PRIVATE_TEXTS)], [0, 1] * 4)
Check = Callable[[Any, Path], None]


def save_tiny_model(model_type: str, kind: str, folder: Path) -> Path:
    """Writes a tiny random model of a type that transformers knows, and a byte-level tokenizer. Returns the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedTokenizerFast

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = (AutoModelForMaskedLM if kind == "encoder" else AutoModelForCausalLM).from_config(
            AutoConfig.for_model(model_type, **TINY_CONFIG)
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)  # biases and norms away from their defaults
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([*PRIVATE_TEXTS], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        cls_token="<s>", sep_token="</s>", model_max_length=128,
    ).save_pretrained(folder)  # fmt: skip
    return folder


@dataclass(frozen=True)
class CheckResult:
    """Holds the outcome of one check on an entry point.

    Attributes:
        entry: the name of the entry point.
        group: the group of the entry point without "milkglass.", such as "attack".
        check: the check's title.
        failure: what is wrong. None: the check passed.
    """

    entry: str
    group: str
    check: str
    failure: str | None


def check_package(package: str) -> Iterator[CheckResult]:
    """Checks every entry point of an installed package.

    Raises:
        UsageError: the package is not installed, or has no entry point of Milkglass.
        PluginError: an entry point cannot be loaded.
    """
    try:
        points = [point for point in distribution(package).entry_points if point.group.startswith("milkglass.")]
    except PackageNotFoundError:
        raise UsageError(f"no package {package!r} is installed", f"pip install {package}") from None
    if not points:
        groups = ", ".join(f"milkglass.{group}" for group in GROUPS)
        raise UsageError(f"{package} has no entry point of Milkglass", f"the groups are {groups}")
    for point in points:
        yield from _check_entry(point)


def _check_entry(point: EntryPoint) -> Iterator[CheckResult]:
    """Yields the results of all checks on one entry point."""
    group = point.group.removeprefix("milkglass.")
    if group not in GROUPS:
        yield CheckResult(point.name, group, "the group exists", f"it is one of {', '.join(GROUPS)}")
        return
    entry = load_entry(point)
    kinds = [kind for kind in CHECKS if isinstance(entry, kind)]
    if group not in {CHECKS[kind][0] for kind in kinds}:
        expected = " or ".join(
            kind.__name__ for kind, (kind_group, _) in CHECKS.items() if kind_group == group.removeprefix("gradient_")
        )
        yield CheckResult(
            point.name, group, "the entry is of its group", f"it is a {type(entry).__name__}, no {expected}"
        )
        return
    for check in CHECKS[kinds[0]][1]:
        with TemporaryDirectory(prefix="milkglass-check-") as folder:
            failure = None
            try:
                check(entry, Path(folder))
            except Exception as error:  # noqa: BLE001 - whatever a package raises is what is reported
                failure = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            yield CheckResult(point.name, group, str(check.__doc__).strip().rstrip("."), failure)


# --- every method -----------------------------------------------------------------------------------------------------
def check_frozen_dataclass(entry: Any, folder: Path) -> None:
    """It is a frozen dataclass, and equals one that is made with its defaults."""
    kind = type(entry)
    assert is_dataclass(kind) and kind.__dataclass_params__.frozen, f"{kind.__name__} is no frozen dataclass"  # type: ignore[attr-defined]
    assert kind() == entry, f"{kind.__name__}() is another instance"


def check_paper(entry: Any, folder: Path) -> None:
    """It names its paper, and its page says what it does."""
    paper = getattr(type(entry), "paper", None)
    assert paper is None or isinstance(paper, Paper), (
        f"paper is {paper!r}; milkglass.papers.unpublished_method(...) makes one"
    )
    assert (inspect.getmodule(type(entry)) or entry).__doc__, "its module has no docstring"


# --- attacks ----------------------------------------------------------------------------------------------------------
def check_declared_needs(attack: Attack, folder: Path) -> None:
    """It declares what it sees and assumes, and refuses with a reason where that is missing."""
    assert attack.title and attack.sees, "title or sees is empty"
    assert all(issubclass(kind, Observation) for kind in attack.sees), "sees holds something that is no observation"
    unknown_names = (attack.assumes | attack.uses) - {field.name for field in fields(Knowledge)}
    assert not unknown_names, f"Knowledge has no {', '.join(sorted(unknown_names))}"
    assert why_not(attack, Transcript((), 10), Knowledge()), "it applies to an empty transcript"


def check_run_or_refusal(attack: Attack, folder: Path) -> None:
    """It runs on what is not defended, or refuses with a reason; two runs with one seed are equal."""
    scene = _scene(Plain(), folder)
    outcomes = [run(scene, {attack.name: attack}, None, Budget(), 1).results for _ in range(2)]
    for results in outcomes:
        failed_results = [cell for cell in results if cell.state == "failed"]
        assert not failed_results, f"it failed: {failed_results[0].reason}"
        assert all(cell.reason for cell in results if cell.state == "does not apply"), "it refuses without a reason"
    measures = [[(cell.adversary, str(cell.measures)) for cell in cells] for cells in outcomes]
    assert measures[0] == measures[1], "two runs with one seed differ"


def check_counted_work(attack: Attack, folder: Path) -> None:
    """An attack that asks its budget again and again counts what it does: else a budget of work never ends it."""
    scene = _scene(Plain(), folder)
    for attacker in scene.attackers_of(attack):
        if why_not(attack, scene.seen_by(attacker), attacker.knowledge) is not None:
            continue
        clock_readings, clock = list[float](), WorkClock()

        def note_reading(clock: WorkClock = clock, clock_readings: list[float] = clock_readings) -> bool:
            clock_readings.append(clock.seconds)
            return False

        attack(
            scene.seen_by(attacker),
            attacker.knowledge,
            Budget(1e9, stopped=note_reading, clock=clock),
            np.random.default_rng(1),
        )
        assert len(clock_readings) < MIN_BUDGET_CHECKS or len(set(clock_readings)) > 1, (
            f"it asked {len(clock_readings)} times and spent nothing"
        )


# --- schemes ----------------------------------------------------------------------------------------------------------
def check_same_model_again(scheme: Scheme, folder: Path) -> None:
    """One secret makes one model, another secret makes another, and the result is verified."""
    base = _model_for(scheme, folder)
    key = new_key(base, "tiny", scheme, base.digest(), SECRET)
    other_key = new_key(base, "tiny", scheme, base.digest(), OTHER_SECRET)
    for name, used_key in {"a": key, "b": key, "c": other_key}.items():
        scramble(base, used_key, folder / name)
    weights = [(folder / name / "model.safetensors").read_bytes() for name in ("a", "b", "c")]
    assert weights[0] == weights[1], "the same secret makes another model"
    assert weights[0] != weights[2], "another secret makes the same model"
    failed_checks = [check.name for check in verify(base, key, folder / "a") if not check.passed]
    assert not failed_checks, f"verify finds {', '.join(failed_checks)} wrong"
    assert require_scrambled(folder / "a")


def check_key_round_trip(scheme: Scheme, folder: Path) -> None:
    """A key file keeps the scheme and its parameters."""
    base = _model_for(scheme, folder)
    key = unseal(seal(new_key(base, "tiny", scheme, base.digest(), SECRET), "of a check", scrypt_n=2**10), "of a check")
    assert scheme_of(key) == scheme, "the reopened key has another scheme"


def check_no_secret_on_server(scheme: Scheme, folder: Path) -> None:
    """The scrambled folder holds neither the secret nor the map of ids, and ids come back."""
    base = _model_for(scheme, folder)
    key = new_key(base, "tiny", scheme, base.digest(), SECRET)
    scramble(base, key, folder / "out")
    maps = [ids.astype(kind).tobytes() for ids in (key.sigma, key.inverse) for kind in ("<i4", "<i8", "<u2")]
    for file in (folder / "out").iterdir():
        content = file.read_bytes()
        assert not [secret for secret in (key.root, key.root.hex().encode(), *maps) if secret in content], (
            f"{file.name} holds it"
        )
    codec = Codec.open(key, base.folder)
    (sent_ids,) = codec.encode([PRIVATE_TEXTS[0]]).ids
    if codec.can_decode:
        public_ids = codec.tokenizer(PRIVATE_TEXTS[0])["input_ids"]
        assert codec.inverse[sent_ids].tolist() == public_ids, "a text does not come back"


# --- sanitizers -------------------------------------------------------------------------------------------------------
def check_words_of_table(method: SanitizerMethod, folder: Path) -> None:
    """Only words of its table cross, and one stream gives one result."""
    words = tuple(sorted({word.strip(",") for text in PRIVATE_TEXTS for word in text.split()} - {"120", "80"}))
    table = WordVectors(words, np.random.default_rng(0).normal(size=(len(words), 6)).astype(np.float32))
    sanitizer = method.text_sanitizer(table, np.arange(len(words)))
    sent = sanitizer.texts([*PRIVATE_TEXTS, "Kowalczyk has 4711 zlotys"], Stream.of_seed(1))
    assert sent == sanitizer.texts([*PRIVATE_TEXTS, "Kowalczyk has 4711 zlotys"], Stream.of_seed(1)), (
        "one stream, two results"
    )
    assert "Kowalczyk" not in sent[-1] and "4711" not in sent[-1], "a word that is not in the table crosses"
    json.dumps(method.document())


# --- defences ---------------------------------------------------------------------------------------------------------
def check_split_by_secret(defence: Defence, folder: Path) -> None:
    """One secret makes the same halves; another sends something else."""
    base = _encoder(folder)
    halves = [
        defence.split(base, CORPUS, secret, folder / name)
        for name, secret in (("a", SECRET), ("b", SECRET), ("c", OTHER_SECRET))
    ]
    crossed_bytes = [_crossed_bytes(client.send(PRIVATE_TEXTS)) for client, _ in halves]
    assert crossed_bytes[0] == crossed_bytes[1], "the same secret sends something else"
    assert crossed_bytes[0] != crossed_bytes[2], "another secret sends the same"
    assert json.dumps(defence.document()) and defence.document()["name"]


def check_halves_apart(defence: Defence, folder: Path) -> None:
    """The server's folder holds neither the secret nor a text; the client's is its owner's alone and loads again."""
    base = _encoder(folder)
    client, _ = defence.split(base, CORPUS, SECRET, folder / "server")
    client.save(folder / "client")
    content = b"\n".join(file.read_bytes() for file in (folder / "server").rglob("*") if file.is_file())
    secrets = (SECRET, SECRET.hex().encode(), *(text.encode() for text in CORPUS.texts))
    assert not any(secret in content for secret in secrets), "the server's folder holds the secret or a text"
    for path in (folder / "client", *(folder / "client").rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, f"others can read {path.name} of the client's half"
    loaded_client, server = defence.load(base, folder / "client", folder / "server")
    assert _crossed_bytes(loaded_client.send(PRIVATE_TEXTS)) == _crossed_bytes(client.send(PRIVATE_TEXTS)), (
        "the loaded half sends something else"
    )
    server.stored_observations()


def check_scene_of_defence(defence: Defence, folder: Path) -> None:
    """An audit of it runs to its end."""
    from milkglass.attacks.catalogue import ATTACKS

    chosen_attacks = {name: ATTACKS[name] for name in ("knn", "channel", "near-hidden", "decipherment")}
    results = run(_scene(defence, folder), chosen_attacks, None, Budget(), 1).results
    failed_results = [cell for cell in results if cell.state == "failed"]
    assert not failed_results, f"{failed_results[0].attack} failed: {failed_results[0].reason}"


def check_shared_gradient(defence: GradientDefence, folder: Path) -> None:
    """What is shared has the names and shapes of the step, is finite, and is decided by the seed."""
    step = SharedStep.open(_encoder(folder).folder, "classification")
    ids, mask = pad_texts([[5, 9, 7, 6], [8, 11, 4]], pad_id=1)
    state_before = {name: tensor.clone() for name, tensor in step.module.state_dict().items()}
    runs = [
        share_gradient(step, ids, mask, torch.tensor([0, 1]), defence, 0, Stream.of_seed(1)).tensors for _ in range(2)
    ]
    shapes = {name: tensor.shape for name, tensor in step.module.named_parameters()}
    for name, tensor in runs[0].items():
        assert tensor.shape == shapes[name] and tensor.isfinite().all(), f"{name} is not a finite tensor of its shape"
        assert torch.equal(tensor, runs[1][name]), f"{name} differs between two runs with one seed"
    assert all(torch.equal(tensor, state_before[name]) for name, tensor in step.module.state_dict().items()), (
        "the model was changed"
    )


# --- engines and families ---------------------------------------------------------------------------------------------
def check_ids_alone(engine: IdsEngine, folder: Path) -> None:
    """A request holds the ids and the model's name and no other text, and what is not offered is refused."""
    call = engine.completion("model-name", IdsRequest((5, 9, 7), max_tokens=4))
    assert call.path.startswith("/"), f"the path is {call.path!r}"
    assert "5" in json.dumps(call.body), "the ids are not in the body"
    assert callable(engine.reader(IdsRequest((5,), max_tokens=1)))
    if "seed" not in engine.options:
        try:
            engine.require(IdsRequest((5,), max_tokens=1, seed=1))
        except UsageError:
            return
        raise AssertionError("an option that is not offered is not refused")


def check_bad_answer_refused(engine: IdsEngine, folder: Path) -> None:
    """An event that is no answer is refused with an error of Milkglass."""
    for event in ({}, {"choices": 3}, {"choices": [{"token_ids": ["5"]}]}, {"output_ids": "x"}, {"tokens": [1.5]}):
        try:
            chunk = engine.reader(IdsRequest((5,), max_tokens=4))(event)
        except MilkglassError:
            continue
        assert not chunk.ids, f"an event {event} gave ids"


def check_permutation(family: Family, folder: Path) -> None:
    """Permuting the ids of a model of each of its types changes no logit."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    from milkglass.schemes.mixture import Mixture

    for model_type in family.model_types:
        base = Checkpoint.open(save_tiny_model(model_type, family.kind, folder / model_type))
        unknown_names = unknown_tensor_names(base.tensors)
        assert not unknown_names, f"{model_type}: {unknown_names[0]} has a word that is not in Family.parts"
        key = new_key(base, "tiny", None, base.digest(), SECRET)
        scramble(base, key, folder / f"{model_type}-out", mixture=Mixture.identity(VOCAB_SIZE))
        loader = AutoModelForMaskedLM if family.kind == "encoder" else AutoModelForCausalLM
        ids = torch.from_numpy(np.random.default_rng(0).integers(4, VOCAB_SIZE, (2, 9)))
        sigma = torch.from_numpy(key.sigma).long()
        with torch.inference_mode():
            unpermuted = loader.from_pretrained(base.folder).eval()(ids).logits
            permuted = loader.from_pretrained(folder / f"{model_type}-out").eval()(sigma[ids]).logits[..., sigma]
        difference = (unpermuted - permuted).abs().max()
        assert difference <= 1e-4, f"{model_type}: logits differ by {difference:.2g}"


# --- ways of `milkglass compare` --------------------------------------------------------------------------------------
def check_description(way: Way, folder: Path) -> None:
    """It says what leaves the machine, whom the user trusts, which rows it is for and what the next command is."""
    assert way.title and way.trust and way.provider, "title, trust or provider is empty"
    assert way.group in get_args(WayGroup), f"group is {way.group!r}, one of {', '.join(get_args(WayGroup))}"
    assert way.tasks and {*way.tasks} <= {*ALL_TASKS}, f"tasks are {way.tasks}, some of {', '.join(ALL_TASKS)}"
    way.command.format(**dict.fromkeys(("model", "rows", "task", "kept", "text", "compare"), "word"))


def check_defence_applies(way: Way, folder: Path) -> None:
    """If it puts a defence in front of a model, the defence is known and protects a small encoder or decoder."""
    if not isinstance(way, DefenceWay):
        return
    defence = defence_of(way.entry)
    kind = "encoder" if {*way.tasks} & {*LABEL_TASKS} else "decoder"
    base = Checkpoint.open(save_tiny_model("bert" if kind == "encoder" else "llama", kind, folder / "base"))
    assert (reason := defence.refusal(base)) is None, f"it refuses a small {kind}: {reason}"


CHECKS: Mapping[type, tuple[str, tuple[Check, ...]]] = {
    Attack: (
        "attack",
        (check_frozen_dataclass, check_paper, check_declared_needs, check_run_or_refusal, check_counted_work),
    ),
    Scheme: (
        "scheme",
        (
            check_frozen_dataclass, check_paper, check_same_model_again, check_key_round_trip,
            check_no_secret_on_server,
        ),
    ),
    SanitizerMethod: ("sanitizer", (check_frozen_dataclass, check_words_of_table)),
    GradientDefence: ("defence", (check_frozen_dataclass, check_paper, check_shared_gradient)),
    Defence: (
        "defence",
        (check_frozen_dataclass, check_paper, check_split_by_secret, check_halves_apart, check_scene_of_defence),
    ),
    IdsEngine: ("engine", (check_ids_alone, check_bad_answer_refused)),
    Family: ("family", (check_permutation,)),
    Way: ("way", (check_description, check_defence_applies)),
}  # fmt: skip


def _encoder(folder: Path) -> Checkpoint:
    """Writes a tiny encoder into the folder, and opens it."""
    return Checkpoint.open(save_tiny_model("bert", "encoder", folder / "base"))


def _scene(defence: Defence, folder: Path) -> Scene:
    """Returns the scene of a defence of the tiny encoder, in which an attacker has text like the private texts."""
    base = _encoder(folder)
    client, server = defence.split(base, CORPUS, SECRET, folder / "server")
    return scene_of(base, client, server, PRIVATE_TEXTS, {ALIKE: CORPUS.texts[4:]})


def _model_for(scheme: Scheme, folder: Path) -> Checkpoint:
    """Returns a decoder for schemes that rewrite layers, which only works for the Llama family; else an encoder."""
    if scheme.needs_whole_layers:
        return Checkpoint.open(save_tiny_model("llama", "decoder", folder / "base"))
    return _encoder(folder)


def _crossed_bytes(observations: tuple[Observation, ...]) -> list[bytes]:
    """Returns the bytes of everything observed."""
    crossed_bytes = []
    for observation in observations:
        if isinstance(observation, Tokens):
            crossed_bytes += [observation.ids.ids.tobytes(), observation.ids.lengths.tobytes()]
        elif isinstance(observation, Activations):
            crossed_bytes += [observation.hidden.numpy().tobytes(), observation.lengths.tobytes()]
    return crossed_bytes
