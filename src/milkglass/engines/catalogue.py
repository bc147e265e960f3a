"""All engines, by name."""

from milkglass.catalogue import Catalogue
from milkglass.engines.engine import IdsEngine
from milkglass.engines.llamacpp import LlamaCpp
from milkglass.engines.milkglass import MilkglassServer
from milkglass.engines.sglang import SGLang
from milkglass.engines.vllm import VLLM

ENGINES: Catalogue[IdsEngine] = Catalogue(
    "engine", MilkglassServer(), VLLM(), SGLang(), LlamaCpp(), group="milkglass.engine", kind=IdsEngine
)
