"""Lists all sanitizers by name, with their papers' parameters. To add one, write a file and add a line here.

The shared tests then run on it. GHOST, which needs a whole model, is in ghost/.
"""

from __future__ import annotations

from milkglass.catalogue import Catalogue
from milkglass.sanitizers.custext import CusTextMethod, CusTextPlusMethod
from milkglass.sanitizers.method import SanitizerMethod
from milkglass.sanitizers.rnm import RnmMethod
from milkglass.sanitizers.santext import SanTextMethod, SanTextPlusMethod

SANITIZERS: Catalogue[SanitizerMethod] = Catalogue(
    "sanitizer",
    SanTextMethod(),
    SanTextPlusMethod(),
    CusTextMethod(),
    CusTextPlusMethod(),
    RnmMethod(),
    group="milkglass.sanitizer",
    kind=SanitizerMethod,
)
