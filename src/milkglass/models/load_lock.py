"""One model is built at a time in a process.

While transformers loads a model it replaces `PreTrainedModel.tie_weights` by a function that does nothing, for the
whole process, and puts back what it found before. Of two loads at once the later one finds the other's replacement and
may put that back last: from then on no head is tied in this process, and models answer with weights of their own.

Out of scope: which model.
"""

from __future__ import annotations

import threading

ONE_LOAD = threading.RLock()
